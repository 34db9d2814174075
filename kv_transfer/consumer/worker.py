"""The worker half of a decode node: its KV arrives without the workers' doing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from kv_transfer.base import KVCacheHandle
from kv_transfer.config import KVTransferConfig
from kv_transfer.connectors.no_connector import NoConnectorWorker
from kv_transfer.layout import KVLayout
from kv_transfer.memory.devices.cache_handle import handle_of_tensor
from kv_transfer.memory.load_marks import LoadGate, create_gate
from kv_transfer.tier import LoadTicket


class ConsumerConnectorWorker(NoConnectorWorker):
    """Lets transfer processes map the caches, and waits for KV that comes from the host tier."""

    def __init__(self, config: KVTransferConfig, rank: int) -> None:
        super().__init__(rank)
        self._has_host_tier = config.host_tier_bytes > 0
        self._gate: LoadGate | None = None

    def register_kv_cache(
        self, layout: KVLayout, memory: Any, current_stream: Callable[[], int] | None = None
    ) -> KVCacheHandle:
        handle = handle_of_tensor(self._rank, layout, memory)
        if not self._has_host_tier:
            return handle
        self._gate = create_gate(layout.num_layers, current_stream)
        return msgspec.structs.replace(handle, load_marks_fd=self._gate.marks.fd)

    def wait_for_layer_load(self, ticket: LoadTicket, layer: int) -> None:
        assert self._gate is not None
        self._gate.wait(ticket, layer)

    def shutdown(self) -> None:
        if self._gate is not None:
            self._gate.close()
            self._gate = None
