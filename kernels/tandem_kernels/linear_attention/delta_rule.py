"""The gated delta rule: decodes token by token, prompts in chunks.

A state is read once and written once in a step, whatever the number of tokens. Lengths are read on
the device, so a CUDA graph may hold any of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.batch.state_metadata import StateMetadata
from tandem_kernels.linear_attention.delta_chunks import delta_chunks
from tandem_kernels.linear_attention.delta_gates import decay_and_rate, unit_length
from tandem_kernels.linear_attention.delta_tuning import FIXED, DeltaTuning, decode_tuning
from tandem_kernels.small_launches import in_turn, take_turn


@triton.jit
def _take_in(
    state: tl.tensor,
    line: tl.tensor,
    gate: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    head: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    NUM_KEYS: tl.constexpr,
    NUM_VALUES: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
) -> tl.tensor:
    """Returns columns of a state with the token whose queries, keys and values begin at `line`, and
    whose gates at `gate`."""
    key_head = head // (NUM_VALUES // NUM_KEYS)
    key = tl.load(line + (NUM_KEYS + key_head) * KEY_DIM + row, mask=row < KEY_DIM, other=0.0)
    values = line + 2 * NUM_KEYS * KEY_DIM + head * VALUE_DIM
    value = tl.load(values + column, mask=column < VALUE_DIM, other=0.0).to(tl.float32)
    key = unit_length(key.to(tl.float32), 0)
    log_decay, rate = decay_and_rate(gate, a_log, dt_bias, head, NUM_VALUES)
    state *= tl.exp(log_decay)
    known = tl.sum(state * key[:, None], axis=0)
    state += key[:, None] * ((value - known) * rate)[None, :]
    return state


@triton.jit(do_not_specialize=["first_req"])
def delta_rule_kernel(
    mixed: tl.tensor,
    gates: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    states: tl.tensor,
    blocks: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    rows: tl.tensor,
    num_taken: tl.tensor,
    kept_gates: tl.tensor,
    out: tl.tensor,
    first_req: tl.tensor,
    mixed_stride: tl.tensor,
    gates_stride: tl.tensor,
    state_stride: tl.tensor,
    scale: tl.tensor,
    NUM_KEYS: tl.constexpr,
    NUM_VALUES: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    VALUES: tl.constexpr,
    PENDING: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Takes in, in program (r, h, j), all tokens of request first_req + r for columns j * VALUES
    and on of the state of value head h. With up to `PENDING` tokens pending, it takes these in, and
    reads the state as the request's own tokens would leave it."""
    take_turn(OVERLAP)
    r = tl.program_id(0) + first_req
    head = tl.program_id(1)
    seq_len = tl.load(seq_lens + r)
    start = tl.load(query_start_loc + r)
    stop = tl.load(query_start_loc + r + 1)
    if (seq_len == 0) | (start == stop):
        return
    row = tl.arange(0, BLOCK_KEY)
    column = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    in_key, in_value = row < KEY_DIM, column < VALUE_DIM
    real = in_key[:, None] & in_value[None, :]
    place = tl.load(blocks + r).to(tl.int64) * state_stride + head * (KEY_DIM * VALUE_DIM)
    place = states + place + row[:, None] * VALUE_DIM + column[None, :]
    first = seq_len - (stop - start)
    gate = gates + start.to(tl.int64) * gates_stride
    if PENDING > 0:
        request_row = tl.load(rows + r).to(tl.int64)
        taken = tl.load(num_taken + request_row)
        state = tl.load(place, mask=real & (taken > 0), other=0.0)
        count = tl.minimum(tl.maximum(first - taken, 0), PENDING)
        line = r * (PENDING + stop - start) + PENDING - count
        line = mixed + line.to(tl.int64) * mixed_stride
        kept = kept_gates + request_row * (2 * PENDING * 2 * NUM_VALUES)
        for i in range(count):
            old = kept + (first - count + i) % (2 * PENDING) * (2 * NUM_VALUES)
            state = _take_in(
                state, line, old, a_log, dt_bias, head, row, column,
                NUM_KEYS, NUM_VALUES, KEY_DIM, VALUE_DIM,
            )  # fmt: skip
            line += mixed_stride
        if count > 0:
            tl.store(place, state, mask=real)
    else:
        state = tl.load(place, mask=real & (first > 0), other=0.0)
        line = mixed + start.to(tl.int64) * mixed_stride
    query_head = head // (NUM_VALUES // NUM_KEYS) * KEY_DIM
    to = out + (start.to(tl.int64) * NUM_VALUES + head) * VALUE_DIM + column
    for i in range(stop - start):
        state = _take_in(
            state, line, gate, a_log, dt_bias, head, row, column,
            NUM_KEYS, NUM_VALUES, KEY_DIM, VALUE_DIM,
        )  # fmt: skip
        query = tl.load(line + query_head + row, mask=in_key, other=0.0)
        query = unit_length(query.to(tl.float32), 0) * scale
        read = tl.sum(state * query[:, None], axis=0)
        tl.store(to, read.to(out.dtype.element_ty), mask=in_value)
        if PENDING > 0:
            new = kept + (first + i) % (2 * PENDING) * (2 * NUM_VALUES) + head
            is_ours = tl.program_id(2) == 0
            tl.store(new, tl.load(gate + head), mask=is_ours)
            tl.store(new + NUM_VALUES, tl.load(gate + NUM_VALUES + head), mask=is_ours)
        line += mixed_stride
        gate += gates_stride
        to += NUM_VALUES * VALUE_DIM
    if PENDING == 0:
        tl.store(place, state, mask=real)


