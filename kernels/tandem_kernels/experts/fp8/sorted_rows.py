"""Rows in e4m3 that lie beside each other by their expert, so that the copy engine loads tiles of
them, and where each expert's tiles begin."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.experts.expert_rows import ExpertRows, num_sorted_tiles, sorted_rows
from tandem_kernels.experts.fp8.ahead_shapes import HEIGHT
from tandem_kernels.gemm.fp8_rows import fp8_scale
from tandem_kernels.reference.fp8 import GROUP

_WHOLE, _PART = 2048, 1024
"""Up to the first number of columns a row has one program, wider ones one for each part: 8,192
rows of DeepSeek-V3 take 241 us so, and 371 in programs of all 7,168 columns (one H200)."""


@triton.jit(do_not_specialize=["num_pairs"])
def sorted_tiles_kernel(
    order: tl.tensor,
    counts: tl.tensor,
    tiles: tl.tensor,
    places: tl.tensor,
    num_pairs: tl.tensor,
    num_experts: tl.tensor,
    HEIGHT: tl.constexpr,
    EXPERTS: tl.constexpr,
) -> None:
    """Writes tile p, and the places of its pairs, in program p, as `SortedTiles` has them."""
    tile = tl.program_id(0)
    expert, place, pair = sorted_rows(
        order, counts, tile, num_pairs, num_experts, HEIGHT, EXPERTS, HEIGHT, 0
    )
    real = pair < num_pairs
    tl.store(places + pair, place, mask=real)
    tl.store(tiles + 3 * tile + 1, tl.minimum(expert, num_experts - 1))
    tl.store(tiles + 3 * tile + 2, tl.min(place, axis=0))
    tl.store(tiles + 3 * tile + 3, tl.sum(real.to(tl.int32), axis=0))
    if tile == 0:
        tl.store(tiles, num_sorted_tiles(counts, num_experts, EXPERTS, HEIGHT))


@triton.jit(do_not_specialize=["scales_stride"])
def quantise_to_places_kernel(
    x: tl.tensor,
    experts: tl.tensor,
    places: tl.tensor,
    numbers: tl.tensor,
    scales: tl.tensor,
    x_stride: tl.tensor,
    scales_stride: tl.tensor,
    width: tl.tensor,
    TOP_K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Quantises columns j * BLOCK and on of row p in program (p, j), and writes them where each of
    its pairs has its place."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    column = first + tl.arange(0, BLOCK)
    group = first // GROUP + tl.arange(0, BLOCK // GROUP)
    value = tl.load(x + row * x_stride + column, mask=column < width, other=0.0).to(tl.float32)
    groups = tl.reshape(value, [BLOCK // GROUP, GROUP])
    scale = fp8_scale(tl.max(tl.abs(groups), axis=1))
    scaled = tl.reshape(groups * (1.0 / scale)[:, None], [BLOCK]).to(numbers.dtype.element_ty)
    for k in tl.static_range(TOP_K):
        pair = row * TOP_K + k
        real = tl.load(experts + pair) >= 0
        place = tl.load(places + pair, mask=real, other=0).to(tl.int64)
        tl.store(numbers + place * width + column, scaled, mask=real & (column < width))
        to = scales + group * scales_stride + place
        tl.store(to, scale, mask=real & (group * GROUP < width))


@dataclass(frozen=True, slots=True)
class SortedTiles:
    """Holds the tiles of a step's experts, of HEIGHT rows but for the last of each expert.

    Attributes:
        rows: The pairs by expert.
        tiles: [1 + 3 * most] int32: how many tiles there are, and of each its expert, the place of
            its first pair among all sorted, and how many pairs it has.
        places: [T * k] int32, of each pair; of one that goes nowhere it means nothing.
    """

    rows: ExpertRows
    tiles: Tensor
    places: Tensor

    @classmethod
    def of(cls, experts: Tensor, num_experts: int) -> SortedTiles:
        """Sorts the pairs of `experts` [T, k] int32; -1: none."""
        rows = ExpertRows.of(experts, num_experts, searched=0)
        assert rows.order is not None
        num_pairs = experts.numel()
        # The kernel counts what it is given: there is room even where a token names one twice.
        most = triton.cdiv(num_pairs, HEIGHT) + num_experts
        tiles = rows.order.new_empty(1 + 3 * most)
        places = torch.empty_like(rows.order)
        sorted_tiles_kernel[(most,)](
            rows.order,
            rows.counts,
            tiles,
            places,
            num_pairs,
            num_experts,
            HEIGHT=HEIGHT,
            EXPERTS=triton.next_power_of_2(num_experts),
            num_warps=1,
        )
        return cls(rows, tiles, places)


def quantise_to_places(x: Tensor, sorted_tiles: SortedTiles) -> tuple[Tensor, Tensor]:
    """Quantises rows `x` [T, H], as `quantise_fp8` does, once for each of their pairs.

    Returns:
        (numbers [T * k, H] e4m3, scales [ceil(H / 128), T * k] float32), sorted. Behind the last
        pair that goes anywhere is nothing that means anything.
    """
    experts = sorted_tiles.rows.experts
    num_rows, width = x.shape
    num_pairs = experts.numel()
    numbers = torch.empty((num_pairs, width), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((triton.cdiv(width, GROUP), num_pairs), device=x.device)
    block = max(triton.next_power_of_2(width), GROUP)
    if block > _WHOLE:
        block = _PART
    quantise_to_places_kernel[(num_rows, triton.cdiv(width, block))](
        x,
        experts,
        sorted_tiles.places,
        numbers,
        scales,
        x.stride(0),
        scales.stride(0),
        width,
        TOP_K=experts.shape[1],
        GROUP=GROUP,
        BLOCK=block,
        num_warps=4 if block == _PART else max(block // 512, 1),
    )
    return numbers, scales
