"""One layer's experts in each format of weights: random ones, their GEMMs, and tiles to try."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from msgspec import structs
from torch import Tensor

from bench.engine.timing.expert_shapes import LayerShape
from bench.engine.timing.tilings import tilings
from tandem_kernels import ops
from tandem_kernels.experts.expert_rows import ExpertRows
from tandem_kernels.experts.expert_sums import sum_pairs
from tandem_kernels.experts.expert_tuning import ExpertShape, ExpertTuning
from tandem_kernels.experts.fp4.experts import multiply
from tandem_kernels.experts.fp4.pair_shapes import takes_each_pair
from tandem_kernels.experts.fp4.pairs import fp4_pair_gemm
from tandem_kernels.experts.fp8.experts import fp8_gemm
from tandem_kernels.experts.fp8.pairs import fp8_pair_gemm
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
INT4_GROUP = 128
POWERS = -0x08080809
"""Four bytes 0xf7, exponents as `gemm.fp4_tiles` keeps them: weights of at most 0.1, like those of
models."""
SCALES = -0x5F5F5F60
"""Four bytes 0xa0, scales as `gemm.fp4_tiles` keeps them: 2 ** -2."""


def random_fp4(outer: tuple[int, ...], outputs: int, inputs: int, words: int) -> Tensor:
    """Returns tiles of 4-bit floats on the GPU [*outer, ..., words]."""
    size = *outer, *tiles_of(outputs, inputs, words)
    tiles = torch.randint(-(2**31), 2**31, size, dtype=torch.int32, device="cuda")
    tiles[..., NUMBER_WORDS:] = POWERS if words == TILE_WORDS else SCALES
    return tiles


def random_int4(count: int, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    """Returns packed weights on the GPU [count, outputs, inputs / 4], and factors and zeros of
    their groups [count, inputs / INT4_GROUP, outputs, 2]."""
    inputs = padded_inputs(inputs, INT4_GROUP)
    size = count, outputs, inputs // 4
    packed = torch.randint(-(2**15), 2**15, size, dtype=torch.int16, device="cuda")
    size = count, inputs // INT4_GROUP, outputs
    groups = torch.full((*size, 2), 8.0, dtype=torch.bfloat16, device="cuda")
    groups[..., 0] = 0.004
    return packed, groups


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

    def given(self, x: Tensor) -> Any:
        """Returns what a GEMM takes for its rows `x` in bf16."""
        return x

    @classmethod
    def tunings(cls, rows_per_expert: float, *, gated: bool) -> Iterator[ExpertTuning]:
        """Yields the tiles of a GEMM that may be fast where experts have this many rows."""
        yield from tilings(f"expert-{cls.table}", ExpertTuning, rows_per_expert)

    def _outputs(self, weights: Tensor, gated: bool) -> Tensor:
        columns = self.shape.width if gated else self.shape.hidden
        return torch.empty(weights.numel(), columns, dtype=torch.bfloat16, device="cuda")


class Bf16Weights(ExpertWeights):
    table, bits = "bf16", 16

    @classmethod
    def table_shape(cls, shape: LayerShape) -> ExpertShape:
        ungated = "bf16_ungated" if shape.matrices == 2 else cls.table
        return structs.replace(super().table_shape(shape), weights=ungated)

    def __init__(self, shape: LayerShape) -> None:
        super().__init__(shape)
        first = (shape.matrices - 1) * shape.width
        sizes = (first, shape.hidden), (shape.hidden, shape.width)
        self.w13, self.w2 = (
            torch.empty(shape.num_experts, *size, dtype=torch.bfloat16, device="cuda")
            for size in sizes
        )
        for weight in (self.w13, self.w2):
            weight.normal_(0, 0.02)

    def experts(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        return ops.fused_experts(x, self.w13, self.w2, weights, chosen, gate=self.shape.gate)

    def gemm(
        self, x: Tensor, weights: Tensor, rows: ExpertRows, tuning: ExpertTuning, *, gated: bool
    ) -> None:
        weight, gate = (self.w13, self.shape.gate) if gated else (self.w2, None)
        out = self._outputs(weights, gated)
        expert_gemm(x, weight, weights, rows, out, tuning, gated=gated, gate=gate)


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

    def given(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Returns rows as they are, too: pairs by themselves quantise those of the second GEMM."""
        return x, quantise_fp8(x, GROUP)

    @classmethod
    def tunings(cls, rows_per_expert: float, *, gated: bool) -> Iterator[ExpertTuning]:
        """Yields those that a GEMM can take: gate and up are two strips by themselves."""
        for tuning in super().tunings(rows_per_expert, gated=gated):
            if tuning.strips == 1 or not gated:
                yield tuning

    def gemm(
        self,
        x: tuple[Tensor, tuple[Tensor, Tensor]],  # type: ignore[override]
        weights: Tensor,
        rows: ExpertRows,
        tuning: ExpertTuning,
        *,
        gated: bool,
    ) -> None:
        """Computes one of both GEMMs; the first with the quantisation of its output."""
        weight = (self.w13, self.s13) if gated else (self.w2, self.s2)
        out = self._outputs(weights, gated)
        plain, given = x
        if tuning.each_pair:
            of = weights, rows.experts
            fp8_pair_gemm(given if gated else plain, weight, *of, out, tuning)
            return
        if gated and tuning.cols == GROUP:
            numbers = torch.empty_like(out, dtype=torch.float8_e4m3fn)
            scales = torch.empty(-(-self.shape.width // GROUP), len(out), device="cuda")
            fp8_gemm(given, weight, weights, rows, (numbers, scales), tuning)
            return
        fp8_gemm(given, weight, weights, rows, (out, None), tuning)
        if gated:
            quantise_fp8(out, GROUP)


class Fp8ChannelWeights(Fp8BlockWeights):
    blocks = False


class Mxfp4Weights(ExpertWeights):
    table, bits = "mxfp4", 4.25
    words: ClassVar[int] = TILE_WORDS
    f13: Tensor | None = None
    f2: Tensor | None = None

    def __init__(self, shape: LayerShape) -> None:
        super().__init__(shape)
        self.w13 = self._random(2, shape.width, shape.hidden)
        self.w2 = self._random(1, shape.hidden, shape.width)

    def _random(self, parts: int, outputs: int, inputs: int) -> Tensor:
        return random_fp4((self.shape.num_experts, parts), outputs, inputs, self.words)

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
        multiply(x, weight, weights, rows, pairs, tuning, factors=factors)
        if not gated:
            sum_pairs(pairs, rows.experts)


class Nvfp4Weights(Mxfp4Weights):
    table, bits = "nvfp4", 4.5
    words = NVFP4_TILE_WORDS

    def __init__(self, shape: LayerShape) -> None:
        super().__init__(shape)
        self.f13 = torch.full((shape.num_experts, 2), 0.5, device="cuda")
        self.f2 = torch.full((shape.num_experts,), 0.5, device="cuda")

    @classmethod
    def tunings(cls, rows_per_expert: float, *, gated: bool) -> Iterator[ExpertTuning]:
        """Yields those of MXFP4 that multiply each weight by its scale. Of prompts only some: the
        others never were the fastest of MXFP4."""
        for tuning in tilings("expert-mxfp4", ExpertTuning, rows_per_expert):
            if not tuning.late and (
                rows_per_expert <= 32 or tuning.extra_rows or tuning.strips > 1
            ):
                yield tuning


class Int4Weights(ExpertWeights):
    table, bits = "int4", 4.25

    def __init__(self, shape: LayerShape) -> None:
        super().__init__(shape)
        self.w13 = random_int4(shape.num_experts, 2 * shape.width, shape.hidden)
        self.w2 = random_int4(shape.num_experts, shape.hidden, shape.width)

    def experts(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        return ops.int4_experts(x, *self.w13, *self.w2, weights, chosen)

    def gemm(
        self, x: Tensor, weights: Tensor, rows: ExpertRows, tuning: ExpertTuning, *, gated: bool
    ) -> None:
        weight = self.w13 if gated else self.w2
        out = self._outputs(weights, gated)
        int4_expert_gemm(x, weight, weights, rows, out, tuning, gated=gated)


FORMATS: dict[str, type[ExpertWeights]] = {
    "bf16": Bf16Weights,
    "fp8-block": Fp8BlockWeights,
    "fp8-channel": Fp8ChannelWeights,
    "mxfp4": Mxfp4Weights,
    "nvfp4": Nvfp4Weights,
    "int4": Int4Weights,
}
