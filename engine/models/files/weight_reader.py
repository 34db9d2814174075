"""Reads ranges of bytes from a checkpoint's files, ahead of their consumer.

    1. pieces are asked for in the order of the files
    2. threads read them, this many bytes ahead at most
    3. the caller takes them in the same order; their memory is used again, and for a GPU it is
       known to the device (pinned), which copies from it while the caller goes on

It reads in place of mapping files: one that is cut off meanwhile is an error and not the end of the
process, memory is what the pieces take however large the files are, and a network file system is
asked for megabytes and not for pages.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import xxhash
from torch import Tensor

from engine.models.errors import CheckpointError
from engine.models.files.passing_digests import PassingDigests
from engine.models.files.stored_tensors import PIECE_BYTES

_HASHED_BYTES = 1 << 20
"""This much stays in a core's cache between reading and hashing. For a GPU pieces are hashed as a
whole: threads that change places more often, for the interpreter's lock, cost more."""
_PIECES_MORE = 1
"""Pieces that are read ahead, besides one for each thread."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of bytes of a file.

    Attributes:
        into: Contiguous memory on the host that takes them; None: the reader's own.
        is_kept: The caller may keep the memory for longer than until the next job.
        block_bytes: The size of its blocks for digests; the last may be smaller.
    """

    file: Path
    start: int
    stop: int
    into: Tensor | None = None
    is_kept: bool = False
    block_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start

    @property
    def is_pooled(self) -> bool:
        """Returns whether it is read into memory that is used again: neither what is small, which
        is quick to allocate, nor what does not fit."""
        is_own = self.into is None and not self.is_kept
        return is_own and PIECE_BYTES // 4 < self.num_bytes <= PIECE_BYTES


class ReadJob(Protocol):
    """Needs some pieces at once."""

    @property
    def pieces(self) -> tuple[Piece, ...]: ...


JobT = TypeVar("JobT", bound=ReadJob)
T = TypeVar("T")


