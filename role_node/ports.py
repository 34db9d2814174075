"""Keeps the ports of a node for it while it changes its role."""

from __future__ import annotations

import os
import socket

from edge.address import join_address
from engine.node.grpc_server import PortInUse


class HeldPorts:
    """Holds ports by sockets that are bound and do not listen: the server of a role listens beside
    them, and between two roles nothing else gets them."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._holders: list[socket.socket] = []

    def hold(self, port: int) -> int:
        """Returns the port; of 0, one that was free. Raises `PortInUse`."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        holder = socket.socket(family)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind((self._host, port))
        except OSError as error:
            holder.close()
            raise PortInUse(
                f"cannot listen on {join_address(self._host, port)} "
                f"({os.strerror(error.errno or 0)}); choose another port or address"
            ) from None
        self._holders.append(holder)
        found: int = holder.getsockname()[1]
        return found

    def close(self) -> None:
        for holder in self._holders:
            holder.close()
        self._holders.clear()
