"""Resizes frames as the reference processors of videos do, which use torch and not Pillow.

Both sample curves as wide as a new pixel and round to whole shades. torch's weights have 16
bits and Pillow's 22, so that one shade in some hundred differs by one. Here are torch's, without
it: the process that decodes needs no more than numpy. All sums are whole numbers below 2^24, which
float32 has exactly, whatever their order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Frame = npt.NDArray[np.uint8]
"""[height, width, 3]."""
_KEYS = -0.5
_WEIGHT_BITS = 15
_MAX_BITS = 22
_ROWS = 16
"""Rows of the result that are made at once: more read too many rows that weigh nothing."""


class Curve(NamedTuple):
    """Tells what a pixel weighs at a distance, in new pixels. `reach`: none farther counts."""

    reach: int
    weigh: Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]


def resized(frame: Frame, height: int, width: int, curve: Curve) -> Frame:
    """Returns the frame in another size."""
    across = _along(frame.transpose(1, 0, 2), width, curve).transpose(1, 0, 2)
    return _along(across, height, curve)


def _cubic(far: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    near = ((_KEYS + 2) * far - (_KEYS + 3)) * far * far + 1
    outer = (((far - 5) * far + 8) * far - 4) * _KEYS
    return np.where(far < 1, near, np.where(far < 2, outer, 0.0))


def _lanczos(far: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.where(far < 3, np.sinc(far) * np.sinc(far / 3), 0.0)


CUBIC, LANCZOS = Curve(2, _cubic), Curve(3, _lanczos)


def _along(frame: Frame, size: int, curve: Curve) -> Frame:
    """Returns `frame` with `size` rows."""
    if len(frame) == size:
        return frame
    first, weights, bits = _weights(len(frame), size, curve)
    shades = np.ascontiguousarray(frame).reshape(len(frame), -1).astype(np.float32)
    found = np.empty((size, shades.shape[1]), np.uint8)
    for start in range(0, size, _ROWS):
        stop = min(size, start + _ROWS)
        low = int(first[start])
        high = min(len(frame), int(first[stop - 1]) + weights.shape[1])
        part = np.zeros((stop - start, high - low), np.float32)
        for row in range(start, stop):
            begin = int(first[row]) - low
            count = min(weights.shape[1], high - low - begin)
            part[row - start, begin : begin + count] = weights[row, :count]
        sums = part @ shades[low:high]
        sums += 1 << (bits - 1)
        np.floor(np.ldexp(sums, -bits, out=sums), out=sums)
        found[start:stop] = np.clip(sums, 0, 255)
    return found.reshape(size, *frame.shape[1:])


def _weights(
    size: int, new: int, curve: Curve
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], int]:
    """Returns for each new row the first row that it is made of, [new]; what these weigh,
    [new, rows], in whole numbers; and how many bits of these are behind the point."""
    scale = size / new
    wide = max(scale, 1.0)
    middle = scale * (np.arange(new) + 0.5)
    reach = curve.reach * wide
    first = np.maximum((middle - reach + 0.5).astype(np.int64), 0)
    stop = np.minimum((middle + reach + 0.5).astype(np.int64), size)
    rows = first[:, None] + np.arange(int((stop - first).max()))
    far = np.abs((rows - middle[:, None] + 0.5) / wide)
    weights = curve.weigh(far)
    weights[rows >= stop[:, None]] = 0.0
    weights /= weights.sum(1, keepdims=True)
    bits, most = 0, float(weights.max())
    while bits < _MAX_BITS and int(0.5 + most * (1 << (bits + 1))) < 1 << _WEIGHT_BITS:
        bits += 1
    whole = np.trunc(weights * (1 << bits) + np.where(weights < 0, -0.5, 0.5))
    return first, whole.astype(np.float32), bits
