"""Measures the processes of a cluster and of its client: which there are and what each of them
holds; and while a load runs, the cores each uses, how late the event loops of services are, and
times between tokens where decode nodes see them, before routers and clients.

    1. `ProcessLoad(services, client_pids)`
    2. `begin`, then the load
    3. `figures`
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import aiohttp
import psutil

from bench.figures import Figures
from bench.serving.clusters.node_metrics import by_label, histogram_quantile
from bench.serving.clusters.pd_cluster import metrics_url
from cli.local_cluster.supervisor import Service
from edge.http.event_loop.loop_lateness import NAME as LATENESS


@dataclass(frozen=True, slots=True)
class Usage:
    """The use of one process. `private_mib`: memory that is its own, in RAM; `fds`: open files."""

    private_mib: float
    fds: int


def below(root: int) -> Iterator[psutil.Process]:
    """Returns `root` and all of its descendants that run now."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(root)
        yield from (process, *process.children(recursive=True))


def module_of(process: psutil.Process) -> str:
    """Returns what `python -m` was asked to run, of a node's child its module; empty for another
    program, or for none."""
    try:
        words = process.cmdline()
    except psutil.Error:
        return ""
    words = words[words.index("-m") + 1 :] if "-m" in words[:-1] else [""]
    return words[1] if words[0] == "edge.program" else words[0]


def usage(root: int) -> dict[str, Usage]:
    """Returns usage by module and process id: one that was started again is another one."""
    found: dict[str, Usage] = {}
    for process in below(root):
        with suppress(psutil.Error):
            memory, num_fds = process.memory_info(), process.num_fds()
            if name := module_of(process):
                own = round((memory.rss - memory.shared) / 2**20, 3)
                found[f"{name} {process.pid}"] = Usage(own, num_fds)
    return found


def cpu_seconds(root: int) -> dict[str, float]:
    """Returns the CPU time of `root` and its descendants since their start, by module; of all of a
    module's processes together."""
    found: dict[str, float] = {}
    for process in below(root):
        with suppress(psutil.Error):
            times, name = process.cpu_times(), module_of(process) or "others"
            found[name] = found.get(name, 0.0) + times.user + times.system
    return found


_GAPS = "vllm:inter_token_latency_seconds_bucket"
_LATENESS = f"{LATENESS}_bucket"
_PARTS = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_LATE_MS = ("0.5", "1", "2", "5")

Buckets = dict[str, float]


class ProcessLoad:
    """See the module docstring. A service that does not answer, or is not ours, is left out."""

    def __init__(self, services: Sequence[Service], client_pids: Sequence[int]) -> None:
        self._services = services
        self._client_pids = client_pids
        self._begun_at = 0.0
        self._cpu_s: dict[str, float] = {}
        self._gaps: dict[str, Buckets] = {}
        self._lateness: dict[str, Buckets] = {}

    async def begin(self) -> None:
        self._gaps = await self._buckets_now(_GAPS)
        self._lateness = await self._buckets_now(_LATENESS)
        self._cpu_s, self._begun_at = self._cpu_now(), time.perf_counter()

    async def figures(self) -> Figures:
        """Returns what was used, in cores, and quantiles between bounds of the nodes' buckets. Of a
        service that was started again, what its first process used is not known."""
        seconds, cpu_now = time.perf_counter() - self._begun_at, self._cpu_now()
        used = {
            name: round(max(0.0, cpu_s - self._cpu_s.get(name, 0.0)) / seconds, 3)
            for name, cpu_s in cpu_now.items()
        }
        gaps = {
            node: quantiles_ms(self._gaps.get(node, {}), buckets)
            for node, buckets in (await self._buckets_now(_GAPS)).items()
        }
        late = {
            name: lateness_figures(self._lateness.get(name, {}), buckets)
            for name, buckets in (await self._buckets_now(_LATENESS)).items()
        }
        return {"cores_used": used, "itl_ms_at_decode_nodes": gaps, "event_loops": late}

    def _cpu_now(self) -> dict[str, float]:
        found = {
            f"{service.spec.name}: {module}": cpu_s
            for service in self._services
            if service.pid is not None
            for module, cpu_s in cpu_seconds(service.pid).items()
        }
        own = [sum(cpu_seconds(pid).values()) for pid in self._client_pids]
        return found | {f"client {number}": cpu_s for number, cpu_s in enumerate(own)}

    async def _buckets_now(self, name: str) -> dict[str, Buckets]:
        """Returns the buckets of a histogram by service, of those that have it."""
        found: dict[str, Buckets] = {}
        async with aiohttp.ClientSession() as session:
            for service in self._services:
                with contextlib.suppress(aiohttp.ClientError):
                    buckets = await by_label(session, metrics_url(service), name, "le")
                    found |= {service.spec.name: buckets} if buckets else {}
        return found


def quantiles_ms(before: Buckets, after: Buckets) -> Figures:
    """Returns quantiles of what was counted in between, in milliseconds."""
    found = {name: histogram_quantile(before, after, part) for name, part in _PARTS.items()}
    return {name: None if v is None else round(1e3 * v, 2) for name, v in found.items()}


def lateness_figures(before: Buckets, after: Buckets) -> Figures:
    """Returns how late an event loop was, and the share of moments that exceed each limit."""
    counted = {float(le): count - before.get(le, 0.0) for le, count in after.items()}
    total = max(counted.values(), default=0.0)
    shares = {
        f"over_{limit}_ms": round(1 - counted[float(limit) / 1e3] / total, 5) if total else None
        for limit in _LATE_MS
    }
    return {**quantiles_ms(before, after), **shares}
