"""Questions about an input are answered by how likely the labels of their options are."""

from __future__ import annotations

import asyncio
import math
from itertools import pairwise
from typing import Any

import pytest

from decode_node.answer.decisions.decisions_format import label_shares
from decode_node.protocol.decisions.question_texts import labels
from decode_node.serving.decisions.label_tokens import label_tokens
from engine.frontend.templates.chat_template import ChatTemplate
from engine.frontend.tokenizer import Tokenizer
from tests.decode_node.chat_clients import thinking_tokenizer
from tests.decode_node.decode_fakes import FakeRequest
from tests.decode_node.http_node import HttpNode, http_node
from tests.engine.frontend.small_tokenizers import byte_level_backend

URL = "/v1/decisions"
INPUT = "The boat is in the harbour."
FITS: dict[str, Any] = {"type": "predicate", "instructions": "It floats."}
PLACE: dict[str, Any] = {
    "type": "choice",
    "name": "place",
    "instructions": "Where is it?",
    "choices": [{"value": "harbour", "description": "by the sea"}, {"value": True}],
}
SCALE: dict[str, Any] = {
    "type": "score",
    "instructions": [
        {"type": "input_text", "text": "How wet?"},
        {"type": "input_json", "data": {}},
    ],
    "levels": [{"label": "dry"}, {"label": "damp"}, {"label": "wet"}],
}
BODY: dict[str, Any] = {"model": "tiny", "input": INPUT, "questions": [FITS, PLACE, SCALE]}
CONTEXT = 1024
"""Leaves room for questions in tokens of one byte."""


async def post(node: HttpNode, **fields: Any) -> dict[str, Any]:
    response = await node.client.post(URL, json={**BODY, **fields})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def shares_of(*logprobs: float) -> list[float]:
    weights = [math.exp(one) for one in logprobs]
    return [one / sum(weights) for one in weights]


async def test_answers_are_the_probabilities_of_the_labels() -> None:
    """The engine tells -0.5 of the first label, and 0.25 less of each further one."""
    async with http_node(context=CONTEXT) as node:
        found = await post(node)
        first, second, third = found["answers"]
        assert first["type"] == "predicate" and first["name"] is None
        assert first["probability"] == pytest.approx(shares_of(-0.5, -0.75)[0])
        assert (second["name"], second["choice"]) == ("place", "harbour")
        assert [one["value"] for one in second["probabilities"]] == ["harbour", True]
        assert second["confidence"] == pytest.approx(math.exp(-0.5))
        expected = shares_of(-0.5, -0.75, -1.0)
        assert [one["label"] for one in third["probabilities"]] == ["dry", "damp", "wet"]
        assert [one["probability"] for one in third["probabilities"]] == pytest.approx(expected)
        assert third["score"] == pytest.approx(expected[1] + 2 * expected[2])
        usage = found["usage"]
        assert (found["model"], usage["output_tokens"]) == ("tiny", 3)
        assert usage["total_tokens"] == usage["input_tokens"] + 3


async def test_each_question_is_a_prompt_with_the_input_in_front() -> None:
    items = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_json", "data": {"a": [1]}}]},
    ]
    seen: list[str] = []
    async with http_node(context=CONTEXT) as node:

        def note(fake: FakeRequest) -> None:
            seen.append(node.tokenizer.decode(fake.request.spec.prompt_token_ids))

        node.engine.on_generate = note
        await post(node, input=items)
    expected = (
        "Statement: It floats.\nIs the statement true?\nA: true\nB: false\n",
        "Question: Where is it?\nWhich of these fits best?\nA: harbour (by the sea)\nB: true\n",
        "Question: How wet?\n{}\n",
    )
    for prompt, question in zip(seen, expected, strict=True):
        assert prompt.startswith('s:Be brief.\nu:{"a":[1]}')
        assert question in prompt


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"questions": []}, "questions"),
        ({"questions": [FITS] * 65}, "questions"),
        ({"questions": [{"type": "guess", "instructions": "?"}]}, "questions.0.type"),
        ({"questions": [{**PLACE, "choices": [{"value": "a"}]}]}, "questions.0.choices"),
        ({"questions": [{**PLACE, "choices": [{"value": "a"}] * 2}]}, "questions.0.choices"),
        ({"questions": [FITS, {**SCALE, "levels": None}]}, "questions.1.levels"),
        (
            {"questions": [{**PLACE, "choices": [{"value": str(i)} for i in range(200)]}]},
            "questions.0.choices",
        ),
        ({"questions": [{**FITS, "instructions": [{"text": "a"}]}]}, "questions.0.instructions.0"),
        (
            {"questions": [{**FITS, "instructions": [{"type": "input_json", "data": 1}]}]},
            "questions.0.instructions.0.data",
        ),
        ({"input": []}, "input"),
        ({"input": [{"type": "guess"}]}, "input.0.type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]},
            "input.0.content.0",
        ),
        ({"input": "a" * CONTEXT}, "input"),
        ({"model": "other"}, "model"),
    ],
)
async def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    async with http_node(context=CONTEXT) as node:
        response = await node.client.post(URL, json={**BODY, **fields})
        assert response.status_code in (400, 404), response.text
        assert response.json()["error"]["param"] == param
        assert not node.engine.requests


