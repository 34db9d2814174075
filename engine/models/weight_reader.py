"""Reads ranges of bytes from a checkpoint's files, ahead of their consumer.

    1. pieces are asked for in the order of the files
    2. threads read them, this many bytes ahead at most
    3. the caller takes them in the same order; their memory is used again

It reads in place of mapping files: one that is cut off meanwhile is an error and not the end of the
process, memory is what the pieces take however large the files are, and a network file system is
asked for megabytes and not for pages.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from engine.models.errors import CheckpointError

PIECE_BYTES = 8 << 20
"""Cuttable tensors are read in pieces of at most this size."""
_PIECES_AHEAD = 2
"""Pieces that are read ahead for each thread."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of bytes of a file.

    Attributes:
        into: Contiguous memory on the host that takes them; None: the reader's own.
        is_kept: The caller may keep the memory for longer than until the next job.
    """

    file: Path
    start: int
    stop: int
    into: Tensor | None = None
    is_kept: bool = False

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


class WeightReader:
    """Reads with `num_threads` threads. Used once.

    Attributes:
        num_bytes: Read so far.
    """

    def __init__(self, num_threads: int) -> None:
        self.num_bytes = 0
        self._num_threads = num_threads
        self._files: dict[Path, int] = {}
        self._free: list[Tensor] = []

    def read(self, jobs: Iterable[JobT]) -> Iterator[tuple[JobT, list[Tensor]]]:
        """Yields each job with its pieces, [bytes] uint8, which are valid until the next one, if
        they are not to be kept.

        Raises:
            CheckpointError: A file is cut off, or cannot be read.
        """
        ahead_bytes = self._num_threads * _PIECES_AHEAD * PIECE_BYTES
        waiting: deque[tuple[JobT, list[tuple[Piece, Future[Tensor]]], int]] = deque()
        bytes_waiting = 0
        with ExitStack() as stack:
            stack.callback(self._close)
            pool = stack.enter_context(ThreadPoolExecutor(self._num_threads, "weight-reader"))
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
        self, job: JobT, reads: list[tuple[Piece, Future[Tensor]]]
    ) -> Iterator[tuple[JobT, list[Tensor]]]:
        memory = [read.result() for _, read in reads]
        parts = [(part, piece) for part, (piece, _) in zip(memory, reads, strict=True)]
        self.num_bytes += sum(piece.num_bytes for _, piece in parts)
        yield job, [part[: piece.num_bytes] for part, piece in parts]
        self._free += [part for part, piece in parts if piece.is_pooled]

    def _submit(self, pool: ThreadPoolExecutor, piece: Piece) -> Future[Tensor]:
        file = self._files.get(piece.file)
        if file is None:
            with _named(piece.file):
                file = self._files[piece.file] = os.open(piece.file, os.O_RDONLY | os.O_CLOEXEC)
        if piece.into is not None:
            memory = piece.into.reshape(-1).view(torch.uint8)
        elif piece.is_pooled and self._free:
            memory = self._free.pop()
        else:
            size = PIECE_BYTES if piece.is_pooled else piece.num_bytes
            memory = torch.empty(size, dtype=torch.uint8)
        return pool.submit(_read, file, piece, memory)

    def _close(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()


def _read(file: int, piece: Piece, memory: Tensor) -> Tensor:
    """Reads a piece and returns `memory`; one call of the kernel gives 2 GiB at most."""
    view = memory.numpy().data[: piece.num_bytes]
    done = 0
    while done < piece.num_bytes:
        with _named(piece.file):
            count = os.preadv(file, [view[done:]], piece.start + done)
        if count == 0:
            raise CheckpointError(
                piece.file,
                f"is cut off: {piece.start + done} of {piece.stop} bytes are there",
                "copy or download the checkpoint again",
            )
        done += count
    return memory


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Names the file that an operating system's error is about."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            path, f"cannot be read ({error})", "copy or download the checkpoint again"
        ) from error
