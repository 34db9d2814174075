#!/usr/bin/env python3
"""How long a prompt's KV takes between two nodes of one host when there is hardly any of it.

The layout has as many layers, blocks and chunks as that of Llama-3.1-8B, but heads so short that
copies take little: what is left are messages between processes that have slept. Real transfer
processes, every byte compared at the end. Beside the percentiles stands what copies alone take.

    python -m bench.kv.latency
    python -m bench.kv.latency --processes 4 --tokens 8000
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import asdict, dataclass

import numpy as np

from bench.kv.pair import Case, HostCaches, KVPair
from bench.record import write_result
from kv_transfer.layout import KVLayout, attention_group
from kv_transfer.memory.copy_stream import HostCopyStream

_BLOCK_SIZE = 64
_REAL_HEAD_DIM, _SHORT_HEAD_DIM = 128, 2
_CHUNK_BYTES = (2 << 20) * _SHORT_HEAD_DIM // _REAL_HEAD_DIM
_WARM_UP = 20
_PAUSE_S = 0.01
"""Lets processes fall asleep between two transfers, as they do between two requests."""
_PERCENTILES = (10, 50, 90, 99)


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds from the commands of both nodes until decode's engine hears that all is there,
    by percentile. `copies_ms`: what the copies alone take, one after the other."""

    transports: str
    processes: int
    tokens: int
    transfers: int
    ms: dict[int, float]
    copies_ms: float


def short_layout() -> KVLayout:
    group = attention_group(
        layers=range(32),
        heads=8,
        head_dim=_SHORT_HEAD_DIM,
        dtype="bfloat16",
        block_size=_BLOCK_SIZE,
    )
    return KVLayout(groups=(group,), tp_size=1, model_hash="bench")


def measure(transports: str, tokens: int, processes: int, streams: int, count: int) -> Latency:
    """Measures `count` transfers, one after the other."""
    layout = short_layout()
    caches = HostCaches(layout, -(-tokens // _BLOCK_SIZE) * _BLOCK_SIZE)
    case = Case(
        transport="h2",
        streams=max(streams, 2 * processes) if processes > 1 else streams,
        processes=processes,
        chunk_bytes=_CHUNK_BYTES,
        block_size=_BLOCK_SIZE,
        tokens=tokens,
        data=transports,
    )
    pair = KVPair(caches, case)
    times = []
    try:
        for _ in range(_WARM_UP + count):
            started = time.perf_counter()
            pair.run()
            times.append(1e3 * (time.perf_counter() - started))
            pair.settle()
            time.sleep(_PAUSE_S)
        caches.check_kv(0)
        ordered = sorted(times[_WARM_UP:])
        percentiles = {p: round(ordered[(count - 1) * p // 100], 3) for p in _PERCENTILES}
        copies = round(_copies_ms(caches), 3)
        return Latency(transports, processes, tokens, count, percentiles, copies)
    finally:
        pair.close()
        caches.close()


def _copies_ms(caches: HostCaches) -> float:
    """Returns the median time of all copies of a transfer by one process."""
    stream, page = HostCopyStream(), caches.layout.page_bytes
    blocks = np.arange(caches.layout.num_layers * caches.num_blocks, dtype=np.int64)
    sources = caches.source.address + page * blocks
    targets = caches.target.address + page * np.random.default_rng(0).permutation(blocks)
    sizes = np.full(len(blocks), page)
    times = []
    for _ in range(20):
        started = time.perf_counter()
        stream.copy(targets, sources, sizes)
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--transports", nargs="+", default=["cuda_ipc,stream", "stream"])
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--processes", type=int, default=1, help="of each side")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--count", type=int, default=300, help="transfers of each kind")
    parser.add_argument("--name", default="kv_latency", help="of the result; empty: none")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    rows = [
        measure(transports, args.tokens, args.processes, args.streams, args.count)
        for transports in args.transports
    ]
    print(f"{'transports':18}{'copies':>8}" + "".join(f"{f'p{p}':>8}" for p in _PERCENTILES))
    for row in rows:
        times = "".join(f"{row.ms[p]:8.2f}" for p in _PERCENTILES)
        print(f"{row.transports:18}{row.copies_ms:8.2f}{times}  ms")
    if args.name:
        write_result(args.name, [asdict(row) for row in rows])


if __name__ == "__main__":
    main()
