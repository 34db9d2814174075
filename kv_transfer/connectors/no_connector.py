"""Both halves of a connector for an engine that exchanges no KV, so that nothing need ask."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

from kv_transfer.base import (
    ChunkLike,
    KVCacheHandle,
    KVConnectorScheduler,
    KVConnectorWorker,
    RequestLike,
)
from kv_transfer.layout import BlockIds, KVLayout
from kv_transfer.metadata import (
    KVConnectorMetadata,
    KVConnectorOutput,
    KVTransferParams,
)


class NoConnectorScheduler(KVConnectorScheduler):
    """Nothing comes and nothing goes. Requests with KV parameters are refused."""

    check_interval_s = math.inf

    def __init__(self) -> None:
        self._never_readable = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    @property
    def peer_info(self) -> None:
        return None

    def refusal(self, request: RequestLike) -> str:
        if request.kv_transfer_params is None:
            return ""
        return (
            "the request exchanges KV with another node, but this engine has no KV transfer; "
            "start it as a prefill or decode node"
        )

    def get_num_new_matched_tokens(self, request: RequestLike, num_computed_tokens: int) -> int:
        return 0

    def update_state_after_alloc(
        self, request: RequestLike, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        return

    def build_connector_meta(
        self, step_id: int, chunks: list[ChunkLike]
    ) -> KVConnectorMetadata | None:
        return None

    def fileno(self) -> int:
        return self._never_readable

    def get_finished(self) -> KVConnectorOutput | None:
        return None

    def request_finished(self, request: RequestLike) -> bool:
        return False

    def abort(self, request: RequestLike) -> bool:
        return False

    def retry(
        self,
        request: RequestLike,
        params: KVTransferParams,
        block_ids: BlockIds,
        num_computed_tokens: int,
    ) -> None:
        return

    @property
    def counters(self) -> dict[str, float]:
        return {}

    def check_alive(self) -> None:
        return

    def shutdown(self) -> None:
        if self._never_readable >= 0:
            os.close(self._never_readable)
            self._never_readable = -1


class NoConnectorWorker(KVConnectorWorker):
    """Does nothing, at once."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def register_kv_cache(
        self, layout: KVLayout, memory: Any, current_stream: Callable[[], int] | None = None
    ) -> KVCacheHandle:
        """Returns a handle that leads to no memory: nothing maps the caches."""
        num_blocks = memory.numel() * memory.element_size() // layout.block_bytes
        return KVCacheHandle(rank=self._rank, pid=os.getpid(), num_blocks=num_blocks)

    def start_load_kv(self, step_id: int, metadata: KVConnectorMetadata) -> None:
        return

    def save_kv_layer(self, layer: int) -> None:
        return

    def shutdown(self) -> None:
        return
