"""Knows the tiles with which the GEMMs of experts run best, from tables that were measured
(`python -m bench.engine.experts --tune` writes them):

    expert_tables/NVIDIA_H200/E128-N768-K2048-bf16.json
                  GPU         experts, units of one on this rank, hidden size, format of the weights
    {"gate_up": [{"up_to": 8, "rows": 16, ...}, ..., {"up_to": null, ...}], "down": [...]}

`up_to` is the mean number of rows that an expert has. A shape that nothing measured takes the table
of the nearest one, and the log says so once. Its steps of fewer pairs than experts take what was
measured for as many pairs: most experts have one row then, and how many programs run depends on the
pairs, not on the number of experts.
"""

from __future__ import annotations

import logging
import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

logger = logging.getLogger(__name__)

TABLES = Path(__file__).parent / "expert_tables"
MAX_SEARCHED_PAIRS = 128
"""Up to this many (token, expert) pairs each program finds its own rows; beyond, they are sorted
first, by one more launch."""
_SEARCHED_OF_FORMAT = {"mxfp4": 48, "nvfp4": 48, "int4": 48}
"""The same of formats whose programs are short: to look takes them longer than that launch. 120
pairs of DeepSeek-V4-Flash take 324 us sorted, and 395 searched (one H200)."""
_PLAIN_FORMAT, _UNGATED_FORMAT, _EXACT_FORMAT = "bf16", "bf16_ungated", "fp32"
_LIKE = {"nvfp4": "mxfp4", _UNGATED_FORMAT: _PLAIN_FORMAT}
"""Formats that take another one's tiles before those of bf16, because the same kernels run them."""
_FILE_NAME = re.compile(r"E(\d+)-N(\d+)-K(\d+)-(\w+)\.json")
_RETUNE = "python -m bench.engine.experts --tune measures and writes one"


class ExpertTuning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Says how one GEMM runs.

    Attributes:
        rows, cols, depth: Of a tile: pairs, outputs, and how much of the inner dimension at once.
        group: This many row tiles in a row share their weights' tiles in the cache.
        splits: Parts of the inner dimension, which different programs take; in formats that can.
        extra_rows: Of a tile besides its `rows`, in formats that can: experts seldom have just as
            many as a power of two.
        spares_extra: Tiles whose expert has no rows left for `extra_rows` do not multiply them.
        unroll: Steps of the inner dimension in one turn of the loop; `num_stages` counts turns. In
            formats that can.
        strips: Outputs of a tile are this many products, 1 or 2, each of a multiple of 64; with 2
            the
            inner dimension is not split. In formats that can.
        each_pair: Every (token, expert) pair has programs of its own, and the second GEMM sums
            those of a token; in formats that can.
        late: Of each pair by itself: weights are multiplied without the exponents of their groups,
            which multiply sums. Of 8 rows, 64 inputs and fewer than 4 warps; in formats that can.
        runs: Programs of an SM among which all tiles are shared out evenly, for steps of at most
            `rows` tokens; 0: a program has a tile. In formats that can.
        registers: Of a thread at most, so that more programs share an SM; 0: as many as the
            compiler wants.
    """

    rows: int
    cols: int
    depth: int
    num_warps: int
    num_stages: int
    group: int = 1
    splits: int = 1
    extra_rows: int = 0
    spares_extra: bool = False
    unroll: int = 1
    strips: int = 1
    each_pair: bool = False
    late: bool = False
    runs: int = 0
    registers: int = 0

    def within(self, shared_bytes: int, matrices: int, itemsize: int) -> ExpertTuning:
        """Returns this with as few stages less as its tiles need to fit in shared memory, which
        differs by GPU: 227 KiB on Hopper, 163 on an A100, 99 on an L40S.

        Args:
            matrices: Weights that a tile multiplies: 2 of gate and up, or in strips, else 1.
            itemsize: Bytes of a number, of rows and of weights.
        """
        stage = (self.rows + matrices * self.cols) * self.depth * itemsize
        stages = max(1, min(self.num_stages, shared_bytes // stage))
        return msgspec.structs.replace(self, num_stages=stages)

    @property
    def options(self) -> dict[str, int]:
        """Returns the options of a launch."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return {**options, "maxnreg": self.registers} if self.registers else options


