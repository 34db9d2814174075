"""The interface of linear methods: which tensors a linear layer holds, and how it computes.

    1. `create`                once: the layer gets its parameters, not yet loaded
    2. `checkpoint_weights`    names the checkpoint's tensors that fill them
    3. `apply`, `gate_up`, `add_to`, `project_heads`    each step

A method keeps nothing of a layer, so one may take another's place that holds the same tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor, nn

from engine.layers.rows import RowForm, Rows, UnnormedRows, UnscaledProduct
from engine.layers.shard import CheckpointWeight, Shard
from engine.parallel.distributed import ParallelGroup
from engine.quantization import Scheme
from tandem_kernels import ops


@dataclass(frozen=True, slots=True)
class LinearPart:
    """A part of a layer's outputs or inputs, and where the checkpoint has it.

    Attributes:
        prefix: The checkpoint's name without a suffix, like "model.layers.0.mlp.up_proj".
        shape: Outputs and inputs of the checkpoint's tensor.
        dim: 0: the layer has some of the outputs; 1: some of the inputs.
        start: First index of them in the checkpoint's tensor.
        rows: Outputs of the layer that this part fills.
        order: [rows] int64 or None: output i of the part is output `order[i]` of the checkpoint's
            slice.
    """

    prefix: str
    shape: tuple[int, int]
    dim: int
    start: int
    rows: slice = field(default_factory=lambda: slice(None))
    order: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ColumnPart:
    """Outputs [start, start + count) of a projection that has `total`; `order` as in
    `LinearPart`."""

    start: int
    count: int
    total: int
    order: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LinearShare:
    """A rank's share of a layer, as a choice of methods must know it.

    Attributes:
        name: Of the layer, for errors.
        outputs: In their order; several projections of one input are one layer.
        inputs: First index and count of the inputs.
        total_inputs: Of all ranks together.
    """

    name: str
    outputs: tuple[ColumnPart, ...]
    inputs: tuple[int, int]
    total_inputs: int


@dataclass(frozen=True, slots=True)
class HeadPlaces:
    """Says how far queries and keys turn, and where keys and values go.

    Attributes:
        positions, cos_sin_cache, kv_cache, slot_mapping: See
            `tandem_kernels.reference.elementwise.rope_and_cache`.
        keep_kv: Keys and values are read from the heads, too.
    """

    positions: Tensor
    cos_sin_cache: Tensor
    kv_cache: Tensor
    slot_mapping: Tensor
    keep_kv: bool


class LinearLayer(nn.Module):
    """Holds what methods give it: `weight` [out, in] and `bias` [out].

    Attributes:
        scheme: How its weights are quantised; None: they are plain.
        share: Of this rank.
        weight_scale, weight_zero: Beside `weight`, as `fp8_linear` and `int8_linear` have them.
        packed, groups, input_order: Instead of `weight`, as `int4_linear` has them: 4-bit weights,
            and the order in which they take inputs; None: as they come.
        tiles, factors: Instead of `weight`, as `fp4_linear` has them; None: there are no factors.
    """

    scheme: Scheme | None
    share: LinearShare
    method: LinearMethod
    weight: nn.Parameter
    weight_scale: nn.Parameter
    weight_zero: nn.Parameter | None
    bias: nn.Parameter | None
    packed: nn.Parameter
    groups: nn.Parameter
    input_order: nn.Parameter | None
    tiles: nn.Parameter
    factors: nn.Parameter | None


class LinearMethod(ABC):
    """Computes linear layers in one way.

    Attributes:
        input_form: How inputs are best given; None: plain.
    """

    input_form: ClassVar[RowForm | None] = None

    @abstractmethod
    def create(
        self, layer: LinearLayer, num_outputs: int, num_inputs: int, bias: bool, shard: Shard
    ) -> None:
        """Gives the layer its parameters, uninitialised."""

    @abstractmethod
    def checkpoint_weights(
        self, layer: LinearLayer, part: LinearPart
    ) -> Iterator[CheckpointWeight]:
        """Yields all tensors of the checkpoint that one part of the layer is filled from."""

    @abstractmethod
    def apply(self, layer: LinearLayer, x: Tensor) -> Tensor:
        """Multiplies by the weight: [T, in] -> [T, out]."""

    def gate_up(self, layer: LinearLayer, x: Tensor) -> Tensor:
        """Computes [T, in] -> [T, out / 2]: `silu(gate) * up`, where gate is the first half."""
        return ops.silu_and_mul(self.apply(layer, x))

    def add_to(self, layer: LinearLayer, x: Tensor, residual: Tensor) -> bool:
        """Adds to `residual` [T, out] in place, if that is the faster way; returns whether."""
        return False

    def plain_weight(self, layer: LinearLayer) -> Tensor | None:
        """Returns the weight [out, in] of a layer that is no more than that, for a launch that
        computes more than the layer; None: there is no such weight."""
        return None

    def project_heads(
        self, layer: LinearLayer, x: Rows | UnnormedRows, places: HeadPlaces
    ) -> Tensor | None:
        """Computes heads [T, Hq + 2 Hkv, D] of a layer of queries, keys and values, rotated and
        written to the cache, if one launch for all that is the faster way. Else returns None, and
        has done nothing."""
        return None

    def apply_rows(self, layer: LinearLayer, x: Rows) -> Tensor:
        """Does what `apply` does, [T, in] -> [T, out]; `x` may be as `input_form` has it."""
        assert isinstance(x, Tensor)
        return self.apply(layer, x)

    def unscaled(self, layer: LinearLayer, x: Rows) -> Tensor | UnscaledProduct:
        """Does what `apply_rows` does, [T, in] -> [T, out], but may leave it to the reader to
        scale the result."""
        return self.apply_rows(layer, x)

    def gate_up_rows(
        self, layer: LinearLayer, x: Rows, form: RowForm | None, is_gelu: bool
    ) -> Rows:
        """Does what `gate_up` does, or the same with GELU; may return it as the next layer's
        `input_form` asks for."""
        assert isinstance(x, Tensor)
        if is_gelu:
            return ops.gelu_tanh_and_mul(self.apply(layer, x))
        return self.gate_up(layer, x)

    def accumulate(self, layer: LinearLayer, x: Rows, out: Tensor) -> None:
        """Adds the product to `out` [T, out] in place, in the GEMM where it can."""
        out.add_(self.apply_rows(layer, x))

    def reduce(self, local: Tensor, group: ParallelGroup) -> Tensor:
        """Returns the sum of [T, out] over ranks. `local` may be overwritten."""
        return group.all_reduce(local)


class Unquantised(LinearMethod):
    """Holds the checkpoint's own numbers."""

    def create(
        self, layer: LinearLayer, num_outputs: int, num_inputs: int, bias: bool, shard: Shard
    ) -> None:
        layer.weight = shard.parameter(num_outputs, num_inputs)
        layer.bias = shard.parameter(num_outputs) if bias else None

    def checkpoint_weights(
        self, layer: LinearLayer, part: LinearPart
    ) -> Iterator[CheckpointWeight]:
        weight = layer.weight[part.rows]
        yield CheckpointWeight(
            part.prefix + ".weight", weight, part.shape, part.dim, part.start, part.order
        )
        yield from bias_weights(layer, part)

    def plain_weight(self, layer: LinearLayer) -> Tensor | None:
        return layer.weight if layer.bias is None else None


