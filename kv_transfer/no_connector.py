"""The worker half of a node that exchanges no KV, so that workers need not ask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kv_transfer.base import KVCacheHandle, KVConnectorWorker
from kv_transfer.memory.cache_handle import handle_of_tensors
from kv_transfer.metadata import KVConnectorMetadata


class NoConnectorWorker(KVConnectorWorker):
    """Does nothing, at once."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def register_kv_caches(
        self, kv_caches: list[Any], current_stream: Callable[[], int] | None = None
    ) -> KVCacheHandle:
        return handle_of_tensors(self._rank, kv_caches)

    def start_load_kv(self, step_id: int, metadata: KVConnectorMetadata) -> None:
        return

    def save_kv_layer(self, layer: int) -> None:
        return

    def shutdown(self) -> None:
        return
