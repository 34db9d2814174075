"""Tiles of the FP8 GEMMs of few rows, tried inside whole decode steps of Llama 3.1 8B.

    python -m bench.engine.fp8_steps                 # 1, 16, 32 and 64 requests, context 1088
    python -m bench.engine.fp8_steps --batches 1,16

Kernels overlap, so what is fastest alone need not be so in a step. A step is one CUDA graph; each
tile is tried for one GEMM while the library computes the others, and at last the fastest of each
together, where it is faster than the library.
Writes bench/results/fp8-steps.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from bench.engine.step_variants import step_ms
from bench.engine.variants.model import VariantModel
from bench.record import write_result
from engine.layers.methods import fp8_linear
from tandem_kernels.gemm import fp8_gemm
from tandem_kernels.gemm.fp8_gemm import Fp8Tuning

_CONTEXT = 1088
_LARGEST_ERROR = 0.1
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}

Given = tuple[int, int, int, bool, int, int]
"""Outputs, depth, splits, whether weights come first, stages, lines."""
_TILES: dict[str, list[Given]] = {
    "qkv": [
        (32, 256, 2, False, 4, 0), (32, 256, 2, False, 4, 16), (32, 256, 1, False, 4, 16),
        (16, 256, 1, False, 4, 16), (64, 128, 2, True, 6, 16), (64, 256, 2, True, 3, 16),
    ],
    "o": [
        (32, 256, 4, False, 4, 0), (32, 256, 4, False, 4, 8), (32, 256, 2, False, 4, 16),
        (16, 256, 2, False, 4, 16), (64, 128, 4, True, 6, 8), (64, 128, 2, True, 6, 16),
    ],
    "gate_up": [
        (32, 256, 1, False, 3, 0), (32, 256, 1, False, 3, 8), (16, 256, 1, False, 4, 8),
        (32, 128, 1, False, 6, 8), (64, 128, 1, True, 4, 8), (64, 128, 1, True, 3, 4),
    ],
    "down": [
        (32, 256, 4, False, 4, 0), (32, 256, 4, False, 4, 8), (32, 256, 2, False, 4, 8),
        (16, 256, 2, False, 4, 8), (64, 128, 4, True, 6, 8), (64, 128, 7, True, 6, 8),
        (128, 128, 7, True, 4, 8),
    ],
}  # fmt: skip


def tuning(given: Given) -> Fp8Tuning:
    cols, depth, splits, swap, stages, lines = given
    return Fp8Tuning(cols, depth, splits, swap, 4, stages, lines)


@contextmanager
def applied(tiles: dict[str, Fp8Tuning] | None) -> Iterator[None]:
    """Computes the GEMMs that are named by our kernel, with these tiles, and all others by the
    library; None: as the engine does."""
    if tiles is None:
        yield
        return
    by_shape = {SHAPES[name]: tile for name, tile in tiles.items()}

    def chosen(rows: int, outputs: int, inner: int, *, gated: bool, blocks: bool) -> Fp8Tuning:
        return by_shape[2 * outputs if gated else outputs, inner]

    def path(rows: int, weight: Tensor, w_scales: Tensor) -> str:
        return "small" if tuple(weight.shape) in by_shape else "unscaled"

    with ExitStack() as patches:
        patches.enter_context(patch.object(fp8_gemm, "fp8_tuning", chosen))
        for module in (fp8_gemm, fp8_linear):
            patches.enter_context(patch.object(module, "fp8_path", path))
        yield


class Trial:
    """Times ways of one step; the library's is what the others must equal."""

    def __init__(self, model: VariantModel, batch: int) -> None:
        self.model, self.batch = model, batch
        self.step = model.decode_step(model.decode_metadata(batch, _CONTEXT))
        self.rows: list[dict[str, object]] = []
        self.expected: Tensor | None = None

    def measure(self, name: str, tiles: dict[str, Fp8Tuning] | None) -> float:
        row: dict[str, object] = {"batch": self.batch, "way": name}
        self.rows.append(row)
        try:
            with applied(tiles):
                ms, logits, same = step_ms(self.model, self.step)
        except Exception as error:  # what one tile cannot do must not end the others
            row["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
            print(row, flush=True)
            return float("inf")
        if self.expected is None:
            self.expected = logits
        error = float((logits - self.expected).norm() / self.expected.norm())
        row |= {"ms": round(ms, 4), "logits": float(f"{error:.1e}"), "same bits": same}
        print(row, flush=True)
        return ms if same and error < _LARGEST_ERROR else float("inf")


def try_batch(model: VariantModel, batch: int) -> list[dict[str, object]]:
    trial = Trial(model, batch)
    library = trial.measure("library", {})
    trial.measure("present", None)
    best: dict[str, Fp8Tuning] = {}
    for shape, tiles in _TILES.items():
        times = {
            tuning(given): trial.measure(f"{shape} {given}", {shape: tuning(given)})
            for given in tiles
            if batch <= 32 or given[3]
        }
        fastest = min(times, key=lambda tile: times[tile])
        if times[fastest] < library:
            best[shape] = fastest
    trial.measure(f"best of each: {best}", best)
    trial.measure("library again", {})
    return trial.rows


def try_steps(batches: list[int], is_tiny: bool = False) -> list[dict[str, object]]:
    model = VariantModel("llama-3.1-8b", tiny=is_tiny, quantization="fp8")
    with torch.inference_mode():
        return [row for batch in batches for row in try_batch(model, batch)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", default="1,16,32,64")
    parser.add_argument("--dry-run", action="store_true", help="a tiny model on the CPU")
    arguments = parser.parse_args()
    rows = try_steps([int(batch) for batch in arguments.batches.split(",")], arguments.dry_run)
    if not arguments.dry_run:
        print(write_result("fp8-steps", rows))


if __name__ == "__main__":
    main()
