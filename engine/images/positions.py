"""Positions of tokens in prompts with images ("mrope").

A text token has one position three times, the next after the one before it. All tokens of an image
share the first (time); the second counts their rows, the third their columns, both from the same
start. Text goes on behind the largest. Pairs of frames of a video that no text parts have the same
start, and times of their own. Source: Wang et al., Qwen2-VL, 2024.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.images.image_input import ImageSpan


def prompt_positions(images: Sequence[ImageSpan]) -> npt.NDArray[np.int64]:
    """Returns [3, end of the last image] int64: time, row and column of each token so far. `images`
    are in order and do not overlap."""
    parts: list[npt.NDArray[np.int64]] = []
    index = start = position = 0
    for image in images:
        num_text = image.offset - index
        text = np.arange(position, position + num_text, dtype=np.int64)
        parts.append(np.broadcast_to(text, (3, num_text)))
        if not image.joins:
            start = position = position + num_text
        grid = np.zeros((3, image.rows, image.columns), np.int64)
        grid[0] = image.time
        grid[1] = np.arange(image.rows)[:, None]
        grid[2] = np.arange(image.columns)
        parts.append(grid.reshape(3, -1) + start)
        position = max(position, start + max(image.time + 1, image.rows, image.columns))
        index = image.end
    return np.concatenate(parts, axis=1)
