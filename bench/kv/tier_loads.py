#!/usr/bin/env python3
"""Measures what bounds loads from host memory on this host's processors: comparing checksums, and
copying where no device copies.

One transfer process's share of the tier, in this process: blocks of Llama-3.1-8B's shape are stored
and loaded again and again. `checks` are loads onto a device whose copies cost nothing, as on a GPU
whose own engine copies; `checks and copies` are loads on CPU. A rank's rate is that of one process
times its processes, until memory or PCIe is full.

    python -m bench.kv.tier_loads                   4 shares, 256 MiB each
    python -m bench.kv.tier_loads --threads 1 2 4   threads that compare

1 GB = 1e9 bytes. Writes bench/results/tier_loads.json with --write.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time

from bench.record import write_result
from host.memory_file import MemoryFile
from kv_transfer.base import KVCacheHandle
from kv_transfer.layout import KVLayout, attention_group
from kv_transfer.memory.cache_view import KVCacheView
from kv_transfer.memory.copy_stream import CopyStream, HostCopyStream, Numbers
from kv_transfer.memory.host_device import HostDevice
from kv_transfer.memory.host_pool import HostPool, PoolConfig
from kv_transfer.metadata import HostTierEvent, LoadMeta, StoreMeta, TierEvent, TierJob

_NUM_LAYERS, _BLOCK_SIZE = 32, 128
_ROUNDS = 9


class FreeCopies(HostCopyStream):
    """Copies nothing."""

    def copy(
        self, targets: Numbers, sources: Numbers, sizes: Numbers, in_portions: bool = False
    ) -> None:
        return


class FreeDevice(HostDevice):
    """Has copies that cost nothing."""

    def new_stream(self) -> CopyStream:
        return FreeCopies()


class Share:
    """The first of `num_processes` shares of `num_blocks` blocks."""

    def __init__(self, num_blocks: int, num_processes: int, threads: int, device: HostDevice):
        group = attention_group(
            layers=range(_NUM_LAYERS),
            heads=8,
            head_dim=128,
            dtype="bfloat16",
            block_size=_BLOCK_SIZE,
        )
        layout = KVLayout(groups=(group,), tp_size=1, model_hash="bench")
        self._memory = MemoryFile.create("bench-kv", num_blocks * layout.block_bytes)
        handle = KVCacheHandle(rank=0, pid=os.getpid(), fd=self._memory.fd, num_blocks=num_blocks)
        self._view = KVCacheView(handle, layout, device=device)
        self._done: asyncio.Queue[HostTierEvent] = asyncio.Queue()
        config = PoolConfig(
            num_slots=num_blocks, share=(0, num_processes), process=0, check_threads=threads
        )
        self._pool = HostPool(self._view, config, self._hear)
        self._blocks = list(range(num_blocks))
        self._num_bytes = num_blocks * layout.block_bytes // num_processes

    def _hear(self, event: TierEvent) -> None:
        if isinstance(event, HostTierEvent):
            self._done.put_nowait(event)

    async def cost(self, job: TierJob) -> tuple[float, float]:
        """Returns GB/s of a job, which must go well, and its CPU seconds a GB."""
        at, cpu = time.perf_counter(), time.process_time()
        self._pool.obey(job)
        event = await self._done.get()
        assert not event.damaged
        gb = self._num_bytes / 1e9
        return gb / (time.perf_counter() - at), (time.process_time() - cpu) / gb

    async def costs(self, job: TierJob) -> dict[str, float]:
        found = [await self.cost(job) for _ in range(_ROUNDS)]
        rates, cpu = [one[0] for one in found], [one[1] for one in found]
        return {
            "GB/s": round(statistics.median(rates), 2),
            "most GB/s": round(max(rates), 2),
            "CPU s a GB": round(statistics.median(cpu), 3),
        }

    def store(self) -> StoreMeta:
        names = [b"%d" % block for block in self._blocks]
        return StoreMeta(1, self._blocks, self._blocks, names)

    def load(self) -> LoadMeta:
        return LoadMeta(2, self._blocks, self._blocks)

    async def close(self) -> None:
        await self._pool.close()
        self._view.close()
        self._memory.close()


async def rates(num_blocks: int, num_processes: int, threads: int) -> dict[str, dict[str, float]]:
    """Returns rates and costs of one share."""
    found = {}
    for name, device in (("checks", FreeDevice()), ("checks and copies", HostDevice())):
        share = Share(num_blocks, num_processes, threads, device)
        await share.cost(share.store())
        found[name] = await share.costs(share.load())
        if name != "checks":
            found["stores"] = await share.costs(share.store())
        await share.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--processes", type=int, default=4, help="that share a block")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    figures = {
        "tokens": args.tokens,
        "processes that share a block": args.processes,
        "one share": {
            f"{threads} threads": asyncio.run(
                rates(args.tokens // _BLOCK_SIZE, args.processes, threads)
            )
            for threads in args.threads
        },
    }
    print(json.dumps(figures, indent=1))
    if args.write:
        print(write_result("tier_loads", figures))


if __name__ == "__main__":
    main()
