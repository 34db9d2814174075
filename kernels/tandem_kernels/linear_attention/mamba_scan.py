"""State-space layers of Mamba 2: decodes token by token, prompts in chunks.

A state is read once and written once in a step, whatever the number of tokens. Lengths are read on
the device, so a CUDA graph may hold any of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.batch.state_metadata import StateMetadata
from tandem_kernels.linear_attention.delta_tuning import FIXED, DeltaTuning, decode_tuning
from tandem_kernels.linear_attention.mamba_chunks import mamba_chunks
from tandem_kernels.linear_attention.mamba_steps import decay_and_step
from tandem_kernels.small_launches import in_turn, take_turn


@triton.jit
def mamba_scan_kernel(
    mixed: tl.tensor,
    steps: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    skip: tl.tensor,
    states: tl.tensor,
    blocks: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    out: tl.tensor,
    mixed_stride: tl.tensor,
    steps_stride: tl.tensor,
    state_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    VALUES: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Takes in, in program (r, h, j), all tokens of request r for columns j * VALUES and on of
    the state of head h."""
    take_turn(OVERLAP)
    r = tl.program_id(0)
    head = tl.program_id(1)
    seq_len = tl.load(seq_lens + r)
    start = tl.load(query_start_loc + r)
    stop = tl.load(query_start_loc + r + 1)
    if (seq_len == 0) | (start == stop):
        return
    row = tl.arange(0, BLOCK_SIZE)
    column = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    in_row, in_column = row < SIZE, column < HEAD_DIM
    real = in_row[:, None] & in_column[None, :]
    place = tl.load(blocks + r).to(tl.int64) * state_stride + head * (SIZE * HEAD_DIM)
    place = states + place + row[:, None] * HEAD_DIM + column[None, :]
    state = tl.load(place, mask=real & (seq_len > stop - start), other=0.0)
    group = head // (NUM_HEADS // NUM_GROUPS)
    line = mixed + start.to(tl.int64) * mixed_stride
    step = steps + start.to(tl.int64) * steps_stride
    to = out + (start.to(tl.int64) * NUM_HEADS + head) * HEAD_DIM + column
    passed = tl.load(skip + head)
    for _ in range(start, stop):
        keys = line + NUM_HEADS * HEAD_DIM + group * SIZE + row
        key = tl.load(keys, mask=in_row, other=0.0).to(tl.float32)
        query = tl.load(keys + NUM_GROUPS * SIZE, mask=in_row, other=0.0).to(tl.float32)
        value = tl.load(line + head * HEAD_DIM + column, mask=in_column, other=0.0).to(tl.float32)
        log_decay, dt = decay_and_step(step, a_log, dt_bias, head)
        state = state * tl.exp(log_decay) + key[:, None] * (value * dt)[None, :]
        read = tl.sum(state * query[:, None], axis=0) + passed * value
        tl.store(to, read.to(out.dtype.element_ty), mask=in_column)
        line += mixed_stride
        step += steps_stride
        to += NUM_HEADS * HEAD_DIM
    tl.store(place, state, mask=real)


def mamba_scan(
    mixed: Tensor,
    steps: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    skip: Tensor,
    states: Tensor,
    metadata: StateMetadata,
    fixed_order: bool = False,
) -> Tensor:
    """See `reference.mamba.mamba_scan`. Rows of padding are anything."""
    _, num_heads, _, head_dim = states.shape
    shape = (mixed.shape[0], num_heads, head_dim)
    out = torch.empty(shape, dtype=mixed.dtype, device=mixed.device)
    num_reqs, num_decodes = metadata.seq_lens.shape[0], metadata.num_decodes
    given = mixed, steps, a_log, dt_bias, skip, states, metadata
    one_by_one = num_reqs if fixed_order else num_decodes
    if one_by_one > 0:
        mamba_tokens(*given, out, one_by_one, FIXED if fixed_order else None)
    if one_by_one < num_reqs:
        mamba_chunks(*given, out)
    return out


def mamba_tokens(
    mixed: Tensor,
    steps: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    skip: Tensor,
    states: Tensor,
    metadata: StateMetadata,
    out: Tensor,
    num_reqs: int,
    tuning: DeltaTuning | None = None,
) -> None:
    """Computes the first `num_reqs` requests of `metadata` token by token; arguments as those of
    `reference.mamba.mamba_scan`.

    Args:
        out: [T, H, P]; rows of these requests are written.
        tuning: None: the choice for this many requests.
    """
    tuning = tuning or decode_tuning(num_reqs)
    _, num_heads, size, head_dim = states.shape
    mamba_scan_kernel[(num_reqs, num_heads, triton.cdiv(head_dim, tuning.values))](
        mixed,
        steps,
        a_log,
        dt_bias,
        skip,
        states,
        metadata.blocks,
        metadata.query_start_loc,
        metadata.seq_lens,
        out,
        mixed.stride(0),
        steps.stride(0),
        states.stride(0),
        NUM_HEADS=num_heads,
        NUM_GROUPS=(mixed.shape[1] - num_heads * head_dim) // (2 * size),
        SIZE=size,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=triton.next_power_of_2(size),
        VALUES=tuning.values,
        num_warps=tuning.num_warps,
        enable_fp_fusion=tuning.fuses,
        **in_turn(mixed.device, len(mixed)),
    )
