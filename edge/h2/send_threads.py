"""Threads that hand bytes to the kernel.

They never wait for a peer: sockets do not block, and the event loop waits until one can take more.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence

from edge.h2.io_threads import IoThreads
from edge.h2.out_message import Buffer, OutMessage
from edge.h2.tls_socket import TlsSocket

Sent = int | OSError
"""Bytes that the kernel took, 0 when it has no room now; or why the connection broke."""

Connection = socket.socket | TlsSocket


def send_now(sock: Connection, buffers: Sequence[Buffer]) -> Sent:
    """Sends as much as the socket takes."""
    try:
        return sock.sendmsg(buffers)
    except (BlockingIOError, InterruptedError):
        return 0
    except OSError as error:
        return error


class SendThreads:
    """Made on the event loop that is notified of results."""

    def __init__(self, num_threads: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._threads = IoThreads("kv-send", num_threads)

    def send(
        self,
        sock: Connection,
        buffers: Sequence[Buffer],
        messages: Sequence[OutMessage],
        done: Callable[[Sent], None],
    ) -> None:
        """`buffers` are of `messages`. `done` is called on the event loop. The socket must stay
        open until then."""

        def work() -> Sent:
            for message in messages:
                message.complete()
            return send_now(sock, buffers)

        self._threads.do(work, done, self._loop)

    def close(self) -> None:
        """Closes when the jobs that were given are done."""
        self._threads.close()
