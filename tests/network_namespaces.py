"""Hosts on one switch, each in a network namespace of its own: a link can fall silent without
either end noticing, as when a cable is cut behind the next switch.

    this process ── port ─┐
          host a ── port ─┤ bridge        cut: the port leaves the bridge; the link stays up
          host b ── port ─┘               mend: it comes back

Needs the right to make namespaces (root, or CAP_SYS_ADMIN) and Debian's iproute2.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pytest

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


class Switch:
    """Connects hosts, whose `addresses` go by their names."""

    def __init__(self, names: Sequence[str]) -> None:
        self._name = f"tandem-{os.getpid()}"
        self._device = f"td-{os.getpid()}"
        self._network = f"198.18.{os.getpid() % 256}"
        self.addresses = {name: f"{self._network}.{i}" for i, name in enumerate(names, 1)}

    def open(self) -> None:
        """Raises `subprocess.CalledProcessError` where it may not."""
        _ip("", *(f"netns add {self._namespace(name)}" for name in ("switch", *self.addresses)))
        self._in("switch", "link add br0 type bridge", "link set br0 up")
        for name, address in self.addresses.items():
            self._plug(name, f"eth0 netns {self._namespace(name)}")
            self._in(name, f"addr add {address}/24 dev eth0", "link set eth0 up", "link set lo up")
        self._plug("here", f"{self._device} netns {os.getpid()}")
        address = f"{self._network}.254/24"
        _ip("", f"addr add {address} dev {self._device}", f"link set {self._device} up")

    def close(self) -> None:
        """The other devices go with their namespaces, a moment later. Idempotent."""
        namespaces = [self._namespace(name) for name in ("switch", *self.addresses)]
        for words in (f"link del {self._device}", *(f"netns del {name}" for name in namespaces)):
            subprocess.run(["ip", *words.split()], check=False, capture_output=True)

    def cut(self, name: str) -> None:
        """From now on nothing reaches the host or comes from it."""
        self._in("switch", f"link set dev port-{name} nomaster")

    def mend(self, name: str) -> None:
        self._in("switch", f"link set dev port-{name} master br0")

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        """Sockets that this thread makes inside, and processes that it starts, are the host's."""
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        there = os.open(f"/run/netns/{self._namespace(name)}", os.O_RDONLY)
        try:
            _enter(there)
            try:
                yield
            finally:
                _enter(home)
        finally:
            os.close(home)
            os.close(there)

    def _plug(self, name: str, peer: str) -> None:
        self._in(
            "switch",
            f"link add port-{name} type veth peer name {peer}",
            f"link set dev port-{name} master br0 up",
        )

    def _in(self, name: str, *lines: str) -> None:
        _ip(self._namespace(name), *lines)

    def _namespace(self, name: str) -> str:
        return f"{self._name}-{name}"


class NoNamespacesError(RuntimeError):
    """Network namespaces cannot be had here; says why."""


@contextmanager
def opened_switch(*names: str) -> Iterator[Switch]:
    """Raises `NoNamespacesError`."""
    switch = Switch(names)
    try:
        try:
            switch.open()
        except FileNotFoundError as error:
            raise NoNamespacesError("there is no `ip` here (Debian: iproute2)") from error
        except subprocess.CalledProcessError as error:
            reason = f"network namespaces cannot be had here: {error.stderr.strip()}"
            raise NoNamespacesError(reason) from error
        yield switch
    finally:
        switch.close()


@contextmanager
def switched(*names: str) -> Iterator[Switch]:
    """Skips the test where namespaces cannot be had."""
    with ExitStack() as stack:
        try:
            switch = stack.enter_context(opened_switch(*names))
        except NoNamespacesError as error:
            pytest.skip(str(error))
        yield switch


def _ip(namespace: str, *lines: str) -> None:
    command = ["ip", *(["-n", namespace] if namespace else []), "-batch", "-"]
    subprocess.run(command, input="\n".join(lines), check=True, capture_output=True, text=True)


def _enter(descriptor: int) -> None:
    if _libc.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
