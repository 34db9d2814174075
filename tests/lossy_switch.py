"""Hosts on a switch of our own, each in a network namespace: what it does to packets is set live.

    host a ── tap ─┐                     delay, loss, corruption that TCP does not see, a rate with
    host b ── tap ─┤ thread: LossySwitch its queue, and the longest packet, for each pair of hosts
    here   ── tap ─┘ in user space       and direction

A tap hands frames to the thread as its kernel sends them, so nothing is merged on the way. Needs
root (or CAP_NET_ADMIN and CAP_SYS_ADMIN), /dev/net/tun and Debian's iproute2.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

HERE = "here"
_TUNSETIFF = 0x400454CA
_TAP_WITHOUT_INFO = 0x0002 | 0x1000
_CLONE_NEWNET = 0x40000000
_QUEUE_S = 0.4
"""Packets that would wait longer for a link with a rate are dropped."""
_ETHERNET_BYTES = 14
_QUEUED = 10_000
"""Packets of a kernel that wait for us: when we are busy, they should not be lost."""
_MAX_FRAME = 65536
_AT_ONCE = 64
_IPV4 = b"\x08\x00"
_TCP_OVER_IP = 40
_LARGE = 500
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Says what happens to packets of one direction. `rate`: bytes per second, 0: no limit. `mtu`:
    longer packets vanish without a word, 0: none do."""

    delay_s: float = 0.0
    loss: float = 0.0
    corruption: float = 0.0
    rate: float = 0.0
    mtu: int = 0


CLEAN = Conditions()


class NoSwitchError(RuntimeError):
    """Namespaces or taps cannot be had here; says why."""


@dataclass(slots=True)
class _Port:
    """A host's end. `index` is in its address and hardware address."""

    name: str
    index: int
    tap: int = -1
    free_at: dict[int, float] = field(default_factory=dict)
    """When the link to each other port has sent what it got."""


