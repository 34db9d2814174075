#!/usr/bin/env python3
"""The KV data plane against raw TCP: GB/s and CPU seconds per GB, in the same run and layout.

One prefill and one decode connector with real transfer processes move the KV of one prompt (an
8B Llama: 32 layers, 8 heads of 128, bf16) from one cache into another, through block tables and
checksums. Measured from the two commands until the decode side reports that all has arrived. Raw
TCP moves as many bytes in as large chunks with as many connections and processes. The processes of
one point are up together and take turns, so what else the machine does touches all alike; ratios
are taken within a turn. The KV is carried in both ways that nodes can be asked to use
(`pull_transport`). Destinations are cleared before and compared byte by byte after every transfer.
1 GB = 1e9 bytes.

    python -m bench.kv.transfer                          1 to 16 streams
    python -m bench.kv.transfer --sweep processes        or chunk-kib, tokens
    python -m bench.kv.transfer --sweep receive-threads  0: event loops receive
    python -m bench.kv.transfer --sweep tokens --points 500 2000 8000
    python -m bench.kv.transfer --realtime               (root) other programs have to wait
    python -m bench.kv.transfer --gpus 0 1               from GPU 0 to GPU 1, over TCP
    python -m bench.kv.transfer --gpus 0 1 --data cuda_ipc,stream

Standard error tells each stage as it begins and each transfer as it ends, so a run that is cut off
says where it stood; `--limit-s` ends one that hangs.

What is not swept stays as its flag says. Writes bench/results/NAME.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.arguments import parser_of
from bench.figures import markdown
from bench.kv.pair import Caches, Case, KVPair, RawTcp, llama_8b
from bench.record import write_result
from edge.logs.setup import LogStyle, setup_logging

_TRANSPORTS = ("h2", "grpcio")
_RAW_TCP = "raw TCP"
_REALTIME_PRIORITY = 10


@dataclass(frozen=True, slots=True)
class Sweep:
    """The values of a setting, and the case with one of them."""

    points: tuple[int, ...]
    at: Callable[[Case, int], Case]


def _in_whole_blocks(case: Case) -> Case:
    """Rounds to whole blocks, which can be compared byte by byte."""
    size = case.block_size
    return replace(case, tokens=-(-case.tokens // size) * size)


def _with_processes(case: Case, count: int) -> Case:
    """Adds processes, with two streams each at least."""
    return replace(case, processes=count, streams=max(case.streams, 2 * count))


SWEEPS = {
    "streams": Sweep((1, 2, 4, 8, 16), lambda case, n: replace(case, streams=n)),
    "processes": Sweep((1, 2, 4, 8), _with_processes),
    "chunk-kib": Sweep(
        (256, 512, 1024, 2048, 4096), lambda case, kib: replace(case, chunk_bytes=kib << 10)
    ),
    "tokens": Sweep(
        (500, 1000, 2000, 4000, 8000, 16_000, 32_000), lambda case, n: replace(case, tokens=n)
    ),
    "receive-threads": Sweep((0, 1, 2, 4), lambda case, n: replace(case, receive_threads=n)),
}


def say(line: str) -> None:
    print(f"{time.monotonic():10.3f} {line}", file=sys.stderr, flush=True)


@dataclass(slots=True)
class Turn:
    """One transfer. CPU in seconds for each GB; `others`: share of the machine others used."""

    num_bytes: int
    seconds: float
    cpu_send: float
    cpu_receive: float
    others: float

    @property
    def gb_per_s(self) -> float:
        return self.num_bytes / 1e9 / self.seconds

    @property
    def cpu(self) -> float:
        return self.cpu_send + self.cpu_receive


Row = dict[str, Any]
"""Holds one transport at one point of a sweep."""


def timed(
    senders: list[int],
    receivers: list[int],
    run: Callable[[], object],
    num_bytes: Callable[[], int],
) -> Turn:
    """Measures one turn; `num_bytes` is asked afterwards."""
    ours = [*senders, *receivers, os.getpid()]
    before = cpu_seconds(senders), cpu_seconds(receivers), cpu_seconds(ours), machine_seconds()
    started = time.perf_counter()
    run()
    elapsed = time.perf_counter() - started
    after = cpu_seconds(senders), cpu_seconds(receivers), cpu_seconds(ours), machine_seconds()
    send, receive, own, busy = (b - a for a, b in zip(before, after, strict=True))
    gigabytes = num_bytes() / 1e9
    others = max(0.0, busy - own) / (elapsed * len(os.sched_getaffinity(0)))
    return Turn(num_bytes(), elapsed, send / gigabytes, receive / gigabytes, others)


def summarise(transport: str, point: int, turns: list[Turn], raw: Sequence[Turn]) -> Row:
    """Returns medians over turns. `raw`: raw TCP's turns beside them, or nothing; rates are
    compared within a turn."""
    rates = [turn.gb_per_s for turn in turns]
    pairs = list(zip(turns, raw, strict=False))
    return {
        "transport": transport,
        "point": point,
        "num_bytes": turns[0].num_bytes,
        "milliseconds": _median([turn.seconds * 1e3 for turn in turns]),
        "gb_per_s": _median(rates),
        "gb_per_s_worst": round(min(rates), 4),
        "gb_per_s_best": round(max(rates), 4),
        "cpu_send_s_per_gb": _median([turn.cpu_send for turn in turns]),
        "cpu_receive_s_per_gb": _median([turn.cpu_receive for turn in turns]),
        "of_raw_tcp": _median([turn.gb_per_s / base.gb_per_s for turn, base in pairs]),
        "cpu_of_raw_tcp": _median([turn.cpu / base.cpu for turn, base in pairs]),
        "others": _median([turn.others for turn in turns]),
        "turns": len(turns),
    }


def cpu_seconds(pids: list[int]) -> float:
    """Returns the CPU time of all threads of these processes so far."""
    total = 0
    for pid in pids:
        for stat in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            total += int(stat.read_text().split()[0])
    return total / 1e9


def machine_seconds() -> float:
    """Returns the time that all cores together were not idle."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    busy = sum(int(field) for i, field in enumerate(fields[:8]) if i not in (3, 4))
    return busy / os.sysconf("SC_CLK_TCK")


