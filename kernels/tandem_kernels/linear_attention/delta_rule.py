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
def delta_rule_kernel(
    mixed: tl.tensor,
    gates: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    states: tl.tensor,
    blocks: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    out: tl.tensor,
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
    OVERLAP: tl.constexpr,
) -> None:
    """Takes in, in program (r, h, j), all tokens of request r for columns j * VALUES and on of
    the state of value head h."""
    take_turn(OVERLAP)
    r = tl.program_id(0)
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
    goes_on = seq_len > stop - start
    state = tl.load(place, mask=real & goes_on, other=0.0)
    key_head = head // (NUM_VALUES // NUM_KEYS)
    line = mixed + start.to(tl.int64) * mixed_stride
    gate = gates + start.to(tl.int64) * gates_stride
    to = out + (start.to(tl.int64) * NUM_VALUES + head) * VALUE_DIM + column
    for _ in range(start, stop):
        query = tl.load(line + key_head * KEY_DIM + row, mask=in_key, other=0.0)
        key = tl.load(line + (NUM_KEYS + key_head) * KEY_DIM + row, mask=in_key, other=0.0)
        values = line + 2 * NUM_KEYS * KEY_DIM + head * VALUE_DIM
        value = tl.load(values + column, mask=in_value, other=0.0).to(tl.float32)
        query = unit_length(query.to(tl.float32), 0) * scale
        key = unit_length(key.to(tl.float32), 0)
        log_decay, rate = decay_and_rate(gate, a_log, dt_bias, head, NUM_VALUES)
        state *= tl.exp(log_decay)
        known = tl.sum(state * key[:, None], axis=0)
        state += key[:, None] * ((value - known) * rate)[None, :]
        read = tl.sum(state * query[:, None], axis=0)
        tl.store(to, read.to(out.dtype.element_ty), mask=in_value)
        line += mixed_stride
        gate += gates_stride
        to += NUM_VALUES * VALUE_DIM
    tl.store(place, state, mask=real)


def gated_delta_rule(
    mixed: Tensor,
    gates: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    metadata: StateMetadata,
    fixed_order: bool = False,
) -> Tensor:
    """See `reference.delta_rule.gated_delta_rule`. Rows of padding are anything."""
    num_tokens = mixed.shape[0]
    _, num_values, _, value_dim = states.shape
    shape = (num_tokens, num_values, value_dim)
    out = torch.empty(shape, dtype=mixed.dtype, device=mixed.device)
    num_reqs, num_decodes = metadata.seq_lens.shape[0], metadata.num_decodes
    given = mixed, gates, a_log, dt_bias, states, metadata
    one_by_one = num_reqs if fixed_order else num_decodes
    if one_by_one > 0:
        delta_tokens(*given, out, one_by_one, FIXED if fixed_order else None)
    if one_by_one < num_reqs:
        delta_chunks(*given, out)
    return out


def delta_tokens(
    mixed: Tensor,
    gates: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    metadata: StateMetadata,
    out: Tensor,
    num_reqs: int,
    tuning: DeltaTuning | None = None,
) -> None:
    """Computes the first `num_reqs` requests of `metadata` token by token; arguments as those of
    `reference.delta_rule.gated_delta_rule`.

    Args:
        out: [T, Hv, V]; rows of these requests are written.
        tuning: None: the choice for this many requests.
    """
    tuning = tuning or decode_tuning(num_reqs)
    _, num_values, key_dim, value_dim = states.shape
    num_keys = (mixed.shape[1] - num_values * value_dim) // (2 * key_dim)
    grid = (num_reqs, num_values, triton.cdiv(value_dim, tuning.values))
    delta_rule_kernel[grid](
        mixed,
        gates,
        a_log,
        dt_bias,
        states,
        metadata.blocks,
        metadata.query_start_loc,
        metadata.seq_lens,
        out,
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
        num_warps=tuning.num_warps,
        **in_turn(mixed.device, len(mixed)),
    )
