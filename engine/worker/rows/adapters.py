"""The adapters of one rank: which it has in host memory, in slots, and which rows use them.

    1. `load`         an adapter's share is read into host memory, by its digest; `drop` forgets it
    2. `add_request`  a row gets its request's slot; one that holds another adapter is filled first,
                      behind the steps that are on their way
    3. `begin`        of each step: whether any of its rows has an adapter
    4. `apply_to`     once the step's batch is there: tokens get the slots of their rows
    5. `remove_request`

The scheduler decides which adapter is in which slot, alike for all ranks. A step without adapters
computes what it would if there were none, and so do graphs, which are recorded for either kind of
step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from engine.batch.buffer_utils import CarriedTensor, HostBackedTensor
from engine.batch.input_batch import InputBatch, Int32Array
from engine.batch.row_states import RowError
from engine.config import EngineConfig
from engine.contracts.scheduler_output import NewRequestData
from engine.contracts.steps.step_launches import GraphKey
from engine.layers.methods.lora import AdapterForm
from engine.models.adapters.adapter_files import AdapterError, read_adapter
from engine.models.adapters.lora_weights import LoRAWeights
from engine.models.base import CausalLM
from tandem_kernels import ops

NO_SLOT = -1


class Adapters(Protocol):
    """Answers what a runner asks of adapters."""

    has_any: bool
    """Whether rows of the step that is next have adapters. Set by `begin`, or to record a graph."""

    @property
    def kinds(self) -> Sequence[bool]:
        """Returns the values that `has_any` may have."""

    def each_kind(self) -> Iterator[bool]:
        """Yields them, and makes steps be of that kind whatever their rows have: to warm up."""

    @property
    def carried(self) -> list[CarriedTensor]: ...
    def add_request(self, new: NewRequestData) -> None: ...
    def remove_request(self, row: int) -> None: ...
    def begin(self, rows: Int32Array) -> None: ...
    def of_step(self, key: GraphKey | None) -> GraphKey | None: ...
    def apply_to(self, batch: InputBatch) -> None: ...
    def load(self, digest: str, path: str) -> None: ...
    def drop(self, digest: str) -> None: ...


class NoAdapters:
    """Serves the model as it is."""

    has_any = False
    kinds: Sequence[bool] = (False,)

    @property
    def carried(self) -> list[CarriedTensor]:
        return []

    def each_kind(self) -> Iterator[bool]:
        yield False

    def add_request(self, new: NewRequestData) -> None:
        """Raises `RowError` for a request with an adapter, which the scheduler must not send."""
        if new.lora is not None:
            raise RowError(f"row {new.row} has an adapter, and there is no room for any")

    def remove_request(self, row: int) -> None:
        pass

    def begin(self, rows: Int32Array) -> None:
        pass

    def of_step(self, key: GraphKey | None) -> GraphKey | None:
        return key

    def apply_to(self, batch: InputBatch) -> None:
        pass

    def load(self, digest: str, path: str) -> None:
        raise AdapterError(path, "cannot be loaded: there is no room", "start with --enable-lora")

    def drop(self, digest: str) -> None:
        pass


class WorkerAdapters:
    """Fills the slots of `weights`. All arrays are indexed by row."""

    kinds: Sequence[bool] = (False, True)

    def __init__(self, config: EngineConfig, weights: LoRAWeights, device: torch.device) -> None:
        assert config.lora is not None
        self._max_rank = config.lora.max_lora_rank
        self._weights = weights
        self.has_any = False
        self._forced: bool | None = None
        self._shares: dict[str, torch.Tensor] = {}
        """Adapters in host memory, by digest."""
        self._slots: list[str] = [""] * config.lora.max_loras
        """The digest of what each slot holds."""
        rows = config.scheduler.max_num_seqs
        self._row_slots = HostBackedTensor(rows, np.int32, device)
        self._row_slots.write(slice(None), NO_SLOT)
        self._token_slots = torch.full(
            (config.scheduler.max_num_batched_tokens,), NO_SLOT, dtype=torch.int32, device=device
        )

    def load(self, digest: str, path: str) -> None:
        """Reads an adapter into host memory, unless it is there. May run beside steps, in another
        thread.

        Raises:
            AdapterError: It cannot be read or served, or is not what its digest says.
        """
        if digest in self._shares:
            return
        adapter = read_adapter(Path(path), self._max_rank)
        if adapter.digest != digest:
            raise AdapterError(
                path, "has changed since it was registered", "unload it, and load it again"
            )
        self._shares[digest] = self._weights.pack(adapter)

    def drop(self, digest: str) -> None:
        """Forgets an adapter that no row has, and none will get without its being loaded anew."""
        self._shares.pop(digest, None)

    @property
    def carried(self) -> list[CarriedTensor]:
        """Returns the arrays that are carried over before a step."""
        return [self._row_slots]

    def add_request(self, new: NewRequestData) -> None:
        """Raises `RowError` when the adapter is not there."""
        if new.lora is None:
            return
        index, digest = new.lora.index, new.lora.digest
        if self._slots[index] != digest:
            share = self._shares.get(digest)
            if share is None:
                raise RowError(f"row {new.row} has adapter {digest}, which is not in memory")
            self._weights.fill(index, share)
            self._slots[index] = digest
        self._row_slots.write(new.row, index)

    def remove_request(self, row: int) -> None:
        if self._row_slots.np[row] != NO_SLOT:
            self._row_slots.write(row, NO_SLOT)

    def begin(self, rows: Int32Array) -> None:
        """Looks whether any of the step's rows has an adapter."""
        self.has_any = bool((self._row_slots.np[rows] != NO_SLOT).any())
        if self._forced is not None:
            self.has_any = self._forced

    def each_kind(self) -> Iterator[bool]:
        """Yields the kinds of steps, of which those that run meanwhile are."""
        for kind in self.kinds:
            self._forced = kind
            yield kind
        self._forced = None

    def of_step(self, key: GraphKey | None) -> GraphKey | None:
        """Returns the key of the graph for this step among those of one size."""
        return key._replace(adapters=True) if key is not None and self.has_any else key

    def apply_to(self, batch: InputBatch) -> None:
        """Gives the tokens of the pass that is next the slots of their rows, if it has any."""
        if not self.has_any:
            self._weights.tokens.slots = None
            return
        slots = self._token_slots[: batch.num_tokens]
        ops.lora_slots_of_tokens(
            self._row_slots.tensor, batch.idx_mapping, batch.query_start_loc, slots
        )
        self._weights.tokens.slots = slots


def create_adapters(config: EngineConfig, model: CausalLM, device: torch.device) -> Adapters:
    """Gives the layers of a model that is not loaded yet room for adapters, and loads those that
    the engine has from its start, as many as host memory is to hold.

    Raises:
        CheckpointError: The model takes no adapters, or one cannot be served.
    """
    lora = config.lora
    if lora is None:
        return NoAdapters()
    dtype = getattr(torch, config.model.dtype)
    weights = LoRAWeights(
        model,
        lora,
        config.model.path,
        dtype,
        device,
        fixed_order=config.device.deterministic,
        form=AdapterForm.choose(config.device, device),
    )
    adapters = WorkerAdapters(config, weights, device)
    for module in lora.modules[: lora.max_cpu_loras]:
        adapters.load(module.digest, module.path)
    return adapters
