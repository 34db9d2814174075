"""Two hosts with a cable of limited bandwidth between them: network namespaces and a token bucket.

Needs root, and Debian's iproute2. Each direction has the bandwidth to itself.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

ADDRESSES = ("198.19.0.1", "198.19.0.2")


@contextmanager
def slow_link(mbit: int) -> Iterator[tuple[str, str]]:
    """Yields the names of the two namespaces. `mbit`: per second and direction; 0: no limit."""
    names = f"td-bench-{os.getpid()}-0", f"td-bench-{os.getpid()}-1"
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        _run(*f"ip -n {names[0]} link add eth0 type veth peer name eth0 netns {names[1]}".split())
        for name, address in zip(names, ADDRESSES, strict=True):
            for words in (f"addr add {address}/30 dev eth0", "link set eth0 up", "link set lo up"):
                _run("ip", "-n", name, *words.split())
            if mbit:
                bucket = f"qdisc add dev eth0 root tbf rate {mbit}mbit burst 256kb latency 400ms"
                _run("ip", "netns", "exec", name, "tc", *bucket.split())
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