FIXED = ExpertTuning(rows=64, cols=64, depth=64, num_warps=4, num_stages=3)
"""One choice for all batches, where a row must have the same bits in any company."""
_EXACT = ExpertTuning(rows=16, cols=32, depth=32, num_warps=4, num_stages=2)
"""Float32 is not served for speed."""


class ExpertShape(msgspec.Struct, frozen=True):
    """Identifies a table on its GPU.

    Attributes:
        num_experts, width, hidden: Experts; units of one that this rank has; hidden size.
        weights: The format of the weights. One without tables takes those of a format that is
            computed by the same kernels, or those of bf16.
    """

    num_experts: int
    width: int
    hidden: int
    weights: str = _PLAIN_FORMAT

    @classmethod
    def of_plain(cls, w13: Tensor, w2: Tensor) -> ExpertShape:
        """Returns the shape of weights that are stored as plain numbers, of which fp16 runs as bf16
        does: `w13` [E, 2 I, H], without a gate [E, I, H]; `w2` [E, H, I]. Without a gate a program
        has one matrix in shared memory, not two, and so tiles for which two have no room."""
        num_experts, hidden, width = w2.shape
        plain = _UNGATED_FORMAT if w13.shape[1] == width else _PLAIN_FORMAT
        weights = _EXACT_FORMAT if w13.dtype.itemsize > 2 else plain
        return cls(num_experts, width, hidden, weights)

    @property
    def has_tables(self) -> bool:
        """Returns whether tiles were measured: not of float32, which is not served for speed."""
        return self.weights != _EXACT_FORMAT

    @property
    def file_name(self) -> str:
        sizes = f"E{self.num_experts}-N{self.width}-K{self.hidden}"
        return f"{sizes}-{self.weights}.json"

    def distance(self, other: ExpertShape) -> float:
        """Returns how unlike the sizes are: 1 for each doubling of one of them."""
        return sum(
            abs(math.log2(getattr(self, size) / getattr(other, size)))
            for size in ("num_experts", "width", "hidden")
        )


class Range(msgspec.Struct, frozen=True):
    """Says which tuning serves up to how many rows of an expert on average; None: any number."""

    up_to: float | None
    tuning: ExpertTuning


class ExpertTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Holds the ranges of both GEMMs, in rising order; the last of each has no end."""

    gate_up: tuple[Range, ...]
    down: tuple[Range, ...]

    def __post_init__(self) -> None:
        for ranges in (self.gate_up, self.down):
            ends = [math.inf if part.up_to is None else part.up_to for part in ranges]
            if not ends or ends != sorted(set(ends)) or ends[-1] != math.inf:
                raise ValueError("up_to must rise from range to range, and be null in the last")

    def choose(self, rows_per_expert: float, *, gated: bool) -> ExpertTuning:
        return self.range_of(rows_per_expert, gated=gated).tuning

    def range_of(self, rows_per_expert: float, *, gated: bool) -> Range:
        return next(
            part
            for part in (self.gate_up if gated else self.down)
            if part.up_to is None or rows_per_expert <= part.up_to
        )

    def to_json(self) -> bytes:
        """Writes the file's contents, a range a line; what formats do not all have only where
        it is not as usual."""
        kinds = []
        for kind in ("gate_up", "down"):
            lines = [_line(part) for part in getattr(self, kind)]
            kinds.append(f'  "{kind}": [\n    '.encode() + b",\n    ".join(lines) + b"\n  ]")
        return b"{\n" + b",\n".join(kinds) + b"\n}\n"

    @classmethod
    def from_json(cls, data: bytes) -> ExpertTable:
        """Raises `msgspec.ValidationError`: the contents are not a table."""
        kinds = msgspec.json.decode(data, type=dict[str, list[dict[str, Any]]])
        ranges = {
            kind: [{"up_to": part.pop("up_to", 0), "tuning": part} for part in parts]
            for kind, parts in kinds.items()
        }
        return msgspec.convert(ranges, cls)


_USUAL = {
    "splits": 1,
    "extra_rows": 0,
    "spares_extra": False,
    "unroll": 1,
    "strips": 1,
    "each_pair": False,
    "late": False,
    "runs": 0,
    "registers": 0,
}


def _line(part: Range) -> bytes:
    fields = {"up_to": part.up_to, **msgspec.structs.asdict(part.tuning)}
    for name, usual in _USUAL.items():
        if fields[name] == usual:
            del fields[name]
    return msgspec.json.encode(fields)


def expert_tuning(
    shape: ExpertShape, num_pairs: float, gpu: str, *, gated: bool, tables: Path = TABLES
) -> ExpertTuning:
    """Chooses by the mean number of rows that an expert has, or by pairs where they are few.

    Args:
        num_pairs: (token, expert) pairs of the step, of this rank's experts; where these are some
            of the layer's, as many as it has on average.
        gpu: Its name, as `device.gpu_name` gives it.
        gated: The first GEMM, which computes two outputs for each column.
    """
    return expert_range(shape, num_pairs, gpu, gated=gated, tables=tables).tuning


def expert_range(
    shape: ExpertShape, num_pairs: float, gpu: str, *, gated: bool, tables: Path = TABLES
) -> Range:
    """Returns the range of a table that `expert_tuning` chooses."""
    if not shape.has_tables:
        return Range(None, _EXACT)
    rows = num_pairs / shape.num_experts
    if rows < 1:  # Of a table of fewer experts, pairs that are more had a row each no longer.
        rows = min(1.0, num_pairs / nearest_shape(shape, gpu, tables)[1].num_experts)
    return nearest_table(shape, gpu, tables).range_of(rows, gated=gated)


def searched_pairs(weights: str) -> int:
    """Returns the most pairs that programs search, by the format of the weights."""
    return _SEARCHED_OF_FORMAT.get(weights, MAX_SEARCHED_PAIRS)


def gemm_tunings(
    shape: ExpertShape, num_pairs: float, gpu: str
) -> tuple[ExpertTuning, ExpertTuning]:
    """Chooses for both GEMMs of a step, gate·up first."""
    first, second = (expert_tuning(shape, num_pairs, gpu, gated=gated) for gated in (True, False))
    return first, second


@cache
def nearest_table(shape: ExpertShape, gpu: str, tables: Path) -> ExpertTable:
    """Returns the table of a shape, or of the nearest one: of the same format if any GPU has one,
    because formats differ in the tiles that they allow, and of the same GPU if it has one.
    """
    measured_gpu, measured = nearest_shape(shape, gpu, tables)
    if (measured_gpu, measured) != (gpu, shape):
        logger.warning(
            "experts of shape %s on %s have no table of tiles, and take that of %s/%s; %s",
            shape.file_name.removesuffix(".json"),
            gpu,
            measured_gpu,
            measured.file_name,
            _RETUNE,
        )
    return ExpertTable.from_json((tables / measured_gpu / measured.file_name).read_bytes())


@cache
def nearest_shape(shape: ExpertShape, gpu: str, tables: Path) -> tuple[str, ExpertShape]:
    """Returns GPU and shape of the table that `nearest_table` reads."""
    return min(
        _list_tables(tables),
        key=lambda place: (
            _unlikeness(place[1].weights, shape.weights),
            place[0] != gpu,
            shape.distance(place[1]),
            place[1].file_name,
        ),
    )


def _unlikeness(tabled: str, weights: str) -> int:
    """Returns 0 for a table's format, 1 for one that runs by the same kernels, else 2."""
    return 0 if tabled == weights else 1 if tabled == _LIKE.get(weights) else 2


@cache
def _list_tables(tables: Path) -> list[tuple[str, ExpertShape]]:
    """Lists the GPU and the shape of every table."""
    return [
        (path.parent.name, ExpertShape(int(name[1]), int(name[2]), int(name[3]), name[4]))
        for path in sorted(tables.glob("*/*.json"))
        if (name := _FILE_NAME.fullmatch(path.name))
    ]