def _median(values: list[float]) -> float | None:
    return round(statistics.median(values), 4) if values else None


def raw_turn(files: Caches, tcp: RawTcp, case: Case) -> Turn:
    """Moves as many bytes by raw TCP between memory files."""
    files.clear()
    turn = timed(*tcp.pids, tcp.run, lambda: files.num_bytes)
    files.check_raw(case.chunk_bytes)
    return turn


def kv_turn(caches: Caches, pair: KVPair) -> Turn:
    caches.clear()
    turn = timed(*pair.pids, pair.run, lambda: pair.num_bytes)
    caches.check_kv()
    pair.settle()
    return turn


def measure_point(case: Case, point: int, args: argparse.Namespace) -> list[Row]:
    """Has all kinds of transfer take turns; the first round warms up."""
    gpus = tuple(args.gpus) if args.gpus else None
    layout, count = llama_8b(case.block_size), case.processes
    kinds: dict[str, Callable[[], Turn]] = {}
    turns: dict[str, list[Turn]] = defaultdict(list)
    with ExitStack() as stack:
        say(f"caches of {case.tokens} tokens ...")
        caches = stack.enter_context(closing(Caches(layout, case.tokens, gpus)))
        for transport in args.transports:
            say(f"{count} + {count} transfer processes, {case.data}, {transport} ...")
            pair = KVPair(caches, replace(case, transport=transport))
            stack.callback(pair.close)
            kinds[transport] = lambda pair=pair: kv_turn(caches, pair)
        if not args.no_raw_tcp:
            own = closing(Caches(layout, case.tokens, None)) if gpus else nullcontext(caches)
            files = stack.enter_context(own)
            tcp = RawTcp(*files.files, case.streams, case.chunk_bytes, case.processes)
            stack.callback(tcp.close)
            kinds = {_RAW_TCP: lambda: raw_turn(files, tcp, case), **kinds}
        say("ready; transfers ...")
        for number in range(args.turns + 1):
            for kind, take in kinds.items():
                turn = take()
                say(f"turn {number}, {kind}: {turn.num_bytes / 1e6:.0f} MB in {turn.seconds:.4f} s")
                if number:
                    turns[kind].append(turn)
    raw = turns.get(_RAW_TCP, [])
    return [summarise(kind, point, mine, raw) for kind, mine in turns.items()]


