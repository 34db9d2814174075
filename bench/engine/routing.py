"""Count the experts that decode steps of a mixture of experts touch, against uniform routing.

    python -m bench.engine.routing --shape qwen3-30b-a3b

Random weights need not route evenly, and a step that touches fewer experts reads fewer bytes:
figures against a peer with uniform routing need routing that is as even. This runs the model as
`bench.engine.speed` does, without graphs, and counts.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from bench.engine.models.shapes import SHAPES, shape_config
from engine.executor.uniproc_executor import UniprocExecutor
from engine.layers.router import Router
from engine.speed.offline_engine import offline_engine

_BATCHES = (1, 16, 64, 256)


@contextmanager
def counted(num_tokens: int) -> Iterator[list[int]]:
    """Collects how many experts each layer touches in steps of `num_tokens` tokens."""
    found: list[int] = []
    forward = Router.forward

    def route(self: Router, x: Tensor, slot_mapping: Tensor) -> tuple[Tensor, Tensor]:
        weights, experts = forward(self, x, slot_mapping)
        if len(x) == num_tokens:
            found.append(len(experts.unique()))
        return weights, experts

    Router.forward = route  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Router.forward = forward  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    shapes = [name for name, shape in SHAPES.items() if "num_experts_per_tok" in shape]
    parser.add_argument("--shape", choices=shapes, default=shapes[0])
    shape = SHAPES[name := parser.parse_args().shape]
    names = "num_experts", "n_routed_experts", "num_local_experts"
    experts = int(str(next(shape[name] for name in names if name in shape)))
    top_k = int(str(shape["num_experts_per_tok"]))
    # A router whose choice is made inside of its experts would not be seen.
    config = shape_config(name, enforce_eager=True, disabled_fast_paths=("fused-router",))
    with offline_engine(config, UniprocExecutor(config)) as engine:
        for batch in _BATCHES:
            with counted(batch) as found:
                engine.run([engine.request(1024 if batch < 64 else 128, 8) for _ in range(batch)])
            uniform = experts * (1 - (1 - top_k / experts) ** batch)
            mean = statistics.fmean(found)
            print(f"{name} {batch} tokens: {mean:.1f} experts a layer, uniform {uniform:.1f}")


if __name__ == "__main__":
    main()
