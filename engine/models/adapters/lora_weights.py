"""Slots for adapters in the layers of one rank, and how adapters are packed into them.

    1. `LoRAWeights(model, ...)`   once, before the model is loaded: attention and dense
                                   feed-forward layers get slots, all of which are one tensor
    2. `pack`                      an adapter's files become this rank's share, as a slot has it
    3. `fill`                      a share goes into a slot, in one copy

    slots  [max_loras, size]       size = all of ( A | B ) of layer 0, of layer 1, ...

Matrices are padded with zeros to `max_lora_rank`, and B is multiplied by the adapter's scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.layers.attention.block import AttentionBlock
from engine.layers.feed_forward.mlp import GatedMLP
from engine.layers.linear import GateUpParallelLinear, QKVParallelLinear, RowParallelLinear
from engine.layers.methods.base import ColumnPart, LinearLayer
from engine.layers.methods.lora import AdapterForm, AdapterTokens, WithAdapters
from engine.lora import LoRAConfig
from engine.models.adapters.adapter_files import AdapterError, AdapterFiles, ModuleMatrices
from engine.models.base import CausalLM
from engine.models.errors import CheckpointError
from engine.models.files.stored_tensors import StoredTensor
from tandem_kernels.lora.lora_gemm_shapes import num_counters

_TWO_LAUNCHES = AdapterForm()
_ALIGNED = 64
"""Matrices begin at multiples of this many numbers."""
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class _Place:
    """Says where a layer's matrices lie in a slot: A [P * r, K] from `a`, B [N, r] from `b`."""

    layer: LinearLayer
    a: int
    b: int

    @property
    def num_inputs(self) -> int:
        return self.layer.share.inputs[1]

    @property
    def num_outputs(self) -> int:
        return sum(part.count for part in self.layer.share.outputs)


@dataclass(frozen=True, slots=True)
class _Target:
    """A module of the checkpoint: the projections of a layer that it holds, [first, last)."""

    place: _Place
    first: int
    last: int


