"""The worker half of a decode node: its KV arrives without the workers' doing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kv_transfer.base import KVCacheHandle
from kv_transfer.memory.cache_handle import handle_of_tensors
from kv_transfer.no_connector import NoConnectorWorker


class ConsumerConnectorWorker(NoConnectorWorker):
    """Lets transfer processes map the caches, and has nothing else to do."""

    def register_kv_caches(
        self, kv_caches: list[Any], current_stream: Callable[[], int] | None = None
    ) -> KVCacheHandle:
        return handle_of_tensors(self._rank, kv_caches)
