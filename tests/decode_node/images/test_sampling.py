"""Frames are picked, and brought to a size, as the processors of transformers 5.24 do. What these
gave stands here: they need torchvision, and run nowhere else in the suite."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decode_node.images.fit import fitted_frames
from decode_node.images.videos.resize import CUBIC, LANCZOS, resized
from decode_node.images.videos.sampling import sampled
from engine.images.video_spec import Sampling, VideoSpec
from engine.images.vision_spec import PixelSpec


def spec(sampling: Sampling, least: int = 3136, most: int = 1 << 24, tokens: int = 0) -> VideoSpec:
    return VideoSpec(
        token_id=1,
        frame_token_id=1,
        sampling=sampling,
        min_pixels=least,
        max_pixels=most,
        of_all=sampling != "even_steps",
        max_frames={"count": 32, "even_pairs": 96}.get(sampling, 768),
        max_tokens=tokens,
    )


@pytest.mark.parametrize(
    ("sampling", "total", "rate", "count", "first", "last"),
    [
        ("even_steps", 7, 30.0, 4, [0, 1, 3, 5], [3, 5]),
        ("even_steps", 40, 10.0, 8, [0, 5, 10, 15, 20, 25, 30], [30, 35]),
        ("even_steps", 300, 29.97, 20, [0, 15, 30, 45, 60, 75, 90], [270, 285]),
        ("even_steps", 9000, 15.0, 768, [0, 11, 23, 35, 46, 58, 70], [8976, 8988]),
        ("even_ends", 7, 30.0, 4, [0, 2, 4, 6], [4, 6]),
        ("even_ends", 300, 29.97, 20, [0, 16, 31, 47, 63, 79, 94], [283, 299]),
        ("even_ends", 9000, 15.0, 768, [0, 12, 23, 35, 47, 59, 70], [8987, 8999]),
        ("even_pairs", 7, 30.0, 2, [0, 6], [0, 6]),
        ("even_pairs", 40, 10.0, 8, [0, 5, 11, 16, 22, 27, 33], [33, 39]),
        ("even_pairs", 300, 29.97, 20, [0, 15, 31, 47, 62, 78, 94], [283, 299]),
        ("even_pairs", 9000, 15.0, 96, [0, 94, 189, 284, 378, 473, 568], [8904, 8999]),
        ("seconds", 7, 30.0, 2, [0, 0], [0, 0]),
        ("seconds", 1000, 25.0, 80, [0, 13, 25, 38, 50, 63, 75], [975, 988]),
        ("seconds", 9000, 15.0, 600, [0, 16, 31, 46, 61, 76, 91], [8985, 8999]),
        ("count", 40, 10.0, 32, [0, 1, 2, 3, 5, 6, 7], [37, 38]),
        ("count", 5, 10.0, 5, [0, 1, 2, 3, 4], [3, 4]),
        ("paced", 7, 30.0, 2, [0, 0], [0, 0]),
        ("paced", 40, 10.0, 24, [0, 2, 4, 5, 7, 9, 10], [37, 39]),
        ("paced", 1000, 25.0, 80, [0, 13, 25, 38, 50, 63, 75], [975, 988]),
        ("paced", 9000, 15.0, 600, [0, 15, 30, 45, 60, 75, 90], [8970, 8985]),
    ],
)
def test_frames_are_those_of_the_reference_processor(
    sampling: Sampling, total: int, rate: float, count: int, first: list[int], last: list[int]
) -> None:
    found = sampled(spec(sampling), total, rate, 2)
    assert (len(found), found[:7], found[-2:]) == (count, first, last)


@given(
    st.sampled_from(["even_steps", "even_ends", "even_pairs", "seconds", "paced", "count"]),
    st.integers(1, 3000),
    st.floats(0.01, 1000.0),
    st.integers(1, 40),
)
def test_frames_are_in_order_and_within_limits(
    sampling: Sampling, total: int, rate: float, most: int
) -> None:
    found = sampled(spec(sampling).limited(max_frames=most), total, rate, 2)
    assert 1 <= len(found) <= most
    assert all(0 <= a <= b < total for a, b in pairwise([*found, found[-1]]))


@pytest.mark.parametrize(
    ("height", "width", "count", "sizes"),
    [
        (120, 90, 4, [(112, 84), (128, 96), (112, 84)]),
        (360, 640, 3, [(140, 280), (128, 256), (112, 224)]),
        (20, 300, 5, [(28, 308), (32, 480), (28, 420)]),
        (1080, 1920, 2, [(140, 280), (160, 320), (140, 280)]),
    ],
)
def test_sizes_are_those_of_the_reference_processor(
    height: int, width: int, count: int, sizes: list[tuple[int, int]]
) -> None:
    cases = (
        ("even_steps", 14, 4 * 784, 60 * 784),
        ("even_ends", 16, 8 * 1024, 120 * 1024),
        ("seconds", 14, 8 * 784, 120 * 784),
    )
    found = [
        fitted_frames(
            height,
            width,
            count,
            PixelSpec(patch_size=patch, max_pixels=1 << 24),
            spec(sampling, least, most),  # type: ignore[arg-type]
        )
        for sampling, patch, least, most in cases
    ]
    assert found == sizes


def test_frames_of_gemma_are_as_large_as_their_tokens() -> None:
    """Sizes are those of an image of 70 tokens, as its processor has them, or of as many as are
    left to each frame, or as an operator allows."""
    of_one = {"temporal_patch_size": 1, "fit": "fill", "most_tokens": 280}
    pixels = PixelSpec(patch_size=16, merge_size=3, **of_one)  # type: ignore[arg-type]
    video = msgspec.structs.replace(spec("count"), frame_tokens=70)
    assert fitted_frames(120, 90, 32, pixels, video) == (432, 336)
    assert fitted_frames(9, 300, 32, pixels, video) == (48, 2304)
    few = video.limited(max_tokens=32 * 12)
    assert fitted_frames(120, 90, 32, pixels, few) == (192, 144)
    assert fitted_frames(120, 90, 32, pixels.limited(12), video) == (192, 144), "as images may be"


@pytest.mark.parametrize(("total", "count"), [(2, 2), (96, 95), (1481, 96), (54_001, 64)])
def test_frames_in_whole_pairs_are_where_torch_has_them(total: int, count: int) -> None:
    """Its places are sums in float32, which are cut to whole numbers: some are one less."""
    video = msgspec.structs.replace(spec("even_pairs"), fps=1.0)
    expected = torch.linspace(0, total - 1, count // 2 * 2).long().tolist()
    assert sampled(video, total, total / count, 2) == expected


def test_frames_of_muse_have_its_shape() -> None:
    pixels = PixelSpec(patch_size=14, fit="nearest", most_tokens=4096)
    video = msgspec.structs.replace(spec("even_pairs"), frame_tokens=144)
    sizes = [(120, 90), (360, 640), (20, 300), (1080, 1920), (3000, 40)]
    found = [fitted_frames(*size, 8, pixels, video) for size in sizes]
    assert found == [(112, 84), (252, 448), (28, 308), (252, 448), (2884, 28)]
    assert fitted_frames(1080, 1920, 8, pixels.limited(12), video) == (56, 112), "as images may be"
    few = video.limited(max_tokens=4 * 12)
    assert fitted_frames(1080, 1920, 8, pixels, few) == (56, 112), "of four pairs"


@pytest.mark.parametrize("sampling", ["even_steps", "even_ends"])
def test_fewer_tokens_make_frames_smaller(sampling: Sampling) -> None:
    pixels = PixelSpec(patch_size=14, max_pixels=1 << 24)
    for tokens in (4000, 200, 9):
        height, width = fitted_frames(720, 1280, 9, pixels, spec(sampling, tokens=tokens))
        assert 5 * (height // 28) * (width // 28) <= max(tokens, 5 * 2)


@pytest.mark.parametrize("mode", ["bicubic", "lanczos"])
@pytest.mark.parametrize(
    ("size", "new"),
    [((70, 90), (28, 56)), ((50, 60), (112, 140)), ((64, 64), (64, 32)), ((9, 301), (28, 84))],
)
def test_shades_are_those_of_torch(size: tuple[int, int], new: tuple[int, int], mode: str) -> None:
    frame = np.random.default_rng(1).integers(0, 256, (*size, 3), dtype=np.uint8)
    planes = torch.from_numpy(frame).permute(2, 0, 1).unsqueeze(0)
    expected = torch.nn.functional.interpolate(planes, new, mode=mode, antialias=True)
    found = resized(frame, *new, LANCZOS if mode == "lanczos" else CUBIC)
    np.testing.assert_array_equal(found, expected[0].permute(1, 2, 0).numpy())
