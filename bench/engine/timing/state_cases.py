"""Layers that keep a state, at the shapes of Nemotron 3 Nano (Mamba 2), Qwen3-Next (gated delta
rule) and Kimi Linear (a decay for each channel): decodes, and prompts alone.

Floors: the bytes of states, inputs and outputs; of prompts, the products of the recurrence in
chunks of 64 tokens too. Peers run where `mamba_ssm` and `fla` can be imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    others: dict[str, list[Callable[[], object]]] = {}
    if length > 1:
        others = _mamba_peers(mixed, steps, numbers, (heads, dim, groups, size))
    flops = tokens * products if length > 1 else 0.0
    return Case("states, mamba", _shape(num_reqs, length), calls, moved, flops, others)


def _mamba_peers(
    mixed: Tensor, steps: Tensor, numbers: list[Tensor], sizes: tuple[int, int, int, int]
) -> dict[str, list[Callable[[], object]]]:
    heads, dim, groups, size = sizes
    inner = heads * dim
    x = mixed[None, :, :inner].unflatten(2, (heads, dim))
    b, c = mixed[None, :, inner:].unflatten(2, (2, groups, size)).unbind(2)
    found: dict[str, list[Callable[[], object]]] = {}
    try:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        a_log, dt_bias, skip = numbers
        found["mamba_ssm"] = [
            partial(
                mamba_chunk_scan_combined, x, steps[None], -a_log.exp(), b, c, 128,
                D=skip, dt_bias=dt_bias, dt_softplus=True, return_final_states=True,
            )
        ]  # fmt: skip
    except ImportError:
        pass
    try:
        from fla.ops.simple_gla import chunk_simple_gla

        q, k = (part.repeat_interleave(heads // groups, dim=2) for part in (c, b))
        decay = -torch.rand(1, len(mixed), heads, device="cuda")
        found["fla"] = [partial(chunk_simple_gla, q, k, x, decay, output_final_state=True)]
    except ImportError:
        pass
    return found


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
    others: dict[str, list[Callable[[], object]]] = {}
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        q, k = (randn(1, tokens, heads, dim) for _ in range(2))
        v, beta = randn(1, tokens, heads, dim), torch.rand(1, tokens, heads, device="cuda")
        if length > 1:
            run = partial(
                chunk_gated_delta_rule, q, k, v, -beta, beta,
                output_final_state=True, use_qk_l2norm_in_kernel=True,
            )  # fmt: skip
            others["fla"] = [run]
    except ImportError:
        pass
    flops = tokens * heads * 2 * dim * (3 * dim + 3 * _CHUNK) if length > 1 else 0.0
    return Case("states, delta rule", _shape(num_reqs, length), calls, moved, flops, others)


def _kda(num_reqs: int, length: int) -> Case:
    heads, dim = 32, 128
    tokens, each = num_reqs * length, heads * dim
    mixed, decays, gates = randn(tokens, 3 * each), randn(tokens, each), randn(tokens, heads)
    numbers = torch.rand(heads, device="cuda"), torch.rand(each, device="cuda")
    states, metadata = _states(num_reqs, heads, dim, dim), _metadata(num_reqs, length)
    rule = partial(ops.gated_delta_rule, decays=decays)
    calls = [partial(rule, mixed, gates, *numbers, own, metadata) for own in states]
    moved = mixed.nbytes + decays.nbytes + gates.nbytes + tokens * each * 2 + 2 * states[0].nbytes
    others: dict[str, list[Callable[[], object]]] = {}
    try:
        from fla.ops.kda import chunk_kda

        q, k, v = mixed[None].unflatten(2, (3, heads, dim)).unbind(2)
        decay, beta = -decays[None].unflatten(2, (heads, dim)).float().exp(), gates[None].sigmoid()
        if length > 1:
            run = partial(
                chunk_kda, q, k, v, decay, beta,
                output_final_state=True, use_qk_l2norm_in_kernel=True,
            )  # fmt: skip
            others["fla"] = [run]
    except ImportError:
        pass
    flops = tokens * heads * 2 * dim * (3 * dim + 4 * _CHUNK) if length > 1 else 0.0
    return Case("states, kda", _shape(num_reqs, length), calls, moved, flops, others)
