"""One layer's experts in each format of weights: random ones, their GEMMs, and tiles to try."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tandem_kernels import ops
from tandem_kernels.experts.expert_rows import ExpertRows
from tandem_kernels.experts.expert_sums import sum_pairs
from tandem_kernels.experts.expert_tuning import ExpertShape, ExpertTuning
from tandem_kernels.experts.fp4.experts import fp4_expert_gemm
from tandem_kernels.experts.fp4.pair_shapes import takes_each_pair
from tandem_kernels.experts.fp4.pairs import fp4_pair_gemm
from tandem_kernels.experts.fp8_experts import fp8_gemm
from tandem_kernels.experts.fused_experts import expert_gemm
from tandem_kernels.experts.int4_experts import int4_expert_gemm
from tandem_kernels.gemm.fp4_tiles import (
    NUMBER_WORDS,
    NVFP4_TILE_WORDS,
    TILE_WORDS,
    tiles_of,
)
from tandem_kernels.gemm.fp8_activations import quantise_fp8
from tandem_kernels.gemm.int4_packing import padded_inputs
from tandem_kernels.reference.fp8 import GROUP

_BF16_FLOPS_PER_US = 690e6
"""A large bf16 GEMM on an H200, as measured inside our steps."""
_EACH_PAIR = (
    (8, 64, 64, 1, 3), (8, 64, 64, 1, 5), (8, 64, 64, 2, 3), (8, 64, 64, 2, 5), (8, 64, 128, 2, 3),
    (8, 128, 64, 2, 3), (8, 128, 64, 2, 5), (16, 64, 128, 4, 3), (8, 64, 64, 2, 7),
    (8, 64, 64, 2, 9), (8, 64, 128, 2, 4),
)  # fmt: skip
"""Rows, cols, depth, warps and stages of MXFP4 pairs by themselves. With 8 rows four warps would
have to share rows and outputs, and shuffle. With 7 stages an SM has room for 7 programs of the
first GEMM, which in 5 splits has 6.8 for each: they cannot gather on some SMs."""
_LATE_PAIRS = (8, 64, 64, 1, 2), (8, 64, 64, 2, 2), (8, 64, 64, 2, 3), (8, 128, 64, 2, 2)
"""The same of pairs whose powers multiply sums, by three tiles in a turn: of 2880 inputs there are
15 times three."""
_UNROLLED_FEW = (8, 64, 64, 2, 2), (8, 128, 64, 2, 2), (16, 128, 64, 4, 2)
_UNROLLED_MANY = (
    (64, 64, 64, 4, 2), (64, 128, 64, 4, 2), (64, 128, 64, 8, 2), (64, 256, 64, 8, 2),
    (128, 64, 64, 4, 2), (128, 128, 64, 8, 2),
)  # fmt: skip
"""Rows, cols, depth, warps and stages of three steps in a turn, which take fewer instructions a
weight."""
POWERS = -0x08080809
"""Four bytes 0xf7, exponents as `gemm.fp4_tiles` keeps them: weights of at most 0.1, like those of
models."""
SCALES = -0x5F5F5F60
"""Four bytes 0xa0, scales as `gemm.fp4_tiles` keeps them: 2 ** -2."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    num_experts: int
    top_k: int
    hidden: int
    width: int


SHAPES = {
    "deepseek-v2-lite": LayerShape(64, 6, 2048, 1408),
    "deepseek-v3": LayerShape(256, 8, 7168, 2048),
    "deepseek-v4-flash": LayerShape(256, 6, 4096, 2048),
    "gemma-4-26b-a4b": LayerShape(128, 8, 2816, 704),
    "glm-4.5-air": LayerShape(128, 8, 4096, 1408),
    "gpt-oss-20b": LayerShape(32, 4, 2880, 2880),
    "gpt-oss-120b": LayerShape(128, 4, 2880, 2880),
    "minimax-m2": LayerShape(256, 8, 3072, 1536),
    "mixtral-8x7b": LayerShape(8, 2, 4096, 14336),
    "qwen3-30b-a3b": LayerShape(128, 8, 2048, 768),
    "qwen3-235b-a22b": LayerShape(128, 8, 4096, 1536),
}
"""Layers on one rank; `--ranks` divides their width."""


