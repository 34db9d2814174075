"""The worker half of a connector that remembers which layers it was handed."""

from __future__ import annotations

from kv_transfer.connectors.no_connector import NoConnectorWorker
from kv_transfer.metadata import KVConnectorMetadata


class SavedLayers(NoConnectorWorker):
    """Records saved layers. `saved`: (step, layer) in order, for steps whose KV somebody
    waits for.
    """

    def __init__(self) -> None:
        super().__init__(rank=0)
        self.saved: list[tuple[int, int]] = []
        self._step_id = -1
        self._saves = False

    def start_load_kv(self, step_id: int, metadata: KVConnectorMetadata) -> None:
        self._step_id, self._saves = step_id, metadata.save_kv

    def save_kv_layer(self, layer: int) -> None:
        if self._saves:
            self.saved.append((self._step_id, layer))