def print_rows(rows: list[Row], name: str) -> None:
    head = "MB, ms, GB/s, worst, best, CPU-s/GB sent, received, of TCP, CPU of TCP, others"
    cells = []
    for row in rows:
        numbers = [row["num_bytes"] / 1e6, *list(row.values())[3:-1]]
        named = ["" if one is None else f"{one:.4g}" for one in numbers]
        cells.append([row["transport"], str(row["point"]), *named])
    print(markdown(f"transport, {name}, {head}", cells))


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--sweep", choices=SWEEPS, default="streams")
    parser.add_argument("--points", type=int, nargs="+", help="values of what is swept")
    parser.add_argument(
        "--tokens", type=int, default=2048, help="of the prompt; 128 KiB each, whole blocks"
    )
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--processes", type=int, default=1, help="transfer processes of each side")
    parser.add_argument(
        "--receive-threads", type=int, default=0, help="of each process; 0: its event loop receives"
    )
    parser.add_argument("--chunk-kib", type=int, default=2048)
    parser.add_argument("--staging-mib", type=int, default=512, help="of a rank")
    parser.add_argument("--transports", choices=_TRANSPORTS, nargs="+", default=list(_TRANSPORTS))
    parser.add_argument(
        "--data", choices=("stream", "cuda_ipc,stream", "nixl,stream"),
        default="stream",
        help="cuda_ipc,stream: decode copies out of the prefill node's cache itself; nixl,stream: "
        "it reads it through NIXL",
    )  # fmt: skip
    parser.add_argument(
        "--gpus", type=int, nargs=2, metavar=("FROM", "TO"), help="caches on GPUs; default: host"
    )
    parser.add_argument("--limit-s", type=float, default=60.0, help="of each transfer")
    parser.add_argument("--no-raw-tcp", action="store_true", help="do not compare with it")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--realtime", action="store_true", help="round-robin scheduling (root)")
    parser.add_argument(
        "--name", help="of the result files; empty: none. Default: kv_transfer_SWEEP"
    )
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    setup_logging(LogStyle(), "bench")
    if args.realtime:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(_REALTIME_PRIORITY))
    sweep = SWEEPS[args.sweep]
    case = Case(
        transport="h2",
        streams=args.streams,
        processes=args.processes,
        receive_threads=args.receive_threads,
        chunk_bytes=args.chunk_kib << 10,
        block_size=args.block_size,
        tokens=args.tokens,
        staging_bytes=args.staging_mib << 20,
        data=args.data,
        limit_s=args.limit_s,
    )
    default = f"kv_transfer_{args.sweep.replace('-', '_')}"
    name = default if args.name is None else args.name
    rows: list[Row] = []
    for point in args.points or sweep.points:
        rows += measure_point(_in_whole_blocks(sweep.at(case, point)), point, args)
        if name:
            figures = {"settings": vars(args), "rows": rows}
            write_result(name, figures)
    print_rows(rows, args.sweep)
    if name:
        print(f"written: bench/results/{name}.json")


if __name__ == "__main__":
    main()
