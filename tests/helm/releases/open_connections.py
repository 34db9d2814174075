"""Finds which pods of a cluster of processes have connections to which."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import psutil

from tests.kubernetes_stand_in.resources import Object


def component(pod: Object) -> str:
    return str(pod["metadata"]["labels"]["app.kubernetes.io/component"])


def open_connections(running: Sequence[tuple[Object, int]]) -> Iterator[tuple[Object, Object, int]]:
    """Yields (from, to, port) of each connection that a pod has opened to another one's address."""
    by_address = {pod["status"]["podIP"]: pod for pod, _ in running}
    for pod, pid in running:
        for address, port in _called(pid):
            target = by_address.get(address)
            if target is not None and target is not pod:
                yield pod, target, port


def _called(pid: int) -> set[tuple[str, int]]:
    """Returns what a process and its children have called: ports below those that callers get."""
    found: set[tuple[str, int]] = set()
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in (own := psutil.Process(pid), *own.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                for one in process.net_connections("tcp"):
                    if one.status == psutil.CONN_ESTABLISHED and one.raddr.port < 10_000:
                        found.add((one.raddr.ip.removeprefix("::ffff:"), one.raddr.port))
    return found
