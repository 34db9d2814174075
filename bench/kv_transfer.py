#!/usr/bin/env python3
"""The KV data plane against raw TCP: GB/s and CPU seconds per GB, in the same run and layout.

One prefill and one decode connector with real transfer processes move the KV of one prompt (an
8B Llama by default: 32 layers, 8 heads of 128, bf16, 2048 tokens) from one cache into another,
through block tables and checksums. Measured from the two commands until the decode side
reports that all has arrived. Raw TCP moves as many bytes in as large chunks with as many
connections. All processes are up together and take turns, so what else the machine does touches
both alike; ratios are taken within a turn. The KV is carried in both ways that nodes can be told to
use (`pull_transport`). Destinations are cleared before and compared byte by
byte after every transfer. 1 GB = 1e9 bytes.

    python -m bench.kv_transfer
    python -m bench.kv_transfer --realtime    (root) other programs have to wait meanwhile
"""

from __future__ import annotations

import argparse
import os
import random
import select
import statistics
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib
import numpy as np

from bench.raw_tcp import RawTcp
from bench.record import RESULTS, write_result
from kv_transfer.base import KVCacheHandle, KVConnectorScheduler
from kv_transfer.config import KVRole, KVTransferConfig, PullTransportName
from kv_transfer.factory import create_scheduler_connector
from kv_transfer.host.memory_file import MemoryFile
from kv_transfer.layer_marks import LayerMarks
from kv_transfer.layout import KVLayout
from kv_transfer.metadata import KVTransferParams

matplotlib.use("Agg")
from matplotlib import pyplot as plt

_STREAMS = (1, 2, 4, 8)
_TRANSPORTS: tuple[PullTransportName, ...] = ("h2", "grpcio")
_RAW_TCP = "raw TCP"
_REALTIME_PRIORITY = 10


@dataclass(slots=True)
class Prompt:
    """All that a connector reads of a request."""

    request_id: str
    num_prompt_tokens: int
    kv_transfer_params: KVTransferParams | None


@dataclass(slots=True)
class PromptChunk:
    """One step that computes the whole prompt."""

    request: Prompt
    first_token: int
    num_tokens: int
    block_ids: list[int]


@dataclass(slots=True)
class Turn:
    """One transfer. CPU in seconds for each GB; `others`: share of the machine others used."""

    gb_per_s: float
    cpu_send: float
    cpu_receive: float
    others: float


@dataclass(slots=True)
class Row:
    """One transport with one number of streams; medians over all turns."""

    transport: str
    streams: int
    gb_per_s: float
    gb_per_s_worst: float
    gb_per_s_best: float
    cpu_send_s_per_gb: float
    cpu_receive_s_per_gb: float
    of_raw_tcp: float
    cpu_of_raw_tcp: float
    others: float
    turns: int


