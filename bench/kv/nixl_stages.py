#!/usr/bin/env python3
"""Walks through NIXL stage by stage between two processes, and says where it stops.

    1. load        the library is imported
    2. agent       UCX opens its devices
    3. memory      what is read, or read into: allocated here (own), as transfer processes allocate
                   windows, or mapped from another process (mapped), as they map caches
    4. register    that memory
    5. connect     the reader learns of the holder
    6. first word  8 bytes of host memory are read
    7. read        growing parts of the memory, three times each; all of it in pieces of 64 KiB

Each stage is announced on standard error before it begins, and ended with its seconds. One that
exceeds `--limit-s` ends its process with the stacks of all threads; the other memory is walked
through all the same. UCX's own words (which transports it chose) are among them.

Beside the pieces, another Python thread of the reader wakes every 0.1 ms: an agent in a process
that launches kernels must not hold its interpreter lock. How late that thread woke is told next to
the longest calls of NIXL, and next to how late it woke while nothing was read.

    python -m bench.kv.nixl_stages                   host memory, over UCX's TCP
    python -m bench.kv.nixl_stages --gpus 0 1        GPU 0 is read into GPU 1
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from ctypes import addressof, c_char
from typing import IO, Any

import msgspec
import numpy as np

from bench.kv.pair import llama_8b, make_caches
from host.child_process import die_with_parent
from kv_transfer.base import KVCacheHandle
from kv_transfer.memory.devices import device_of
from kv_transfer.transports.nixl.agent import NixlAgent, NixlError, load

_BLOCK_SIZE = 128
_WORD_BYTES = 8
_GRACE_S = 2.0
_WAKE_S = 0.0001
_QUIET_S = 1.0
_PIECE_BYTES = 64 << 10
_STUCK = 3
"""Exit status of a process in which a stage exceeded its limit."""


class Place(msgspec.Struct, frozen=True):
    """Says what one process does, and with which memory."""

    role: str
    num_bytes: int
    limit_s: float
    gpu: int | None = None
    mapped: KVCacheHandle | None = None
    """The memory that it maps; it allocates its own where this is None."""


class Holder(msgspec.Struct, frozen=True):
    """Tells the reader where to read."""

    metadata: bytes
    address: int
    device: int | None
    word: int


class Watch:
    """Announces stages, and ends the process when one takes too long."""

    def __init__(self, place: Place) -> None:
        self._name = f"{place.role}, {'mapped' if place.mapped else 'own'} memory"
        self._limit_s = place.limit_s

    @contextlib.contextmanager
    def stage(self, what: str) -> Iterator[None]:
        say(f"{self._name}: {what} ...")
        # Where native code does not give the interpreter lock back, the timer cannot run.
        faulthandler.dump_traceback_later(self._limit_s + _GRACE_S, exit=True)
        stuck = threading.Timer(self._limit_s, self._end, (what,))
        stuck.daemon = True
        stuck.start()
        at = time.perf_counter()
        try:
            yield
        except Exception as error:
            say(f"{self._name}: {what} FAILED after {time.perf_counter() - at:.3f} s: {error}")
            raise
        finally:
            stuck.cancel()
            faulthandler.cancel_dump_traceback_later()
        say(f"{self._name}: {what} took {time.perf_counter() - at:.3f} s")

    def _end(self, what: str) -> None:
        say(f"{self._name}: STUCK: {what} did not end within {self._limit_s:g} s")
        faulthandler.dump_traceback()
        os._exit(_STUCK)


class HeldUp:
    """Tells how late a Python thread of this process woke, at most, within a `with` block."""

    def __init__(self) -> None:
        self.longest_ms = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> HeldUp:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        at = time.perf_counter()
        while not self._ended.is_set():
            time.sleep(_WAKE_S)
            now = time.perf_counter()
            self.longest_ms = max(self.longest_ms, (now - at - _WAKE_S) * 1e3)
            at = now


def say(line: str) -> None:
    print(f"{time.monotonic():10.3f} {line}", file=sys.stderr, flush=True)


class Memory:
    """The memory that is read, or read into. Keeps it alive."""

    def __init__(self, place: Place) -> None:
        self.device: int | None = None
        self.words: mmap.mmap | None = None
        self._kept: Any
        if place.mapped is not None:
            device = device_of(place.mapped)
            self._kept = mapping = device.open_cache(place.mapped)
            self.address, self.device = mapping.address, device.number
        elif place.gpu is not None:
            import torch

            self._kept = torch.zeros(place.num_bytes, dtype=torch.uint8, device=f"cuda:{place.gpu}")
            torch.cuda.synchronize(place.gpu)
            self.address, self.device = self._kept.data_ptr(), place.gpu
        else:
            self._kept, self.address = pages(place.num_bytes)


def pages(num_bytes: int) -> tuple[mmap.mmap, int]:
    memory = mmap.mmap(-1, num_bytes)
    return memory, addressof(c_char.from_buffer(memory))


def start_agent(place: Place, watch: Watch) -> tuple[NixlAgent, Memory, int]:
    """Walks through the stages that both sides have."""
    hosts = ["127.0.0.1"]
    with watch.stage("load"):
        load(hosts)
    with watch.stage("agent"):
        agent = NixlAgent(hosts)
    with watch.stage(f"memory of {place.num_bytes / 1e6:.0f} MB"):
        memory = Memory(place)
    with watch.stage("register host memory"):
        memory.words, word = pages(mmap.PAGESIZE)
        agent.register(word, mmap.PAGESIZE, None)
    with watch.stage(f"register {place.num_bytes / 1e6:.0f} MB, device {memory.device}"):
        agent.register(memory.address, place.num_bytes, memory.device)
    return agent, memory, word


def hold(place: Place, watch: Watch, out: IO[bytes]) -> None:
    """Answers until standard input ends."""
    agent, memory, word = start_agent(place, watch)
    holder = Holder(agent.metadata, memory.address, memory.device, word)
    out.write(msgspec.json.encode(holder) + b"\n")
    out.flush()
    ended = threading.Thread(target=sys.stdin.buffer.read, daemon=True)
    ended.start()
    while ended.is_alive():
        agent.notices()
        time.sleep(0.0002)


def read(place: Place, watch: Watch, out: IO[bytes]) -> None:
    """Reads from the holder, of which standard input tells."""
    agent, memory, word = start_agent(place, watch)
    holder = msgspec.json.decode(sys.stdin.buffer.readline(), type=Holder)
    with watch.stage("connect"):
        name = agent.connect(holder.metadata)

    def take(target: int, source: int, num_bytes: int, ours: int | None, its: int | None) -> float:
        at = time.perf_counter()
        targets, sources, sizes = (np.array([value]) for value in (target, source, num_bytes))
        transfer = agent.read(name, targets, sources, sizes, (ours, its))
        while not transfer.is_done():
            agent.notices()
        return time.perf_counter() - at

    with watch.stage("first word"):
        take(word, holder.word, _WORD_BYTES, None, None)
    rates: dict[str, Any] = {}
    size = _PIECE_BYTES
    while size <= place.num_bytes:
        with watch.stage(f"read {size / 1e6:.2f} MB three times"):
            best = min(
                take(memory.address, holder.address, size, memory.device, holder.device)
                for _ in range(3)
            )
        rates[f"{size / 1e6:.2f} MB"] = round(size / best / 1e9, 3)
        say(f"reader: {size / 1e6:.2f} MB at {size / best / 1e9:.3f} GB/s")
        size *= 16
    with watch.stage("read in pieces"):
        rates["in pieces"] = read_pieces(agent, name, memory, holder, place.num_bytes)
    out.write(json.dumps(rates).encode() + b"\n")
    out.flush()


def read_pieces(
    agent: NixlAgent, name: str, memory: Memory, holder: Holder, num_bytes: int
) -> dict[str, float]:
    """Returns GB/s, and in milliseconds how long posting and the longest look took, and how late
    another thread woke meanwhile and before."""
    with HeldUp() as quiet:
        time.sleep(_QUIET_S)
    offsets = np.arange(0, num_bytes - _PIECE_BYTES + 1, _PIECE_BYTES)
    sizes = np.full(len(offsets), _PIECE_BYTES)
    devices = (memory.device, holder.device)
    looks = [0.0]
    with HeldUp() as busy:
        began = time.perf_counter()
        transfer = agent.read(
            name, memory.address + offsets, holder.address + offsets, sizes, devices
        )
        looked = time.perf_counter()
        post = looked - began
        while not transfer.is_done():
            now = time.perf_counter()
            looks.append(now - looked)
            time.sleep(_WAKE_S)
            looked = time.perf_counter()
        ended = time.perf_counter()
    return {
        "GB/s": round(len(offsets) * _PIECE_BYTES / (ended - began) / 1e9, 3),
        "post": round(post * 1e3, 3),
        "longest look": round(max(looks) * 1e3, 3),
        "other thread late": round(busy.longest_ms, 3),
        "while nothing was read": round(quiet.longest_ms, 3),
    }


def child() -> None:
    """Runs one role. Standard output is for the parent alone: UCX writes to standard error."""
    die_with_parent()
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    place = msgspec.json.decode(sys.stdin.buffer.readline(), type=Place)
    try:
        (hold if place.role == "holder" else read)(place, Watch(place), out)
    except (NixlError, OSError) as error:
        raise SystemExit(f"{place.role}: {error}") from error


def start(place: Place) -> subprocess.Popen[bytes]:
    log = {"UCX_LOG_LEVEL": "info", "UCX_LOG_FILE": "stderr", "UCX_PROTO_INFO": "used"}
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.kv.nixl_stages", "--child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**log, **os.environ},
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(place) + b"\n")
    process.stdin.flush()
    return process


def walk(holder: Place, reader: Place) -> dict[str, Any]:
    """Returns GB/s by size, or which side ended early."""
    sides = [start(holder), start(reader)]
    try:
        for side, process in zip(("holder", "reader"), sides, strict=True):
            assert process.stdin is not None and process.stdout is not None
            line = process.stdout.readline()
            if not line:
                return {"ended early": side, "status": process.wait()}
            if side == "holder":
                with contextlib.suppress(BrokenPipeError):
                    sides[1].stdin.write(line)  # type: ignore[union-attr]
                    sides[1].stdin.flush()  # type: ignore[union-attr]
        return dict(json.loads(line))
    finally:
        for process in sides:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, nargs=2, metavar=("FROM", "TO"))
    parser.add_argument("--tokens", type=int, default=2048, help="so much memory; 128 KiB each")
    parser.add_argument("--memory", nargs="+", choices=("own", "mapped"), default=["own", "mapped"])
    parser.add_argument("--limit-s", type=float, default=20.0, help="of each stage")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child()
        return
    gpus = tuple(args.gpus) if args.gpus else None
    caches = make_caches(llama_8b(_BLOCK_SIZE), args.tokens, gpus)
    found = {}
    for memory in args.memory:
        places = [
            Place(
                role,
                caches.num_bytes,
                args.limit_s,
                args.gpus[index] if args.gpus else None,
                caches.handle(role == "holder") if memory == "mapped" else None,
            )
            for index, role in enumerate(("holder", "reader"))
        ]
        found[memory] = walk(*places)
        say(f"{memory}: {found[memory]}")
    caches.close()
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
