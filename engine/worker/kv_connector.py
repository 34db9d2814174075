"""The runner's side of KV transfer. Without P/D it passes steps and layers on to none.

1. `register_kv_cache`    once, after allocation
2. `pre_forward(step)`    a forward pass follows; returns what the model calls after a layer
   or `no_forward(step)`  the step computes nothing
3. `replace`              the engine changes its role; then 1. again
4. `shutdown`
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.config import EngineConfig
from engine.contracts.scheduler_output import SchedulerOutput
from kv_transfer.base import KVCacheHandle, KVConnectorWorker
from kv_transfer.factory import create_worker_connector
from kv_transfer.layout import KVLayout
from kv_transfer.tier import LoadTicket

OnLayer = Callable[[int], None]


def waits_for_layers(step: SchedulerOutput) -> bool:
    """Returns whether the step's forward pass must stop at layers, as a recorded one cannot."""
    return step.kv is not None and step.kv.load is not None


def ignore_layer(layer: int) -> None:
    """Does nothing, as nothing waits for this step's KV."""


class KVConnector:
    """Passes steps and layers on to the transfer side of this rank."""

    def __init__(self, worker: KVConnectorWorker) -> None:
        self._worker = worker

    def register_kv_cache(self, layout: KVLayout, memory: torch.Tensor) -> KVCacheHandle:
        """Returns how transfer processes map `memory`, all slots in the shape that `layout` has."""
        current_stream = _current_stream if memory.is_cuda else None
        return self._worker.register_kv_cache(layout, memory, current_stream)

    def pre_forward(self, step: SchedulerOutput) -> OnLayer:
        if step.kv is None:
            return ignore_layer
        self._worker.start_load_kv(step.step_id, step.kv)
        if step.kv.load is None:
            return self._worker.save_kv_layer
        return self._waits(step.kv.load)

    def _waits(self, ticket: LoadTicket) -> OnLayer:
        """Waits for the first layer's KV. Returns what waits for the next one after each layer."""
        worker = self._worker
        worker.wait_for_layer_load(ticket, 0)

        def on_layer(layer: int) -> None:
            worker.save_kv_layer(layer)
            worker.wait_for_layer_load(ticket, layer + 1)

        return on_layer

    def no_forward(self, step: SchedulerOutput) -> None:
        if step.kv is not None:
            self._worker.start_load_kv(step.step_id, step.kv)

    def replace(self, config: EngineConfig, rank: int) -> None:
        """Becomes the transfer side of another role, which has yet to be given the cache. No step
        may be in flight."""
        self._worker.shutdown()
        self._worker = _create_worker(config, rank)

    def shutdown(self) -> None:
        self._worker.shutdown()


def _current_stream() -> int:
    """Returns the stream of this thread, as the driver knows it."""
    return torch.cuda.current_stream().cuda_stream


def create_kv_connector(config: EngineConfig, rank: int) -> KVConnector:
    """Returns the half of this rank, counted in its group."""
    return KVConnector(_create_worker(config, rank))


def _create_worker(config: EngineConfig, rank: int) -> KVConnectorWorker:
    group, own = divmod(rank, config.parallel.group_size)
    return create_worker_connector(config.kv_transfer, config.name_of_group(group), own)
