"""How GEMMs are launched whose programs, as many as SMs, do more than multiply with each tile
(`tunings/*/fused_gemm.json`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tandem_kernels.tunings.table import plain_table


@dataclass(frozen=True, slots=True)
class FusedTuning:
    """Tiles and launch of one kernel.

    Attributes:
        rows, cols: Outputs of a tile; of a gated one, columns of gates, beside as many of ups. What
            the kernels take are whole tiles of 256 columns of weights.
        depth: Inputs of a step.
        tiles_down: See `persistent_tiles.place_of_tile`.
    """

    rows: int
    cols: int
    depth: int
    num_warps: int
    num_stages: int
    tiles_down: int

    @property
    def sizes(self) -> dict[str, int]:
        """Returns what kernels are compiled for."""
        return {
            "ROWS": self.rows,
            "COLS": self.cols,
            "DEPTH": self.depth,
            "TILES_DOWN": self.tiles_down,
        }

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


_TABLE = plain_table("fused_gemm", FusedTuning, ("gated",))


def fused_tuning(device: torch.device, gated: bool) -> FusedTuning:
    """Returns how gate·up (`gated`), or queries, keys and values are computed on a device."""
    return _TABLE.choose(device, gated)
