"""Weights of a linear layer in each format: random ones, ways to multiply by them, and tiles."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.engine.timing.device_time import rotations
from bench.engine.timing.expert_formats import INT4_GROUP, random_fp4, random_int4
from bench.engine.timing.tilings import tilings
from tandem_kernels import ops
from tandem_kernels.gemm import fp4_gemm, fp8_activations, fp8_gemm, int4_gemm, int8_gemm
from tandem_kernels.gemm.few_row_gemm import FewRowTuning, few_row_tuning, run_few_rows
from tandem_kernels.gemm.fp4_tiles import NVFP4_TILE_WORDS, TILE_WORDS, tiles_of
from tandem_kernels.gemm.fp4_tuning import Fp4Tuning, fp4_tuning
from tandem_kernels.gemm.fp8_gemm import fp8_small_m
from tandem_kernels.gemm.fp8_tuning import Fp8Tuning
from tandem_kernels.gemm.gemm_thresholds import gemm_thresholds
from tandem_kernels.gemm.int4_packing import padded_inputs
from tandem_kernels.gemm.int4_tuning import Int4Tuning, int4_tuning
from tandem_kernels.gemm.int8_gemm import Int8Tuning, int8_tiles
from tandem_kernels.gemm.int8_weights import MAX_ROWS, int8_weight_gate_up, int8_weight_gemm
from tandem_kernels.gemm.small_m_gemm import (
    SmallMTuning,
    run_small_m,
    small_m_gate_up,
    small_m_gemm,
    small_m_tuning,
)
from tandem_kernels.reference import fp8 as reference

BF16 = torch.bfloat16
_SMALL_M_ROWS, _FUSED_ROWS = 16, 1024
"""Kernels of our own multiply bf16 weights up to and, with the activation, from these rows."""
Way = Callable[[int], object]
"""Multiplies by the weights of this number, of `Weights.count`."""


@dataclass(frozen=True, slots=True)
class Shape:
    """`outputs` of the kernel: half of the weight's when gated. `is_wide`: float32 outputs, and no
    bias."""

    outputs: int
    inputs: int
    gated: bool = False
    is_wide: bool = False

    @property
    def weight_outputs(self) -> int:
        return self.outputs * (1 + self.gated)


SHAPES = {
    "qkv": Shape(6144, 4096),
    "o": Shape(4096, 4096),
    "gate_up": Shape(14336, 4096, gated=True),
    "down": Shape(4096, 14336),
    "head": Shape(128256, 4096, is_wide=True),
    "70b-qkv": Shape(2560, 8192),
    "70b-o": Shape(8192, 2048),
    "70b-gate_up": Shape(7168, 8192, gated=True),
    "70b-down": Shape(8192, 7168),
    "70b-head": Shape(32064, 8192, is_wide=True),
    "oss-qkv": Shape(5120, 2880),
    "oss-o": Shape(2880, 4096),
    "oss-router": Shape(128, 2880, is_wide=True),
    "oss-head": Shape(201088, 2880, is_wide=True),
}
"""Llama-3.1-8B's, those of a rank of four of its 70B, and gpt-oss-120b's."""


class Weights(ABC):
    """Holds the weights of one shape, as often as keeps them out of the cache, and `rows` tokens.

    Attributes:
        nbytes: Of one weight, with its scales.
    """

    nbytes: int

    def __init__(self, shape: Shape, rows: int) -> None:
        self.shape, self.rows = shape, rows
        kind = torch.float32 if shape.is_wide else BF16
        with torch.device("cuda"):
            self.x = torch.randn(rows, shape.inputs, dtype=BF16)
            self.out = torch.empty(rows, shape.outputs, dtype=kind)
            self.count = self._make()

    @abstractmethod
    def _make(self) -> int:
        """Makes weights on the GPU, sets `nbytes`, and returns how many there are."""

    @abstractmethod
    def ways(self) -> Mapping[str, Way]:
        """Returns what can compute this layer; `chosen`: as the engine does."""

    def tunings(self) -> Iterator[Any]:
        """Yields tiles that may suit."""
        yield from ()

    def tiled(self, tuning: Any, index: int) -> object:
        """Computes the layer by these tiles. Raises `OutOfResources`."""
        raise NotImplementedError


class Bf16(Weights):
    def _make(self) -> int:
        outputs, inner = self.shape.weight_outputs, self.shape.inputs
        self.nbytes = 2 * outputs * inner
        count = rotations(self.nbytes)
        self.weights = torch.randn(count, outputs, inner, dtype=BF16)
        self.bias = None if self.shape.is_wide else torch.randn(outputs, dtype=BF16)
        return count

    def ways(self) -> Mapping[str, Way]:
        found: dict[str, Way] = {"library": lambda index: library(self, self.weights[index])}
        if self.rows <= _SMALL_M_ROWS and not self.shape.is_wide:
            small = small_m_gate_up if self.shape.gated else small_m_gemm
            found["chosen"] = lambda index: small(self.x, self.weights[index])
        return found


class SmallM(Bf16):
    """Our own GEMM of whole tiles, whatever the number of rows from which the library is faster."""

    def tiled(self, tuning: SmallMTuning, index: int) -> None:
        run_small_m(self.x, self.weights[index], None, self.out, tuning, gated=self.shape.gated)

    def tunings(self) -> Iterator[SmallMTuning]:
        shape = self.shape
        yield small_m_tuning(self.x.device, shape.gated, self.rows, shape.outputs, shape.inputs)
        sizes = (32, 64), (128, 256), (3, 4, 5), (1,) if shape.gated else (1, 2, 3, 4)
        for cols, depth, stages, splits in itertools.product(*sizes):
            if shape.outputs * splits <= 320 * cols or splits == 1:
                yield SmallMTuning(cols, depth, 4, stages, splits)


class FewRows(Bf16):
    """Our own GEMM of a few rows and any size, which has no activation in it."""

    def ways(self) -> Mapping[str, Way]:
        if self.shape.gated:
            return super().ways()
        usual = few_row_tuning(self.x.device, self.rows, self.shape.outputs, self.shape.inputs)
        return {**super().ways(), "chosen": partial(self.tiled, usual)}

    def tiled(self, tuning: FewRowTuning, index: int) -> None:
        run_few_rows(self.x, self.weights[index], self.bias, self.out, tuning)

    def tunings(self) -> Iterator[FewRowTuning]:
        if self.shape.gated:
            return
        yield few_row_tuning(self.x.device, self.rows, self.shape.outputs, self.shape.inputs)
        known = gemm_thresholds(self.x.device)
        if self.rows > known.register_rows:
            for cols, depth, stages in itertools.product((16, 32), (128, 256, 512), (3, 4, 5)):
                yield FewRowTuning(cols, depth, 4, stages)
            return
        sizes = (1, 2, 4, 8), (512, 1024, 2048, 4096), (2, 4, 8)
        if self.shape.outputs > known.many_outputs:
            sizes = (4, 8, 16), (512, 1024, 2048), (1, 2, 4)
        for cols, depth, warps in itertools.product(*sizes):
            numbers = cols * depth // (32 * warps)
            if numbers >= 8 and numbers * self.rows <= 128:
                yield FewRowTuning(cols, depth, warps)


class Int4(Weights):
    def _make(self) -> int:
        outputs, columns = self.shape.weight_outputs, padded_inputs(self.shape.inputs, INT4_GROUP)
        self.nbytes = outputs * (columns // 2 + columns // INT4_GROUP * 4)
        count = rotations(self.nbytes)
        self.weights = list(zip(*random_int4(count, outputs, columns), strict=True))
        return count

    def ways(self) -> Mapping[str, Way]:
        usual = int4_tuning(
            self.x.device, self.rows, self.shape.outputs, self.shape.inputs, gated=self.shape.gated
        )
        return {"chosen": partial(self.tiled, usual), "written out": self._written_out}

    def tiled(self, tuning: Int4Tuning, index: int) -> None:
        weight = self.weights[index]
        int4_gemm.launch(self.x, *weight, None, self.out, tuning, gated=self.shape.gated)

    def _written_out(self, index: int) -> Tensor:
        return library(self, ops.int4_dequantise(*self.weights[index], self.shape.inputs))

    def tunings(self) -> Iterator[Int4Tuning]:
        gated = self.shape.gated
        yield int4_tuning(
            self.x.device, self.rows, self.shape.outputs, self.shape.inputs, gated=gated
        )
        yield from tilings("gemm-int4", partial(Int4Tuning, swapped=True), self.rows, gated=gated)


class Nvfp4(Weights):
    words: ClassVar[int] = NVFP4_TILE_WORDS

    def _make(self) -> int:
        size = tiles_of(self.shape.weight_outputs, self.shape.inputs, self.words)
        self.nbytes = 4 * math.prod(size)
        self.factors = None
        if self.words == NVFP4_TILE_WORDS:
            self.factors = torch.full((self.shape.weight_outputs,), 0.5)
        shape, count = self.shape, rotations(self.nbytes)
        self.weights = random_fp4((count,), shape.weight_outputs, shape.inputs, self.words)
        return count

    def ways(self) -> Mapping[str, Way]:
        return {"chosen": partial(self.tiled, None), "written out": self._written_out}

    def tiled(self, tuning: Fp4Tuning | None, index: int) -> None:
        given = self.x, self.weights[index], self.factors, None, self.out
        fp4_gemm.launch(*given, tuning, gated=self.shape.gated)

    def _written_out(self, index: int) -> Tensor:
        given = self.weights[index], self.factors, self.shape.inputs, BF16
        return library(self, ops.fp4_dequantise(*given))

    def tunings(self) -> Iterator[Fp4Tuning]:
        gated = self.shape.gated
        yield fp4_tuning(
            self.x.device, self.rows, self.shape.outputs, self.shape.inputs, gated=gated
        )
        yield from tilings("gemm-fp4", Fp4Tuning, self.rows, gated=gated)


class Mxfp4(Nvfp4):
    words = TILE_WORDS


_INT8_TILES = (
    Int8Tuning(64, 128, 128, 4, 5),
    Int8Tuning(64, 256, 128, 4, 4),
    Int8Tuning(128, 128, 128, 4, 5),
    Int8Tuning(128, 128, 128, 8, 5),
    Int8Tuning(128, 256, 128, 8, 3),
    Int8Tuning(128, 256, 128, 8, 4),
    Int8Tuning(256, 128, 128, 8, 3),
)
_FEW_TILES = (
    Fp8Tuning(64, 128, 1, True, 4, 4, lines=8),
    Fp8Tuning(64, 128, 2, True, 4, 4, lines=8),
    Fp8Tuning(128, 128, 1, True, 4, 4, lines=8),
    Fp8Tuning(32, 256, 1, False, 4, 4, lines=8),
    Fp8Tuning(32, 256, 2, False, 4, 4, lines=8),
)
_MOST_FEW = 128
"""Rows: the kernel of few rows has a tile of all of them."""


class EightBits(Weights):
    """Holds weights of 8 bits with a scale for each output; rows are quantised as well."""

    def _make(self) -> int:
        outputs, inner = self.shape.weight_outputs, self.shape.inputs
        self.nbytes = outputs * inner
        self.scales = torch.rand(outputs) / 1000
        count = max(2, rotations(self.nbytes, 8))
        self.weights = [self._random(outputs, inner) for _ in range(count)]
        self.given = self._quantised()
        return count

    @abstractmethod
    def _random(self, outputs: int, inner: int) -> Tensor: ...

    @abstractmethod
    def _quantised(self) -> tuple[Tensor, Tensor]: ...


class Int8(EightBits):
    """Multiplies integers; in its way `w8a16` rows stay in bf16."""

    def _random(self, outputs: int, inner: int) -> Tensor:
        return torch.randint(-128, 128, (outputs, inner), dtype=torch.int8)

    def _quantised(self) -> tuple[Tensor, Tensor]:
        return fp8_activations.quantise_int8(self.x)

    def ways(self) -> Mapping[str, Way]:
        found: dict[str, Way] = {"chosen": self._chosen}
        if self.rows > 16:
            found["_int_mm"] = lambda i: torch._int_mm(self.given[0], self.weights[i].t())
        if self.rows <= MAX_ROWS:
            found["w8a16"] = self._halves
        return found

    def _chosen(self, index: int) -> Tensor:
        given = *self.given, self.weights[index], self.scales
        if self.shape.gated:
            return int8_gemm.int8_gate_up(*given, BF16)
        return int8_gemm.int8_gemm(*given, None, BF16)

    def _halves(self, index: int) -> Tensor:
        given = self.x, self.weights[index], self.scales[None], None
        return (int8_weight_gate_up if self.shape.gated else int8_weight_gemm)(*given)

    def tiled(self, tuning: Int8Tuning | Fp8Tuning, index: int) -> object:
        given = *self.given, self.weights[index], self.scales, None, self.out
        if isinstance(tuning, Int8Tuning):
            return int8_tiles(*given, tuning, gated=self.shape.gated)
        return fp8_small_m(*given, tuning, gated=self.shape.gated)

    def tunings(self) -> Iterator[Int8Tuning | Fp8Tuning]:
        if self.rows > 32:
            yield from _INT8_TILES
        for few in _FEW_TILES if self.rows <= _MOST_FEW else ():
            is_narrow = few.swap or self.rows <= 32
            if is_narrow and not (self.shape.gated and few.splits > 1):
                yield few


class Fp8(EightBits):
    def _random(self, outputs: int, inner: int) -> Tensor:
        return reference.to_e4m3(torch.randn(outputs, inner))

    def _quantised(self) -> tuple[Tensor, Tensor]:
        return fp8_activations.quantise_fp8(self.x)

    def ways(self) -> Mapping[str, Way]:
        return {"chosen": self._chosen}

    def _chosen(self, index: int) -> Tensor:
        given = *self.given, self.weights[index], self.scales
        if self.shape.gated:
            return fp8_gemm.fp8_gate_up(*given, BF16)
        return fp8_gemm.fp8_gemm(*given, None, BF16)


def library(given: Weights, weight: Tensor) -> Tensor:
    """Computes what the engine leaves to the library, of a weight in bf16."""
    if given.shape.is_wide:
        return torch.mm(given.x, weight.t(), out_dtype=torch.float32)
    if not given.shape.gated:
        return F.linear(given.x, weight)
    if given.rows >= _FUSED_ROWS:
        return ops.fused_gate_up(given.x, weight)
    return ops.silu_and_mul(F.linear(given.x, weight))


FORMATS: Mapping[str, type[Weights]] = {
    "bf16": Bf16,
    "few-rows": FewRows,
    "small-m": SmallM,
    "int4": Int4,
    "int8": Int8,
    "nvfp4": Nvfp4,
    "mxfp4": Mxfp4,
    "fp8": Fp8,
}
