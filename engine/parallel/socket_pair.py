"""Sums and exchanges of two ranks on CPU, over one connection of their own.

    1. rank 0 listens on its own address and tells its port and a secret in the store
    2. rank 1 connects and says the secret; nothing listens any more
    3. `exchange`: both send their bytes and receive the other's, each in the thread that asks
    4. `close`

A library's thread between caller and socket takes four switches of threads for each sum, ten times
as long as the sum of a decode step's few kilobytes takes: steps of tiny models did little else.
"""

from __future__ import annotations

import secrets
import select
import socket
from datetime import timedelta

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

_KEY = "socket pair"
_SECRET_BYTES = 16
_FIRST_BYTES_S = 5.0
"""Seconds in which a process that connects has to send the secret."""
_AT_ONCE = 32 << 10
"""Bytes that any socket takes without a receiver: up to this many, both ranks send first."""


class RankLostError(RuntimeError):
    """The other rank's connection has ended, or nothing came for too long. Says which."""


class SocketPair:
    """The connection of rank `rank` with the other of two.

    Args:
        store: Where both ranks meet.
        address: Of this rank's host.
        timeout: A rank that is waited for longer counts as dead.

    Raises:
        ConnectionError: The ranks did not meet.
    """

    def __init__(self, store: Store, rank: int, address: str, timeout: timedelta) -> None:
        seconds = timeout.total_seconds()
        try:
            meet = _accept if rank == 0 else _connect
            self._socket = meet(store, address, seconds)
        except (RuntimeError, OSError) as error:
            raise ConnectionError(
                f"rank {rank} of 2 at {address} has no connection with the other: {error}"
            ) from error
        self._socket.settimeout(seconds)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._poll = select.poll()

    def exchange(self, mine: Tensor) -> Tensor:
        """Returns the other rank's `mine`, which has the same shape. `mine` is contiguous.

        Raises:
            RankLostError: The other is gone or hangs.
        """
        theirs = torch.empty_like(mine)
        if mine.numel() == 0:
            return theirs
        try:
            if mine.nbytes <= _AT_ONCE:
                self._socket.sendall(_bytes_of(mine))
                self._receive(_bytes_of(theirs))
            else:
                self._send_and_receive(_bytes_of(mine), _bytes_of(theirs))
        except OSError as error:
            raise RankLostError(
                f"the other rank of two is gone, or has not answered for "
                f"{self._socket.gettimeout():.0f} s: {error}"
            ) from error
        return theirs

    def _send_and_receive(self, source: memoryview, target: memoryview) -> None:
        """Does both as either becomes possible: each waiting for the other's whole message would
        take a slow link twice the time, or for ever."""
        while source or target:
            wanted = (select.POLLOUT if source else 0) | (select.POLLIN if target else 0)
            self._poll.register(self._socket, wanted)
            ready = self._poll.poll(1e3 * (self._socket.gettimeout() or 0))
            if not ready:
                raise TimeoutError("nothing could be sent or received")
            if ready[0][1] & ~select.POLLOUT and target:
                target = self._received(target)
            if ready[0][1] & ~select.POLLIN and source:
                source = source[self._socket.send(source) :]

    def _receive(self, target: memoryview) -> None:
        while target:
            target = self._received(target)

    def _received(self, target: memoryview) -> memoryview:
        """Returns what of `target` is still to come."""
        count = self._socket.recv_into(target)
        if count == 0:
            raise ConnectionResetError("it has closed the connection")
        return target[count:]

    def close(self) -> None:
        self._socket.close()


def _bytes_of(x: Tensor) -> memoryview:
    return x.detach().reshape(-1).view(torch.uint8).numpy().data


def _accept(store: Store, address: str, seconds: float) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    secret = secrets.token_bytes(_SECRET_BYTES)
    with socket.create_server((address.strip("[]"), 0), family=family) as listener:
        listener.settimeout(seconds)
        host, port = listener.getsockname()[:2]
        store.set(_KEY, f"{host} {port} {secret.hex()}")
        while True:
            connection, _ = listener.accept()
            connection.settimeout(min(seconds, _FIRST_BYTES_S))
            if secrets.compare_digest(_first_bytes(connection), secret):
                return connection
            connection.close()


def _first_bytes(connection: socket.socket) -> bytes:
    """Returns what a caller says first; less, if it says no more."""
    said = b""
    try:
        while len(said) < _SECRET_BYTES and (more := connection.recv(_SECRET_BYTES - len(said))):
            said += more
    except OSError:
        return b""
    return said


def _connect(store: Store, _: str, seconds: float) -> socket.socket:
    host, port, secret = store.get(_KEY).decode().split()
    connection = socket.create_connection((host, int(port)), seconds)
    connection.sendall(bytes.fromhex(secret))
    return connection
