"""Threads that do nothing but hand bytes to the kernel.

Copying into a socket's buffer is most of what sending costs, and Python's lock is free meanwhile:
a few threads let one transfer process send with more than one core. They never wait for a peer:
sockets do not block, and the event loop waits until one can take more.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue

from kv_transfer.transports.stream.h2.tls_socket import TlsSocket
from kv_transfer.wire.out_message import Buffer, OutMessage

Sent = int | OSError
"""Bytes that the kernel took, 0 when it has no room now; or why the connection broke."""

Connection = socket.socket | TlsSocket

_Job = tuple[Connection, Sequence[Buffer], Sequence[OutMessage], Callable[[Sent], None]]


def send_now(sock: Connection, buffers: Sequence[Buffer]) -> Sent:
    """Sends as much as the socket takes."""
    try:
        return sock.sendmsg(buffers)
    except (BlockingIOError, InterruptedError):
        return 0
    except OSError as error:
        return error


class SendThreads:
    """Made on the event loop that is told of results."""

    def __init__(self, num_threads: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"kv-send-{i}", daemon=True)
            for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def send(
        self,
        sock: Connection,
        buffers: Sequence[Buffer],
        messages: Sequence[OutMessage],
        done: Callable[[Sent], None],
    ) -> None:
        """`buffers` are of `messages`. `done` is called on the event loop. The socket must stay
        open until then."""
        self._jobs.put((sock, buffers, messages, done))

    def close(self) -> None:
        """Closes when the jobs that were given are done."""
        for _ in self._threads:
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            sock, buffers, messages, done = job
            for message in messages:
                message.complete()
            result = send_now(sock, buffers)
            del job, sock, buffers, messages
            # A loop that was closed meanwhile wants to know no more.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(done, result)
            del done
