"""Layers that keep a state, at the shapes of Nemotron 3 Nano (Mamba 2), Qwen3-Next (gated delta
rule) and Kimi Linear (a decay for each channel): decodes, and prompts alone.

Floors: the bytes of states, inputs and outputs; of prompts, the products of the recurrence in
chunks of 64 tokens too. Peers run where `mamba_ssm` and `fla` can be imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module

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
    for num_reqs, length in (*((1, n) for n in _PROMPTS), *((n, 1) for n in _DECODES)):
        yield _mamba(num_reqs, length)
        yield _delta("states, delta rule", num_reqs, length, num_keys=16)
        yield _delta("states, kda", num_reqs, length, num_keys=32, of_channels=True)


def _peer(module: str, name: str) -> Callable[..., object] | None:
    """Returns a function of another package; None where that is not installed."""
    try:
        found: Callable[..., object] = getattr(import_module(module), name)
    except ImportError:
        return None
    return found


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
    if scan := _peer("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined"):
        a_log, dt_bias, skip = numbers
        found["mamba_ssm"] = [
            partial(
                scan, x, steps[None], -a_log.exp(), b, c, 128,
                D=skip, dt_bias=dt_bias, dt_softplus=True, return_final_states=True,
            )
        ]  # fmt: skip
    if chunk := _peer("fla.ops.simple_gla", "chunk_simple_gla"):
        q, k = (part.repeat_interleave(heads // groups, dim=2) for part in (c, b))
        decay = -torch.rand(1, len(mixed), heads, device="cuda")
        found["fla"] = [partial(chunk, q, k, x, decay, output_final_state=True)]
    return found


def _delta(name: str, num_reqs: int, length: int, num_keys: int, of_channels: bool = False) -> Case:
    """Computes the delta rule of 32 heads, which share keys. `of_channels`: each channel of a key
    decays by itself."""
    heads, dim = 32, 128
    tokens, each = num_reqs * length, heads * dim
    mixed = randn(tokens, (2 * num_keys + heads) * dim)
    decays = randn(tokens, each) if of_channels else None
    gates = randn(tokens, heads if of_channels else 2 * heads)
    numbers = [torch.rand(size, device="cuda") for size in (heads, each if of_channels else heads)]
    states, metadata = _states(num_reqs, heads, dim, dim), _metadata(num_reqs, length)
    rule = partial(ops.gated_delta_rule, decays=decays)
    calls = [partial(rule, mixed, gates, *numbers, own, metadata) for own in states]
    moved = mixed.nbytes + gates.nbytes + tokens * each * 2 + 2 * states[0].nbytes
    moved += decays.nbytes if decays is not None else 0
    others: dict[str, list[Callable[[], object]]] = {}
    kind = ("kda", "chunk_kda") if of_channels else ("gated_delta_rule", "chunk_gated_delta_rule")
    if length > 1 and (chunk := _peer(f"fla.ops.{kind[0]}", kind[1])):
        q, k, v = (randn(1, tokens, heads, dim) for _ in range(3))
        beta = torch.rand(1, tokens, heads, device="cuda")
        decay = -beta if decays is None else -decays[None].unflatten(2, (heads, dim)).float().exp()
        others["fla"] = [
            partial(
                chunk, q, k, v, decay, beta,
                output_final_state=True, use_qk_l2norm_in_kernel=True,
            )
        ]  # fmt: skip
    products = 4 if of_channels else 3
    flops = tokens * heads * 2 * dim * (3 * dim + products * _CHUNK) if length > 1 else 0.0
    return Case(name, _shape(num_reqs, length), calls, moved, flops, others)
