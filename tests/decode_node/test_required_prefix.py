"""A prompt begins with the tokens that a trainer has of the turns before, whatever tokens their
text would have now."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from decode_node.serving.prompts.required_prefix import common_end
from engine.frontend.templates.chat_template import ChatTemplate
from engine.frontend.tokenizer import Tokenizer
from tests.decode_node.http_node import HttpNode, http_node
from tests.engine.frontend.small_tokenizers import byte_level_backend

Json = dict[str, Any]

CHATS = "/v1/chat/completions"
TURN = (
    "<|user|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.last %}[{{ m.reasoning_content }}]{% endif %}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "({{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}"
)
ASKED = "{% if add_generation_prompt %}<|user|>assistant\n{% endif %}"


def template(closing: str) -> str:
    return "{% for m in messages %}" + TURN + closing + "{% endfor %}" + ASKED


CLOSED = template("</s>")
"""Turns end with the token with which models end answers, as in most templates."""
OTHERWISE = template("{{ '</s>' if loop.last and m.role == 'assistant' else '<|end|>' }}")
"""Answers that others follow end with another one, as in gpt-oss's."""
OPEN = template("")
"""The next turn's beginning is the end, as in GLM's."""
USER = {"role": "user", "content": "hello"}
MORE = {"role": "user", "content": "more </s> of it"}
ANSWER = {"role": "assistant", "content": "the quick brown fox"}
CALLS = [
    {"id": f"call_{i}", "type": "function", "function": {"name": "f", "arguments": f'{{"n": {i}}}'}}
    for i in range(2)
]
CALLED = {"role": "assistant", "content": None, "tool_calls": CALLS}
RESULTS = [{"role": "tool", "tool_call_id": f"call_{i}", "content": "the dog"} for i in range(2)]


def tokenizer(source: str = CLOSED) -> Tokenizer:
    return Tokenizer(byte_level_backend(), ChatTemplate(source, {}))


TOKENS = tokenizer()


def node_of(source: str = CLOSED) -> AbstractAsyncContextManager[HttpNode]:
    return http_node(tokenizer=tokenizer(source), end_ids=(TOKENS.added_token_ids["</s>"],))


def drawn(text: str, end: str = "</s>") -> list[int]:
    """Returns a prompt's tokens, and those of an answer, each letter for itself, as no tokenizer
    writes it."""
    answer = [id_ for letter in text for id_ in TOKENS.encode(letter)]
    return TOKENS.encode("<|user|>user\nhello</s><|user|>assistant\n") + answer + TOKENS.encode(end)


async def prompt_of(node: HttpNode, prefix: list[int], *messages: Json, **fields: Any) -> list[int]:
    """Returns the tokens that the engine got, as the answer tells them."""
    body = {"messages": [USER, *messages], "required_prefix_token_ids": prefix, **fields}
    response = await node.client.post(CHATS, json={**body, "return_token_ids": True})
    assert response.status_code == 200, response.text
    found: list[int] = response.json()["prompt_token_ids"]
    assert found == list(node.engine.only.request.spec.prompt_token_ids)
    node.engine.forget_ended()
    told = await node.client.post("/tokenize", json=body)
    rendered = await node.client.post(CHATS + "/render", json=body)
    assert found == told.json()["tokens"] == rendered.json()["token_ids"]
    return found


LATER = "<|user|>user\nmore </s> of it{}<|user|>assistant\n"


@pytest.mark.parametrize(
    ("source", "closing"), [(CLOSED, "</s>"), (OTHERWISE, "<|end|>"), (OPEN, "")]
)
async def test_what_follows_an_answer_follows_its_own_tokens(source: str, closing: str) -> None:
    async with node_of(source) as node:
        for end in ("</s>", ""):
            prefix = drawn(ANSWER["content"], end)
            assert prefix != TOKENS.encode(TOKENS.decode(prefix, skip_special_tokens=False))
            later = LATER.format(closing)
            rest = later if end else closing + later
            assert await prompt_of(node, prefix, ANSWER, MORE) == prefix + TOKENS.encode(rest)


