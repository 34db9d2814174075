"""How GEMMs of few rows of 8-bit numbers run best, by their shape (`tunings/*/fp8_few.json`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tandem_kernels.tunings.table import TuningTable


@dataclass(frozen=True, slots=True)
class Fp8Tuning:
    """Says how one shape runs best.

    Attributes:
        cols, depth: Outputs of a program, and how much of the inner dimension it takes at once.
        splits: Programs that share the inner dimension.
        swap: Weights are the first operand.
        lines: This many of 128 inputs of each output are brought into the cache while the kernel
            before this one ends.
    """

    cols: int
    depth: int
    splits: int
    swap: bool
    num_warps: int
    num_stages: int
    lines: int = 0


@dataclass(frozen=True, slots=True)
class _Fp8Programs:
    """Says how programs compute their tile, and how many of them there should be: the inner
    dimension is cut, at most into `most_splits`, while there are fewer. Parts are multiples of
    `part` inputs, and no fewer than `least_inputs`.
    """

    tuning: Fp8Tuning
    programs: int
    most_splits: int
    part: int
    least_inputs: int = 0


def _split(
    taken: _Fp8Programs, num_rows: int, num_outputs: int, inner: int, gated: bool, blocks: bool
) -> Fp8Tuning:
    tuning, splits = taken.tuning, 1
    while (
        splits < taken.most_splits
        and num_outputs // tuning.cols * splits < taken.programs
        and inner % (2 * taken.part * splits) == 0
        and inner // (2 * splits) >= taken.least_inputs
    ):
        splits *= 2
    depth = tuning.depth if inner % (tuning.depth * splits) == 0 else 128
    return replace(tuning, splits=splits, depth=depth)


_TABLE = TuningTable(
    "fp8_few", _Fp8Programs, ("num_rows", "num_outputs", "inner", "gated", "blocks"), _split
)


def fp8_tuning(
    device: torch.device, num_rows: int, num_outputs: int, inner: int, *, gated: bool, blocks: bool
) -> Fp8Tuning:
    """Returns what suits a shape; all take inner dimensions of multiples of 128 and outputs of
    multiples of 64."""
    return _TABLE.choose(device, num_rows, num_outputs, inner, gated, blocks)
