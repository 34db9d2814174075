#!/usr/bin/env python3
"""Copies from GPU to GPU by a process without torch: alone, and many by one call of the driver.

A child maps a source and a destination cache by CUDA IPC, as a transfer process of decode does, and
copies all blocks of all layers in the destination's random order: by one call for each block, or
for so many (`CudaCopies`). Every byte is compared. GB/s are medians of nine rounds; CPU is the
child's, for one copy. 1 GB = 1e9 bytes.

    python -m bench.kv.gpu_copies --gpus 0 1
    python -m bench.kv.gpu_copies --block-sizes 64 --at-once 1 8 128   tokens of a block, 4 KiB each

Writes bench/results/gpu_copies.json.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

import msgspec
import numpy as np

from bench.kv.pair import GpuCaches, llama_8b
from bench.record import write_result
from kv_transfer.base import KVCacheHandle
from kv_transfer.memory.cuda_driver import cuda_driver
from kv_transfer.memory.devices import device_of

_ROUNDS = 9
_TIMEOUT_S = 60
_NUM_TOKENS = 8192


class Job(msgspec.Struct):
    """The work of a child. `places`: block of the destination for each block of the source."""

    source: KVCacheHandle
    target: KVCacheHandle
    num_layers: int
    block_bytes: int
    places: list[int]
    at_once: int


class Answer(msgspec.Struct):
    gb_per_s: float
    cpu_us_per_copy: float


@dataclass(frozen=True, slots=True)
class Row:
    block_kib: int
    at_once: int
    gb_per_s: float
    cpu_us_per_copy: float


def work(job: Job) -> Answer:
    """Copies; runs in the child."""
    device, driver = device_of(job.target), cuda_driver()
    source, target = device.open_cache(job.source), device.open_cache(job.target)
    layers = np.arange(job.num_layers)[:, None] * len(job.places)
    sources = source.address + job.block_bytes * (layers + np.arange(len(job.places))).ravel()
    targets = target.address + job.block_bytes * (layers + np.array(job.places)).ravel()
    sizes = np.full_like(sources, job.block_bytes)
    stream = driver.new_stream()
    if job.at_once == 1:
        issue, parts = driver.copies.issue_alone, [slice(None)]
    else:
        issue = driver.copies.issue
        parts = [slice(i, i + job.at_once) for i in range(0, len(sizes), job.at_once)]
    rates, costs = [], []
    for _ in range(_ROUNDS):
        cpu, started = time.process_time(), time.perf_counter()
        for part in parts:
            issue(targets[part], sources[part], sizes[part], stream)
        driver.synchronize(stream)
        rates.append(len(sizes) * job.block_bytes / 1e9 / (time.perf_counter() - started))
        costs.append((time.process_time() - cpu) / len(sizes) * 1e6)
    source.close()
    target.close()
    return Answer(statistics.median(rates), statistics.median(costs))


def measure(caches: GpuCaches, at_once: int) -> Row:
    """Measures; runs in the parent, which owns the caches."""
    layout = caches.layout
    job = Job(
        caches.handle(is_source=True),
        caches.handle(is_source=False),
        layout.num_layers,
        layout.page_bytes,
        caches.target_blocks,
        at_once,
    )
    caches.clear()
    child = subprocess.run(
        [sys.executable, "-m", "bench.kv.gpu_copies", "--child"],
        input=msgspec.json.encode(job),
        stdout=subprocess.PIPE,
        timeout=_TIMEOUT_S,
        check=True,
    )
    caches.check_kv(held=0)
    answer = msgspec.json.decode(child.stdout, type=Answer)
    return Row(layout.page_bytes >> 10, at_once, answer.gb_per_s, answer.cpu_us_per_copy)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, nargs=2, default=[0, 1], metavar=("FROM", "TO"))
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[16, 64, 128, 256])
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--name", default="gpu_copies", help="of the result; empty: none")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        sys.stdout.buffer.write(
            msgspec.json.encode(work(msgspec.json.decode(sys.stdin.buffer.read(), type=Job)))
        )
        return
    rows: list[Row] = []
    print(f"{'KiB':>5} {'at once':>8} {'GB/s':>7} {'CPU us a copy':>14}")
    for block_size in args.block_sizes:
        caches = GpuCaches(llama_8b(block_size), _NUM_TOKENS, tuple(args.gpus))
        for at_once in args.at_once:
            row = measure(caches, at_once)
            rows.append(row)
            figures = f"{row.gb_per_s:7.1f} {row.cpu_us_per_copy:14.2f}"
            print(f"{row.block_kib:5} {at_once:8} {figures}", flush=True)
        caches.close()
    if args.name:
        write_result(args.name, {"settings": vars(args), "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