def gated_delta_rule(
    mixed: Tensor,
    gates: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    metadata: StateMetadata,
    fixed_order: bool = False,
    kept: Tensor | None = None,
) -> Tensor:
    """See `reference.delta_rule.gated_delta_rule`. Rows of padding are anything."""
    _, num_values, _, value_dim = states.shape
    shape = (gates.shape[0], num_values, value_dim)
    out = torch.empty(shape, dtype=mixed.dtype, device=mixed.device)
    num_reqs, num_decodes = metadata.seq_lens.shape[0], metadata.num_decodes
    given = gates, a_log, dt_bias, states, metadata, out
    tuning = FIXED if fixed_order else None
    # Rows of tokens that nothing is pending in front of: their numbers are those of the step.
    plain = mixed[metadata.num_pending_rows :]
    drafting = num_decodes if metadata.pending is not None else 0
    if drafting > 0:
        delta_tokens(mixed, *given, range(drafting), tuning, kept)
    one_by_one = range(drafting, num_reqs if fixed_order else num_decodes)
    if len(one_by_one) > 0:
        delta_tokens(plain, *given, one_by_one, tuning)
    if not fixed_order and num_decodes < num_reqs:
        delta_chunks(plain, *given)
    return out


def delta_tokens(
    mixed: Tensor,
    gates: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    metadata: StateMetadata,
    out: Tensor,
    requests: range,
    tuning: DeltaTuning | None = None,
    kept: Tensor | None = None,
) -> None:
    """Computes `requests` of `metadata` token by token; arguments as those of
    `reference.delta_rule.gated_delta_rule`.

    Args:
        out: [T, Hv, V]; rows of these requests are written.
        tuning: None: the choice for this many requests.
        kept: None: nothing is pending of these requests.
    """
    tuning = tuning or decode_tuning(len(requests))
    _, num_values, key_dim, value_dim = states.shape
    num_keys = (mixed.shape[1] - num_values * value_dim) // (2 * key_dim)
    grid = (len(requests), num_values, triton.cdiv(value_dim, tuning.values))
    pending = None if kept is None else metadata.pending
    delta_rule_kernel[grid](
        mixed,
        gates,
        a_log,
        dt_bias,
        states,
        metadata.blocks,
        metadata.query_start_loc,
        metadata.seq_lens,
        metadata.seq_lens if pending is None else pending.rows,
        metadata.seq_lens if pending is None else pending.num_taken,
        gates if kept is None else kept,
        out,
        requests.start,
        mixed.stride(0),
        gates.stride(0),
        states.stride(0),
        key_dim**-0.5,
        NUM_KEYS=num_keys,
        NUM_VALUES=num_values,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_KEY=triton.next_power_of_2(key_dim),
        VALUES=tuning.values,
        PENDING=0 if pending is None else pending.most,
        num_warps=tuning.num_warps,
        enable_fp_fusion=tuning.fuses,
        **in_turn(mixed.device, len(gates)),
    )
