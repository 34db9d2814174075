"""Tells where the processes of a rank run, and starts them there."""

from __future__ import annotations

from typing import Any, Protocol

from host.child_process import ChildProcess, HostedProcess
from host.sockets.secure_socket import HostLink


class ProcessHost(Protocol):
    """Starts processes on one host, for one rank: its worker and what maps the worker's memory."""

    @property
    def link(self) -> HostLink | None:
        """Returns None when memory and socket names are shared with us."""

    def start(
        self, module: str, config: Any, name: str, env: dict[str, str] | None = None
    ) -> HostedProcess:
        """Starts one as `ChildProcess.start` does. Returns at once; a host that is gone shows as
        the end of the process."""


class LocalHost:
    """This one."""

    link: HostLink | None = None

    def start(
        self, module: str, config: Any, name: str, env: dict[str, str] | None = None
    ) -> HostedProcess:
        return ChildProcess.start(module, config, name, env)
