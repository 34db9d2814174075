"""Blocks that leave the cache and come back, through real transfer processes that are killed at
random, in memory and files that are damaged at random: every block that comes back is compared.

    1. store: blocks are filled with what their names say, and stored
    2. load:  blocks are filled with garbage, then with what is found; each byte is compared
    3. crash: one process is killed; or all of them, and another engine starts in the same folders

A cycle is one of 1 and 2. As a program it runs for long, and prints what it saw:

    PYTHONPATH=.:tests:tests/kv_transfer python tests/kv_transfer/tier_stress.py --cycles 100000

With --write it writes bench/results/tier_stress.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import select
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from kv_caches import layout
from kv_nodes import KVNode

from bench.record import write_result
from kv_transfer.config import KVTransferConfig
from kv_transfer.control.transfer_processes import TransferProcessFailed
from kv_transfer.metadata import KVConnectorOutput
from kv_transfer.tiers.host_tier import PooledHostTier

SHAPE = layout(num_layers=3)
NUM_BLOCKS, NUM_SLOTS, NUM_FILES, NUM_NAMES = 48, 24, 64, 160
_MOST = 6
_MOST_STARTS = 10
_PATIENCE_S = 600
"""Beside others, at low priority, little may happen for long."""
_NOTHING = KVConnectorOutput()


@dataclass(frozen=True, slots=True)
class _Job:
    names: list[bytes]
    blocks: list[int]
    is_load: bool


class TierStress:
    """One engine after another, in `folder`."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._rng = random.Random(seed)
        self._names = [hashlib.sha256(b"%d" % i).digest() for i in range(NUM_NAMES)]
        self.seen = Counter[str]()
        """Counts what has happened; `wrong` must stay 0."""
        self._jobs: dict[int, _Job] = {}
        self._start()

    def run(self, cycles: int, cycles_per_crash: int) -> None:
        """Runs so many more cycles. Raises AssertionError for the first wrong byte."""
        begun = self.seen["cycles"]
        next_crash = begun + cycles_per_crash
        while self.seen["cycles"] < begun + cycles:
            if len(self._jobs) >= 6 or len(self._free) < 2 * _MOST or not self._tier.is_ready:
                self._take_answers()
            elif self.seen["cycles"] >= next_crash:
                next_crash += cycles_per_crash
                self._crash()
            else:
                self._damage_something()
                self._cycle()
        self._settle()

    def report(self, seconds: float) -> None:
        seen = self.seen
        print(
            f"{seen['cycles']} cycles, {seen['compared']} blocks compared, "
            f"{seen['deaths of an engine']} engines died, {seconds:.0f} s",
            file=sys.stderr,
        )

    def close(self) -> None:
        self._count()
        self._node.close()

    # One engine -------------------------------------------------------------------------------

    def _start(self) -> None:
        block_bytes = SHAPE.block_bytes
        config = KVTransferConfig(
            kv_role="kv_producer",
            num_processes=2,
            chunk_bytes=2048,
            staging_bytes=4 << 20,
            host_tier_bytes=NUM_SLOTS * block_bytes,
            host_tier_path=str(self._folder / "memory"),
            disk_tier_bytes=NUM_FILES * block_bytes,
            disk_tier_path=str(self._folder / "disk"),
        )
        self._node = self._started(config)
        tier = self._node.connector.host_tier
        assert tier is not None
        self._tier: PooledHostTier = tier
        self._words = self._node.caches[0].words
        self._free = list(range(NUM_BLOCKS))
        self._is_whole = True
        self._wait_until_ready()
        self.seen["found after a start"] += sum(name in tier for name in self._names)

    def _started(self, config: KVTransferConfig) -> KVNode:
        """Starts an engine; where others leave it no processor for a minute, yet another one."""
        for _ in range(_MOST_STARTS):
            try:
                return KVNode(config, SHAPE, NUM_BLOCKS)
            except TransferProcessFailed:
                self.seen["starts that took too long"] += 1
        raise AssertionError(f"no engine has started of {_MOST_STARTS}")

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not self._tier.is_ready:
            assert time.monotonic() < deadline, self._node.connector.counters
            self._take_answers()

    def _crash(self) -> None:
        if self._is_whole and self._rng.random() < 0.3:
            # Another death of a young process would have to wait for its restart.
            self._is_whole = False
            os.kill(self._rng.choice(self._node.connector.process_pids), signal.SIGKILL)
            self.seen["deaths of a process"] += 1
            return
        for pid in self._node.connector.process_pids:
            os.kill(pid, signal.SIGKILL)
        self._count()
        self._node.close()
        self._jobs.clear()
        self.seen["deaths of an engine"] += 1
        self._start()

    def _count(self) -> None:
        """Adds what the engine has counted."""
        names = "loaded_blocks", "damaged_blocks", "spilled_blocks", "fetched_blocks"
        counters = self._tier.counters
        self.seen.update({name: int(counters[f"host_tier_{name}"]) for name in names})
        self.seen["displaced_blocks"] += int(counters["host_tier_displaced_blocks"])
        self.seen["evicted_files"] += int(counters["disk_tier_evicted_blocks"])
        self.seen["damaged_files"] += int(counters["disk_tier_damaged_files"])

    # What it does -----------------------------------------------------------------------------

    def _cycle(self) -> None:
        self.seen["cycles"] += 1
        names = self._rng.sample(self._names, self._rng.randint(1, _MOST))
        found = self._tier.num_found(names, 0)
        if found:
            self._load(names[:found])
        else:
            self._store([name for name in names if name not in self._tier])

    def _load(self, names: list[bytes]) -> None:
        blocks = [self._free.pop() for _ in names]
        self._words[:, blocks] = 0xDEAD
        self._jobs[self._tier.load(names, blocks)] = _Job(names, blocks, True)

    def _store(self, names: list[bytes]) -> None:
        blocks = [self._free.pop() for _ in names]
        for name, block in zip(names, blocks, strict=True):
            self._words[:, block] = self._contents(name)
        begun = self._tier.store(list(zip(names, blocks, strict=True)))
        count = 0
        if begun is not None:
            job, count = begun
            self._jobs[job] = _Job(names[:count], blocks[:count], False)
        self._free += blocks[count:]

    def _contents(self, name: bytes) -> np.ndarray:
        rng = np.random.default_rng(list(name[:8]))
        one = self._words[:, 0]
        return rng.integers(0, 1 << 16, one.shape, np.uint16).astype(one.dtype)

    def _damage_something(self) -> None:
        """Flips a bit of a file, or of a page in memory, or leaves half of one, every now and
        then."""
        if self._rng.random() > 0.02:
            return
        files = list((self._folder / "disk").rglob("*.kv"))
        kind = self._rng.choice(["memory", "file", "short"])
        if kind == "memory":
            # A bit that flips before its checksum is computed is a bit that was stored.
            is_stored = any(not job.is_load for job in self._jobs.values())
            files = [] if is_stored else list((self._folder / "memory").rglob("*.slots"))
        if not files:
            return
        try:
            self._damage(self._rng.choice(files), kind)
        except FileNotFoundError:
            return  # It was evicted a moment ago.
        self.seen[f"damage: {kind}"] += 1

    def _damage(self, path: Path, kind: str) -> None:
        size = path.stat().st_size
        if kind == "short":
            os.truncate(path, self._rng.randrange(size))
            return
        # Of memory the end, where pages are: a record is written by one process alone.
        start = max(0, size - NUM_SLOTS * 64) if kind == "memory" else 0
        with path.open("r+b") as file:
            place = self._rng.randrange(start, size)
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 1 << self._rng.randrange(8)]))

    def _settle(self) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while self._jobs:
            assert time.monotonic() < deadline, self._tier.leftovers()
            self._take_answers()

    def _take_answers(self) -> None:
        """Waits for something to happen, and compares what has come back."""
        assert not self._tier._off, self._tier._off
        poller = select.poll()
        poller.register(self._node.connector.fileno(), select.POLLIN)
        poller.poll(100)
        output = self._node.connector.get_finished() or _NOTHING
        for number, is_right in output.host_jobs.items():
            job = self._jobs.pop(number, None)
            if job is None:
                continue
            if job.is_load and is_right:
                for name, block in zip(job.names, job.blocks, strict=True):
                    self.seen["compared"] += 1
                    if not np.array_equal(self._words[:, block], self._contents(name)):
                        self.seen["wrong"] += 1
                        raise AssertionError(f"a wrong block came back: {dict(self.seen)}")
            self.seen["failed jobs"] += not is_right
            self._free += job.blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cycles", type=int, default=100_000)
    parser.add_argument("--cycles-per-crash", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        stress = TierStress(Path(folder), args.seed)
        started = time.monotonic()
        while (left := args.cycles - stress.seen["cycles"]) > 0:
            stress.run(min(left, max(1, args.cycles // 20)), args.cycles_per_crash)
            stress.report(time.monotonic() - started)
        stress.close()
        figures = {**stress.seen, "wrong": stress.seen["wrong"]}
        figures["seconds"] = round(time.monotonic() - started)
    print(json.dumps(figures, indent=1))
    if args.write:
        print(write_result("tier_stress", figures))


if __name__ == "__main__":
    main()
