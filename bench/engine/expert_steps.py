"""Time experts inside an engine's own prompts beside the sweep's way to time them.

    python -m bench.engine.expert_steps                      # gpt-oss-120b, a prompt of 2048 tokens
    python -m bench.engine.expert_steps --tokens 8192

The same GEMMs, microseconds of a layer, with the tiles that the table takes:

    in the step       kernels of prompts, as the profiler sees them
    layers in turn    the same calls alone, in a graph: inputs and routing were kept
    one layer         the first layer's weights and all layers' inputs
    as the sweep      the first layer's weights, random rows, no bias, SiLU, routing of its own

Steps route uniformly (`models/uniform_routing.py`). Tiles are those that have rows, counted from
the routing. Where steps take longer than layers in turn, other kernels or the clock are why; where
these take longer than one layer, addresses; where tiles differ, routing. Each graph is replayed
for some time: `first` are its first times, `last` its last ones. MXFP4 alone. Writes
bench/results/expert-steps-SHAPE-TOKENS.json.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from bench.engine.models.shapes import shape_config
from bench.engine.models.uniform_routing import uniform_routing
from bench.engine.timing.device_time import replay_times
from bench.engine.timing.step_breakdown import cuda_events
from bench.record import write_result
from engine.executor.uniproc_executor import UniprocExecutor
from engine.layers.sparse_mlp import Experts
from engine.speed.offline_engine import OfflineEngine, offline_engine
from tandem_kernels.device import gpu_name
from tandem_kernels.experts.expert_plan import ExpertPlan
from tandem_kernels.experts.expert_tuning import ExpertShape, gemm_tunings
from tandem_kernels.experts.fp4.experts import fp4_expert_gemm
from tandem_kernels.experts.fp4.pair_shapes import format_of

SHAPES = "gpt-oss-20b", "gpt-oss-120b"
_KERNEL = "fp4_expert_gemm_kernel"
_REPLAYS = 40
_BUFFERS = 4
"""Inputs of the second GEMM that take turns: one alone would stay in the cache."""
Times = list[float]


@dataclass(frozen=True, slots=True)
class ExpertCall:
    """Holds what a layer's experts were given in a step."""

    layer: Experts
    x: Tensor
    weights: Tensor
    chosen: Tensor

    @property
    def shape(self) -> ExpertShape:
        sizes = self.layer.sizes
        return ExpertShape(sizes.count, sizes.width, sizes.hidden, format_of(self.layer.w13))

    def gemms(
        self, between: Tensor, out: Tensor, *, plain: bool
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """Returns both GEMMs as calls, from `x` into `between`, and from there into `out`. `plain`:
        without biases, and with SiLU."""
        layer = self.layer
        b13, gate, b2 = (None,) * 3 if plain else (layer.b13, layer.gate, layer.b2)
        plan = ExpertPlan.of(self.chosen, self.shape)
        given = self.weights, plan.rows
        return (
            partial(fp4_expert_gemm, self.x, layer.w13, *given, between, plan.gate_up, b13, gate),
            partial(fp4_expert_gemm, between, layer.w2.unsqueeze(1), *given, out, plan.down, b2),
        )

    def as_swept(self) -> ExpertCall:
        """Returns the call as the sweep makes it: other rows, other routing."""
        num_experts, top_k = self.shape.num_experts, self.chosen.shape[1]
        order = torch.rand(len(self.x), num_experts, device=self.x.device).argsort(-1)
        return replace(self, x=torch.randn_like(self.x), chosen=order[:, :top_k].int())


@contextmanager
def kept_calls(num_tokens: int) -> Iterator[list[ExpertCall]]:
    """Keeps what experts are given meanwhile in steps of so many tokens, once a layer."""
    found: list[ExpertCall] = []
    forward = Experts.forward

    def compute(self: Experts, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        if len(x) == num_tokens and all(call.layer is not self for call in found):
            found.append(ExpertCall(self, x.clone(), weights.clone(), experts.clone()))
        return forward(self, x, weights, experts)

    Experts.forward = compute  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Experts.forward = forward  # type: ignore[method-assign]


def tiles_of(chosen: Tensor, num_experts: int, height: int) -> int:
    """Returns how many tiles of `height` rows have any, where [T, k] tokens go to experts."""
    counts = torch.bincount(chosen.flatten().clamp(min=-1) + 1, minlength=num_experts + 1)[1:]
    return int((-(-counts // height)).sum())


def step_times(engine: OfflineEngine, num_tokens: int, num_layers: int) -> tuple[Times, Times]:
    """Returns the microseconds of first and second GEMMs in prompts, by layer: medians of some."""
    found = []
    for _ in range(5):
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            engine.run([engine.request(num_tokens, 1)])
            torch.cuda.synchronize()
        times = [end - start for start, end, name in cuda_events(profiler) if name == _KERNEL]
        if len(times) == 2 * num_layers:
            found.append(times)
    assert found, f"a step of {num_layers} layers launches {_KERNEL} twice a layer"
    medians = [statistics.median(of_one) for of_one in zip(*found, strict=True)]
    return medians[::2], medians[1::2]


def alone(calls: Sequence[ExpertCall], *, plain: bool) -> dict[str, tuple[float, float]]:
    """Returns the microseconds of each GEMM of `calls` alone: of first replays and of last ones.
    `plain`: see `ExpertCall.gemms`."""
    pairs, shape = calls[0].chosen.numel(), calls[0].shape
    empty = partial(torch.empty, dtype=calls[0].x.dtype, device=calls[0].x.device)
    between = [empty(pairs, shape.width) for _ in range(_BUFFERS)]
    out = empty(pairs, shape.hidden)
    made = [call.gemms(between[i % _BUFFERS], out, plain=plain) for i, call in enumerate(calls)]
    figures = {}
    for name, gemms in zip(("gate-up", "down"), zip(*made, strict=True), strict=True):
        times = replay_times(gemms, _REPLAYS)
        figures[name] = statistics.median(times[:3]), statistics.median(times[-3:])
    return figures


def report(
    engine: OfflineEngine, calls: Sequence[ExpertCall], num_tokens: int
) -> dict[str, object]:
    """Prints all ways to time them side by side, and returns them."""
    one = [replace(call, layer=calls[0].layer) for call in calls]
    ways = {
        "layers in turn": (calls, False),
        "one layer": (one, False),
        "as the sweep": ([call.as_swept() for call in one], True),
    }
    steps = step_times(engine, num_tokens, len(calls))
    figures: dict[str, object] = {}
    print(f"{'us a layer':16}{'gate-up':>20}{'down':>20}{'tiles':>14}   first, last replays")
    heights = []
    first = calls[0]
    tunings = gemm_tunings(first.shape, first.chosen.numel(), gpu_name(first.x.device))
    for name, tuning, times in zip(("gate-up", "down"), tunings, steps, strict=True):
        heights.append(tuning.rows + tuning.extra_rows)
        figures[name] = {"tuning": repr(tuning), "in the step": times}
        print(f"{name}: {tuning}")
    medians = [statistics.fmean(times) for times in steps]
    _print("in the step", [(medians[0],), (medians[1],)], calls, heights)
    for way, (of, plain) in ways.items():
        found = alone(of, plain=plain)
        figures[way] = found
        _print(way, [*found.values()], of, heights)
    return figures


def _print(
    way: str,
    times: Sequence[tuple[float, ...]],
    calls: Sequence[ExpertCall],
    heights: Sequence[int],
) -> None:
    number = calls[0].shape.num_experts
    tiles = [
        statistics.fmean(tiles_of(call.chosen, number, height) for call in calls)
        for height in heights
    ]
    texts = [" ".join(f"{time:8.1f}" for time in of) for of in times]
    print(f"{way:16}{texts[0]:>20}{texts[1]:>20}   {tiles[0]:.0f} and {tiles[1]:.0f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default=SHAPES[-1])
    parser.add_argument("--tokens", type=int, default=2048, help="of the prompt, a step's at most")
    given = parser.parse_args()
    config = shape_config(given.shape, enforce_eager=True)
    with (
        uniform_routing(config.scheduler.max_num_batched_tokens),
        offline_engine(config, UniprocExecutor(config)) as engine,
    ):
        with kept_calls(given.tokens) as calls:
            engine.run([engine.request(given.tokens, 1)])
        figures = report(engine, calls, given.tokens)
    print(write_result(f"expert-steps-{given.shape}-{given.tokens}", figures))


if __name__ == "__main__":
    main()