async def test_calls_end_with_the_token_that_ends_their_turn() -> None:
    later = "<|user|>tool\nthe dog</s>" * 2 + "<|user|>assistant\n"
    async with node_of() as node:
        for end in ("</s>", ""):
            prefix = drawn('(f {"n": 0})(f {"n": 1})', end)
            rest = later if end else "</s>" + later
            found = await prompt_of(node, prefix, CALLED, *RESULTS)
            assert found == prefix + TOKENS.encode(rest)


@pytest.mark.parametrize("said", ["", "a", "hello", "</s>", " the end \n\n"])
async def test_thoughts_that_the_template_leaves_out_stay(said: str) -> None:
    answer = {"role": "assistant", "content": said, "reasoning_content": "so many thoughts" * 3}
    prefix = drawn(f"[{answer['reasoning_content']}]{said}")
    async with node_of() as node:
        found = await prompt_of(node, prefix, answer, MORE)
        assert found == prefix + TOKENS.encode(LATER.format("</s>"))
        assert await prompt_of(node, prefix, answer) == prefix + TOKENS.encode(
            "<|user|>assistant\n"
        )


async def test_only_the_last_answer_ends_it() -> None:
    prefix = drawn("first</s><|user|>user\nhello</s><|user|>assistant\nsecond")
    answers = [{"role": "assistant", "content": text} for text in ("first", "second")]
    async with node_of() as node:
        found = await prompt_of(node, prefix, answers[0], USER, answers[1], MORE)
        assert found == prefix + TOKENS.encode(LATER.format("</s>"))


async def test_tokens_that_a_trainer_keeps_in_messages_are_no_text() -> None:
    source = "{% for m in messages %}{{ m | tojson }}{% endfor %}"
    kept = {"prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [-1.0]}
    async with node_of(source) as node:
        texts = [
            (await node.client.post("/tokenize", json={"messages": [USER, answer]})).json()
            for answer in (ANSWER, ANSWER | kept)
        ]
        assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("change", "is_kept"),
    [
        ({}, True),
        ({"generation_token_ids": None}, False),
        ({"content": "the slow brown fox"}, False),
        ({"prompt_token_ids": [1]}, False),
        ({"generation_token_ids": [10**9]}, False),
        ({"generation_token_ids": [None, "x", 1e300, [5]]}, False),
        ({"prompt_token_ids": 5}, False),
    ],
    ids=range(7),
)
async def test_answers_bring_their_tokens_along(change: Json, is_kept: bool) -> None:
    """They count where their text is the template's, so that another model's change nothing."""
    prefix = drawn(ANSWER["content"])
    cut = len(TOKENS.encode("<|user|>user\nhello</s><|user|>assistant\n"))
    kept = {"prompt_token_ids": prefix[:cut], "generation_token_ids": prefix[cut:]}
    of_text = {**kept, "generation_token_ids": [str(one) for one in prefix[cut:]]}
    async with node_of() as node:
        plain = await prompt_of(node, [], ANSWER | change, MORE)
        for tokens in kept, of_text:
            found = await prompt_of(node, [], ANSWER | tokens | change, MORE)
            if is_kept:
                assert found == prefix + TOKENS.encode(LATER.format("</s>")) != plain
            else:
                assert found == plain