class LoRAWeights:
    """Gives the layers of `model` slots, and fills them.

    Attributes:
        tokens: Says which slots the tokens of a pass have.

    Raises:
        CheckpointError: The model has no layers that take adapters.
    """

    def __init__(
        self,
        model: CausalLM,
        config: LoRAConfig,
        path: str,
        dtype: torch.dtype,
        device: torch.device,
        *,
        fixed_order: bool,
        form: AdapterForm = _TWO_LAUNCHES,
    ) -> None:
        self._rank = config.max_lora_rank
        self.tokens = AdapterTokens()
        self._targets: dict[str, _Target] = {}
        places: list[_Place] = []
        self._size = 0
        for layer in _adaptable(model):
            parts = len(layer.share.outputs)
            place = _Place(layer, self._size, 0)
            self._size += _aligned(parts * self._rank * place.num_inputs)
            place = _Place(layer, place.a, self._size)
            self._size += _aligned(place.num_outputs * self._rank)
            places.append(place)
            for name, first, last in _modules_of(layer):
                self._targets[name] = _Target(place, first, last)
        if not places:
            raise CheckpointError(path, "has no layers that take adapters", "leave --enable-lora")
        self._slots = torch.zeros(config.max_loras, self._size, dtype=dtype, device=device)
        for place in places:
            counters = torch.zeros(
                num_counters(place.num_outputs), dtype=torch.int32, device=device
            )
            a, b = self._matrices(self._slots, place)
            ends = tuple(_ends(place.layer.share.outputs))
            inner = place.layer.method
            place.layer.method = WithAdapters(
                inner, self.tokens, a, b, ends, counters, fixed_order=fixed_order, form=form
            )

    def pack(self, adapter: AdapterFiles) -> Tensor:
        """Returns this rank's share of an adapter, [size] on the host; in pinned memory for a GPU.

        Raises:
            AdapterError: It has a module that takes no adapter here, or of another shape.
        """
        is_pinned = self._slots.is_cuda
        packed = torch.zeros(self._size, dtype=self._slots.dtype, pin_memory=is_pinned)
        for name, module in adapter.modules.items():
            target = self._targets.get(name)
            if target is None:
                raise AdapterError(
                    adapter.folder,
                    f"adapts {name}, which is no linear layer of attention or of a dense "
                    "feed-forward block of this model",
                    "train it for the layers that are, or merge it into the model",
                )
            self._pack_module(packed, adapter, name, module, target)
        return packed

    def fill(self, slot: int, packed: Tensor) -> None:
        """Fills a slot from `packed` [size] on the host, after what is queued on the device. The
        host does not wait for it."""
        self._slots[slot].copy_(packed, non_blocking=True)

    @property
    def num_bytes(self) -> int:
        """Returns the size of a slot."""
        return self._size * self._slots.element_size()

    def _pack_module(
        self,
        packed: Tensor,
        adapter: AdapterFiles,
        name: str,
        module: ModuleMatrices,
        target: _Target,
    ) -> None:
        share, rank = target.place.layer.share, module.rank
        parts = share.outputs[target.first : target.last]
        shape = (sum(part.total for part in parts), share.total_inputs)
        given = (module.b.shape[0], module.a.shape[1])
        if given != shape:
            raise AdapterError(
                adapter.folder,
                f"is for {given[0]} outputs and {given[1]} inputs of {name}, which has "
                f"{shape[0]} and {shape[1]}",
                "use an adapter that was trained for this model",
            )
        start, count = share.inputs
        a = _numbers(adapter, module.a)[:, start : start + count]
        b = _numbers(adapter, module.b) * module.scale
        whole_a, whole_b = self._matrices(packed[None], target.place)
        row = sum(part.count for part in share.outputs[: target.first])
        before = 0
        for index, part in enumerate(parts, start=target.first):
            own = b[before + part.start : before + part.start + part.count]
            if part.order is not None:
                own = b[before + part.start :][part.order]
            first = index * self._rank
            whole_a[0, first : first + rank] = a
            whole_b[0, row : row + part.count, :rank] = own
            row, before = row + part.count, before + part.total

    def _matrices(self, slots: Tensor, place: _Place) -> tuple[Tensor, Tensor]:
        """Returns a layer's A [slots, P * r, K] and B [slots, N, r], which are views."""
        rows = len(place.layer.share.outputs) * self._rank
        shape_a, shape_b = (rows, place.num_inputs), (place.num_outputs, self._rank)
        a = slots[:, place.a : place.a + math.prod(shape_a)]
        b = slots[:, place.b : place.b + math.prod(shape_b)]
        return a.view(-1, *shape_a), b.view(-1, *shape_b)


def _adaptable(model: CausalLM) -> Iterator[LinearLayer]:
    """Yields the layers of attention and of dense feed-forward blocks. Those of experts, of latent
    and of linear attention have inputs or forms of their own."""
    for name, block in model.named_modules():
        if isinstance(block, AttentionBlock):
            yield from (block.qkv_proj, block.o_proj)
        elif isinstance(block, GatedMLP) and not name.endswith(".shared.mlp"):
            yield from (block.gate_up_proj, block.down_proj)


def _modules_of(layer: LinearLayer) -> Iterator[tuple[str, int, int]]:
    """Yields the checkpoint's modules of a layer: (name, first projection, last)."""
    prefix = layer.share.name
    names: tuple[str, ...] = ()
    fused = ""
    if isinstance(layer, RowParallelLinear):
        yield prefix, 0, 1
    elif isinstance(layer, QKVParallelLinear):
        names, fused = layer.names, "qkv_proj"
    elif isinstance(layer, GateUpParallelLinear):
        names, fused = ("gate_proj", "up_proj"), "gate_up_proj"
    yield from ((f"{prefix}.{name}", i, i + 1) for i, name in enumerate(names))
    if fused:
        yield f"{prefix}.{fused}", 0, len(names)


def _ends(parts: tuple[ColumnPart, ...]) -> Iterator[int]:
    end = 0
    for part in parts:
        end += part.count
        yield end


def _numbers(adapter: AdapterFiles, tensor: StoredTensor) -> Tensor:
    """Returns a tensor of the file in float32."""
    raw = bytearray(adapter.weights[tensor.start : tensor.stop])
    return torch.frombuffer(raw, dtype=_DTYPES[tensor.dtype]).view(tensor.shape).float()


def _aligned(count: int) -> int:
    return -(-count // _ALIGNED) * _ALIGNED
