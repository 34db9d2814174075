#!/usr/bin/env python3
"""The broadcast of step messages: what sending costs, how fast readers wake, what idling costs.

Readers are processes like the workers. Between messages everybody sleeps, as in an engine whose
steps take `--gap` seconds, so a wake-up is the whole way: futex, scheduler of the kernel, copy,
checksum. One case waits for seconds between messages: its CPU share is that of an idle worker.
The ring is for workers on the engine core's host; TCP, encrypted, here over loopback, for others.

    python -m bench.engine.message_queue
"""

from __future__ import annotations

import argparse
import os
import secrets
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

import msgspec
import zmq

from bench.record import write_result
from engine.executor.message_queue import MessageQueueHandle, MessageQueueWriter
from engine.executor.open_queue import open_queue
from engine.executor.remote_queue import RemoteQueueHandle, RemoteQueueWriter
from host.child_process import ipc_address, read_config
from host.local_socket import Context, bind_socket, connect_socket
from host.secure_socket import LinkKey

_WARM_UP = 5


class ReaderConfig(msgspec.Struct):
    handle: MessageQueueHandle | RemoteQueueHandle
    reader: int
    reply_address: str


class Reply(msgspec.Struct, array_like=True):
    received_at: float
    cpu_s: float


@dataclass(slots=True)
class Case:
    """Times in microseconds. `reader_cpu_percent`: of one core, over the whole case."""

    num_readers: int
    message_bytes: int
    gap_s: float
    transport: str = "ring"
    send_p50_us: float = 0.0
    send_p99_us: float = 0.0
    wake_up_p50_us: float = 0.0
    wake_up_p99_us: float = 0.0
    reader_cpu_percent: float = 0.0


def read() -> None:
    """Runs the reader's process."""
    config = read_config(ReaderConfig)
    context = zmq.Context()
    replies = connect_socket(context, zmq.PUSH, config.reply_address)
    queue = open_queue(context, config.handle, config.reader, lambda: None)
    while queue.dequeue() != b"end":
        received_at = time.monotonic()
        replies.send(msgspec.msgpack.encode(Reply(received_at, time.process_time())))
    queue.close()
    context.destroy()


def start_reader(config: ReaderConfig) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "bench.engine.message_queue", "--reader"]
    reader = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert reader.stdin is not None
    reader.stdin.write(b"%d\n" % os.getpid() + msgspec.json.encode(config))
    reader.stdin.close()
    return reader


def new_queue(context: Context, name: str, case: Case) -> MessageQueueWriter | RemoteQueueWriter:
    if case.transport == "tcp":
        key = LinkKey.create()
        return RemoteQueueWriter(context, "127.0.0.1", key, case.num_readers, lambda: None)
    addresses = [ipc_address(name, f"reader{r}") for r in range(case.num_readers)]
    return MessageQueueWriter(context, name, addresses, lambda: None)


def measure(case: Case, num_messages: int) -> None:
    name = f"bench-{secrets.token_hex(6)}"
    context = zmq.Context()
    replies = bind_socket(context, zmq.PULL, ipc_address(name, "replies"))
    queue = new_queue(context, name, case)
    readers = [
        start_reader(ReaderConfig(queue.handle, r, ipc_address(name, "replies")))
        for r in range(case.num_readers)
    ]
    sends, wake_ups, answers = [], [], []
    for _ in range(num_messages + _WARM_UP):
        message = os.urandom(case.message_bytes)
        started_at = time.monotonic()
        queue.enqueue(message)
        sends.append(time.monotonic() - started_at)
        for _ in readers:
            answers.append(msgspec.msgpack.decode(replies.recv(), type=Reply))
            wake_ups.append(answers[-1].received_at - started_at)
        time.sleep(case.gap_s)
    queue.enqueue(b"end")
    for reader in readers:
        reader.wait()
    queue.close()
    context.destroy(linger=0)
    case.send_p50_us, case.send_p99_us = percentiles(sends[_WARM_UP:])
    case.wake_up_p50_us, case.wake_up_p99_us = percentiles(wake_ups[_WARM_UP * len(readers) :])
    case.reader_cpu_percent = round(cpu_percent(answers[_WARM_UP * len(readers) :]), 2)


def percentiles(seconds: list[float]) -> tuple[float, float]:
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return round(cuts[49] * 1e6, 1), round(cuts[98] * 1e6, 1)


def cpu_percent(answers: list[Reply]) -> float:
    """Returns the share of the busiest reader; its CPU seconds are the largest that were
    reported.
    """
    worked = max(a.cpu_s for a in answers[-2:]) - min(a.cpu_s for a in answers[:2])
    return 100 * worked / (answers[-1].received_at - answers[0].received_at)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gap", type=float, default=0.005, help="seconds between messages")
    parser.add_argument("--messages", type=int, default=1000)
    parser.add_argument("--reader", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.reader:
        read()
        return
    cases = [
        Case(readers, size, arguments.gap, transport)
        for transport in ("ring", "tcp")
        for readers in (1, 2, 4, 8)
        for size in (300, 10_000, 200_000)
    ]
    for case in cases:
        measure(case, arguments.messages)
        print(case)
    idle = Case(1, 300, 2.0)
    measure(idle, 5)
    print(idle)
    print(write_result("message_queue", [asdict(case) for case in [*cases, idle]]))


if __name__ == "__main__":
    main()
