"""State-space layers of Mamba 2: decodes token by token, prompts in chunks.

A state is read once and written once in a step, whatever the number of tokens. Lengths are read on
the device, so a CUDA graph may hold any of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem_kernels.batch.state_metadata import StateMetadata
from tandem_kernels.linear_attention.delta_tuning import FIXED, DeltaTuning
from tandem_kernels.linear_attention.mamba_chunks import mamba_chunks
from tandem_kernels.linear_attention.mamba_steps import decay_and_step
from tandem_kernels.linear_attention.mamba_tuning import token_tuning
from tandem_kernels.small_launches import in_turn


@triton.jit
def _take_in(
    state: tl.tensor,
    line: tl.tensor,
    value: tl.tensor,
    step: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    head: tl.tensor,
    row: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
) -> tl.tensor:
    """Returns columns of a state with the token whose inputs begin at `line`, whose x in these
    columns is `value`, and whose steps begin at `step`."""
    keys = line + NUM_HEADS * HEAD_DIM + head // (NUM_HEADS // NUM_GROUPS) * SIZE
    key = tl.load(keys + row, mask=row < SIZE, other=0.0).to(tl.float32)
    log_decay, dt = decay_and_step(step, a_log, dt_bias, head)
    return state * tl.exp(log_decay) + key[:, None] * (value * dt)[None, :]


@triton.jit(do_not_specialize=["first_req"])
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
    rows: tl.tensor,
    num_taken: tl.tensor,
    kept_steps: tl.tensor,
    out: tl.tensor,
    first_req: tl.tensor,
    mixed_stride: tl.tensor,
    steps_stride: tl.tensor,
    state_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    VALUES: tl.constexpr,
    PENDING: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Takes in, in program (r, h, j), all tokens of request first_req + r for columns j * VALUES
    and on of the state of head h. With up to `PENDING` tokens pending, it takes these in, and reads
    the state as the request's own tokens would leave it."""
    r = tl.program_id(0) + first_req
    head = tl.program_id(1)
    seq_len = tl.load(seq_lens + r)
    start = tl.load(query_start_loc + r)
    stop = tl.load(query_start_loc + r + 1)
    exists = (seq_len > 0) & (start < stop)
    if OVERLAP:
        gdc_launch_dependents()
    row = tl.arange(0, BLOCK_SIZE)
    column = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    in_row, in_column = row < SIZE, column < HEAD_DIM
    real = in_row[:, None] & in_column[None, :]
    place = tl.load(blocks + r).to(tl.int64) * state_stride + head * (SIZE * HEAD_DIM)
    place = states + place + row[:, None] * HEAD_DIM + column[None, :]
    first = seq_len - (stop - start)
    values = head * HEAD_DIM + column
    step = steps + start.to(tl.int64) * steps_stride
    if PENDING > 0:
        if OVERLAP:
            gdc_wait()
        if not exists:
            return
        request_row = tl.load(rows + r).to(tl.int64)
        taken = tl.load(num_taken + request_row)
        state = tl.load(place, mask=real & (taken > 0), other=0.0)
        count = tl.minimum(tl.maximum(first - taken, 0), PENDING)
        line = r * (PENDING + stop - start) + PENDING - count
        line = mixed + line.to(tl.int64) * mixed_stride
        kept = kept_steps + request_row * (2 * PENDING * NUM_HEADS)
        for i in range(count):
            value = tl.load(line + values, mask=in_column, other=0.0).to(tl.float32)
            old = kept + (first - count + i) % (2 * PENDING) * NUM_HEADS
            state = _take_in(
                state, line, value, old, a_log, dt_bias, head, row,
                NUM_HEADS, NUM_GROUPS, SIZE, HEAD_DIM,
            )  # fmt: skip
            line += mixed_stride
        if count > 0:
            tl.store(place, state, mask=real)
    else:
        # An earlier step wrote it, so it is on its way before the kernel in front has ended.
        state = tl.load(place, mask=real & (first > 0) & exists, other=0.0)
        if OVERLAP:
            gdc_wait()
        if not exists:
            return
        line = mixed + start.to(tl.int64) * mixed_stride
    queries = NUM_HEADS * HEAD_DIM + (NUM_GROUPS + head // (NUM_HEADS // NUM_GROUPS)) * SIZE + row
    to = out + start.to(tl.int64) * (NUM_HEADS * HEAD_DIM) + values
    passed = tl.load(skip + head)
    for i in range(stop - start):
        value = tl.load(line + values, mask=in_column, other=0.0).to(tl.float32)
        state = _take_in(
            state, line, value, step, a_log, dt_bias, head, row,
            NUM_HEADS, NUM_GROUPS, SIZE, HEAD_DIM,
        )  # fmt: skip
        query = tl.load(line + queries, mask=in_row, other=0.0).to(tl.float32)
        read = tl.sum(state * query[:, None], axis=0) + passed * value
        tl.store(to, read.to(out.dtype.element_ty), mask=in_column)
        if PENDING > 0:
            new = kept + (first + i) % (2 * PENDING) * NUM_HEADS + head
            tl.store(new, tl.load(step + head), mask=tl.program_id(2) == 0)
        line += mixed_stride
        step += steps_stride
        to += NUM_HEADS * HEAD_DIM
    if PENDING == 0:
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
    kept: Tensor | None = None,
) -> Tensor:
    """See `reference.mamba.mamba_scan`. Rows of padding are anything."""
    _, num_heads, _, head_dim = states.shape
    shape = (len(steps), num_heads, head_dim)
    out = torch.empty(shape, dtype=mixed.dtype, device=mixed.device)
    num_reqs, num_decodes = metadata.seq_lens.shape[0], metadata.num_decodes
    given = steps, (a_log, dt_bias, skip), states, metadata, out
    tuning = FIXED if fixed_order else None
    # Rows of tokens that nothing is pending in front of: their numbers are those of the step.
    plain = mixed[metadata.num_pending_rows :]
    drafting = num_decodes if metadata.pending is not None else 0
    if drafting > 0:
        mamba_tokens(mixed, *given, range(drafting), tuning, kept)
    one_by_one = range(drafting, num_reqs if fixed_order else num_decodes)
    if len(one_by_one) > 0:
        mamba_tokens(plain, *given, one_by_one, tuning)
    if not fixed_order and num_decodes < num_reqs:
        mamba_chunks(plain, *given)
    return out


