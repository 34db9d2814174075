"""Finds, without a GPU, what a single prompt makes one compute beyond its own rows: rows of the
CUDA graph that the step is padded to, and of tiles that its GEMMs are cut into.

Waves are those of a GEMM whose tiles are 128 x 256 on 132 multiprocessors, as the library mostly
takes them for such sizes on Hopper; a prompt just above a full wave pays for almost two.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import EngineConfig
from engine.worker.cudagraph_utils import recorded_prompts

TILE_ROWS, TILE_COLS = 128, 256
NUM_SMS = 132


@dataclass(frozen=True, slots=True)
class LengthCost:
    """The rows of one prompt.

    Attributes:
        graph: Rows of the CUDA graph that computes it; 0: kernels are launched one by one.
        rows: Rows that GEMMs are given: those of the graph, or the prompt's own.
        tiled: `rows`, up to whole tiles.
        narrow_share: The part of its waves that a GEMM of `hidden_size` outputs keeps busy.
    """

    length: int
    graph: int
    rows: int
    tiled: int
    narrow_share: float

    @property
    def wasted(self) -> int:
        """Returns the rows of the graph's padding."""
        return self.rows - self.length

    @property
    def wasted_in_tiles(self) -> int:
        """Returns the rows of padding and tiles together."""
        return self.tiled - self.length


def length_costs(config: EngineConfig, lengths: list[int]) -> list[LengthCost]:
    """Returns what each prompt costs under these settings, alone in its step."""
    keys = recorded_prompts(config)
    sizes = sorted({key.num_tokens for key in keys})
    hidden = int(config.model.spec["hidden_size"])
    found = []
    for length in lengths:
        graph = next((size for size in sizes if size >= length), 0)
        rows = graph or length
        tiles = -(-rows // TILE_ROWS)
        narrow = tiles * -(-hidden // TILE_COLS)
        waves = -(-narrow // NUM_SMS)
        share = round(narrow / (waves * NUM_SMS), 3)
        found.append(LengthCost(length, graph, rows, tiles * TILE_ROWS, share))
    return found


def describe(costs: list[LengthCost]) -> str:
    """Returns a table."""
    lines = [f"{'tokens':>7}{'graph':>7}{'padding':>9}{'and tiles':>11}{'waves used':>12}"]
    lines += [
        f"{one.length:7}{one.graph or '-':>7}{one.wasted:9}{one.wasted_in_tiles:11}"
        f"{one.narrow_share:12.0%}"
        for one in costs
    ]
    return "\n".join(lines)
