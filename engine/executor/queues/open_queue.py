"""A reader for whichever queue a handle belongs to."""

from __future__ import annotations

from collections.abc import Callable

from engine.executor.queues.message_queue import MessageQueueHandle, MessageQueueReader
from engine.executor.queues.remote_queue import RemoteQueueHandle, RemoteQueueReader
from host.sockets.local_socket import Context


def open_queue(
    context: Context,
    handle: MessageQueueHandle | RemoteQueueHandle,
    reader: int,
    check_alive: Callable[[], None],
) -> MessageQueueReader | RemoteQueueReader:
    """Opens the reader's end; `check_alive` raises when there is nothing to wait for any more."""
    if isinstance(handle, MessageQueueHandle):
        return MessageQueueReader(context, handle, reader, check_alive)
    return RemoteQueueReader(context, handle, reader, check_alive)