async def test_a_model_that_always_thinks_is_not_asked() -> None:
    backend = byte_level_backend()
    backend.add_tokens(["<think>", "</think>"])
    turns = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for switch, status in (("false", 400), ("enable_thinking is false", 200)):
        end = f"{{% if not {switch} %}}<think>{{% endif %}}"
        tokenizer = Tokenizer(backend, ChatTemplate(turns + end, {}))
        async with http_node(
            context=CONTEXT, tokenizer=tokenizer, reasoning_parser="qwen3"
        ) as node:
            response = await node.client.post(URL, json=BODY)
            assert response.status_code == status, response.text
            if status == 400:
                assert response.json()["error"]["code"] == "unsupported_model"


async def test_a_model_whose_answers_begin_with_a_header_is_not_asked() -> None:
    backend = byte_level_backend()
    backend.add_tokens(["<|start|>", "<|channel|>", "<|message|>", "<|end|>"])
    turns = "{% for m in messages %}<|start|>{{ m.content }}{% endfor %}<|start|>assistant"
    tokenizer = Tokenizer(backend, ChatTemplate(turns, {}))
    async with http_node(
        context=CONTEXT, tokenizer=tokenizer, reasoning_parser="openai_gptoss"
    ) as node:
        response = await node.client.post(URL, json=BODY)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "model")


async def test_labels_are_tokens_of_their_own_behind_the_prompt() -> None:
    tokenizer = thinking_tokenizer()
    found = await label_tokens(tokenizer, "go on:\n", 26)
    assert list(found) == [label for label, _ in zip(labels(), range(26), strict=False)]
    for label, token_id in found.items():
        assert tokenizer.encode(f"go on:\n{label}", add_special_tokens=False)[-1] == token_id
    # A byte-level vocabulary has no pairs of letters.
    assert len(await label_tokens(tokenizer, "go on:\n", 60)) == 26


async def test_answers_go_on_while_labels_are_found_and_that_is_done_once() -> None:
    """A byte-level vocabulary has none of 676 pairs: looking at them takes tens of milliseconds."""
    looked: list[str] = []

    class Counted(Tokenizer):
        def encode(self, text: str, **options: Any) -> list[int]:
            looked.append(text)
            return super().encode(text, **options)

    turns: list[int] = []

    async def go_on() -> None:
        while True:
            turns.append(len(looked))
            await asyncio.sleep(0)

    tokenizer = Counted(byte_level_backend(), ChatTemplate("", {}))
    looked.clear()
    other = asyncio.create_task(go_on())
    many, few = await asyncio.gather(
        label_tokens(tokenizer, "go on:\n", 60), label_tokens(tokenizer, "go on:\n", 3)
    )
    other.cancel()
    assert list(many)[:3] == list(few) and len(few) == 3
    assert len(looked) == 1 + 26 + 26**2
    assert max(late - early for early, late in pairwise(turns)) <= 17
    assert await label_tokens(tokenizer, "go on:\n", 60) == many
    assert len(looked) == 1 + 26 + 26**2


def test_the_probabilities_of_labels_add_up_to_one() -> None:
    assert label_shares([math.log(0.2), math.log(0.6)]) == pytest.approx([0.25, 0.75])
    assert label_shares([-math.inf, -2000.0]) == [0.0, 1.0]
    assert label_shares([-math.inf, -math.inf]) == [0.5, 0.5]
