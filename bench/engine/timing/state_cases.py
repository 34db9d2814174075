"""Layers that keep a state, at the shapes of Nemotron 3 Nano (Mamba 2), Qwen3-Next (gated delta
rule) and Kimi Linear (a decay for each channel): decodes, and prompts alone.

Floors: the bytes of states, inputs and outputs; of prompts, the products of the recurrence in
chunks of 64 tokens too.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from bench.engine.timing.device_time import rotations
from bench.engine.timing.kernel_cases import Case, randn
from tandem_kernels import ops
from tandem_kernels.batch.state_metadata import StateMetadata

_DECODES = 1, 16, 64, 256
_PROMPTS = 8192, 32_768
_CHUNK = 64


def state_cases() -> Iterator[Case]:
    """Lists prompts that begin, and decodes."""
    for length in _PROMPTS:
        yield _mamba(1, length)
        yield _delta(1, length)
        yield _kda(1, length)
    for num_decodes in _DECODES:
        yield _mamba(num_decodes, 1)
        yield _delta(num_decodes, 1)
        yield _kda(num_decodes, 1)


def _metadata(num_reqs: int, length: int) -> StateMetadata:
    starts = torch.arange(num_reqs + 1, device="cuda", dtype=torch.int32) * length
    seq_lens = torch.full_like(starts[1:], length if length > 1 else 1000)
    blocks = torch.arange(num_reqs, device="cuda", dtype=torch.int32)
    return StateMetadata(blocks, starts, seq_lens, num_reqs if length == 1 else 0)


def _shape(num_reqs: int, length: int) -> str:
    return f"{num_reqs} x 1" if length == 1 else f"{length} alone"


def _states(num_reqs: int, *shape: int) -> list[Tensor]:
    size = torch.Size((num_reqs, *shape)).numel() * 4
    return [
        torch.randn((num_reqs, *shape), device="cuda", dtype=torch.float32)
        for _ in range(rotations(size))
    ]


def _mamba(num_reqs: int, length: int) -> Case:
    heads, dim, size, groups = 64, 64, 128, 8
    inner, tokens = heads * dim, num_reqs * length
    projected = randn(tokens, 2 * inner + 2 * groups * size + heads)
    mixed, steps = projected[:, inner:-heads].contiguous(), projected[:, -heads:]
    numbers = [torch.rand(heads, device="cuda") for _ in range(3)]
    states = _states(num_reqs, heads, size, dim)
    metadata = _metadata(num_reqs, length)
    scan = ops.mamba_scan
    calls = [partial(scan, mixed, steps, *numbers, own, metadata) for own in states]
    moved = (mixed.nbytes + tokens * (heads + inner) * 2) + 2 * states[0].nbytes
    products = 2 * heads * (2 * size * dim + _CHUNK * dim) + 2 * groups * _CHUNK * size
    flops = tokens * products if length > 1 else 0.0
    return Case("states, mamba", _shape(num_reqs, length), calls, moved, flops)


def _delta(num_reqs: int, length: int) -> Case:
    keys, heads, dim = 16, 32, 128
    tokens, channels = num_reqs * length, (2 * keys + heads) * dim
    mixed, gates = randn(tokens, channels), randn(tokens, 2 * heads)
    numbers = [torch.rand(heads, device="cuda") for _ in range(2)]
    states = _states(num_reqs, heads, dim, dim)
    metadata = _metadata(num_reqs, length)
    rule = ops.gated_delta_rule
    calls = [partial(rule, mixed, gates, *numbers, own, metadata) for own in states]
    moved = mixed.nbytes + gates.nbytes + tokens * heads * dim * 2 + 2 * states[0].nbytes
    flops = tokens * heads * 2 * dim * (3 * dim + 3 * _CHUNK) if length > 1 else 0.0
    return Case("states, delta rule", _shape(num_reqs, length), calls, moved, flops)


def _kda(num_reqs: int, length: int) -> Case:
    heads, dim = 32, 128
    tokens, each = num_reqs * length, heads * dim
    mixed, decays, gates = randn(tokens, 3 * each), randn(tokens, each), randn(tokens, heads)
    numbers = torch.rand(heads, device="cuda"), torch.rand(each, device="cuda")
    states, metadata = _states(num_reqs, heads, dim, dim), _metadata(num_reqs, length)
    rule = partial(ops.gated_delta_rule, decays=decays)
    calls = [partial(rule, mixed, gates, *numbers, own, metadata) for own in states]
    moved = mixed.nbytes + decays.nbytes + gates.nbytes + tokens * each * 2 + 2 * states[0].nbytes
    flops = tokens * heads * 2 * dim * (3 * dim + 4 * _CHUNK) if length > 1 else 0.0
    return Case("states, kda", _shape(num_reqs, length), calls, moved, flops)
