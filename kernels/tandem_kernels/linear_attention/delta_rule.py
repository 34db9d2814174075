"""The gated delta rule: decodes token by token, prompts in chunks.

A state is read once and written once in a step, whatever the number of tokens. Lengths are read on
the device, so a CUDA graph may hold any of it.
"""

from __future__ import annotations

from typing import TypedDict

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem_kernels.batch.state_metadata import StateMetadata
from tandem_kernels.linear_attention.delta_chunks import delta_chunks
from tandem_kernels.linear_attention.delta_gates import log_decay, rate_of, unit_length
from tandem_kernels.linear_attention.delta_tuning import FIXED, DeltaTuning, decode_tuning
from tandem_kernels.linear_attention.kda_chunks import kda_chunks
from tandem_kernels.small_launches import in_turn


class _How(TypedDict):
    """Holds what kinds of layers differ in."""

    decays: Tensor | None
    rate_scale: float
    decay_floor: float


@triton.jit
def _take_in(
    state: tl.tensor,
    line: tl.tensor,
    rate: tl.tensor,
    decay: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    rate_scale: tl.tensor,
    head: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    NUM_KEYS: tl.constexpr,
    NUM_VALUES: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    FLOOR: tl.constexpr,
) -> tl.tensor:
    """Returns columns of a state with the token whose queries, keys and values begin at `line`, and
    whose gates at `rate` and at `decay`."""
    key_head = head // (NUM_VALUES // NUM_KEYS)
    key = tl.load(line + (NUM_KEYS + key_head) * KEY_DIM + row, mask=row < KEY_DIM, other=0.0)
    values = line + 2 * NUM_KEYS * KEY_DIM + head * VALUE_DIM
    value = tl.load(values + column, mask=column < VALUE_DIM, other=0.0).to(tl.float32)
    key = unit_length(key.to(tl.float32), 0)
    beta = rate_of(tl.load(rate + head).to(tl.float32), rate_scale)
    if BY_CHANNEL:
        channel = head * KEY_DIM + row
        a = tl.load(decay + channel, mask=row < KEY_DIM, other=0.0).to(tl.float32)
        a += tl.load(dt_bias + channel, mask=row < KEY_DIM, other=0.0)
        state *= tl.exp(log_decay(a, tl.load(a_log + head), FLOOR))[:, None]
    else:
        a = tl.load(decay + head).to(tl.float32) + tl.load(dt_bias + head)
        state *= tl.exp(log_decay(a, tl.load(a_log + head), FLOOR))
    known = tl.sum(state * key[:, None], axis=0)
    state += key[:, None] * ((value - known) * beta)[None, :]
    return state


@triton.jit
def _keep_gates(
    to: tl.tensor,
    rate: tl.tensor,
    decay: tl.tensor,
    head: tl.tensor,
    row: tl.tensor,
    NUM_VALUES: tl.constexpr,
    KEY_DIM: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
) -> None:
    """Copies a head's gates of a token to where `to` begins; the first program of a head does."""
    is_ours = tl.program_id(2) == 0
    tl.store(to + head, tl.load(rate + head), mask=is_ours)
    if BY_CHANNEL:
        channel, mask = head * KEY_DIM + row, row < KEY_DIM
        gate = tl.load(decay + channel, mask=mask, other=0.0)
        tl.store(to + NUM_VALUES + channel, gate, mask=mask & is_ours)
    else:
        tl.store(to + NUM_VALUES + head, tl.load(decay + head), mask=is_ours)


