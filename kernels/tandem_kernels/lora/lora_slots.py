"""The slot of each token of a step, from those of rows."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256


@triton.jit(do_not_specialize=["num_reqs", "num_tokens"])
def lora_slots_kernel(
    row_slots: tl.tensor,
    idx_mapping: tl.tensor,
    query_start_loc: tl.tensor,
    out: tl.tensor,
    num_reqs: tl.tensor,
    num_tokens: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Writes the tokens of request r in program r, and those behind the last request's in the
    last program."""
    req = tl.program_id(0)
    start = tl.load(query_start_loc + req)
    is_req = req < num_reqs
    end = tl.load(query_start_loc + req + 1, mask=is_req, other=0)
    row = tl.load(idx_mapping + req, mask=is_req, other=-1)
    slot = tl.load(row_slots + row, mask=row >= 0, other=-1)
    if not is_req:
        end = num_tokens
    for first in range(start, end, BLOCK):
        token = first + tl.arange(0, BLOCK)
        tl.store(out + token, slot, mask=token < end)


def lora_slots_of_tokens(
    row_slots: Tensor, idx_mapping: Tensor, query_start_loc: Tensor, out: Tensor
) -> None:
    """See `reference.lora.lora_slots_of_tokens`."""
    num_reqs = idx_mapping.shape[0]
    lora_slots_kernel[(num_reqs + 1,)](
        row_slots,
        idx_mapping,
        query_start_loc,
        out,
        num_reqs,
        out.shape[0],
        BLOCK=_BLOCK,
        num_warps=1,
    )
