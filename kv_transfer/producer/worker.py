"""The half inside a worker of a producer: reports to transfer processes how far a step is.

    1. `register_kv_cache`    makes the page on which the layers of a step are marked
    2. `start_load_kv(step)`   remembers the step, if something waits for its KV
    3. `wait_for_layer_load`   with a host tier: before a layer whose KV is being loaded
    4. `save_kv_layer(layer)`  on CPU: marks the layer and notifies this rank's transfer processes;
                               on a GPU: the stream will mark it; transfer processes, notified
                               once for each step, poll the mark

Transfer processes may come, go and come back: a message that they miss is made up for by the
next one (progress only grows) and by the scheduler half when the request ends.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import zmq

from host.child_process import ipc_address
from host.sockets.local_socket import Context, connect_socket
from kv_transfer.base import KVCacheHandle, KVConnectorWorker
from kv_transfer.config import KVTransferConfig
from kv_transfer.layout import KVLayout
from kv_transfer.memory.devices.cache_handle import handle_of_tensor
from kv_transfer.memory.load_marks import LoadGate, create_gate
from kv_transfer.metadata import KVConnectorMetadata, StepProgress
from kv_transfer.producer.layer_marks import LayerMarker, LayerMarks, StreamMarker
from kv_transfer.tier import LoadTicket


def steps_address(engine_id: str, rank: int, index: int) -> str:
    """Returns where transfer process `index` of `rank` listens for step progress."""
    return ipc_address(engine_id, f"kv-steps-{rank}-{index}")


class GrpcConnectorWorker(KVConnectorWorker):
    """Worker half of a producer. Nothing here waits for a transfer process."""

    def __init__(self, config: KVTransferConfig, engine_id: str, rank: int) -> None:
        self._rank = rank
        self._step_id = -1
        self._saving = False
        self._marks: LayerMarks | None = None
        self._marker: LayerMarker | None = None
        self._has_host_tier = config.host_tier_bytes > 0
        self._gate: LoadGate | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._context = Context()
        self._sockets = [
            connect_socket(
                self._context, zmq.SocketType.PUSH, steps_address(engine_id, rank, index)
            )
            for index in range(config.num_processes)
        ]

    def register_kv_cache(
        self, layout: KVLayout, memory: Any, current_stream: Callable[[], int] | None = None
    ) -> KVCacheHandle:
        handle = handle_of_tensor(self._rank, layout, memory)
        self._marks = LayerMarks.create(layout.num_layers)
        if current_stream is None:
            self._marker = LayerMarker(self._marks)
        else:
            self._marker = StreamMarker(self._marks, current_stream)
        handle = msgspec.structs.replace(handle, marks_fd=self._marks.fd)
        if not self._has_host_tier:
            return handle
        self._gate = create_gate(layout.num_layers, current_stream)
        return msgspec.structs.replace(handle, load_marks_fd=self._gate.marks.fd)

    def start_load_kv(self, step_id: int, metadata: KVConnectorMetadata) -> None:
        self._step_id = step_id
        self._saving = metadata.save_kv
        if self._saving and self._marker is not None and self._marker.marks_later:
            self._tell(StepProgress(step_id, 0))

    def save_kv_layer(self, layer: int) -> None:
        if not self._saving or self._marker is None:
            return
        self._marker.mark(self._step_id, layer)
        if not self._marker.marks_later:
            self._tell(StepProgress(self._step_id, layer + 1))

    def wait_for_layer_load(self, ticket: LoadTicket, layer: int) -> None:
        assert self._gate is not None
        self._gate.wait(ticket, layer)

    def shutdown(self) -> None:
        for socket in self._sockets:
            socket.close(linger=0)
        self._sockets.clear()
        self._context.term()
        if self._marker is not None and self._marks is not None:
            self._marker.close()
            self._marks.close()
            self._marker = self._marks = None
        if self._gate is not None:
            self._gate.close()
            self._gate = None

    def _tell(self, progress: StepProgress) -> None:
        message = self._encoder.encode(progress)
        for socket in self._sockets:
            with suppress(zmq.Again):
                socket.send(message, zmq.NOBLOCK)
