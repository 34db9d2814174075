"""Says how attention of long queries runs best, by shape (`tunings/*/prefill_attention.json`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tandem_kernels.tunings.table import plain_table

_NO_WINDOW = 1 << 62


@dataclass(frozen=True, slots=True)
class PrefillTuning:
    """Says how one shape runs best; found by measurement.

    Attributes:
        in_parts: Contexts may be cut into parts, because tiles may be too few for the device.
    """

    rows: int
    tile: int
    num_warps: int
    num_stages: int
    in_parts: bool = False


_TABLE = plain_table(
    "prefill_attention",
    PrefillTuning,
    (
        "max_rows",
        "total_rows",
        "max_context",
        "row_bytes",
        "block_size",
        "window",
        "by_warpgroups",
    ),
)


def prefill_tuning(
    device: torch.device,
    max_rows: int,
    total_rows: int,
    max_context: int,
    head_dim: int,
    dtype: torch.dtype,
    block_size: int,
    window: int | None = None,
    *,
    by_warpgroups: bool = False,
) -> PrefillTuning:
    """Choose by rows, which are query tokens times the query heads of a KV head.

    `max_rows` are those of the longest request, `total_rows` those of all requests and KV heads.
    `max_context`: tokens of the longest context, as far as a window shows them. `by_warpgroups`:
    four warps multiply together, and there is room for 192 KiB: on Hopper, of a cache in the
    queries' type.
    """
    return _TABLE.choose(
        device,
        max_rows,
        total_rows,
        max_context,
        _row_bytes(head_dim, dtype),
        block_size,
        _NO_WINDOW if window is None else window,
        by_warpgroups and dtype.itemsize == 2,
    )


def fixed_tuning(head_dim: int, dtype: torch.dtype) -> PrefillTuning:
    """Returns the same tuning for all shapes of a batch."""
    row_bytes = _row_bytes(head_dim, dtype)
    if row_bytes > 512:
        return PrefillTuning(rows=16, tile=16, num_warps=4, num_stages=2)
    if row_bytes > 256:
        return PrefillTuning(rows=64, tile=32, num_warps=4, num_stages=2)
    return PrefillTuning(rows=64, tile=64, num_warps=4, num_stages=4)


def _row_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Returns the bytes of a head of a token in a tile, whose width is a power of two."""
    return (1 << (head_dim - 1).bit_length()) * dtype.itemsize
