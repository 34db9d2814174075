"""Sessions stick by their images, and an image counts as about a thousand tokens, whatever its
bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.request.image_urls import shortened
from router.request.info import RequestInfo, read_request_info

CAT = "data:image/png;base64," + "Q2F0" * 100_000
DOG = "data:image/png;base64," + "RG9n" * 100_000


def info(*parts: str | dict[str, Any], later: tuple[str, ...] = ()) -> RequestInfo:
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str) and not part.startswith("data:")
        else {"type": "image_url", "image_url": {"url": part}}
        for part in parts
    ]
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    messages += [{"role": "user", "content": text} for text in later]
    body = json.dumps({"model": "m", "messages": messages}).encode()
    return read_request_info("/v1/chat/completions", "r", {}, body)


def test_questions_about_one_image_are_one_session() -> None:
    first = info(CAT, "what is it?")
    assert first.session_key == info("describe it", CAT).session_key
    assert first.session_key == info(CAT, "what is it?", later=("and its colour?",)).session_key
    assert first.session_key != info(DOG, "what is it?").session_key
    assert first.session_key != info(CAT, DOG, "what is it?").session_key
    assert info("what is it?").session_key != info("describe it").session_key


def test_images_are_blocks_of_the_prompt() -> None:
    first, again, other = info(CAT, "what?" * 2000), info(CAT, "what?" * 3000), info(DOG, "what?")
    assert first.prefix_blocks[:3] == again.prefix_blocks[:3]
    assert first.prefix_blocks[0] != other.prefix_blocks[0]


def test_an_image_counts_as_a_thousand_tokens() -> None:
    alone = info("what?").num_prompt_tokens
    assert 900 < info(CAT, "what?").num_prompt_tokens - alone < 1200
    assert 1800 < info(CAT, DOG, "what?").num_prompt_tokens - alone < 2300


def test_a_video_counts_as_four_thousand_tokens_and_is_a_session() -> None:
    film, other = (f"data:video/mp4;base64,{data * 100_000}" for data in ("Q2F0", "RG9n"))
    first = info(film, "what?")
    assert 3600 < first.num_prompt_tokens < 4700
    assert first.session_key == info("describe it", film).session_key
    assert first.session_key != info(other, "what?").session_key


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_images_of_the_messages_api_count_likewise(separators: tuple[str, str]) -> None:
    def info_of(data: str, text: str) -> RequestInfo:
        source = {"type": "base64", "media_type": "image/png", "data": data.partition(",")[2]}
        content = [{"type": "image", "source": source}, {"type": "text", "text": text}]
        body = {"model": "m", "messages": [{"role": "user", "content": content}]}
        encoded = json.dumps(body, separators=separators).encode()
        return read_request_info("/v1/messages", "r", {}, encoded)

    cat, dog = info_of(CAT, "what is it?"), info_of(DOG, "what is it?")
    assert cat.session_key == info_of(CAT, "describe it").session_key != dog.session_key
    assert 900 < cat.num_prompt_tokens < 1300


def test_nothing_grows() -> None:
    many = json.dumps([f"data:image/{i}" for i in range(20_000)]).encode()
    assert len(shortened(many)) <= len(many)
    assert shortened(b'["data:image\\/png;base64,AAAA"]') != b'["data:image\\/png;base64,AAAA"]'
    assert json.loads(shortened(many))
    text = b'["no image in it"]'
    assert shortened(text) is text