class LossySwitch:
    """Connects `names`, and this process as `HERE`. `open` → `close`."""

    def __init__(self, names: Sequence[str], seed: int = 0) -> None:
        self._prefix = f"lossy-{os.getpid()}"
        network = f"198.19.{os.getpid() % 256}"
        self._ports = [_Port(name, i) for i, name in enumerate((*names, HERE), 1)]
        self.addresses = {port.name: f"{network}.{port.index}" for port in self._ports}
        self._conditions: dict[tuple[str, str], Conditions] = {}
        self._lost: set[int] = set()
        self._rng = random.Random(seed)
        self._due: list[tuple[float, int, int, bytes]] = []
        self._num_frames = 0
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="switch", daemon=True)

    def open(self) -> None:
        """Builds everything. Raises `NoSwitchError`."""
        try:
            for port in self._ports:
                self._plug(port)
        except FileNotFoundError as error:
            raise NoSwitchError(f"{error.filename} is missing here") from error
        except (OSError, subprocess.CalledProcessError) as error:
            why = (
                error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
            )
            raise NoSwitchError(f"no network namespaces and taps here: {why}") from error
        self._thread.start()

    def close(self) -> None:
        """Idempotent."""
        self._is_closing = True
        if self._thread.is_alive():
            self._thread.join()
        for port in self._ports:
            if port.tap >= 0:
                os.close(port.tap)
                port.tap = -1
            if port.name != HERE:
                command = ["ip", "netns", "del", self._namespace(port.name)]
                with suppress(FileNotFoundError):
                    subprocess.run(command, check=False, capture_output=True)

    def set(self, one: str, other: str, conditions: Conditions) -> None:
        """Sets both directions."""
        self._conditions[one, other] = self._conditions[other, one] = conditions

    def set_from(self, source: str, target: str, conditions: Conditions) -> None:
        """Sets one direction."""
        self._conditions[source, target] = conditions

    def lose(self, port: int) -> None:
        """Drops every packet from and to a TCP port, as a firewall that has forgotten what goes
        on there."""
        self._lost.add(port)

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        """Sockets that this thread makes inside, and processes that it starts, are the host's."""
        with ExitStack() as stack:
            home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
            stack.callback(os.close, home)
            there = os.open(f"/run/netns/{self._namespace(name)}", os.O_RDONLY)
            stack.callback(os.close, there)
            _enter(there)
            try:
                yield
            finally:
                _enter(home)

    # Building ---------------------------------------------------------------------------------

    def _namespace(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def _plug(self, port: _Port) -> None:
        inside: list[str] = []
        device = f"tl{os.getpid() % 10**6}-{port.index}"
        if port.name == HERE:
            port.tap = _tap(device)
        else:
            _run("ip", "netns", "add", self._namespace(port.name))
            inside = ["-n", self._namespace(port.name)]
            with self.on(port.name):
                port.tap = _tap(device)
            _run("ip", *inside, "link", "set", "lo", "up")
        _run("ip", *inside, *f"link set {device} address {_hardware(port.index)}".split())
        _run("ip", *inside, *f"link set {device} txqueuelen {_QUEUED} up".split())
        address = f"{self.addresses[port.name]}/24"
        _run("ip", *inside, *f"addr add {address} dev {device}".split())

    # Switching --------------------------------------------------------------------------------

    def _run(self) -> None:
        poll = select.poll()
        ports = {port.tap: port for port in self._ports}
        for tap in ports:
            poll.register(tap, select.POLLIN)
        while not self._is_closing:
            wait_s = 0.05
            if self._due:
                wait_s = min(wait_s, max(0.0, self._due[0][0] - time.monotonic()))
            for tap, _ in poll.poll(wait_s * 1e3):
                self._read(ports[tap])
            self._deliver()

    def _read(self, port: _Port) -> None:
        for _ in range(_AT_ONCE):
            try:
                frame = os.read(port.tap, _MAX_FRAME)
            except BlockingIOError:
                return
            target = frame[5]
            if frame[0] & 1:
                for other in self._ports:
                    if other is not port:
                        self._send(port, other, frame)
            elif 1 <= target <= len(self._ports):
                self._send(port, self._ports[target - 1], frame)

    def _send(self, source: _Port, target: _Port, frame: bytes) -> None:
        if not self._lost.isdisjoint(_tcp_ports(frame)):
            return
        it = self._conditions.get((source.name, target.name), CLEAN)
        if it.mtu and len(frame) > it.mtu + _ETHERNET_BYTES:
            return
        if it.loss and self._rng.random() < it.loss:
            return
        if it.corruption and self._rng.random() < it.corruption:
            frame = _corrupted(frame, self._rng)
        now = time.monotonic()
        due = now + it.delay_s
        if it.rate:
            begins = max(now, source.free_at.get(target.index, 0.0))
            if begins - now > _QUEUE_S:
                return
            source.free_at[target.index] = begins + len(frame) / it.rate
            due = source.free_at[target.index] + it.delay_s
        self._num_frames += 1
        heapq.heappush(self._due, (due, self._num_frames, target.tap, frame))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            _, _, tap, frame = heapq.heappop(self._due)
            with suppress(BlockingIOError, OSError):
                os.write(tap, frame)


def _tcp_ports(frame: bytes) -> tuple[int, ...]:
    """Returns the ports of a frame with TCP over IPv4."""
    if frame[12:14] != _IPV4 or frame[_ETHERNET_BYTES + 9] != socket.IPPROTO_TCP:
        return ()
    begin = _ETHERNET_BYTES + 4 * (frame[_ETHERNET_BYTES] & 15)
    return struct.unpack_from("!HH", frame, begin)


def _corrupted(frame: bytes, rng: random.Random) -> bytes:
    """Swaps two words of a long payload: sums of words, as TCP checks them, stay the same."""
    first = _ETHERNET_BYTES + _TCP_OVER_IP + 12
    if len(frame) < first + _LARGE:
        return frame
    one, other = rng.sample(range(first, len(frame) - 2, 2), 2)
    changed = bytearray(frame)
    changed[one : one + 2], changed[other : other + 2] = (
        frame[other : other + 2],
        frame[one : one + 2],
    )
    return bytes(changed)


@contextmanager
def opened_switch(*names: str) -> Iterator[LossySwitch]:
    """Returns one that is open. Raises `NoSwitchError`."""
    switch = LossySwitch(names)
    try:
        switch.open()
        yield switch
    finally:
        switch.close()


def _tap(name: str) -> int:
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP_WITHOUT_INFO))
    return tap


def _hardware(index: int) -> str:
    return f"02:00:00:00:00:{index:02x}"


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _enter(descriptor: int) -> None:
    if _libc.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
