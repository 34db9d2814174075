"""Several texts of one message give the same prompt through chats, Responses and Messages."""

from __future__ import annotations

import json
from typing import Any

import pytest

from decode_node.chat_templates.history import history
from decode_node.chat_templates.probe import probe
from decode_node.grammar.reasoning import ReasoningState
from decode_node.parsers.output_parsers import OutputParsers
from decode_node.protocol.bodies.parse_body import parse_body
from decode_node.protocol.chat.chat import ChatCompletionRequest
from decode_node.protocol.messages.messages import MessagesRequest
from decode_node.protocol.responses.responses import ResponsesRequest
from decode_node.serving.chat_reading import ChatReading
from engine.frontend.templates.chat_template import ChatTemplate
from tests.decode_node.chat_clients import thinking_tokenizer

Json = dict[str, Any]

TEXT_ONLY = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"


def _of_parts(joint: str) -> str:
    return (
        "{% for m in messages %}[{{ m.role }}:{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for p in m.content %}{{ p.text }}"
        f"{{% if not loop.last %}}{{{{ {joint!r} }}}}{{% endif %}}"
        "{% endfor %}{% endif %}]{% endfor %}"
    )


LISTS_ALONE = (
    "{% for m in messages %}[{{ m.role }}:{% for p in m.content %}{{ p['text'] }}{% endfor %}]"
    "{% endfor %}"
)
TEMPLATES = [
    pytest.param(TEXT_ONLY, "\n", id="takes text alone"),
    pytest.param(_of_parts(""), "", id="joins by nothing"),
    pytest.param(_of_parts("\n"), "\n", id="joins by a line break"),
    pytest.param(LISTS_ALONE, "", id="takes lists alone"),
]
TURNS = [
    ("user", ["first", "second"]),
    ("assistant", ["a", "b"]),
    ("user", ["last"]),
]


def _prompt(template: str, chat: ChatCompletionRequest) -> str:
    made = ChatTemplate(template, {})
    return made.render(history(chat.messages, probe(made).forms))


def _turns(kinds: dict[str, str]) -> list[Json]:
    return [
        {"role": role, "content": [{"type": kinds[role], "text": text} for text in texts]}
        for role, texts in TURNS
    ]


PLAIN = _turns({"user": "text", "assistant": "text"})
ITEMS = _turns({"user": "input_text", "assistant": "output_text"})


def _chat(messages: list[Json]) -> ChatCompletionRequest:
    return parse_body(json.dumps({"messages": messages}).encode(), ChatCompletionRequest)


def _responses(items: list[Json]) -> ChatCompletionRequest:
    return parse_body(json.dumps({"input": items}).encode(), ResponsesRequest).to_chat()


def _messages(turns: list[Json], **fields: Any) -> ChatCompletionRequest:
    body = {"model": "tiny", "max_tokens": 2, "messages": turns, **fields}
    return parse_body(json.dumps(body).encode(), MessagesRequest).to_chat()


@pytest.mark.parametrize(("template", "joint"), TEMPLATES)
def test_three_apis_render_one_prompt(template: str, joint: str) -> None:
    expected = f"[user:first{joint}second][assistant:a{joint}b][user:last]"
    chats = (_chat(PLAIN), _responses(ITEMS), _messages(PLAIN))
    assert [_prompt(template, chat) for chat in chats] == [expected] * len(chats)


@pytest.mark.parametrize(("template", "joint"), TEMPLATES)
def test_texts_of_the_system_and_of_results_are_joined_alike(template: str, joint: str) -> None:
    parts = [{"type": "text", "text": text} for text in ("x", "y")]
    system = [{"role": "system", "content": parts}, {"role": "user", "content": "hi"}]
    expected = f"[system:x{joint}y][user:hi]"
    chats = (_chat(system), _responses(system), _messages(system[1:], system=parts))
    assert [_prompt(template, chat) for chat in chats] == [expected] * len(chats)

    result = {"type": "tool_result", "tool_use_id": "c", "content": parts}
    failed = {**result, "is_error": True}
    asked = _prompt(template, _messages([{"role": "user", "content": [result, failed]}]))
    assert asked == f"[tool:x{joint}y][tool:Error: x{joint}y]"
    output = {"type": "function_call_output", "call_id": "c", "output": parts}
    assert _prompt(template, _responses([output])) == f"[tool:x{joint}y]"


def test_what_stands_for_another_block_keeps_lines_of_its_own() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "body"}
    blocks = [
        {"type": "document", "source": source},
        {"type": "text", "text": "a"},
        {"type": "text", "text": "b"},
        {"type": "document", "source": source},
    ]
    chat = _messages([{"role": "user", "content": blocks}])
    assert _prompt(_of_parts(""), chat) == "[user:body\nab\nbody]"


def test_an_answer_of_parts_that_is_continued_is_still_inside_its_thoughts() -> None:
    tokenizer = thinking_tokenizer()
    parsers = OutputParsers.of_model(tokenizer, tokenizer.template_sources)
    reading = ChatReading(parsers, tokenizer)
    for begun, state in (
        (["<think>", "I look"], ReasoningState.OPEN),
        (["<think>so</think>", "It is"], ReasoningState.CLOSED),
    ):
        parts = [{"type": "text", "text": text} for text in begun]
        turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": parts}]
        prompt = "\n".join(begun)
        for chat in (
            _messages(turns),
            _chat(turns).model_copy(update={"continue_final_message": True}),
        ):
            assert reading.reasoning_state(chat, prompt) is state
