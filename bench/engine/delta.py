"""Time and tune linear attention by the gated delta rule, beside its floor.

    python -m bench.engine.delta [--ranks 1]   # with the tunings that are built in
    python -m bench.engine.delta --tune        # all candidates; the fastest of each shape first

The shape is that of Qwen3-Next and Qwen3.5-35B-A3B: 16 key heads, 32 value heads, both of 128, in
bf16. The floor of a decode is its states, read and written, over what a copy reaches; that of a
prompt is what its kernels must read and write. Where fla-core is installed its chunked kernels are
timed as a yardstick; they get heads and states as they want them, without what brings them there.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from bench.engine.timing.device_time import copy_bytes_per_us, eager_us, graph_us, rotations
from tandem_kernels import ops
from tandem_kernels.batch.state_metadata import StateMetadata
from tandem_kernels.linear_attention.delta_chunks import delta_chunks
from tandem_kernels.linear_attention.delta_rule import delta_tokens
from tandem_kernels.linear_attention.delta_tuning import MOST_WARPS, DeltaTuning

KEY_HEADS, VALUE_HEADS, DIM, KERNEL = 16, 32, 128, 4
DECODES = (1, 16, 64, 256)
PROMPTS = ((2048,), (8192,), (2048,) * 4, (128,) * 64)


@dataclass(frozen=True)
class Layer:
    """One layer's inputs of a step; several sets of states, so that none stays in the cache."""

    projected: Tensor
    gates: Tensor
    a_log: Tensor
    dt_bias: Tensor
    conv_weight: Tensor
    last_inputs: Tensor
    states: list[Tensor]
    metadata: StateMetadata

    @property
    def channels(self) -> int:
        return self.conv_weight.shape[0]

    @classmethod
    def random(cls, lengths: tuple[int, ...], num_cached: int, ranks: int) -> Layer:
        keys, values = KEY_HEADS // ranks, VALUE_HEADS // ranks
        count, num_tokens = len(lengths), sum(lengths)
        channels = (2 * keys + values) * DIM
        num_decodes = count if max(lengths) == 1 else 0
        shape = (count, values, DIM, DIM)
        with torch.device("cuda"):
            sets = rotations(4 * math.prod(shape), 8)
            bounds = torch.tensor([0, *lengths]).cumsum(0).int()
            return cls(
                torch.randn(num_tokens, channels + values * DIM).bfloat16(),
                torch.randn(num_tokens, 2 * values).bfloat16(),
                torch.zeros(values),
                torch.zeros(values),
                torch.randn(channels, KERNEL).bfloat16(),
                torch.zeros(count, channels, KERNEL - 1).bfloat16(),
                [torch.zeros(shape) for _ in range(sets)],
                StateMetadata(
                    torch.randperm(count).int(),
                    bounds,
                    bounds.diff() + num_cached,
                    num_decodes,
                ),
            )

    def rule(self, run: Callable[..., object]) -> list[Callable[[], object]]:
        mixed = self.projected[:, : self.channels].contiguous()
        given = mixed, self.gates, self.a_log, self.dt_bias
        return [lambda s=states: run(*given, s, self.metadata) for states in self.states]


def parts_us(layer: Layer) -> dict[str, float]:
    """Returns microseconds of everything between the projections."""
    mixed = layer.projected[:, : layer.channels]
    read = torch.randn_like(layer.projected[:, layer.channels :]).unflatten(1, (-1, DIM))
    weight = torch.ones(DIM, device="cuda", dtype=torch.bfloat16)
    gate = layer.projected[:, layer.channels :]
    conv = partial(ops.causal_conv, mixed, layer.conv_weight, layer.last_inputs, layer.metadata)
    return {
        "convolution": graph_us([conv]),
        "delta rule": graph_us(layer.rule(ops.gated_delta_rule)),
        "gated norm": graph_us([lambda: ops.gated_rms_norm(read, gate, weight, 1e-6)]),
    }


def candidates_of(layer: Layer) -> list[tuple[DeltaTuning, int]]:
    """Returns tunings, and warps of the programs that solve chunks: those of decodes have none."""
    is_decode = layer.metadata.num_decodes > 0
    return [
        (DeltaTuning(values, warps, stages), chunk_warps)
        for values in (16, 32, 64)
        for warps in ((1, 2, 4, 8) if is_decode else range(1, MOST_WARPS + 1))
        for stages in ((1,) if is_decode else (1, 2))
        for chunk_warps in ((0,) if is_decode else range(1, MOST_WARPS + 1))
    ]


def tuned_us(layer: Layer, tuning: DeltaTuning, chunk_warps: int) -> float:
    """Returns microseconds, or infinity where the tuning does not fit the device."""
    states = layer.states[0]
    out = torch.empty(len(layer.gates), *states.shape[1:3], device="cuda", dtype=torch.bfloat16)

    def run(*given: object) -> None:
        if layer.metadata.num_decodes:
            delta_tokens(*given, out, len(states), tuning)  # type: ignore[arg-type]
        else:
            delta_chunks(*given, out, tuning, chunk_warps)  # type: ignore[arg-type]

    try:
        return graph_us(layer.rule(run), 7)
    except OutOfResources:
        return math.inf


def fla_us(layer: Layer) -> float:
    """Returns microseconds of fla-core's chunked kernels for the same prompts."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    values = layer.states[0].shape[1]
    keys = (layer.channels // DIM - values) // 2
    sizes = [keys * DIM, keys * DIM, values * DIM]
    q, k, v = (
        part.contiguous().view(1, len(part), -1, DIM)
        for part in layer.projected[:, : layer.channels].split(sizes, dim=1)
    )
    g, beta = -torch.rand_like(layer.gates[None, :, :values].float()), layer.gates[None, :, values:]
    bounds = layer.metadata.query_start_loc.long()
    return eager_us(
        lambda: chunk_gated_delta_rule(
            q, k, v, g, beta.sigmoid(), initial_state=layer.states[0], output_final_state=True,
            use_qk_l2norm_in_kernel=True, cu_seqlens=bounds,
        )
    )  # fmt: skip


def floor_us(layer: Layer, bytes_per_us: float) -> float:
    tokens = 2 * 2 * layer.projected.numel() + 2 * layer.gates.numel()
    return (2 * layer.states[0].nbytes + tokens) / bytes_per_us


def shapes(ranks: int) -> dict[str, Layer]:
    found = {f"decode {n}": Layer.random((1,) * n, 1024, ranks) for n in DECODES}
    for lengths in PROMPTS:
        found[f"prompts {len(lengths)} x {lengths[0]}"] = Layer.random(lengths, 0, ranks)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1, help="GPUs that share the heads")
    parser.add_argument("--tune", action="store_true", help="time all candidates")
    given = parser.parse_args()
    bytes_per_us = copy_bytes_per_us()
    for name, layer in shapes(given.ranks).items():
        print(f"{name}: floor {floor_us(layer, bytes_per_us):.1f} us", flush=True)
        if given.tune:
            times = {candidate: tuned_us(layer, *candidate) for candidate in candidates_of(layer)}
            for (tuning, chunk_warps), us in sorted(times.items(), key=lambda item: item[1])[:5]:
                print(f"   {us:.1f} us {tuning} {chunk_warps}", flush=True)
            continue
        parts = parts_us(layer)
        print("   " + ", ".join(f"{part} {us:.1f} us" for part, us in parts.items()), flush=True)
        if name.startswith("prompts") and importlib.util.find_spec("fla") is not None:
            print(f"   fla-core {fla_us(layer):.1f} us", flush=True)


if __name__ == "__main__":
    main()