def bias_weights(layer: LinearLayer, part: LinearPart) -> Iterator[CheckpointWeight]:
    """Yields the bias of a part, if the layer has one."""
    if layer.bias is not None:
        bias = layer.bias[part.rows]
        start = part.start if part.dim == 0 else 0
        yield CheckpointWeight(part.prefix + ".bias", bias, part.shape[:1], 0, start, part.order)


class Wrapped(LinearMethod):
    """Does what another method does, but for some numbers of rows, of which `rows` says the limit,
    or in some steps."""

    def __init__(self, inner: LinearMethod, rows: int) -> None:
        self.inner = inner
        self.rows = rows

    def create(
        self, layer: LinearLayer, num_outputs: int, num_inputs: int, bias: bool, shard: Shard
    ) -> None:
        self.inner.create(layer, num_outputs, num_inputs, bias, shard)

    def checkpoint_weights(
        self, layer: LinearLayer, part: LinearPart
    ) -> Iterator[CheckpointWeight]:
        return self.inner.checkpoint_weights(layer, part)

    def apply(self, layer: LinearLayer, x: Tensor) -> Tensor:
        return self.inner.apply(layer, x)

    def gate_up(self, layer: LinearLayer, x: Tensor) -> Tensor:
        return self.inner.gate_up(layer, x)

    def add_to(self, layer: LinearLayer, x: Tensor, residual: Tensor) -> bool:
        return self.inner.add_to(layer, x, residual)

    def plain_weight(self, layer: LinearLayer) -> Tensor | None:
        return self.inner.plain_weight(layer)

    def project_heads(
        self, layer: LinearLayer, x: Rows | UnnormedRows, places: HeadPlaces
    ) -> Tensor | None:
        return self.inner.project_heads(layer, x, places)

    def accumulate(self, layer: LinearLayer, x: Rows, out: Tensor) -> None:
        self.inner.accumulate(layer, x, out)

    def reduce(self, local: Tensor, group: ParallelGroup) -> Tensor:
        return self.inner.reduce(local, group)
