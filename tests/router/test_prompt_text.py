"""The router scans bodies: what it makes of them is what whole copies of their parts would give,
and a body of megabytes costs no copies of it."""

from __future__ import annotations

import json
import re
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from router.request.image_urls import shortened
from router.request.info import SessionSource, read_request_info
from router.request.prompt_text import PromptText

LONG = 4 << 20
USER = [{"role": "user", "content": "hello"}]
PIECES = [b"data:image", b'"data":', b'"data": ', b"/", b"\\/", b'"', b"x" * 70, b"y", b" ", b":"]
IMAGE = re.compile(rb'data:image\\?/[^"]*|(?<="data":")[^"]{64,}|(?<="data": ")[^"]{64,}')
"""All that is taken for an image, as one expression says it."""

texts = st.binary(max_size=300).map(lambda text: b" [" + text)


@settings(deadline=None)
@given(texts, texts, st.integers(0, 700))
def test_parts_are_those_of_the_whole(preamble: bytes, prompt: bytes, num_bytes: int) -> None:
    text = PromptText.of(msgspec.Raw(preamble), msgspec.Raw(prompt))
    whole = preamble + prompt.lstrip(b" \t\r\n[")
    assert text.beginning(num_bytes) == whole[:num_bytes]
    assert len(text) == len(whole)
    is_ids = whole.lstrip(b" \t\r\n[")[:1].isdigit()
    assert text.num_tokens == (whole.count(b",") + 1 if is_ids else len(whole) // 4)


def messages_body(line: str, rest: str) -> bytes:
    system = [{"type": "text", "text": line}, {"type": "text", "text": rest}]
    return json.dumps({"system": system, "messages": USER}).encode()


def gateway_body(line: str, rest: str) -> bytes:
    system = {"role": "system", "content": [{"type": "text", "text": line + "\n" + rest}]}
    return json.dumps({"messages": [system, *USER]}).encode()


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/messages", messages_body), ("/v1/chat/completions", gateway_body)],
)
def test_conversations_of_claude_code_share_their_blocks(
    path: str, body: Callable[[str, str], bytes]
) -> None:
    """Their system prompts begin with a line that is another one in each."""
    line = "x-anthropic-billing-header: cc_version=2.1.332.{}; cc_entrypoint=cli;"
    chains = [
        read_request_info(path, "r", {}, body(line.format(one), rest * 2000)).prefix_blocks
        for one, rest in (("6f1", "be kind. "), ("06d", "be kind. "), ("6f1", "be brief. "))
    ]
    assert len(chains[0]) > 2 and chains[0] == chains[1]
    assert chains[0][0] != chains[2][0]


def test_conversations_of_codex_share_their_blocks() -> None:
    """Each item has a name of its own, be it tools or what the developer says."""

    def blocks(name: str, rest: str) -> tuple[int, ...]:
        tools = {"type": "additional_tools", "id": f"at_01a228{name}-7733", "tools": []}
        said = {"type": "message", "id": f"msg_01a228{name}-8317", "role": "developer"}
        body = {"input": [tools, {**said, "content": rest * 2000}]}
        return read_request_info("/v1/responses", "r", {}, json.dumps(body).encode()).prefix_blocks

    first, second = blocks("cf", "be kind. "), blocks("d1", "be kind. ")
    assert len(first) > 2 and first == second
    assert first[0] != blocks("cf", "be brief. ")[0]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_tools_are_part_of_the_prompt(path: str) -> None:
    """An agent's first prompt is tools, for the most part."""
    body = {"messages": [{"role": "user", "content": "be kind " * 1000}]}
    tools = [{"name": f"t{i}", "description": "does " * 200} for i in range(30)]
    plain, whole = (
        read_request_info(path, "r", {}, json.dumps(one).encode())
        for one in (body, {**body, "tools": tools})
    )
    more = whole.num_prompt_tokens - plain.num_prompt_tokens
    assert abs(more - len(json.dumps(tools)) // 4) < 2
    assert whole.prefix_blocks == plain.prefix_blocks
    assert (whole.num_tool_tokens, plain.num_tool_tokens) == (more, 0)
    assert whole.tokens_per_block == plain.tokens_per_block
    half = whole.bounded(whole.num_prompt_tokens // 2)
    assert half.num_tool_tokens == pytest.approx(more / 2, abs=1)


def named(image: re.Match[bytes]) -> bytes:
    name = b"img-" + xxhash.xxh3_128_hexdigest(image.group()).encode()
    return (name * 200)[: min(len(image.group()), 4096)]


@settings(deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=20).map(b"".join))
def test_images_are_found_as_one_expression_would(text: bytes) -> None:
    assert shortened(text) == IMAGE.sub(named, text)
    assert (shortened(text) is text) == (IMAGE.search(text) is None)


def chat(content: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}, {"role": "user", "content": "b"}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a\n" * (LONG // 3)}),
        ("/v1/completions", {"prompt": [1234567] * (LONG // 9)}),
        ("/v1/chat/completions", chat("a\n" * (LONG // 3))),
        ("/v1/responses", {"instructions": "a" * LONG, "input": "hi"}),
        ("/v1/messages", {"system": "a" * LONG, **chat("hi")}),
        ("/tokenize", {"prompt": "a" * LONG}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_nothing_long_is_copied(path: str, body: dict[str, Any]) -> None:
    encoded = json.dumps(body).encode()
    tracemalloc.start()
    try:
        info = read_request_info(path, "r", {}, encoded)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 2.5 * (1 << 20), "the blocks of a prefix are of the first two megabytes"
    if info.generates:
        assert info.num_prompt_tokens > LONG // 12
        assert len(info.prefix_blocks) > 100
        assert info.session_source is SessionSource.PROMPT


def test_the_key_of_a_session_is_of_the_whole_opening() -> None:
    opening = "a" * LONG
    key = read_request_info("/v1/chat/completions", "r", {}, json.dumps(chat(opening)).encode())
    other = json.dumps(chat(opening[:-1] + "b")).encode()
    assert key.session_key != read_request_info("/v1/chat/completions", "r", {}, other).session_key
    first = json.dumps({"role": "user", "content": opening}).encode()
    said = xxhash.xxh3_128_digest(b"0:\0prompt\0" + first)
    assert key.session_key == said


def test_names_that_are_too_long_to_mean_anything_are_cut() -> None:
    body = json.dumps({"prompt": "hi", "model": "m" * LONG, "stream": True}).encode()
    info = read_request_info("/v1/completions", "r", {}, body)
    assert 60_000 < len(info.asked_model) < 70_000
    assert info.is_stream


def test_names_of_items_are_left_out_and_those_of_calls_stay() -> None:
    """A call's name is in the prompt; an item's is another one in each conversation."""
    kept = b'{"id":"call_0123456789"},{"id": "toolu_0123456789"},{"id":"my own"},{"call_id":"ab"}'
    for item in (b'"id":"msg_0123456789",', b'"id": "rs_0123456789abcdef"', b'"id":"ctc_01234567"'):
        text = PromptText.of(msgspec.Raw(b""), msgspec.Raw(b"{" + item + b"}," + kept))
        assert text.beginning(1000) == b"{}," + kept
