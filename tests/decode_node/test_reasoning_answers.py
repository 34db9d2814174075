"""Answers tell what the model thinks apart from what it says, whole and streamed."""

from __future__ import annotations

from typing import Any

import pytest

from decode_node.config import DecodeNodeSettings
from decode_node.main import main as decode_node_main
from decode_node.served_text import create_parsers
from engine.node.settings.engine_settings import SettingsError
from tests.decode_node.chat_clients import (
    CHAT,
    MESSAGES,
    Accumulated,
    accumulated,
    as_accumulated,
    thinking_tokenizer,
)
from tests.decode_node.http_node import chunks_of, http_node

SCRIPT = "<think>\nthe dog → größer\n</think>\n\nthe fox"


async def both(
    script: str, fields: dict[str, Any], **settings: Any
) -> tuple[Accumulated, Accumulated, dict[str, Any], dict[str, Any]]:
    """Returns an answer streamed and whole, the whole one's message, and the last usage."""
    body = {"messages": MESSAGES, "seed": 0, **fields}
    node = http_node(tokenizer=thinking_tokenizer(), scripts=[script], **settings)
    async with node as node:
        whole = (await node.client.post(CHAT, json=body)).json()
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        chunks = chunks_of((await node.client.post(CHAT, json=streamed)).text)
    assert chunks[-1]["usage"] == whole["usage"]
    (stream,), (choice,) = accumulated(chunks), whole["choices"]
    return stream, as_accumulated(choice), choice["message"], whole["usage"]


async def test_reasoning_is_apart_and_its_tokens_are_counted() -> None:
    stream, whole, message, usage = await both(SCRIPT, {})
    assert stream == whole
    assert message["reasoning_content"] == "\nthe dog → größer\n"
    assert message["content"] == "\n\nthe fox"
    assert "tool_calls" not in message
    tokenizer = thinking_tokenizer()
    thought = tokenizer.encode("<think>\nthe dog → größer\n</think>")
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len(thought) - 2}


async def test_what_the_prompt_opened_needs_no_marker() -> None:
    fields = {"chat_template_kwargs": {"open_thinking": True}}
    stream, whole, message, _ = await both("deep</think>yes", fields)
    assert stream == whole
    assert (message["reasoning_content"], message["content"]) == ("deep", "yes")


async def test_without_thinking_there_is_only_content() -> None:
    for fields in (
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
        {"thinking": {"type": "disabled"}},
        {"enable_thinking": False},
        {"reasoning": {"enabled": False}},
    ):
        stream, whole, message, usage = await both("the fox", fields)
        assert stream == whole
        assert (message["reasoning_content"], message["content"]) == (None, "the fox")
        assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_thinking_that_is_cut_off_leaves_no_content() -> None:
    stream, whole, message, _ = await both(SCRIPT, {"max_tokens": 4})
    assert stream == whole
    assert whole.finish_reasons == ["length"]
    assert message["content"] is None
    assert message["reasoning_content"].startswith("\nthe")


async def test_reasoning_can_be_left_out_or_have_both_names() -> None:
    for fields in ({"include_reasoning": False}, {"reasoning": {"exclude": True}}):
        stream, whole, message, usage = await both(SCRIPT, fields)
        assert stream == whole
        assert "reasoning_content" not in message and message["content"] == "\n\nthe fox"
        assert usage["completion_tokens_details"]["reasoning_tokens"] > 0
    _, _, message, _ = await both(SCRIPT, {})
    assert message["reasoning"] == message["reasoning_content"] == "\nthe dog → größer\n"
    _, _, message, _ = await both(SCRIPT, {}, reasoning_alias=False)
    assert message["reasoning_content"] and "reasoning" not in message


async def test_tokens_and_logprobs_are_all_there_once() -> None:
    fields = {"logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    stream, whole, _, usage = await both(SCRIPT, fields)
    assert stream == whole
    ids = thinking_tokenizer().encode(SCRIPT + "</s>")
    assert stream.token_ids == ids
    assert len(stream.logprobs) == len(ids) == usage["completion_tokens"]


async def test_a_server_without_a_parser_leaves_all_in_the_text() -> None:
    stream, whole, message, usage = await both(SCRIPT, {}, reasoning_parser="none")
    assert stream == whole
    assert message["content"] == SCRIPT
    assert "reasoning_content" not in message and "completion_tokens_details" not in usage


def test_an_unknown_parser_ends_the_start() -> None:
    settings = DecodeNodeSettings(model="unused", reasoning_parser="qwen")
    with pytest.raises(SettingsError, match="qwen3"):
        create_parsers(settings, thinking_tokenizer())


@pytest.mark.parametrize("flag", ["--reasoning-parser", "--tool-call-parser"])
def test_a_check_of_settings_knows_the_names(
    flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, code in (("mistral", 0), ("none", 0), ("auto", 0), ("mistrall", 2)):
        monkeypatch.setattr("sys.argv", ["node", "--check", "--model", "any", flag, name])
        assert decode_node_main() == code
        said = capsys.readouterr().err
        assert said.count("\n") == (code != 0) and ("mistral," in said) == (code != 0)


@pytest.mark.parametrize("ids", [[-1], [1, 2**40]])
async def test_tokens_that_no_vocabulary_has_are_refused_by_a_model_that_thinks(
    ids: list[int],
) -> None:
    """The end of its prompt is read, which may be amid thinking."""
    async with http_node(tokenizer=thinking_tokenizer()) as node:
        answer = await node.client.post("/v1/completions", json={"prompt": ids, "max_tokens": 1})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == "prompt"
