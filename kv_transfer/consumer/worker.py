"""The worker half of a decode node: its KV arrives without the workers' doing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kv_transfer.base import KVCacheHandle
from kv_transfer.layout import KVLayout
from kv_transfer.memory.cache_handle import handle_of_tensor
from kv_transfer.no_connector import NoConnectorWorker


class ConsumerConnectorWorker(NoConnectorWorker):
    """Lets transfer processes map the caches, and has nothing else to do."""

    def register_kv_cache(
        self, layout: KVLayout, memory: Any, current_stream: Callable[[], int] | None = None
    ) -> KVCacheHandle:
        return handle_of_tensor(self._rank, layout, memory)
