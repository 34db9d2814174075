"""Videos of a request become pairs of frames with their times; what cannot be taken is named."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio
from PIL import Image

from decode_node.images.image_parts import ImagePlace, expanded
from decode_node.images.image_pool import ImagePool
from decode_node.images.image_reader import ImageReader, ReadLimits
from decode_node.images.preprocess import ImageError
from decode_node.images.videos.preprocess import VideoPixels, preprocess_video
from edge.http.errors import BadRequest
from engine.images.image_input import ImagePixels, image_digest
from engine.images.video_spec import VideoSpec
from engine.images.vision_spec import BlockSpec, VisionSpec
from tests.decode_node.images.test_preprocess import SPEC, encode, picture

VIDEO = VideoSpec(
    token_id=8,
    frame_token_id=8,
    has_mean_times=True,
    sampling="even_ends",
    min_pixels=28 * 28,
    max_pixels=28 * 28 * 40,
)
FRAMES = [picture(60, 90, seed) for seed in range(6)]
MOST = 100_000


def animation(form: str, frames: list[Image.Image] = FRAMES, delay_ms: int = 250) -> bytes:
    options: dict[str, Any] = {"lossless": True} if form == "WEBP" else {}
    more = frames[1:]
    return encode(frames[0], form, save_all=True, append_images=more, duration=delay_ms, **options)


def film(form: str, codec: str, frames: list[Image.Image], rate: int = 4, title: str = "") -> bytes:
    av = pytest.importorskip("av")
    out = io.BytesIO()
    with av.open(out, "w", format=form) as container:
        container.metadata["title"] = title
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = *frames[0].size, "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_image(frame)))
        container.mux(stream.encode())
    return out.getvalue()


def shades(found: VideoPixels) -> list[list[float]]:
    """Returns the mean shade of each frame of each pair."""
    return [
        np.frombuffer(pair.patches, np.uint8).reshape(pair.rows * pair.columns * 4, 3, -1, 196)
        .mean(axis=(0, 1, 3)).round().tolist()
        for pair in found.pairs
    ]  # fmt: skip


def test_an_animation_becomes_pairs_of_frames() -> None:
    """Four frames of six, 0, 2, 3 and 5, are taken of 1.5 seconds: two a second, four at least."""
    found = preprocess_video([animation("WEBP")], SPEC, VIDEO, MOST)
    expected = [np.asarray(FRAMES[i]) for i in (0, 2, 3, 5)]
    assert found.times == (0.25, 1.0) and found.step_s == 0.75
    assert [(pair.rows, pair.columns) for pair in found.pairs] == [(3, 2)] * 2
    # The size stays in one direction; means of resized frames are near those of frames.
    for pair, (first, second) in zip(shades(found), (expected[:2], expected[2:]), strict=True):
        assert np.abs(np.array(pair) - [first.mean(), second.mean()]).max() < 3
    assert len({pair.digest for pair in found.pairs}) == 2


def test_pairs_of_equal_frames_are_images() -> None:
    """A still scene is sent and encoded as one picture is."""
    still = [FRAMES[0].resize((56, 84))] * 5 + [FRAMES[1].resize((56, 84))]
    found = preprocess_video([animation("PNG", still)], SPEC, VIDEO, MOST)
    first, second = found.pairs
    assert len(first.patches) == 3 * 56 * 84 == len(second.patches) // 2
    again = preprocess_video([animation("PNG", still, 500)], SPEC, VIDEO, MOST)
    assert again.pairs[0] == first


def test_pairs_that_see_each_other_are_given_together() -> None:
    """Five of them, two at a time: each is as it is alone."""
    still = [FRAMES[0].resize((56, 84))] * 4 + [frame.resize((56, 84)) for frame in FRAMES]
    data, every = [animation("PNG", still)], {"fps": 4.0, "of_all": False}
    alone = preprocess_video(data, SPEC, msgspec.structs.replace(VIDEO, **every), MOST)
    joined = msgspec.structs.replace(VIDEO, pairs_at_once=2, **every)
    found = preprocess_video(data, SPEC, joined, MOST)
    assert len(alone.pairs) == 5 and found.times == alone.times
    lengths, size = [len(pair.patches) for pair in found.pairs], 2 * 3 * 56 * 84
    assert lengths == [2 * size, 2 * size, size]
    second = alone.pairs[2].patches + alone.pairs[3].patches
    assert found.pairs[1].patches == second and found.pairs[2] == alone.pairs[4]
    first = np.frombuffer(found.pairs[0].patches, np.uint8).reshape(-1, 3, 2, 196)
    assert (first[:, :, 0] == first[:, :, 1]).all(), "equal frames are both there"


@pytest.mark.parametrize(
    ("form", "codec"), [("mp4", "mpeg4"), ("webm", "libvpx-vp9"), ("mov", "libx264")]
)
def test_films_become_pairs_of_frames(form: str, codec: str) -> None:
    grey = [Image.new("RGB", (64, 48), (level,) * 3) for level in (20, 60, 100, 140, 180, 220)]
    found = preprocess_video([film(form, codec, grey)], SPEC, VIDEO, MOST)
    assert found.times == (0.25, 1.0)
    np.testing.assert_allclose(shades(found), [[20, 100], [140, 220]], atol=2)


@pytest.mark.parametrize("form", ["mp4", "matroska"])
def test_a_title_is_in_any_encoding(form: str) -> None:
    named = film(form, "mpeg4", [Image.new("RGB", (64, 48))] * 3, title="Caf+ au lait")
    assert b"Caf+" in named
    latin = named.replace(b"Caf+", "Caf\xe9".encode("latin-1"))
    assert preprocess_video([latin], SPEC, VIDEO, MOST).times[0] >= 0


def test_a_film_that_breaks_off_goes_on_with_its_last_frame() -> None:
    grey = [Image.new("RGB", (64, 48), (40 * level,) * 3) for level in range(6)]
    data = film("matroska", "mpeg4", grey)
    whole = preprocess_video([data], SPEC, VIDEO, MOST)
    cut = preprocess_video([data[: data.rindex(b"\xa3")]], SPEC, VIDEO, MOST)
    assert len(cut.pairs) == len(whole.pairs)


def test_decoders_that_are_not_named_are_never_opened() -> None:
    """The library looks at all streams when it opens a file, also at those that are not decoded."""
    av = pytest.importorskip("av")
    other = film("matroska", "ffv1", [Image.new("RGB", (64, 48))] * 3)
    level = av.logging.get_level()
    av.logging.set_level(av.logging.ERROR)
    try:
        with av.logging.Capture() as lines, pytest.raises(ImageError, match="not decoded here"):
            preprocess_video([other], SPEC, VIDEO, MOST)
    finally:
        av.logging.set_level(level)
    assert any("not on whitelist" in line for *_, line in lines)


def test_pictures_of_their_own_are_all_taken() -> None:
    data = [encode(frame, "JPEG") for frame in FRAMES[:3]]
    found = preprocess_video(data, SPEC, VIDEO, MOST)
    assert found.times == (0.25, 1.0) and len(found.pairs) == 2
    assert len(found.pairs[1].patches) == 3 * 3 * 2 * 28 * 28  # the last one again
    alone = preprocess_video(data[:1], SPEC, VIDEO, MOST)
    assert alone.pairs == preprocess_video(data[:1] * 2, SPEC, VIDEO, MOST).pairs


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([b"no video"], "is no MP4"),
        ([b"\x1aE\xdf\xa3" + bytes(30)], "cannot be decoded|is a film"),
        ([b"GIF89a"], "cannot be decoded"),
        ([animation("GIF")[:2000]], "cannot be decoded"),
        ([animation("GIF", [Image.new("RGB", (500, 400))] * 2)], "500 x 400 pixels"),
        ([encode(FRAMES[0], "JPEG")] * 9, "more than 8 pictures"),
        ([encode(FRAMES[0], "JPEG"), b"?"], "is no PNG"),
    ],
)
def test_what_cannot_be_taken_is_named(data: list[bytes], words: str) -> None:
    video = VIDEO.limited(max_frames=8)
    with pytest.raises(ImageError, match=words):
        preprocess_video(data, SPEC, video, MOST)


def place(data: bytes, head: str = "data:video/mp4;base64,", index: int = 0) -> ImagePlace:
    url = head + base64.b64encode(data).decode()
    return ImagePlace(f"messages.0.content.{index}", url, True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reader() -> AsyncIterator[ImageReader]:
    pool = ImagePool(
        SPEC, size=1, max_pixels=MOST, timeout_s=20.0, video=VIDEO, video_timeout_s=20.0
    )
    reader = ImageReader(pool, ReadLimits(1, 60_000), ReadLimits(2, 200_000))
    yield reader
    await asyncio.to_thread(reader.close)


@pytest.mark.asyncio(loop_scope="module")
async def test_images_and_videos_come_back_in_order(reader: ImageReader) -> None:
    still = encode(FRAMES[0], "JPEG")
    image = ImagePlace("messages.0.content.1", place(still, "data:image/jpeg;base64,").url)
    pictures = base64.b64encode(still).decode()
    found = await reader.read(
        [
            place(animation("GIF"), "data:image/gif;base64,"),
            image,
            ImagePlace(
                "messages.0.content.2", f"data:video/jpeg;base64,{pictures},{pictures}", True
            ),
        ]
    )
    assert [type(one) for one in found] == [VideoPixels, ImagePixels, VideoPixels]
    assert isinstance(found[2], VideoPixels)
    assert len(found[2].pairs[0].patches) == 3 * 3 * 2 * 28 * 28


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (place(b"junk"), "is no MP4"),
        (place(bytes(200_001)), "more than 200000 bytes"),
        (ImagePlace("messages.0.content.0", "https://a.example/a.mp4", True), "--image-url-hosts"),
    ],
)  # fmt: skip
async def test_a_fault_names_its_part(reader: ImageReader, wrong: ImagePlace, words: str) -> None:
    with pytest.raises(BadRequest, match="messages.0.content.0: the video") as caught:
        await reader.read([wrong])
    assert words in caught.value.message
    assert (caught.value.param, caught.value.code) == ("messages.0.content.0", "invalid_video")


@pytest.mark.asyncio(loop_scope="module")
async def test_limits_are_of_each_kind(reader: ImageReader) -> None:
    with pytest.raises(BadRequest, match=r"content.2: a request may have at most 2 videos"):
        await reader.read([place(b"junk", index=i) for i in range(3)])
    none = ImageReader(ImagePool(SPEC, size=1, max_pixels=1, timeout_s=1.0), ReadLimits(1, 1))
    with pytest.raises(BadRequest, match=r"content.0: this model takes no videos"):
        await none.read([place(b"junk")])
    await asyncio.to_thread(none.close)


def _vision(video: VideoSpec) -> VisionSpec:
    return VisionSpec(
        names={},
        depth=1,
        hidden_size=8,
        intermediate_size=8,
        num_heads=1,
        out_hidden_size=8,
        pixels=SPEC,
        block=BlockSpec(norm="rms", activation="silu"),
        patch_shape=(3, 2, 14, 14),
        image_token_id=9,
        video=video,
    )


def _made(*times: float, step_s: float = 1.0) -> VideoPixels:
    pairs = [ImagePixels(image_digest(1, 2, bytes([i])), 1, 2, b"") for i in range(len(times))]
    return VideoPixels(tuple(pairs), times, step_s)


def test_times_are_text_between_frames() -> None:
    video = msgspec.structs.replace(VIDEO, frame_text="{time:.1f}|{whole}#", pad="#")
    written = {"0.2|0#7.5|7#": [41, 8, 42, 43, 8]}
    image = ImagePixels(bytes(32), 1, 1, b"")
    tokens, spans = expanded(
        [5, 8, 6, 9, 7], [_made(0.25, 7.5), image], _vision(video), written.__getitem__
    )
    assert tokens == [5, 41, 8, 8, 42, 43, 8, 8, 6, 9, 7]
    assert [(s.offset, s.end, s.joins, s.time) for s in spans] == [
        (2, 4, False, 0), (6, 8, False, 0), (9, 10, False, 0),
    ]  # fmt: skip


def test_clocks_are_text_with_a_gap_between_frames() -> None:
    text = "{clock} #"
    around = {"opening": "(", "closing": ")"}
    video = msgspec.structs.replace(VIDEO, frame_text=text, gap=" ", pad="#", **around)
    written = {"(00:00 # 01:07 #)": [40, 41, 8, 42, 43, 8, 44]}
    tokens, _ = expanded([5, 8, 6], [_made(0.25, 67.5)], _vision(video), written.__getitem__)
    assert tokens == [5, 40, 41, 8, 8, 42, 43, 8, 8, 44, 6]


def test_spans_of_pairs_that_see_each_other_are_parts_of_one() -> None:
    video = msgspec.structs.replace(VIDEO, frame_text="{time:.1f}#", pad="#", pairs_at_once=2)
    digests = [image_digest(1, 2, bytes([i])) for i in range(2)]
    made = VideoPixels(
        tuple(ImagePixels(digest, 1, 2, b"") for digest in digests), (0.0, 1.0, 2.0), 1.0
    )
    written = {"0.0#1.0#2.0#": [41, 8, 42, 8, 43, 8]}
    tokens, spans = expanded([5, 8, 6], [made], _vision(video), written.__getitem__)
    assert tokens == [5, 41, 8, 8, 42, 8, 8, 43, 8, 8, 6]
    assert [(s.offset, digests.index(s.digest), s.first, s.beside) for s in spans] == [
        (2, 0, 0, 2),
        (5, 0, 2, 2),
        (8, 1, 0, 0),
    ]


def test_times_are_positions_where_no_text_tells_them() -> None:
    video = msgspec.structs.replace(VIDEO, ticks_per_second=2.0)
    tokens, spans = expanded([5, 8, 6], [_made(0.0, 1.2, 2.4, step_s=1.2)], _vision(video), list)
    assert tokens == [5, *[8] * 6, 6]
    assert [(s.offset, s.joins, s.time) for s in spans] == [
        (1, False, 0),
        (3, True, 2),
        (5, True, 4),
    ]


@pytest.mark.parametrize("tokens", [[5, 9], [8, 8], [9, 8]])
def test_places_are_of_the_kind_of_what_is_sent(tokens: list[int]) -> None:
    image = ImagePixels(bytes(32), 1, 1, b"")
    with pytest.raises(BadRequest, match="places for its 2 images and videos"):
        expanded(tokens, [_made(0.0), image], _vision(VIDEO), list)