@triton.jit(do_not_specialize=["first_req"])
def delta_rule_kernel(
    mixed: tl.tensor,
    gates: tl.tensor,
    decays: tl.tensor,
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
    decays_stride: tl.tensor,
    state_stride: tl.tensor,
    scale: tl.tensor,
    rate_scale: tl.tensor,
    NUM_KEYS: tl.constexpr,
    NUM_VALUES: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    VALUES: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    FLOOR: tl.constexpr,
    PENDING: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Takes in, in program (r, h, j), all tokens of request first_req + r for columns j * VALUES
    and on of the state of value head h. With up to `PENDING` tokens pending, it takes these in, and
    reads the state as the request's own tokens would leave it."""
    r = tl.program_id(0) + first_req
    head = tl.program_id(1)
    seq_len = tl.load(seq_lens + r)
    start = tl.load(query_start_loc + r)
    stop = tl.load(query_start_loc + r + 1)
    exists = (seq_len > 0) & (start < stop)
    if OVERLAP:
        gdc_launch_dependents()
    row = tl.arange(0, BLOCK_KEY)
    column = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    in_key, in_value = row < KEY_DIM, column < VALUE_DIM
    real = in_key[:, None] & in_value[None, :]
    place = tl.load(blocks + r).to(tl.int64) * state_stride + head * (KEY_DIM * VALUE_DIM)
    place = states + place + row[:, None] * VALUE_DIM + column[None, :]
    first = seq_len - (stop - start)
    rate = gates + start.to(tl.int64) * gates_stride
    decay = decays + start.to(tl.int64) * decays_stride
    WIDTH: tl.constexpr = NUM_VALUES * (1 + KEY_DIM) if BY_CHANNEL else 2 * NUM_VALUES
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
        kept = kept_gates + request_row * (2 * PENDING * WIDTH)
        for i in range(count):
            old = kept + (first - count + i) % (2 * PENDING) * WIDTH
            state = _take_in(
                state, line, old, old + NUM_VALUES, a_log, dt_bias, rate_scale, head, row, column,
                NUM_KEYS, NUM_VALUES, KEY_DIM, VALUE_DIM, BY_CHANNEL, FLOOR,
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
    query_head = head // (NUM_VALUES // NUM_KEYS) * KEY_DIM
    to = out + (start.to(tl.int64) * NUM_VALUES + head) * VALUE_DIM + column
    for i in range(stop - start):
        state = _take_in(
            state, line, rate, decay, a_log, dt_bias, rate_scale, head, row, column,
            NUM_KEYS, NUM_VALUES, KEY_DIM, VALUE_DIM, BY_CHANNEL, FLOOR,
        )  # fmt: skip
        query = tl.load(line + query_head + row, mask=in_key, other=0.0)
        query = unit_length(query.to(tl.float32), 0) * scale
        read = tl.sum(state * query[:, None], axis=0)
        tl.store(to, read.to(out.dtype.element_ty), mask=in_value)
        if PENDING > 0:
            new = kept + (first + i) % (2 * PENDING) * WIDTH
            _keep_gates(new, rate, decay, head, row, NUM_VALUES, KEY_DIM, BY_CHANNEL)
        line += mixed_stride
        rate += gates_stride
        decay += decays_stride
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
    *,
    decays: Tensor | None = None,
    rate_scale: float = 1.0,
    decay_floor: float = 0.0,
) -> Tensor:
    """See `reference.delta_rule.gated_delta_rule`. Rows of padding are anything."""
    _, num_values, _, value_dim = states.shape
    shape = (gates.shape[0], num_values, value_dim)
    out = torch.empty(shape, dtype=mixed.dtype, device=mixed.device)
    num_reqs, num_decodes = metadata.seq_lens.shape[0], metadata.num_decodes
    given = gates, a_log, dt_bias, states, metadata, out
    tuning = FIXED if fixed_order else None
    how: _How = {"decays": decays, "rate_scale": rate_scale, "decay_floor": decay_floor}
    # Rows of tokens that nothing is pending in front of: their numbers are those of the step.
    plain = mixed[metadata.num_pending_rows :]
    drafting = num_decodes if metadata.pending is not None else 0
    if drafting > 0:
        delta_tokens(mixed, *given, range(drafting), tuning, kept, **how)
    one_by_one = range(drafting, num_reqs if fixed_order else num_decodes)
    if len(one_by_one) > 0:
        delta_tokens(plain, *given, one_by_one, tuning, **how)
    if not fixed_order and num_decodes < num_reqs:
        if decays is None:
            delta_chunks(plain, *given, rate_scale=rate_scale)
        else:
            own = plain, gates, decays, *given[1:]
            kda_chunks(*own, rate_scale=rate_scale, decay_floor=decay_floor)
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
    *,
    decays: Tensor | None = None,
    rate_scale: float = 1.0,
    decay_floor: float = 0.0,
) -> None:
    """Computes `requests` of `metadata` token by token; arguments as those of
    `reference.delta_rule.gated_delta_rule`.

    Args:
        out: [T, Hv, V]; rows of these requests are written.
        tuning: None: the choice for this many requests.
        kept: None: nothing is pending of these requests.
    """
    tuning = tuning or decode_tuning(mixed.device, len(requests))
    _, num_values, key_dim, value_dim = states.shape
    num_keys = (mixed.shape[1] - num_values * value_dim) // (2 * key_dim)
    grid = (len(requests), num_values, triton.cdiv(value_dim, tuning.values))
    pending = None if kept is None else metadata.pending
    of_heads = gates[:, num_values:] if decays is None else decays
    delta_rule_kernel[grid](
        mixed,
        gates,
        of_heads,
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
        of_heads.stride(0),
        states.stride(0),
        key_dim**-0.5,
        rate_scale,
        NUM_KEYS=num_keys,
        NUM_VALUES=num_values,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_KEY=triton.next_power_of_2(key_dim),
        VALUES=tuning.values,
        BY_CHANNEL=decays is not None,
        FLOOR=decay_floor,
        PENDING=0 if pending is None else pending.most,
        num_warps=tuning.num_warps,
        enable_fp_fusion=tuning.fuses,
        **in_turn(mixed.device, len(gates)),
    )
