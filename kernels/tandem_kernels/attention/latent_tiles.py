"""Tiles of latents, for kernels that lay out their registers themselves: those that walk a whole
context, and those that attend to chosen tokens, weigh a tile's values alike."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def tile_memory(
    rows: gl.constexpr, width: gl.constexpr, kind: gl.constexpr
) -> gl.shared_memory_descriptor:
    """Returns memory for a tile of rows that products read."""
    memory: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, width], kind)
    return gl.allocate_shared_memory(kind, [rows, width], memory)


@gluon.jit
def row_weights(
    scores: gl.tensor, seen: gl.tensor, scale: gl.tensor, peak: gl.tensor, summed: gl.tensor
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
    """Returns what a tile's values count for, the new peaks, sums not yet added up over keys, and
    what all before shrinks by."""
    scores = gl.where(seen, scores, float("-inf"))
    higher = gl.maximum(peak, gl.max(scores, axis=1) * scale)
    shrink = gl.exp2(peak - higher)
    weights = gl.exp2(scores * scale - higher[:, None])
    added = folded(weights)
    of_rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, added.type.layout))
    summed = summed * gl.convert_layout(shrink, of_rows)[:, None, None] + added
    return weights, higher, summed, shrink


@gluon.jit
def folded(weights: gl.tensor) -> gl.tensor:
    """Adds up what a thread has of a row's keys: eight are side by side in four threads."""
    rows: gl.constexpr = weights.shape[0]
    return gl.sum(weights.reshape([rows, 2, weights.shape[1] // 16, 8]), axis=2)
