"""The size that an image is resized to, so that it is a grid of whole tokens.

    area       as many pixels as allowed, both sides rounded to tokens            Qwen-VL, GLM-V
    longest    made smaller to fit a square, sides rounded up                     Pixtral
    square     always the same                                                    SigLIP
    patches    made smaller to have few patches, then black is added              MoonViT
    fill       as many tokens as allowed, sides rounded down                      Gemma 4
    nearest    the whole tokens that are nearest to its shape                     Muse Glimmer

Each rounds as the reference processor of its family in transformers does.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from engine.images.video_spec import VideoSpec
from engine.images.vision_spec import Fit, PixelSpec

_SHRINK = 0.97
"""Sides are multiplied by this until they fit, where an operator allows fewer tokens than the
checkpoint."""


class FittedSize(NamedTuple):
    """Pixels: of the resized image, and with the black at its right and its bottom."""

    height: int
    width: int
    padded_height: int
    padded_width: int

    @classmethod
    def plain(cls, height: int, width: int) -> FittedSize:
        return cls(height, width, height, width)


def fitted(height: int, width: int, pixels: PixelSpec) -> FittedSize:
    """Returns what an image of [height, width] becomes."""
    fit, most = _FITS[pixels.fit], pixels.most_tokens
    found = fit(height, width, pixels)
    shrunk = 1.0
    while most and found.padded_height * found.padded_width > most * pixels.unit**2:
        shrunk *= _SHRINK
        found = fit(max(1, int(height * shrunk)), max(1, int(width * shrunk)), pixels)
    return found


def fitted_frames(
    height: int, width: int, count: int, pixels: PixelSpec, video: VideoSpec
) -> tuple[int, int]:
    """Returns the height and the width that `count` frames of [height, width] become. None is
    larger than an image may be."""
    unit, per_pair = pixels.unit, pixels.temporal_patch_size
    left = max(1, (video.max_tokens or sys.maxsize) // -(-count // per_pair))
    if video.frame_tokens:
        tokens = min(video.frame_tokens, pixels.most_tokens, left)
        size = fitted(height, width, msgspec.structs.replace(pixels, most_tokens=tokens))
        return size.height, size.width
    most = min(pixels.max_pixels, left * unit**2)
    counted = max(count, per_pair) if video.of_all else 1
    frames = max(1, round(counted / per_pair)) * per_pair if video.of_all else 1
    most = min(video.max_pixels, most * frames)
    if video.of_all and min(height, width) < unit:
        grow = max(unit / height, unit / width)
        height, width = int(height * grow), int(width * grow)
    near = round(height / unit) * unit, round(width / unit) * unit
    if frames * near[0] * near[1] > most:
        shrink = math.sqrt(counted * height * width / most)
        rows, columns = (math.floor(side / shrink / unit) for side in (height, width))
        return max(1, rows) * unit, max(1, columns) * unit
    if frames * near[0] * near[1] < min(video.min_pixels, most):
        grow = math.sqrt(min(video.min_pixels, most) / (counted * height * width))
        return math.ceil(height * grow / unit) * unit, math.ceil(width * grow / unit) * unit
    return near


def _area(height: int, width: int, pixels: PixelSpec) -> FittedSize:
    unit = pixels.unit
    if pixels.keeps_token and min(height, width) < unit:
        grow = max(unit / height, unit / width)
        height, width = int(height * grow), int(width * grow)
    near = round(height / unit) * unit, round(width / unit) * unit
    if near[0] * near[1] > pixels.max_pixels:
        shrink = math.sqrt(height * width / pixels.max_pixels)
        sides = (max(unit, math.floor(side / shrink / unit) * unit) for side in (height, width))
    elif near[0] * near[1] < pixels.min_pixels:
        grow = math.sqrt(pixels.min_pixels / (height * width))
        sides = (math.ceil(side * grow / unit) * unit for side in (height, width))
    else:
        return FittedSize.plain(*near)
    return FittedSize.plain(*sides)


def _longest(height: int, width: int, pixels: PixelSpec) -> FittedSize:
    ratio = max(height / pixels.longest_edge, width / pixels.longest_edge)
    if ratio > 1:
        height, width = (max(1, math.floor(side / ratio)) for side in (height, width))
    return FittedSize.plain(*(_whole(side, pixels.unit) for side in (height, width)))


def _square(height: int, width: int, pixels: PixelSpec) -> FittedSize:
    return FittedSize.plain(pixels.longest_edge, pixels.longest_edge)


def _patches(height: int, width: int, pixels: PixelSpec) -> FittedSize:
    rows, columns = (max(1, side // pixels.patch_size) for side in (height, width))
    most = pixels.longest_edge
    scale = min(1.0, math.sqrt(pixels.max_patches / (rows * columns)), most / height, most / width)
    height, width = (min(max(1, int(side * scale)), most) for side in (height, width))
    return FittedSize(height, width, *(_whole(side, pixels.unit) for side in (height, width)))


def _fill(height: int, width: int, pixels: PixelSpec) -> FittedSize:
    unit, most = pixels.unit, pixels.most_tokens
    grow = math.sqrt(most * unit**2 / (height * width))
    rows, columns = (math.floor(grow * side / unit) for side in (height, width))
    if rows == 0:
        rows, columns = 1, min(max(1, width // height), most)
    elif columns == 0:
        rows, columns = min(max(1, height // width), most), 1
    return FittedSize.plain(rows * unit, columns * unit)


def _nearest(height: int, width: int, pixels: PixelSpec) -> FittedSize:
    unit, most = pixels.unit, pixels.most_tokens
    rows, columns = height / unit, width / unit
    if rows * columns > most:
        shape = columns / rows
        rows = math.sqrt(most / shape)
        columns = rows * shape
    sides = [[math.floor(side), math.ceil(side)] for side in (rows, columns)]
    grids = {(r, c) for r in sides[0] for c in sides[1] if r >= 1 and c >= 1 and r * c <= most}
    near = min(grids, key=lambda grid: abs(grid[0] / grid[1] - height / width), default=None)
    found = near or (max(1, round(rows)), max(1, round(columns)))
    return FittedSize.plain(found[0] * unit, found[1] * unit)


def _whole(side: int, unit: int) -> int:
    """Returns the side with its last token completed."""
    return -(-side // unit) * unit


_FITS: dict[Fit, Callable[[int, int, PixelSpec], FittedSize]] = {
    "area": _area,
    "longest": _longest,
    "square": _square,
    "patches": _patches,
    "fill": _fill,
    "nearest": _nearest,
}
