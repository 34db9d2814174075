"""The half inside a worker of a producer: tells transfer processes how far a step is.

    1. `start_load_kv(step)`   remembers the step, if somebody waits for its KV
    2. `save_kv_layer(layer)`  one message of a few bytes to each transfer process of this rank

Transfer processes may come, go and come back: a message that they miss is made up for by the
next one (progress only grows) and by the scheduler half when the request ends.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
import zmq

from kv_transfer.base import KVCacheHandle, KVConnectorWorker
from kv_transfer.cache_handle import handle_of_tensors
from kv_transfer.config import KVTransferConfig
from kv_transfer.host.child_process import ipc_address
from kv_transfer.host.local_socket import connect_socket
from kv_transfer.metadata import KVConnectorMetadata, StepProgress


def steps_address(engine_id: str, rank: int, index: int) -> str:
    """Where transfer process `index` of `rank` listens for step progress."""
    return ipc_address(engine_id, f"kv-steps-{rank}-{index}")


class GrpcConnectorWorker(KVConnectorWorker):
    """Worker half of a producer. Nothing here waits for a transfer process."""

    def __init__(self, config: KVTransferConfig, engine_id: str, rank: int) -> None:
        self._rank = rank
        self._step_id = -1
        self._saving = False
        self._encoder = msgspec.msgpack.Encoder()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets = [
            connect_socket(
                self._context, zmq.SocketType.PUSH, steps_address(engine_id, rank, index)
            )
            for index in range(config.num_processes)
        ]

    def register_kv_caches(self, kv_caches: list[Any]) -> KVCacheHandle:
        return handle_of_tensors(self._rank, kv_caches)

    def start_load_kv(self, step_id: int, metadata: KVConnectorMetadata) -> None:
        self._step_id = step_id
        self._saving = metadata.save_kv

    def save_kv_layer(self, layer: int) -> None:
        if not self._saving:
            return
        message = self._encoder.encode(StepProgress(self._step_id, layer + 1))
        for socket in self._sockets:
            with suppress(zmq.Again):
                socket.send(message, zmq.NOBLOCK)

    def shutdown(self) -> None:
        for socket in self._sockets:
            socket.close(linger=0)
        self._sockets.clear()
        self._context.term()
