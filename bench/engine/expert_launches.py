"""The feed-forward block of few rows of gpt-oss-120b: five launches beside three.

    python -m bench.engine.expert_launches
    python -m bench.engine.expert_launches --rows 1 --routers

Five are the norm, which adds what waits in the residual stream, the router, the choice of experts,
gate·up and down. Three are the norm with the router, the choice with gate·up, and down, which adds
to the stream. Times are microseconds a layer in a CUDA graph over many layers' weights, one behind
the other on one stream of rows, as in a step; all of the experts' tiles are those of the table.
`--routers` times other tilings of the norm and router too, each in the whole block. Writes
bench/results/expert-launches.json.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.engine.timing.device_time import graph_us
from bench.engine.timing.expert_formats import SHAPES, Mxfp4Weights
from bench.record import write_result
from tandem_kernels import ops
from tandem_kernels.elementwise.clamped_gate import ClampedGate
from tandem_kernels.experts.normed_router import TUNING, RouterTuning, run_normed_router
from tandem_kernels.experts.router_shapes import MAX_ROUTED_ROWS

SHAPE = SHAPES["gpt-oss-120b"]
_LAYERS = 16
"""Layers have random weights, 1.7 GB each. One row reads 53 MB of each, all of the cache."""
_GATE = ClampedGate(limit=7.0, alpha=1.702)
_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Layer:
    """Holds the weights of one layer's block, with its biases."""

    norm: Tensor
    router: Tensor
    logit_bias: Tensor
    experts: Mxfp4Weights
    b13: Tensor
    b2: Tensor

    @classmethod
    def random(cls) -> Layer:
        count, hidden, width = SHAPE.num_experts, SHAPE.hidden, SHAPE.width
        with torch.device("cuda"):
            return cls(
                torch.rand(hidden, dtype=torch.bfloat16),
                torch.randn(count, hidden, dtype=torch.bfloat16),
                torch.randn(count),
                Mxfp4Weights(SHAPE),
                torch.zeros(count, 2 * width, dtype=torch.bfloat16),
                torch.zeros(count, hidden, dtype=torch.bfloat16),
            )

    def five(self, waiting: Tensor, stream: Tensor, slots: Tensor) -> Tensor:
        """Computes the block apart; returns what then waits to be added to the stream."""
        normed, _ = ops.fused_add_rms_norm(waiting, stream, self.norm, _EPS)
        logits = ops.few_row_gemm(normed, self.router, out_dtype=torch.float32)
        weights, experts = ops.route_tokens(
            logits, slots, None, SHAPE.top_k, logit_bias=self.logit_bias
        )
        w13, w2 = self.experts.w13, self.experts.w2.squeeze(1)
        return ops.fp4_experts(
            normed, w13, w2, SHAPE.width, weights, experts, False, self.b13, self.b2, _GATE
        )

    def three(self, stream: Tensor, slots: Tensor, tuning: RouterTuning) -> None:
        logits = torch.empty(len(stream), SHAPE.num_experts, device="cuda")
        normed = torch.empty_like(stream)
        run_normed_router(
            stream, self.norm, _EPS, self.router, self.logit_bias, logits, normed, tuning
        )
        w13, w2 = self.experts.w13, self.experts.w2.squeeze(1)
        ops.fp4_routed_experts(
            normed, logits, slots, stream, w13, w2, SHAPE.width, SHAPE.top_k,
            b13=self.b13, b2=self.b2, gate=_GATE,
        )  # fmt: skip


def through_all(layers: list[Layer], num_rows: int, tuning: RouterTuning | None) -> float:
    """Returns the microseconds of a layer in three launches; None: in five."""
    with torch.device("cuda"):
        stream = torch.randn(num_rows, SHAPE.hidden, dtype=torch.bfloat16)
        waiting, slots = torch.zeros_like(stream), torch.arange(num_rows)

    def five() -> None:
        waits = waiting.clone()
        for layer in layers:
            waits = layer.five(waits, stream, slots)

    def three() -> None:
        for layer in layers:
            layer.three(stream, slots, tuning or TUNING)

    run: Callable[[], None] = five if tuning is None else three
    return graph_us([run]) / len(layers)


def router_tunings() -> list[RouterTuning]:
    """Returns the tiles of norm and router that may be fast, the engine's first."""
    others = itertools.product((1, 2, 4), (8, 16, 32))
    return list(dict.fromkeys([TUNING, *(RouterTuning(*given) for given in others)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    rows = parser.add_argument("--rows", type=lambda text: tuple(map(int, text.split(","))))
    rows.default = 1, 2, MAX_ROUTED_ROWS
    parser.add_argument("--routers", action="store_true", help="time other tilings of the router")
    parser.add_argument("--layers", type=int, default=_LAYERS)
    given = parser.parse_args()
    layers = [Layer.random() for _ in range(given.layers)]
    figures: list[dict[str, object]] = []
    for num_rows in given.rows:
        five = through_all(layers, num_rows, None)
        print(f"rows={num_rows}: five launches {five:.2f} us a layer")
        for tuning in router_tunings() if given.routers else [TUNING]:
            three = through_all(layers, num_rows, tuning)
            print(f"rows={num_rows}: three launches {three:.2f} us a layer, {tuning}")
            figures.append(
                {"rows": num_rows, "five_us": five, "three_us": three, "router": str(tuning)}
            )
    print(write_result("expert-launches", {"blocks": figures}))


if __name__ == "__main__":
    main()