def mamba_tokens(
    mixed: Tensor,
    steps: Tensor,
    numbers: tuple[Tensor, Tensor, Tensor],
    states: Tensor,
    metadata: StateMetadata,
    out: Tensor,
    requests: range,
    tuning: DeltaTuning | None = None,
    kept: Tensor | None = None,
) -> None:
    """Computes `requests` of `metadata` token by token; arguments as those of
    `reference.mamba.mamba_scan`.

    Args:
        numbers: a_log, dt_bias and skip.
        out: [T, H, P]; rows of these requests are written.
        tuning: None: the choice for this many requests.
        kept: None: nothing is pending of these requests.
    """
    tuning = tuning or token_tuning(mixed.device, len(requests))
    _, num_heads, size, head_dim = states.shape
    pending = None if kept is None else metadata.pending
    mamba_scan_kernel[(len(requests), num_heads, triton.cdiv(head_dim, tuning.values))](
        mixed,
        steps,
        *numbers,
        states,
        metadata.blocks,
        metadata.query_start_loc,
        metadata.seq_lens,
        metadata.seq_lens if pending is None else pending.rows,
        metadata.seq_lens if pending is None else pending.num_taken,
        steps if kept is None else kept,
        out,
        requests.start,
        mixed.stride(0),
        steps.stride(0),
        states.stride(0),
        NUM_HEADS=num_heads,
        NUM_GROUPS=(mixed.shape[1] - num_heads * head_dim) // (2 * size),
        SIZE=size,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=triton.next_power_of_2(size),
        VALUES=tuning.values,
        PENDING=0 if pending is None else pending.most,
        num_warps=tuning.num_warps,
        enable_fp_fusion=tuning.fuses,
        **in_turn(mixed.device, len(steps)),
    )
