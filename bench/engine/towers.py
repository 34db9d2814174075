#!/usr/bin/env python3
"""Times vision towers with random weights in the shapes of published models: how long one image
takes, how many of its tokens that is a second, and what share of a plain product's speed.

    python -m bench.engine.towers                              # all, on a GPU
    python -m bench.engine.towers --towers pixtral --device cpu --sides 224 --repeats 1

Images are encoded one by one, as an engine does, from patches on the host to embeddings.
Results: bench/results/NAME.json.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

from bench.arguments import names_among, numbers, parser_of
from bench.engine.models.shapes import TOWERS as SHAPES
from bench.engine.timing.device_time import matmul_flops_per_us
from bench.record import write_result
from decode_node.images.fit import fitted
from engine.images.image_input import ImagePixels
from engine.images.vision_spec import VisionSpec
from engine.layers.shard import Shard
from engine.models.specs.towers.fields import TextSizes, TowerFile
from engine.models.specs.vision import TOWERS
from engine.models.vision.tower import VisionTower
from engine.models.weights.dummy_weights import fill_dummy
from engine.parallel.place import ParallelPlace


def spec_of(name: str) -> VisionSpec:
    """Returns a published tower."""
    shape = SHAPES[name]
    architecture, whole = shape["architecture"], {"vision_config": shape.get("vision_config", {})}
    file = TowerFile(Path("no-folder"), architecture, whole, TextSizes(**shape["text"]))
    return TOWERS[architecture](file)


def flops(spec: VisionSpec, num_patches: int) -> float:
    """Returns the products and sums of an image's blocks; windows count as the whole image."""
    size, inner = spec.hidden_size, spec.intermediate_size
    layers = 3 if spec.block.is_gated else 2
    linear = 2 * num_patches * (4 * size * size + layers * size * inner)
    return spec.depth * (linear + 4 * num_patches**2 * size)


def measure(name: str, sides: list[int], device: str, repeats: int) -> list[dict[str, object]]:
    """Returns a row for each size of an image. `sides`: in pixels."""
    spec = spec_of(name)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    shard = Shard(ParallelPlace(range(1)), dtype, torch.device(device))
    tower = VisionTower(spec, shard).eval()
    with torch.no_grad():
        fill_dummy(list(tower.checkpoint_weights()), lambda fraction: None)
    peak = matmul_flops_per_us() if device == "cuda" else 0.0
    return [_row(name, spec, tower, side, repeats, peak) for side in sides]


def _row(
    name: str, spec: VisionSpec, tower: VisionTower, side: int, repeats: int, peak: float
) -> dict[str, object]:
    size, pixels = fitted(side, side, spec.pixels), spec.pixels
    rows, columns = size.padded_height // pixels.unit, size.padded_width // pixels.unit
    count = rows * columns * pixels.merge_size**2
    image = ImagePixels(b"", rows, columns, bytes(count * spec.patch_bytes))
    for _ in range(2):
        tower.encode(image)
    _wait(peak)
    began = time.perf_counter()
    for _ in range(repeats):
        tower.encode(image)
    _wait(peak)
    seconds = (time.perf_counter() - began) / repeats
    found: dict[str, object] = {
        "tower": name,
        "side": side,
        "tokens": rows * columns,
        "patches": count,
        "ms": round(1e3 * seconds, 3),
        "tokens_per_s": round(rows * columns / seconds),
    }
    if peak:
        found["share_of_matmul"] = round(flops(spec, count) / (1e6 * seconds * peak), 3)
    return found


def _wait(peak: float) -> None:
    if peak:
        torch.cuda.synchronize()


def main() -> None:
    parser = parser_of(__doc__, "towers")
    parser.add_argument("--towers", type=names_among(SHAPES), default=list(SHAPES))
    parser.add_argument("--sides", type=numbers, default=[448, 1024, 1536], help="pixels")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--repeats", type=int, default=10)
    asked = parser.parse_args()
    rows = []
    for name in asked.towers:
        rows += measure(name, asked.sides, asked.device, asked.repeats)
        print(rows[-1], flush=True)
    write_result(asked.name, rows)


if __name__ == "__main__":
    main()
