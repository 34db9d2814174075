"""Commands and reports between the scheduler half and one transfer process.

On one host both ends know the names of the sockets. To another host the engine core listens for
reports, and the transfer process for commands; its first report says where:

    scheduler half                                 transfer process
    1. listens for reports                         2. `listen_for_commands`, `connect_events`
    3. `CommandSender.accept`   ◀── ProcessReport
    4. `CommandSender.send`     ──▶ commands, those of before 3 first
"""

from __future__ import annotations

import zmq

from host.sockets.local_socket import Context, bind_socket, connect_socket, new_socket
from host.sockets.secure_socket import connect_secure, listen
from kv_transfer.control.process_config import TransferProcessConfig
from kv_transfer.metadata import ProcessReport


def connect_events(context: Context, config: TransferProcessConfig) -> zmq.Socket[bytes]:
    """Returns the socket into which the transfer process pushes its events and reports."""
    if config.link is None:
        return connect_socket(context, zmq.SocketType.PUSH, config.events_address)
    return connect_secure(context, zmq.SocketType.PUSH, config.events_address, config.link.key)


def listen_for_commands(
    context: Context, config: TransferProcessConfig
) -> tuple[zmq.Socket[bytes], str]:
    """Returns the socket and what `ProcessReport.commands_address` must say."""
    if config.link is None:
        return bind_socket(context, zmq.SocketType.PULL, config.commands_address), ""
    socket = new_socket(context, zmq.SocketType.PULL)
    return socket, listen(socket, config.link.host_address, config.link.key)


class CommandSender:
    """Sends commands during one life of a transfer process.

    Never waits: what is sent early is delivered later.
    """

    def __init__(self, context: Context, config: TransferProcessConfig) -> None:
        self._context = context
        self._link = config.link
        self._early: list[bytes] = []
        self._socket: zmq.Socket[bytes] | None = None
        if config.link is None:
            self._socket = connect_socket(context, zmq.SocketType.PUSH, config.commands_address)

    def send(self, message: bytes) -> None:
        if self._socket is None:
            self._early.append(message)
        else:
            self._socket.send(message)

    def accept(self, report: ProcessReport) -> None:
        """Takes a report of this life. The first one opens the way to another host."""
        if self._socket is not None or self._link is None:
            return
        self._socket = connect_secure(
            self._context, zmq.SocketType.PUSH, report.commands_address, self._link.key
        )
        for message in self._early:
            self._socket.send(message)
        self._early.clear()

    def close(self) -> None:
        """Drops what was not delivered. Idempotent."""
        if self._socket is not None:
            self._socket.close(linger=0)