@dataclass(slots=True)
class _Memory:
    """Memory of a piece, [bytes] uint8. `copied`: comes when a GPU has read it."""

    bytes: Tensor
    copied: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Waits until it may be written."""
        if self.copied is not None:
            self.copied.synchronize()


class WeightReader:
    """Reads with `num_threads` threads; 0: that of the caller reads. Used once.

    Args:
        gpu: Memory that is used again is pinned meanwhile, and its bytes may still be on their way
            to this device when the caller asks for the next.
        digests: Is given those of all blocks that it wants to know.

    Attributes:
        num_bytes: Read so far.
    """

    def __init__(
        self,
        num_threads: int,
        *,
        gpu: torch.device | None = None,
        digests: PassingDigests | None = None,
    ) -> None:
        self.num_bytes = 0
        self._num_threads = num_threads
        self._gpu = gpu
        self._digests = digests
        self._pinned: list[_Memory] = []
        self._files: dict[Path, int] = {}
        self._free: deque[_Memory] = deque()

    def read(self, jobs: Iterable[JobT]) -> Iterator[tuple[JobT, list[Tensor]]]:
        """Yields each job with its pieces, [bytes] uint8, which are valid until the next one, if
        they are not to be kept.

        Raises:
            CheckpointError: A file is cut off, or cannot be read.
        """
        ahead_bytes = (self._num_threads + _PIECES_MORE) * PIECE_BYTES
        waiting: deque[tuple[JobT, list[tuple[Piece, Future[_Memory]]], int]] = deque()
        bytes_waiting = 0
        with ExitStack() as stack:
            stack.callback(self._close)
            pool: Executor = _Caller()
            if self._num_threads > 0:
                pool = ThreadPoolExecutor(self._num_threads, "weight-reader")
            stack.enter_context(pool)
            stack.callback(pool.shutdown, cancel_futures=True)
            for job in jobs:
                pieces = job.pieces
                size = sum(PIECE_BYTES if piece.is_pooled else piece.num_bytes for piece in pieces)
                while waiting and bytes_waiting + size > ahead_bytes:
                    bytes_waiting -= waiting[0][2]
                    yield from self._take(*waiting.popleft()[:2])
                reads = [(piece, self._submit(pool, piece)) for piece in pieces]
                waiting.append((job, reads, size))
                bytes_waiting += size
            while waiting:
                yield from self._take(*waiting.popleft()[:2])

    def _take(
        self, job: JobT, reads: list[tuple[Piece, Future[_Memory]]]
    ) -> Iterator[tuple[JobT, list[Tensor]]]:
        memory = [read.result() for _, read in reads]
        parts = [(part, piece) for part, (piece, _) in zip(memory, reads, strict=True)]
        self.num_bytes += sum(piece.num_bytes for _, piece in parts)
        yield job, [part.bytes[: piece.num_bytes] for part, piece in parts]
        for part, piece in parts:
            if part.copied is not None:
                part.copied.record(torch.cuda.current_stream(self._gpu))
            if piece.is_pooled:
                self._free.append(part)

    def _submit(self, pool: Executor, piece: Piece) -> Future[_Memory]:
        file = self._files.get(piece.file)
        if file is None:
            with _named(piece.file):
                file = self._files[piece.file] = os.open(piece.file, os.O_RDONLY | os.O_CLOEXEC)
        if piece.into is not None:
            memory = _Memory(piece.into.reshape(-1).view(torch.uint8))
        elif piece.is_pooled:
            memory = self._free.popleft() if self._free else self._pooled()
        else:
            memory = _Memory(torch.empty(piece.num_bytes, dtype=torch.uint8))
        digests = self._digests
        if digests is not None and not (piece.block_bytes and digests.follows(piece.file)):
            digests = None
        step = _HASHED_BYTES if self._gpu is None else PIECE_BYTES
        return pool.submit(_read, file, piece, memory, digests, step)

    def _pooled(self) -> _Memory:
        """Makes memory of a piece that is used again."""
        memory = _Memory(torch.empty(PIECE_BYTES, dtype=torch.uint8))
        if self._gpu is not None and _register(memory.bytes):
            memory.copied = _event()
            self._pinned.append(memory)
        return memory

    def _close(self) -> None:
        if self._pinned:
            torch.cuda.current_stream(self._gpu).synchronize()
        for memory in self._pinned:
            _cuda().cudaHostUnregister(memory.bytes.data_ptr())
        self._pinned.clear()
        for file in self._files.values():
            os.close(file)
        self._files.clear()


class _Caller(Executor):
    """Does at once what it is given."""

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        done = Future[T]()
        try:
            done.set_result(function(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


def _cuda() -> Any:
    """Returns CUDA's runtime as torch has it."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def _register(memory: Tensor) -> bool:
    """Pins memory in place: what the allocator of pinned memory gives it keeps. Returns False where
    the system has none left to pin, which costs only time."""
    runtime = _cuda()
    found = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    return bool(found == runtime.cudaError.success)


def _read(
    file: int, piece: Piece, memory: _Memory, digests: PassingDigests | None, step: int
) -> _Memory:
    """Reads a piece, and returns `memory`. What `digests` are wanted of is hashed `step` by
    `step`."""
    memory.wait()
    view = memory.bytes.numpy().data[: piece.num_bytes]
    if digests is None:
        _fill(file, piece, view, 0, piece.num_bytes)
        return memory
    for first in range(0, piece.num_bytes, piece.block_bytes):
        end = min(first + piece.block_bytes, piece.num_bytes)
        digest = xxhash.xxh3_128()
        for start in range(first, end, step):
            stop = min(start + step, end)
            _fill(file, piece, view, start, stop)
            digest.update(view[start:stop])
        digests.took((piece.file, piece.start + first, piece.start + end), digest.digest())
    return memory


def _fill(file: int, piece: Piece, view: memoryview, done: int, stop: int) -> None:
    """Reads bytes [done, stop) of a piece; one call of the kernel gives 2 GiB at most."""
    while done < stop:
        with _named(piece.file):
            count = os.preadv(file, [view[done:stop]], piece.start + done)
        if count == 0:
            raise CheckpointError(
                piece.file,
                f"is cut off: {piece.start + done} of {piece.stop} bytes are there",
                "copy or download the checkpoint again",
            )
        done += count


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Names the file that an operating system's error is about."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            path, f"cannot be read ({error})", "copy or download the checkpoint again"
        ) from error
