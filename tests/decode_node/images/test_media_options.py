"""Requests say how their images and videos are prepared: it is done as transformers does it, within
limits, or is refused by its name."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from decode_node.images.image_pool import ImagePool
from decode_node.images.image_reader import ImageReader, ReadLimits
from decode_node.images.media_options import MediaOptions, Prepared, prepared
from decode_node.images.videos.sampling import sampled
from edge.http.errors import BadRequest
from engine.images.image_input import ImagePixels
from engine.images.video_spec import VideoSpec
from engine.images.vision_spec import PixelSpec
from tests.decode_node.images.test_image_reader import GOOD, places, url
from tests.decode_node.images.test_preprocess import SPEC
from tests.decode_node.images.test_sampling import spec

QWEN3 = Prepared(SPEC, spec("even_ends"))
QWEN25 = Prepared(SPEC, spec("even_steps"))
GLM = Prepared(SPEC, spec("seconds"))
GEMMA = Prepared(
    PixelSpec(patch_size=16, merge_size=3, fit="fill", most_tokens=280),
    msgspec.structs.replace(spec("count"), frame_tokens=70),
)
MUSE = Prepared(
    PixelSpec(patch_size=14, fit="nearest", most_tokens=4096),
    msgspec.structs.replace(spec("even_pairs"), frame_tokens=144),
)
NO_VIDEOS = Prepared(PixelSpec(patch_size=14, fit="longest", longest_edge=1540), None)
Options = dict[str, Any]


def video_of(usual: Prepared, io: Options | None = None, **processor: Any) -> VideoSpec:
    found = prepared(usual, MediaOptions(processor, io or {})).video
    assert found is not None
    return found


def pixels_of(usual: Prepared, **processor: Any) -> PixelSpec:
    return prepared(usual, MediaOptions(processor)).pixels


def test_pixels_are_those_of_images_and_of_frames_that_are_like_images() -> None:
    least, most = SPEC.min_pixels, SPEC.max_pixels - 1
    assert pixels_of(QWEN3, max_pixels=most).max_pixels == most
    assert video_of(QWEN3, max_pixels=most) == QWEN3.video
    assert video_of(QWEN25, max_pixels=most).max_pixels == most
    both = {"images_kwargs": {"min_pixels": 784.0}, "videos_kwargs": {"max_pixels": 5000}}
    assert pixels_of(QWEN3, **both).min_pixels == 784
    assert video_of(QWEN3, **both).max_pixels == 5000
    sizes = {"shortest_edge": least + 1, "longest_edge": most}
    assert pixels_of(QWEN3, size=sizes) == pixels_of(QWEN3, min_pixels=least + 1, max_pixels=most)
    assert video_of(QWEN3, size=sizes).max_pixels == most
    # Fewer than the checkpoint's least: that is given up, too.
    assert pixels_of(QWEN3, max_pixels=1).min_pixels == 1


def test_frames_are_picked_by_number_or_by_pace() -> None:
    def frames(found: VideoSpec, total: int = 100, rate: float = 25.0) -> list[int]:
        return sampled(found, total, rate, 2)

    assert frames(video_of(QWEN3, num_frames=5)) == [0, 25, 50, 74, 99]
    # As in transformers: rounded to pairs, and to the even number of them in the middle.
    assert [len(frames(video_of(QWEN25, num_frames=n))) for n in (1, 5, 6, 7)] == [2, 4, 6, 8]
    assert frames(video_of(QWEN25, num_frames=4)) == [0, 25, 50, 75]
    assert len(frames(video_of(QWEN3, fps=4))) == 16
    assert len(frames(video_of(QWEN3, fps=4, num_frames=10))) == 10
    assert len(frames(video_of(GLM, fps=1.0))) == 4
    assert len(frames(video_of(GEMMA, num_frames=8))) == 8
    assert [len(frames(video_of(MUSE, num_frames=n))) for n in (1, 7, 90)] == [1, 6, 8]
    assert video_of(QWEN3, {"video": {"fps": 1, "num_frames": -1}}).fps == 1.0


def test_what_asks_for_nothing_changes_nothing() -> None:
    empty: Options = {"video": {"num_frames": -1, "fps": -1}, "image": None, "audio": {}}
    asked: Options = {"do_sample_frames": True, "max_pixels": None, "use_audio_in_video": False}
    for usual in (QWEN3, GEMMA, NO_VIDEOS):
        assert prepared(usual, MediaOptions(asked, empty)) == usual


def test_soft_tokens_are_those_of_gemma() -> None:
    assert pixels_of(GEMMA, max_soft_tokens=140).most_tokens == 140
    assert video_of(GEMMA, max_soft_tokens=140).frame_tokens == 70
    assert video_of(GEMMA, videos_kwargs={"max_soft_tokens": 35}).frame_tokens == 35


def test_whole_numbers_may_be_written_with_a_point() -> None:
    """Decoders are given whole ones, and end with others."""
    found = prepared(GEMMA, MediaOptions({"max_soft_tokens": 35.0}, {}))
    assert msgspec.convert(msgspec.to_builtins(found), Prepared) == found


@pytest.mark.parametrize(
    ("usual", "processor", "io", "param"),
    [
        (QWEN3, {"max_pixels": 1 << 40}, {}, "mm_processor_kwargs.max_pixels"),
        (QWEN3, {"max_pixels": True}, {}, "mm_processor_kwargs.max_pixels"),
        (QWEN3, {"max_pixels": 4000, "min_pixels": 4001}, {}, "mm_processor_kwargs.min_pixels"),
        (QWEN3, {"size": {"height": 448}}, {}, "mm_processor_kwargs.size.height"),
        (QWEN3, {"size": 448}, {}, "mm_processor_kwargs.size"),
        (QWEN3, {"images_kwargs": 1}, {}, "mm_processor_kwargs.images_kwargs"),
        (QWEN3, {"images_kwargs": {"fps": 1}}, {}, "mm_processor_kwargs.images_kwargs.fps"),
        (QWEN3, {"max_soft_tokens": 70}, {}, "mm_processor_kwargs.max_soft_tokens"),
        (QWEN3, {"do_sample_frames": False}, {}, "mm_processor_kwargs.do_sample_frames"),
        (QWEN3, {"patch_size": 14}, {}, "mm_processor_kwargs.patch_size"),
        (QWEN3, {"num_frames": 769}, {}, "mm_processor_kwargs.num_frames"),
        (QWEN3, {"fps": float("nan")}, {}, "mm_processor_kwargs.fps"),
        (QWEN3, {"fps": 1e9}, {}, "mm_processor_kwargs.fps"),
        (QWEN3, {"fps": "2"}, {}, "mm_processor_kwargs.fps"),
        (QWEN3, {"fps": 2}, {"video": {"fps": 1}}, "media_io_kwargs.video.fps"),
        (QWEN3, {}, {"video": {"num_frames": 0}}, "media_io_kwargs.video.num_frames"),
        (QWEN3, {}, {"video": {"max_duration": 9}}, "media_io_kwargs.video.max_duration"),
        (QWEN3, {}, {"image": {"rgba_background_color": [0, 0, 0]}},
         "media_io_kwargs.image.rgba_background_color"),
        (GLM, {"num_frames": 8}, {}, "mm_processor_kwargs.num_frames"),
        (GEMMA, {"fps": 2}, {}, "mm_processor_kwargs.fps"),
        (GEMMA, {"max_soft_tokens": 1120}, {}, "mm_processor_kwargs.max_soft_tokens"),
        (NO_VIDEOS, {"fps": 2}, {}, "mm_processor_kwargs.fps"),
        (NO_VIDEOS, {"max_pixels": 4000}, {}, "mm_processor_kwargs.max_pixels"),
    ],
)  # fmt: skip
def test_the_rest_is_refused_by_its_name(
    usual: Prepared, processor: Options, io: Options, param: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        prepared(usual, MediaOptions(processor, io))
    assert caught.value.param == param
    assert str(caught.value).startswith(param)


async def test_images_of_one_request_are_smaller_and_others_stay() -> None:
    reader = ImageReader(
        ImagePool(SPEC, size=1, max_pixels=100_000, timeout_s=20.0), ReadLimits(3, 60_000)
    )
    try:
        sizes = []
        for options in (MediaOptions(), MediaOptions({"max_pixels": 28 * 28 * 2}), MediaOptions()):
            (found,) = await reader.read(places(url(GOOD)), options)
            assert isinstance(found, ImagePixels)
            sizes.append((found.rows, found.columns))
        assert sizes == [(2, 3), (1, 1), (2, 3)]
        with pytest.raises(BadRequest, match="fps is not supported"):
            await reader.read([], MediaOptions({"fps": 2}))
    finally:
        await asyncio.to_thread(reader.close)
    with pytest.raises(BadRequest, match="media_io_kwargs: this model takes no images"):
        await ImageReader(None, ReadLimits(3, 1)).read([], MediaOptions(io={"video": {"fps": 2}}))