class ExpertWeights(ABC):
    """Holds the weights of one layer on the GPU.

    Attributes:
        table: The format's name in tables of tiles.
        bits: Of a weight, with its share of a scale.
        flops_per_us: What a large GEMM reaches.
    """

    table: ClassVar[str]
    bits: ClassVar[float]
    flops_per_us: ClassVar[float] = _BF16_FLOPS_PER_US

    def __init__(self, shape: LayerShape) -> None:
        self.shape = shape

    @classmethod
    def table_shape(cls, shape: LayerShape) -> ExpertShape:
        return ExpertShape(shape.num_experts, shape.width, shape.hidden, cls.table)

    @abstractmethod
    def experts(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Computes all experts of a step, as the engine does."""

    @abstractmethod
    def gemm(
        self, x: Tensor, weights: Tensor, rows: ExpertRows, tuning: ExpertTuning, *, gated: bool
    ) -> None:
        """Computes one of both GEMMs of `x`, which is as `given` made it."""

    def given(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Returns what a GEMM takes for its rows `x` in bf16."""
        return x

    @classmethod
    @abstractmethod
    def tunings(cls, rows_per_expert: float) -> Iterator[ExpertTuning]:
        """Yields the tiles that may be fast where experts have this many rows."""

    def _outputs(self, weights: Tensor, gated: bool) -> Tensor:
        columns = self.shape.width if gated else self.shape.hidden
        return torch.empty(weights.numel(), columns, dtype=torch.bfloat16, device="cuda")


class Bf16Weights(ExpertWeights):
    table, bits = "bf16", 16

    def __init__(self, shape: LayerShape) -> None:
        super().__init__(shape)
        sizes = (2 * shape.width, shape.hidden), (shape.hidden, shape.width)
        self.w13, self.w2 = (
            torch.empty(shape.num_experts, *size, dtype=torch.bfloat16, device="cuda")
            for size in sizes
        )
        for weight in (self.w13, self.w2):
            weight.normal_(0, 0.02)

    def experts(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        return ops.fused_experts(x, self.w13, self.w2, weights, chosen)

    def gemm(
        self, x: Tensor, weights: Tensor, rows: ExpertRows, tuning: ExpertTuning, *, gated: bool
    ) -> None:
        weight = self.w13 if gated else self.w2
        expert_gemm(x, weight, weights, rows, self._outputs(weights, gated), tuning, gated=gated)

    @classmethod
    def tunings(cls, rows_per_expert: float) -> Iterator[ExpertTuning]:
        if rows_per_expert <= 8:
            for cols, depth, stages in itertools.product((32, 64, 128), (64, 128, 256), (3, 4, 5)):
                if cols * depth * stages <= 64 * 128 * 5:
                    yield ExpertTuning(16, cols, depth, 4, stages)
        elif rows_per_expert <= 32:
            for rows, cols, depth, warps in itertools.product(
                (16, 32, 64), (32, 64, 128), (64, 128), (4, 8)
            ):
                yield ExpertTuning(rows, cols, depth, warps, 3 if depth == 128 else 4)
        else:
            for rows, cols, warps, stages, group in itertools.product(
                (64, 128), (64, 128, 256), (4, 8), (3, 4), (1, 8)
            ):
                if rows * cols <= 128 * 256 and (rows * cols <= 128 * 128 or warps == 8):
                    yield ExpertTuning(rows, cols, 64, warps, stages, group)


class Fp8BlockWeights(ExpertWeights):
    table, bits, flops_per_us = "fp8", 8, 2 * _BF16_FLOPS_PER_US
    blocks: ClassVar[bool] = True

    def __init__(self, shape: LayerShape) -> None:
        super().__init__(shape)
        self.w13, self.s13 = self._random(2, shape.width, shape.hidden)
        self.w2, self.s2 = self._random(1, shape.hidden, shape.width)

    def _random(self, parts: int, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
        outer = self.shape.num_experts, parts
        numbers = torch.empty(*outer, outputs, inputs, dtype=torch.float8_e4m3fn, device="cuda")
        for expert in numbers:
            expert.copy_(torch.randn(expert.shape, device="cuda"))
        size = (-(-outputs // GROUP), -(-inputs // GROUP)) if self.blocks else (outputs,)
        return numbers, torch.full((*outer, *size), 0.02, device="cuda")

    def experts(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        down = self.w2.squeeze(1), self.s2.squeeze(1)
        return ops.fp8_experts(x, self.w13, self.s13, *down, weights, chosen)

    def given(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return quantise_fp8(x, GROUP)

    def gemm(
        self,
        x: tuple[Tensor, Tensor],  # type: ignore[override]
        weights: Tensor,
        rows: ExpertRows,
        tuning: ExpertTuning,
        *,
        gated: bool,
    ) -> None:
        """Computes one of both GEMMs; the first with the quantisation of its output."""
        weight = (self.w13, self.s13) if gated else (self.w2, self.s2)
        out = self._outputs(weights, gated)
        if gated and tuning.cols == GROUP:
            numbers = torch.empty_like(out, dtype=torch.float8_e4m3fn)
            scales = torch.empty(-(-self.shape.width // GROUP), len(out), device="cuda")
            fp8_gemm(x, weight, weights, rows, (numbers, scales), tuning)
            return
        fp8_gemm(x, weight, weights, rows, (out, None), tuning)
        if gated:
            quantise_fp8(out, GROUP)

    @classmethod
    def tunings(cls, rows_per_expert: float) -> Iterator[ExpertTuning]:
        if rows_per_expert <= 8:
            for cols, warps, stages in itertools.product((64, 128), (4, 8), (3, 4, 5, 6)):
                if warps == 4 or cols == 128:
                    yield ExpertTuning(16, cols, GROUP, warps, stages)
        elif rows_per_expert <= 32:
            for rows, cols, warps, stages in itertools.product(
                (16, 32, 64), (64, 128), (4, 8), (3, 4, 5)
            ):
                yield ExpertTuning(rows, cols, GROUP, warps, stages)
        else:
            sizes = (64, 64, 4), (64, 128, 4), (64, 128, 8), (128, 64, 8), (128, 128, 8)
            for size, stages, group in itertools.product(sizes, (2, 3, 4), (1, 8)):
                rows, cols, warps = size
                yield ExpertTuning(rows, cols, GROUP, warps, stages, group)


class Fp8ChannelWeights(Fp8BlockWeights):
    blocks = False


class Mxfp4Weights(ExpertWeights):
    table, bits = "mxfp4", 4.25
    words: ClassVar[int] = TILE_WORDS
    scales: ClassVar[int] = POWERS
    f13: Tensor | None = None
    f2: Tensor | None = None

    def __init__(self, shape: LayerShape) -> None:
        super().__init__(shape)
        self.w13 = self._random(2, shape.width, shape.hidden)
        self.w2 = self._random(1, shape.hidden, shape.width)

    def _random(self, parts: int, outputs: int, inputs: int) -> Tensor:
        size = self.shape.num_experts, parts, *tiles_of(outputs, inputs, self.words)
        tiles = torch.randint(-(2**31), 2**31, size, dtype=torch.int32, device="cuda")
        tiles[..., NUMBER_WORDS:] = self.scales
        return tiles

    def experts(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        factors = {"f13": self.f13, "f2": self.f2}
        w2, width = self.w2.squeeze(1), self.shape.width
        return ops.fp4_experts(x, self.w13, w2, width, weights, chosen, **factors)

    def gemm(
        self, x: Tensor, weights: Tensor, rows: ExpertRows, tuning: ExpertTuning, *, gated: bool
    ) -> None:
        """Computes one of both GEMMs; the second with the sum over a token's pairs."""
        weight, factors = (self.w13, self.f13) if gated else (self.w2, self.f2)
        pairs = self._outputs(weights, gated)
        out = pairs if gated else pairs.new_empty(len(weights), pairs.shape[1])
        if takes_each_pair(tuning, weights.numel(), out.shape[1]):
            fp4_pair_gemm(x, weight, weights, rows.experts, out, tuning, factors=factors)
            return
        fp4_expert_gemm(x, weight, weights, rows, pairs, tuning, factors=factors)
        if not gated:
            sum_pairs(pairs, rows.experts)

    @classmethod
    def tunings(cls, rows_per_expert: float) -> Iterator[ExpertTuning]:
        if rows_per_expert < 0.3:
            for size, splits in itertools.product(_EACH_PAIR, (3, 5, 8, 9, 15)):
                yield ExpertTuning(*size, splits=splits, each_pair=True)
            for size, splits in itertools.product(_LATE_PAIRS, (3, 5, 8, 15)):
                yield ExpertTuning(*size, splits=splits, unroll=3, each_pair=True, late=True)
        if rows_per_expert <= 8:
            few = (
                (16, 64, 128, 4, 4), (16, 64, 256, 4, 3), (16, 128, 64, 4, 4), (16, 128, 128, 4, 4),
                (8, 64, 64, 2, 4), (8, 64, 64, 2, 6), (8, 64, 128, 2, 3), (8, 128, 64, 2, 3),
                (8, 128, 64, 2, 5), (16, 64, 64, 2, 5), (16, 128, 64, 2, 3), (16, 128, 64, 2, 4),
                (8, 64, 64, 1, 4), (8, 64, 64, 2, 8), (8, 64, 128, 2, 4), (8, 64, 256, 2, 3),
                (8, 128, 128, 2, 3), (16, 128, 128, 4, 3),
            )  # fmt: skip
            for rows, cols, depth, warps, stages in few:
                if rows_per_expert <= rows / 2:
                    yield ExpertTuning(rows, cols, depth, warps, stages)
                if rows_per_expert < 0.2 and cols == 64:
                    yield ExpertTuning(rows, cols, depth, warps, stages, splits=2)
                    yield ExpertTuning(rows, cols, depth, warps, stages, splits=4)
            for size in _UNROLLED_FEW:
                if 0.2 < rows_per_expert <= size[0] / 2:
                    yield ExpertTuning(*size, unroll=3)
        elif rows_per_expert <= 32:
            for rows, cols, depth, stages in itertools.product(
                (16, 32, 64), (64, 128), (64, 128), (3, 4, 5)
            ):
                yield ExpertTuning(rows, cols, depth, cols // 16, stages)
            for rows, cols in itertools.product((16, 32), (64, 128)):
                yield ExpertTuning(rows, cols, 64, cols // 32, 2, unroll=3)
        else:
            many = (
                (64, 64, 64, 4, 3), (64, 128, 64, 4, 4), (128, 64, 64, 4, 3), (128, 64, 128, 4, 3),
                (128, 128, 64, 8, 3), (64, 128, 64, 8, 3), (64, 128, 64, 8, 4),
                (64, 128, 128, 8, 3), (64, 256, 64, 8, 3), (64, 256, 64, 8, 4),
                (128, 256, 64, 8, 3),
            )  # fmt: skip
            for size, extra, group in itertools.product(many, (0, 16, 32), (1, 8)):
                if extra == 0 or size[0] * size[1] <= 128 * 128:
                    yield ExpertTuning(*size, group=group, extra_rows=extra)
            for size, extra, unroll in itertools.product(_UNROLLED_MANY, (0, 16, 32), (2, 3)):
                spares = extra > 0
                yield ExpertTuning(*size, extra_rows=extra, spares_extra=spares, unroll=unroll)
            for size in ((64, 128, 64, 4, 4), (64, 128, 64, 8, 4), (64, 256, 64, 8, 3)):
                yield ExpertTuning(*size, extra_rows=16, spares_extra=True)
            yield from _narrow()
            yield from _stripped()


class Nvfp4Weights(Mxfp4Weights):
    table, bits = "nvfp4", 4.5
    words, scales = NVFP4_TILE_WORDS, SCALES

    def __init__(self, shape: LayerShape) -> None:
        super().__init__(shape)
        self.f13 = torch.full((shape.num_experts, 2), 0.5, device="cuda")
        self.f2 = torch.full((shape.num_experts,), 0.5, device="cuda")

    @classmethod
    def tunings(cls, rows_per_expert: float) -> Iterator[ExpertTuning]:
        """Yields those of MXFP4 that multiply each weight by its scale. Of prompts only some: the
        others never were the fastest of MXFP4."""
        for tuning in super().tunings(rows_per_expert):
            if not tuning.late and (
                rows_per_expert <= 32 or tuning.extra_rows or tuning.strips > 1
            ):
                yield tuning


def _narrow() -> Iterator[ExpertTuning]:
    """Yields tiles of many rows with so few registers that more programs share an SM: three or four
    of four warps, two of eight."""
    sizes = (64, 128, 64, 4, 3), (64, 128, 64, 4, 4), (64, 64, 64, 4, 4), (128, 64, 64, 4, 3)
    for size, registers in itertools.product(sizes, (128, 168)):
        yield ExpertTuning(*size, extra_rows=16, spares_extra=True, registers=registers)
    for size in ((128, 128, 64, 8, 3), (64, 256, 64, 8, 3), (128, 256, 64, 8, 2)):
        yield ExpertTuning(*size, extra_rows=16, spares_extra=True, registers=128)


def _stripped() -> Iterator[ExpertTuning]:
    """Yields tiles of many rows whose products are by 64 outputs for each four warps."""
    sizes = (64, 128, 64, 4, 3), (64, 128, 64, 4, 4), (64, 256, 64, 8, 3), (128, 256, 64, 8, 3)
    for size, extra in itertools.product(sizes, (0, 16, 32)):
        yield ExpertTuning(*size, extra_rows=extra, spares_extra=extra > 0, strips=2)
        if extra > 0:
            yield ExpertTuning(*size, extra_rows=extra, strips=2)


class Int4Weights(ExpertWeights):
    table, bits = "int4", 4.25
    group_size: ClassVar[int] = 128

    def __init__(self, shape: LayerShape) -> None:
        super().__init__(shape)
        self.w13 = self._random(2 * shape.width, shape.hidden)
        self.w2 = self._random(shape.hidden, shape.width)

    def _random(self, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
        count, inputs = self.shape.num_experts, padded_inputs(inputs, self.group_size)
        size = count, outputs, inputs // 4
        packed = torch.randint(-(2**15), 2**15, size, dtype=torch.int16, device="cuda")
        size = count, inputs // self.group_size, outputs
        groups = torch.full((*size, 2), 8.0, dtype=torch.bfloat16, device="cuda")
        groups[..., 0] = 0.004
        return packed, groups

    def experts(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        return ops.int4_experts(x, *self.w13, *self.w2, weights, chosen)

    def gemm(
        self, x: Tensor, weights: Tensor, rows: ExpertRows, tuning: ExpertTuning, *, gated: bool
    ) -> None:
        weight = self.w13 if gated else self.w2
        out = self._outputs(weights, gated)
        int4_expert_gemm(x, weight, weights, rows, out, tuning, gated=gated)

    @classmethod
    def tunings(cls, rows_per_expert: float) -> Iterator[ExpertTuning]:
        depth = 256
        if rows_per_expert <= 8:
            for cols, stages in itertools.product((32, 64, 128), (2, 3)):
                yield ExpertTuning(16, cols, depth, cols // 32, stages)
        elif rows_per_expert <= 32:
            yield ExpertTuning(16, 64, depth, 2, 3)
            yield ExpertTuning(16, 128, depth, 4, 3)
            for rows, warps in itertools.product((32, 64), (4, 8)):
                yield ExpertTuning(rows, 128, depth, warps, 2)
        else:
            for rows, cols, group in itertools.product((64, 128), (64, 128), (1, 8)):
                yield ExpertTuning(rows, cols, depth, cols // 16, 2, group)


FORMATS: dict[str, type[ExpertWeights]] = {
    "bf16": Bf16Weights,
    "fp8-block": Fp8BlockWeights,
    "fp8-channel": Fp8ChannelWeights,
    "mxfp4": Mxfp4Weights,
    "nvfp4": Nvfp4Weights,
    "int4": Int4Weights,
}
