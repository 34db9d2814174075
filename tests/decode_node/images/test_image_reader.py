"""Images of a request: limits and faults are told by their place, and cost nobody else anything."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import signal
import struct
import zlib
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from decode_node.errors import Overloaded, Unavailable
from decode_node.images import image_pool
from decode_node.images.encoded_room import EncodedRoom
from decode_node.images.image_parts import ImagePlace, expanded
from decode_node.images.image_pool import ImagePool
from decode_node.images.image_reader import ImageReader, ReadLimits
from edge.http.errors import BadRequest
from edge.logs.formatters import JsonFormatter
from engine.images.image_input import ImagePixels, image_digest
from engine.images.vision_spec import BlockSpec, PixelSpec, VisionSpec
from tests.decode_node.images.test_preprocess import SPEC, encode, picture
from tests.processes import find_processes

GOOD = encode(picture(80, 60, 1), "PNG")


def url(data: bytes, head: str = "data:image/png;base64,") -> str:
    return head + base64.b64encode(data).decode()


def places(*urls: str) -> list[ImagePlace]:
    return [ImagePlace(f"messages.0.content.{i}", one) for i, one in enumerate(urls)]


def reader_of(pixels: PixelSpec = SPEC, timeout_s: float = 20.0) -> ImageReader:
    pool = ImagePool(pixels, size=1, max_pixels=100_000, timeout_s=timeout_s)
    return ImageReader(pool, ReadLimits(3, 60_000))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reader() -> AsyncIterator[ImageReader]:
    reader = reader_of()
    yield reader
    await asyncio.to_thread(reader.close)


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_images_come_back_in_order(reader: ImageReader) -> None:
    other = encode(picture(60, 90, 2), "JPEG")
    sent = places(url(GOOD), url(other, "data:image/jpeg;base64,"), url(GOOD, "DATA:;base64,"))
    found = await reader.read(sent)
    assert [(one.rows, one.columns) for one in found] == [(2, 3), (3, 2), (2, 3)]
    assert found[0] == found[2] != found[1]
    assert await reader.read([]) == []
    assert reader._room.num_bytes == 0


async def test_images_that_have_no_room_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = reader_of()
    room = EncodedRoom(len(GOOD))
    monkeypatch.setattr(reader, "_room", room)
    with room.held() as hold:
        hold(1)
        with pytest.raises(Overloaded):
            await reader.read(places(url(GOOD)))
    assert room.num_bytes == 0
    assert len(await reader.read(places(url(GOOD)))) == 1
    await asyncio.to_thread(reader.close)


async def test_its_process_logs_as_the_node_does(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frame count of zero makes the library warn, and the first picture is taken."""
    no_frames = b"acTL" + bytes(8)
    chunk = struct.pack(">I", 8) + no_frames + struct.pack(">I", zlib.crc32(no_frames))
    strange = GOOD[:33] + chunk + GOOD[33:]
    handler = logging.NullHandler()
    handler.setFormatter(JsonFormatter("decode"))
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    reader = reader_of()
    assert await reader.read(places(url(strange))) == await reader.read(places(url(GOOD)))
    await asyncio.to_thread(reader.close)
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [(line["process"], "APNG" in line["message"]) for line in lines] == [
        ("image decoder", True)
    ]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("https://example.com/a.png", "--image-url-hosts"),
        ("http://127.0.0.1/", "--image-url-hosts"),
        ("file:///etc/passwd", "must be a data: URL"),
        ("/etc/passwd", "must be a data: URL"),
        ("", "must be a data: URL"),
        ("data:image/png,abc", "must be base64"),
        ("data:text/html;base64,abcd", "must be base64"),
        ("data:image/png;base64,", "is empty"),
        ("data:image/png;base64,@@@@", "not valid base64"),
        ("data:image/png;base64,abcde", "not valid base64"),
        (url(b"not an image at all"), "no PNG, JPEG or WebP"),
        (url(GOOD[:200]), "cannot be decoded"),
        (url(bytes(60_001)), "more than 60000 bytes"),
        (url(encode(picture(400, 400, 1), "JPEG", quality=10)), "400 x 400 pixels"),
    ],
)
async def test_a_fault_names_its_part(reader: ImageReader, wrong: str, words: str) -> None:
    with pytest.raises(BadRequest, match="messages.0.content.1: the image") as caught:
        await reader.read(places(url(GOOD), wrong))
    assert words in caught.value.message
    assert caught.value.param == "messages.0.content.1"
    assert caught.value.code == "invalid_image"


async def test_too_many_are_refused_before_any_is_read(reader: ImageReader) -> None:
    with pytest.raises(BadRequest, match="at most 3 images") as caught:
        await reader.read(places(*[url(b"junk")] * 4))
    assert caught.value.param == "messages.0.content.3"