class Caches:
    """Source and destination, one byte pattern, and the blocks of the prompt on both sides."""

    def __init__(self, layout: KVLayout, num_tokens: int) -> None:
        self.layout = layout
        self.num_tokens = num_tokens
        self.num_blocks = layout.num_blocks_for(num_tokens)
        self.num_bytes = layout.num_layers * self.num_blocks * layout.block_bytes
        self.source = MemoryFile.create("bench-source", self.num_bytes)
        self.target = MemoryFile.create("bench-target", self.num_bytes)
        self.marks = LayerMarks.create(layout.num_layers)
        self._source = np.frombuffer(self.source.buffer, np.uint64)
        self._target = np.frombuffer(self.target.buffer, np.uint64)
        self._source[:] = np.arange(len(self._source), dtype=np.uint64) * 0x9E3779B97F4A7C15
        self.source_blocks = list(range(self.num_blocks))
        self.target_blocks = list(range(self.num_blocks))
        random.Random(0).shuffle(self.target_blocks)

    def clear(self) -> None:
        self._target[:] = 0

    def check_kv(self) -> None:
        shape = (self.layout.num_layers, self.num_blocks, -1)
        arrived = self._target.reshape(shape)[:, self.target_blocks]
        if not np.array_equal(arrived, self._source.reshape(shape)):
            raise SystemExit("the KV that arrived is not the KV that was sent")

    def check_raw(self, chunk_bytes: int) -> None:
        chunks = self._source.reshape(-1, chunk_bytes // 8)
        if not np.array_equal(self._target.reshape(-1, chunk_bytes // 8), chunks[::-1]):
            raise SystemExit("the bytes that arrived are not the bytes that were sent")

    def handle(self, memory: MemoryFile) -> KVCacheHandle:
        return KVCacheHandle(
            rank=0,
            pid=memory.pid,
            fd=memory.fd,
            num_blocks=self.num_blocks,
            marks_fd=self.marks.fd,
        )


class KVPair:
    """One prefill and one decode connector."""

    def __init__(
        self,
        caches: Caches,
        producer: KVConnectorScheduler,
        consumer: KVConnectorScheduler,
    ) -> None:
        self._caches = caches
        self._producer = producer
        self._consumer = consumer
        self._poller = select.poll()
        for connector in (producer, consumer):
            self._poller.register(connector.fileno(), select.POLLIN)
        self._steps = 0
        self._transfer_id = ""
        self._received: list[str] = []
        self._released: list[str] = []

    @property
    def pids(self) -> tuple[list[int], list[int]]:
        return self._producer.process_pids, self._consumer.process_pids

    def run(self) -> None:
        """Until everything has arrived."""
        caches, num_tokens = self._caches, self._caches.num_tokens
        self._transfer_id = transfer_id = uuid.uuid4().hex
        offer = KVTransferParams(do_remote_decode=True, transfer_id=transfer_id)
        wish = KVTransferParams(
            do_remote_prefill=True, transfer_id=transfer_id, peer=self._producer.peer_info
        )
        sent = Prompt("prefill", num_tokens, offer)
        self._steps += 1
        self._producer.update_state_after_alloc(sent, [], 0)
        self._consumer.update_state_after_alloc(
            Prompt("decode", num_tokens, wish), caches.target_blocks, num_tokens
        )
        self._producer.build_connector_meta(
            self._steps, [PromptChunk(sent, 0, num_tokens, caches.source_blocks)]
        )
        self._producer.request_finished(sent)
        self._until(self._received)

    def settle(self) -> None:
        """Until the prefill side has let go of it."""
        self._until(self._released)

    def close(self) -> None:
        self._producer.shutdown()
        self._consumer.shutdown()

    def _until(self, names: list[str]) -> None:
        while self._transfer_id not in names:
            self._poller.poll(1000)
            for connector in (self._consumer, self._producer):
                output = connector.get_finished()
                if output is not None:
                    if output.failed:
                        raise SystemExit(f"a transfer failed: {output.failed}")
                    self._received += output.finished_recving
                    self._released += output.released


def cpu_seconds(pids: list[int]) -> float:
    """CPU time of all threads of these processes so far."""
    total = 0
    for pid in pids:
        for stat in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            total += int(stat.read_text().split()[0])
    return total / 1e9


def machine_seconds() -> float:
    """Time that all cores together were not idle."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    busy = sum(int(field) for i, field in enumerate(fields[:8]) if i not in (3, 4))
    return busy / os.sysconf("SC_CLK_TCK")


def measure(
    num_bytes: int, senders: list[int], receivers: list[int], run: Callable[[], object]
) -> Turn:
    ours = [*senders, *receivers, os.getpid()]
    before = cpu_seconds(senders), cpu_seconds(receivers), cpu_seconds(ours), machine_seconds()
    started = time.perf_counter()
    run()
    elapsed = time.perf_counter() - started
    after = cpu_seconds(senders), cpu_seconds(receivers), cpu_seconds(ours), machine_seconds()
    send, receive, own, busy = (b - a for a, b in zip(before, after, strict=True))
    gigabytes = num_bytes / 1e9
    others = max(0.0, busy - own) / (elapsed * len(os.sched_getaffinity(0)))
    return Turn(gigabytes / elapsed, send / gigabytes, receive / gigabytes, others)


def summarise(transport: str, streams: int, turns: list[Turn], raw: list[Turn]) -> Row:
    def median(values: list[float]) -> float:
        return round(statistics.median(values), 4)

    rates = [turn.gb_per_s for turn in turns]
    pairs = list(zip(turns, raw, strict=True))
    return Row(
        transport=transport,
        streams=streams,
        gb_per_s=median(rates),
        gb_per_s_worst=round(min(rates), 4),
        gb_per_s_best=round(max(rates), 4),
        cpu_send_s_per_gb=median([turn.cpu_send for turn in turns]),
        cpu_receive_s_per_gb=median([turn.cpu_receive for turn in turns]),
        of_raw_tcp=median([turn.gb_per_s / base.gb_per_s for turn, base in pairs]),
        cpu_of_raw_tcp=median(
            [
                (turn.cpu_send + turn.cpu_receive) / (base.cpu_send + base.cpu_receive)
                for turn, base in pairs
            ]
        ),
        others=median([turn.others for turn in turns]),
        turns=len(turns),
    )


def make_pair(
    caches: Caches, streams: int, transport: PullTransportName, arguments: argparse.Namespace
) -> KVPair:
    def connector(role: KVRole, memory: MemoryFile) -> KVConnectorScheduler:
        config = KVTransferConfig(
            kv_role=role,
            num_processes=arguments.processes,
            num_streams=streams,
            chunk_bytes=arguments.chunk_kib << 10,
            staging_bytes=arguments.staging_mib << 20,
            pull_transport=transport,
            transport=arguments.data,
        )
        engine_id = f"bench-{uuid.uuid4().hex[:12]}"
        return create_scheduler_connector(
            config, engine_id, 1, caches.layout, [caches.handle(memory)]
        )

    return KVPair(
        caches,
        connector("kv_producer", caches.source),
        connector("kv_consumer", caches.target),
    )


Case = tuple[str, int]
"""(transport, streams)."""


def take_turns(
    caches: Caches,
    pairs: dict[Case, KVPair],
    raws: dict[int, RawTcp],
    arguments: argparse.Namespace,
) -> dict[Case, list[Turn]]:
    """The first round warms up."""
    turns: dict[Case, list[Turn]] = defaultdict(list)
    for turn in range(arguments.turns + 1):
        for streams, raw in raws.items():
            caches.clear()
            sender, receiver = raw.pids
            measured = {_RAW_TCP: measure(caches.num_bytes, [sender], [receiver], raw.run)}
            caches.check_raw(arguments.chunk_kib << 10)
            for transport in arguments.transports:
                pair = pairs[transport, streams]
                caches.clear()
                measured[transport] = measure(caches.num_bytes, *pair.pids, pair.run)
                caches.check_kv()
                pair.settle()
            for transport, result in measured.items():
                if turn > 0:
                    turns[transport, streams].append(result)
    return turns


def plot(rows: list[Row], path: Path) -> None:
    figure, (rate, cpu) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for transport, marker in ((_RAW_TCP, "o"), ("h2", "s"), ("grpcio", "^")):
        mine = [row for row in rows if row.transport == transport]
        label = transport if transport == _RAW_TCP else f"KV transfer, {transport}"
        streams = [row.streams for row in mine]
        rate.errorbar(
            streams,
            [row.gb_per_s for row in mine],
            yerr=[
                [row.gb_per_s - row.gb_per_s_worst for row in mine],
                [row.gb_per_s_best - row.gb_per_s for row in mine],
            ],
            marker=marker,
            capsize=3,
            label=label,
        )
        totals = [row.cpu_send_s_per_gb + row.cpu_receive_s_per_gb for row in mine]
        cpu.plot(streams, totals, marker=marker, label=label)
    for axes, name in ((rate, "GB/s (median, worst, best)"), (cpu, "CPU seconds per GB")):
        axes.set(xlabel="streams", ylabel=name, xscale="log", ylim=(0, None))
        axes.set_xticks(_STREAMS, labels=[str(streams) for streams in _STREAMS])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)


def print_rows(rows: list[Row]) -> None:
    print(f"{'':12} streams   GB/s  worst   best  CPU-s/GB send+receive  of TCP  CPU/TCP  others")
    for row in rows:
        print(
            f"{row.transport:12} {row.streams:7} {row.gb_per_s:6.2f} {row.gb_per_s_worst:6.2f} "
            f"{row.gb_per_s_best:6.2f}  {row.cpu_send_s_per_gb:8.3f} + "
            f"{row.cpu_receive_s_per_gb:<10.3f} {row.of_raw_tcp:6.2f} "
            f"{row.cpu_of_raw_tcp:8.2f} {row.others:7.0%}"
        )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="KV transfer against raw TCP")
    parser.add_argument("--tokens", type=int, default=2048, help="of the prompt; 128 KiB each")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--streams", type=int, nargs="+", default=list(_STREAMS))
    parser.add_argument("--processes", type=int, default=1, help="transfer processes of each side")
    parser.add_argument("--chunk-kib", type=int, default=2048)
    parser.add_argument("--staging-mib", type=int, default=256)
    parser.add_argument("--transports", choices=_TRANSPORTS, nargs="+", default=list(_TRANSPORTS))
    parser.add_argument(
        "--data", choices=("grpc", "cuda_ipc"), default="grpc",
        help="cuda_ipc: decode copies out of the prefill node's cache itself",
    )  # fmt: skip
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--realtime", action="store_true", help="round-robin scheduling (root)")
    parser.add_argument("--name", default="kv_transfer", help="of the result files; empty: none")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.realtime:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(_REALTIME_PRIORITY))
    layout = KVLayout(
        model_hash="bench",
        dtype="bfloat16",
        num_layers=32,
        num_kv_heads=8,
        head_dim=128,
        block_size=arguments.block_size,
        tp_size=1,
    )
    caches = Caches(layout, arguments.tokens)
    chunk_bytes = arguments.chunk_kib << 10
    pairs: dict[Case, KVPair] = {
        (transport, streams): make_pair(caches, streams, transport, arguments)
        for streams in arguments.streams
        for transport in arguments.transports
    }
    raws = {
        streams: RawTcp(caches.source, caches.target, streams, chunk_bytes)
        for streams in arguments.streams
    }
    try:
        turns = take_turns(caches, pairs, raws, arguments)
    finally:
        for pair in pairs.values():
            pair.close()
        for raw in raws.values():
            raw.close()
    rows = [
        summarise(transport, streams, turns[transport, streams], turns[_RAW_TCP, streams])
        for streams in arguments.streams
        for transport in (_RAW_TCP, *arguments.transports)
    ]
    print_rows(rows)
    if arguments.name:
        figures = {"settings": vars(arguments), "rows": [asdict(row) for row in rows]}
        print("written:", write_result(arguments.name, figures))
        plot(rows, RESULTS / f"{arguments.name}.png")


if __name__ == "__main__":
    main()
