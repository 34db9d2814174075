"""Sampling parameters of a batch's rows, picked in one launch: as four they took 8 µs of a step."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.small_launches import in_turn, take_turn

_BLOCK = 128
_ALIGNED_FLOATS = 4
"""Kernels are compiled anew for addresses that are less aligned than others before: so each
parameter begins where 16 bytes do, whatever the number of places."""


@triton.jit(do_not_specialize=["num_places", "num_rows", "width"])
def pick_parameters_kernel(
    idx_mapping: tl.tensor,
    seq_lens: tl.tensor,
    floats: tl.tensor,
    top_k: tl.tensor,
    seeds: tl.tensor,
    out_floats: tl.tensor,
    out_top_k: tl.tensor,
    out_seeds: tl.tensor,
    out_positions: tl.tensor,
    num_places: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    NUM_FLOATS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Picks, in program j, those of places j * BLOCK and on."""
    take_turn(OVERLAP)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < num_places
    row = tl.maximum(tl.load(idx_mapping + place, mask=inside, other=0), 0)
    seq_len = tl.load(seq_lens + place, mask=inside, other=0)
    for i in tl.static_range(NUM_FLOATS):
        picked = tl.load(floats + i * num_rows + row, mask=inside, other=0.0)
        tl.store(out_floats + i * width + place, picked, mask=inside)
    tl.store(out_top_k + place, tl.load(top_k + row, mask=inside, other=0), mask=inside)
    tl.store(out_seeds + place, tl.load(seeds + row, mask=inside, other=0), mask=inside)
    tl.store(out_positions + place, seq_len.to(tl.int64), mask=inside)


def pick_parameters(
    idx_mapping: Tensor, seq_lens: Tensor, floats: Tensor, top_k: Tensor, seeds: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `reference.sampling.pick_parameters`."""
    num_places, num_floats = len(idx_mapping), len(floats)
    width = triton.cdiv(num_places, _ALIGNED_FLOATS) * _ALIGNED_FLOATS
    picked = (
        floats.new_empty((num_floats, width))[:, :num_places],
        top_k.new_empty(num_places),
        seeds.new_empty(num_places),
        torch.empty(num_places, dtype=torch.int64, device=idx_mapping.device),
    )
    if num_places > 0:
        pick_parameters_kernel[(triton.cdiv(num_places, _BLOCK),)](
            idx_mapping, seq_lens, floats, top_k, seeds, *picked,
            num_places, floats.shape[1], width, NUM_FLOATS=num_floats, BLOCK=_BLOCK, num_warps=4,
            **in_turn(idx_mapping.device, num_places),
        )  # fmt: skip
    return picked
