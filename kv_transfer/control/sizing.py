"""How many transfer processes and streams a node takes when nothing says, and what they need.

Measured on an H200 host: a process pair carries about 3 GB/s over gRPC. Four pairs keep up with
everything that one GPU computes (KV is complete 1 ms after the first token, 35 ms with one pair).
Prefixes that wait with a peer come as fast as they can: a gigabyte in 107 ms by eight pairs, in 157
by four. Each takes up to a core, on prefill and on decode, which may share a host, and half a
gigabyte of its GPU's memory; the node's own processes need theirs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from host.network import Network
from kv_transfer.layout import KVLayout

MOST_PROCESSES = 8
"""A rank has at most this many when nothing asks for more."""
PROCESS_GB_PER_S = 3.0
_CORES_A_PROCESS = 4
_MOST_CHECK_THREADS = 4
"""One compares about 7 GB/s, 16 of a host 59, and PCIe brings a rank's processes 50."""
_RECEIVE_THREADS = 2
"""More are no better: 4 processes moved 7.9 GB/s with none, 10.4 with two each, 10.0 with four."""
_FEWEST_STREAMS = 4
_STREAMS_A_PROCESS = 2
_FEWEST_STAGED_CHUNKS = 8
"""In each process. Prefill: as many for pullers that wait as for those that will come. Decode: half
to receive into, half to copy from."""

_LONG_PROMPT = 1 << 16
"""Longer than windows are."""


def processes_for_this_host(hosts: Sequence[str], ranks: int) -> int:
    """Returns how many each of `ranks` ranks has that run here and use these addresses."""
    try:
        link = Network().gb_per_s(hosts)
    except OSError:
        link = None
    return choose_num_processes(available_cores(), ranks, link, len(hosts))


def choose_num_processes(
    cores: int, ranks_here: int, link_gb_per_s: float | None, num_hosts: int = 1
) -> int:
    """Returns the number of transfer processes of each of `ranks_here` ranks on a host with `cores`
    cores.

    `link_gb_per_s`: of all network interfaces that KV uses together, None when it is not known.
    `num_hosts`: addresses that each shall be used by one process at least.
    """
    by_cores = cores // ranks_here // _CORES_A_PROCESS
    by_link = (
        MOST_PROCESSES
        if link_gb_per_s is None
        else math.ceil(link_gb_per_s / ranks_here / PROCESS_GB_PER_S)
    )
    by_hosts = math.ceil(num_hosts / ranks_here)
    return max(1, by_hosts, min(by_cores, by_link, MOST_PROCESSES))


def choose_num_streams(num_processes: int) -> int:
    """Returns how many serve one request and one rank of the peer."""
    return max(_FEWEST_STREAMS, _STREAMS_A_PROCESS * num_processes)


def choose_receive_threads(cores: int, processes_here: int) -> int:
    """Returns the threads with which each of this many transfer processes receives; half of the
    cores are for all others. 0 where there is no core for a second one: handing over to threads
    costs a fifth of what receiving does, which one alone cannot gain."""
    return _RECEIVE_THREADS if cores // 2 // processes_here >= _RECEIVE_THREADS else 0


def choose_check_threads(cores: int, processes_here: int) -> int:
    """Returns the threads with which each of this many transfer processes compares checksums of
    what it loads from host memory. All cores, for the 30 ms that a gigabyte takes: with half of 16
    it took 39, and rows that decode meanwhile noticed neither."""
    return max(1, min(cores // processes_here, _MOST_CHECK_THREADS))


def fewest_staging_bytes(num_processes: int, chunk_bytes: int) -> int:
    """Returns what one rank needs for copies and the network to go on side by side in all of its
    processes."""
    return num_processes * _FEWEST_STAGED_CHUNKS * chunk_bytes


def available_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns how many this process may use: its affinity, and the quota of its container."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def pull_bytes(layout: KVLayout, first_token: int, num_tokens: int) -> int:
    """Returns how much KV a node with `layout` pulls of a prompt of `num_tokens`, of which it has
    the first `first_token`: that of all its ranks."""
    total = 0
    for group in layout.groups:
        num_blocks = len(group.blocks_to_pull(first_token, num_tokens))
        block_bytes = layout.tp_size * group.bytes_needed(layout.tp_size)
        total += num_blocks * len(group.layers) * block_bytes
    return total


@lru_cache(maxsize=4)
def pull_bytes_per_token(layout: KVLayout) -> float:
    """Returns what each token more of a long prompt adds to that."""
    more = pull_bytes(layout, 0, 2 * _LONG_PROMPT) - pull_bytes(layout, 0, _LONG_PROMPT)
    return more / _LONG_PROMPT