async def test_of_tokens_for_which_there_is_no_room_few_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Megabytes of ids were made text first, which took seconds."""
    given: list[int] = []
    decode = Tokenizer.decode

    def counted(self: Tokenizer, token_ids: list[int], **options: bool) -> str:
        given.append(len(token_ids))
        return decode(self, token_ids, **options)

    (letter,) = TOKENS.encode("a")
    kept = {"prompt_token_ids": [letter], "generation_token_ids": [letter] * 100_000}
    async with node_of() as node:
        plain = await prompt_of(node, [], ANSWER, MORE)
        monkeypatch.setattr(Tokenizer, "decode", counted)
        assert await prompt_of(node, [], ANSWER | kept, MORE) == plain
        prefix = drawn("a" * 100_000)
        cut = len(TOKENS.encode("<|user|>user\nhello</s><|user|>assistant\n"))
        kept = {"prompt_token_ids": prefix[:cut], "generation_token_ids": prefix[cut:]}
        answer = {**ANSWER, "content": "a" * 100_000, **kept}
        refused = await node.client.post(CHATS, json={"messages": [USER, answer, MORE]})
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        assert f"{len(prefix)} tokens" in refused.json()["error"]["message"]
    assert max(given) <= 1024


async def test_the_log_probabilities_of_a_whole_conversation_may_come_back() -> None:
    """NeMo Gym sends them with each turn, and ids as texts."""
    count = 20_000
    kept = {"prompt_token_ids": [5] * count, "generation_token_ids": ["151667"] * count}
    answer = {**ANSWER, **kept, "generation_log_probs": [-0.00012345678901234567] * count}
    async with node_of() as node:
        prefix = drawn(ANSWER["content"])
        found = await prompt_of(node, prefix, answer, MORE)
        assert found == prefix + TOKENS.encode(LATER.format("</s>"))


ONE_CALL = CLOSED.replace(
    "{% for c in", "{% if m.tool_calls and m.tool_calls | length > 1 %}"
    "{{ raise_exception('one call') }}{% endif %}{% for c in",
)  # fmt: skip
SYSTEM_FIRST = CLOSED.replace(
    "<|user|>{{ m.role }}",
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
    "<|user|>{{ m.role }}",
)
SYSTEM = {"role": "system", "content": "be brief"}


@pytest.mark.parametrize(
    ("source", "messages", "fields", "words"),
    [
        (CLOSED, [MORE], {}, "messages has none"),
        (CLOSED, [ANSWER, MORE], {"required_prefix_token_ids": [1, 10**6]}, "out of range"),
        (CLOSED, [ANSWER, MORE], {"required_prefix_token_ids": [1, -1]}, "out of range"),
        (CLOSED, [ANSWER], {"continue_final_message": True}, "exclude each other"),
        (CLOSED, [ANSWER, MORE], {"truncate_prompt_tokens": 9}, "exclude each other"),
        (OPEN, [CALLED, *RESULTS], {}, "no token that ends a call"),
        (ONE_CALL, [CALLED, *RESULTS], {}, "several calls in one answer"),
        (SYSTEM_FIRST, [ANSWER, SYSTEM, MORE], {}, "messages of the system behind"),
    ],
    ids=range(8),
)
async def test_what_it_does_not_go_with_is_named(
    source: str, messages: list[Json], fields: Json, words: str
) -> None:
    body = {"messages": [USER, *messages], "required_prefix_token_ids": drawn("x"), **fields}
    async with node_of(source) as node:
        response = await node.client.post(CHATS, json=body)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "required_prefix_token_ids")
        assert words in error["message"]
        given = {"input": "x", "required_prefix_token_ids": [1]}
        refused = await node.client.post("/v1/responses", json=given)
        assert "only /v1/chat/completions has it" in refused.json()["error"]["message"]


async def test_a_prefix_longer_than_the_context_is_too_long() -> None:
    prefix = [8] * 5000
    body = {"messages": [USER, ANSWER, MORE], "required_prefix_token_ids": prefix}
    async with node_of() as node:
        response = await node.client.post(CHATS, json=body)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        assert "maximum context length is 256 tokens" in error["message"]
        empty = {**body, "required_prefix_token_ids": []}
        assert (await node.client.post(CHATS, json=empty)).status_code == 200


def test_the_end_of_long_texts_is_read_once() -> None:
    class Text(str):
        num_copied = 0

        def __getitem__(self, key: Any) -> str:
            part = super().__getitem__(key)
            Text.num_copied += len(part)
            return part

    for length in (0, 1, 65_535, 65_536, 1_000_003):
        Text.num_copied = 0
        end = "ab" * (length // 2) + "c" * (length % 2)
        assert common_end(Text("x" + end), Text("yy" + end)) == end
        assert common_end(Text(end), Text("y" + end)) == end
        assert Text.num_copied <= 6 * length + 1_000_000


async def test_a_call_in_the_first_form_is_not_written_twice() -> None:
    """It is no field of its own, so that the prompt had it behind the tokens once more."""
    called = {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}
    result = {"role": "function", "name": "f", "content": "the dog"}
    async with node_of() as node:
        chat = {"messages": [USER, called, result], "required_prefix_token_ids": drawn("(f {})")}
        response = await node.client.post(CHATS, json=chat)
    assert response.status_code == 400, response.text
    assert "write its call as tool_calls" in response.json()["error"]["message"]
