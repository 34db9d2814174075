"""The scheduler half of an engine that exchanges no KV, so that the scheduler need not ask."""

from __future__ import annotations

from kv_transfer.base import ChunkLike, KVConnectorScheduler, RequestLike
from kv_transfer.metadata import (
    KVConnectorMetadata,
    KVConnectorOutput,
    KVPeer,
    KVTransferParams,
)


class NoConnectorScheduler(KVConnectorScheduler):
    """Nothing comes, nothing goes. Requests with KV parameters never get this far."""

    @property
    def peer_info(self) -> KVPeer:
        raise LookupError("this engine exchanges no KV, so peers cannot know it")

    def get_num_new_matched_tokens(self, request: RequestLike, num_computed_tokens: int) -> int:
        return 0

    def update_state_after_alloc(
        self, request: RequestLike, block_ids: list[int], num_external_tokens: int
    ) -> None:
        return

    def build_connector_meta(
        self, step_id: int, chunks: list[ChunkLike]
    ) -> KVConnectorMetadata | None:
        return None

    def fileno(self) -> int:
        return -1

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
        block_ids: list[int],
        num_computed_tokens: int,
    ) -> None:
        return

    @property
    def counters(self) -> dict[str, float]:
        return {}

    def check_alive(self) -> None:
        return

    def shutdown(self) -> None:
        return