async def test_a_model_that_sees_none_refuses() -> None:
    reader = ImageReader(None, ReadLimits(0, 1))
    with pytest.raises(BadRequest, match="messages.0.content.0: this model takes no images"):
        await reader.read(places(url(GOOD)))


async def test_a_killed_decoder_is_replaced(reader: ImageReader) -> None:
    await reader.read(places(url(GOOD)))
    (child,) = find_processes(os.getpid(), "decode_node.images.image_child")
    os.kill(child, signal.SIGKILL)
    assert len(await reader.read(places(url(GOOD)))) == 1


@pytest.mark.parametrize(
    ("number", "error"),
    [(signal.SIGKILL, Unavailable), (signal.SIGSEGV, BadRequest)],
    ids=["somebody", "the image"],
)
async def test_an_image_whose_decoders_end_twice(
    reader: ImageReader, monkeypatch: pytest.MonkeyPatch, number: int, error: type[Exception]
) -> None:
    """Those that somebody kills are no fault of the client's."""

    def end(link: image_pool._Link, data: bytes, timeout_s: float) -> object:
        os.kill(link._process.pid, number)
        return ask(link, data, timeout_s)

    ask = image_pool._Link.ask
    with monkeypatch.context() as patched:
        patched.setattr(image_pool._Link, "ask", end)
        with pytest.raises(error):
            await reader.read(places(url(GOOD)))
    assert len(await reader.read(places(url(GOOD)))) == 1


async def test_a_new_process_has_its_start_before_the_first_image_has_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A timeout ends a process, so the image behind it would get the time of a start besides."""
    asked: list[float] = []

    def note(link: image_pool._Link, data: bytes, timeout_s: float) -> object:
        assert link.is_ready
        asked.append(timeout_s)
        return ask(link, data, timeout_s)

    ask = image_pool._Link.ask
    monkeypatch.setattr(image_pool._Link, "ask", note)
    reader = reader_of(timeout_s=15.0)
    assert len(await reader.read(places(url(GOOD)))) == 1
    assert asked == [15.0]
    await asyncio.to_thread(reader.close)


async def test_a_slow_image_is_given_up(reader: ImageReader) -> None:
    await reader.read(places(url(GOOD)))
    (child,) = find_processes(os.getpid(), "decode_node.images.image_child")
    os.kill(child, signal.SIGSTOP)
    assert reader._pool is not None
    reader._pool._timeout_s = 0.2
    try:
        with pytest.raises(BadRequest, match="longer than 0.2 s"):
            await reader.read(places(url(GOOD)))
    finally:
        reader._pool._timeout_s = 20.0
    assert len(await reader.read(places(url(GOOD)))) == 1


def _vision(image: int, row_ends: tuple[int, int] | tuple[()] = ()) -> VisionSpec:
    return VisionSpec(
        names={},
        depth=1,
        hidden_size=8,
        intermediate_size=8,
        num_heads=1,
        out_hidden_size=8,
        pixels=SPEC,
        block=BlockSpec(norm="rms", activation="silu"),
        patch_shape=(3, 14, 14),
        image_token_id=image,
        row_end_ids=row_ends,
    )


def _no_text(text: str) -> list[int]:
    raise AssertionError(text)


def _image(rows: int, columns: int) -> ImagePixels:
    return ImagePixels(image_digest(rows, columns, b""), rows, columns, b"")


async def test_placeholders_become_the_tokens_of_their_images() -> None:
    tokens, spans = expanded(
        [5, 9, 6, 9, 9, 7], [_image(1, 2), _image(2, 2), _image(1, 1)], _vision(9), _no_text
    )
    assert tokens == [5, 9, 9, 6, 9, 9, 9, 9, 9, 7]
    assert [(span.offset, span.num_tokens) for span in spans] == [(1, 2), (4, 4), (8, 1)]


@pytest.mark.parametrize("tokens", [[1, 2], [9, 9], [9]])
async def test_as_many_places_as_images(tokens: list[int]) -> None:
    images = [] if tokens == [9] else [_image(1, 1)]
    counts = f"{tokens.count(9)} places for its {len(images)} images"
    with pytest.raises(BadRequest, match=f"{counts} and videos: the chat template"):
        expanded(tokens, images, _vision(9), _no_text)
    with pytest.raises(BadRequest, match=f"{counts} and videos: it needs one placeholder") as told:
        expanded(tokens, images, _vision(9), _no_text, "image_data")
    assert told.value.param == "image_data" and "template" not in str(told.value)


async def test_rows_of_an_image_end_with_tokens_of_their_own() -> None:
    vision = _vision(9, (7, 8))
    tokens, spans = expanded([5, 9, 9, 6], [_image(2, 3), _image(1, 1)], vision, _no_text)
    assert tokens == [5, 9, 9, 9, 7, 9, 9, 9, 8, 9, 8, 6]
    assert [(span.offset, span.end, span.num_embeddings) for span in spans] == [
        (1, 9, 6),
        (9, 11, 1),
    ]
