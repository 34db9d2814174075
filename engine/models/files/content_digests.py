"""Digests of what tensors of a checkpoint hold, of every byte of them.

A tensor is hashed in blocks of whole rows (`blocks_of`), and its digest is that of its blocks'. So
several threads hash one tensor, in any order. The hash is xxh3 of 128 bits, for two models that
differ by accident, as tunes of one do. A checkpoint may be made on purpose to have the digest of
another, but its author can as well make it answer anything: that is not for this to find.

    1. the file is as it was when its digests were last computed: they are taken from the store
    2. else a rank that has just loaded it gives those of what it read (`passing_digests`)
    3. else its tensors are read, several at once, and hashed
    4. the file is still as it was: its digests are stored

Files are the same while device, inode, size and the times of their last changes are; one of these
times cannot be set back. The store is beside the hub's cache, in `tandem/digests` of `HF_HOME`, a
file for each weight file. Where it cannot be written, the next start reads the weights once more.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from threading import get_native_id, local

import msgspec
import xxhash

from engine.models.errors import CheckpointError
from engine.models.files.stored_tensors import DOWNLOAD_AGAIN, PIECE_BYTES, StoredTensor

logger = logging.getLogger(__name__)

_LEAST_STORED = 64 << 20
"""Files below this size are hashed quicker than it is worth to remember."""
_READ_BYTES = 1 << 20
"""This much stays in a core's cache between reading and hashing."""
_LEAST_SLICE = 64 << 10
"""Slices of a tensor that are matrices of this size or more have blocks of their own."""
_MAX_THREADS = 8
_NICENESS = 10
_FORMAT = 2


def store_folder() -> Path:
    """Returns where digests are kept. Small checkpoints never ask, so the library is not imported
    for them."""
    from huggingface_hub.constants import HF_HOME

    return Path(HF_HOME) / "tandem" / "digests"


class FileDigests(msgspec.Struct):
    """Digests by name of tensor, of a weight file in this state."""

    file: str
    state: tuple[int, ...]
    digests: dict[str, str]
    format: int = _FORMAT


def content_digests(
    tensors: Iterable[StoredTensor], found: Iterable[FileDigests] = ()
) -> dict[str, str]:
    """Returns 128 bits in hexadecimal for each tensor, by the name that its file has for it.

    Args:
        found: What a rank that has loaded the files found meanwhile.

    Raises:
        CheckpointError: A file cannot be read, or is cut off.
    """
    by_file: dict[Path, list[StoredTensor]] = {}
    for tensor in tensors:
        by_file.setdefault(tensor.file, []).append(tensor)
    passed = {of_file.file: of_file for of_file in found}
    digests: dict[str, str] = {}
    for file, own in sorted(by_file.items()):
        digests |= _of_file(file, own, passed.get(str(file.resolve())))
    return digests


def known_digests(file: Path, state: tuple[int, ...]) -> dict[str, str]:
    """Returns what the store has of a file in this state, by name of tensor."""
    return _read_store(file, state).digests


def file_digest(file: Path) -> str:
    """Returns 128 bits in hexadecimal for all bytes of a file, whatever it is. Raises
    `CheckpointError`: it cannot be read."""
    try:
        size = file.stat().st_size
    except OSError as error:
        raise CheckpointError(
            file, f"cannot be read ({error.strerror or error})", "name a file that is there"
        ) from error
    pieces = [
        StoredTensor(f"bytes from {start}", file, "", (), start, min(start + PIECE_BYTES, size))
        for start in range(0, size, PIECE_BYTES)
    ]
    digests = _of_file(file, pieces)
    whole = "".join(digests[piece.name] for piece in pieces)
    return xxhash.xxh3_128(whole.encode()).hexdigest()


def _of_file(
    file: Path, tensors: list[StoredTensor], passed: FileDigests | None = None
) -> dict[str, str]:
    state = state_of(file)
    kept = _read_store(file, state)
    new = [tensor for tensor in tensors if tensor.name not in kept.digests]
    if new:
        if passed is not None and passed.state == state:
            kept.digests |= passed.digests
        kept.digests |= _computed([one for one in new if one.name not in kept.digests])
        if sum(tensor.num_bytes for tensor in new) >= _LEAST_STORED and state_of(file) == state:
            _write_store(file, kept)
    return {tensor.name: kept.digests[tensor.name] for tensor in tensors}


@dataclass(frozen=True, slots=True)
class _OpenFile:
    """A file that threads read, each into a buffer of its own of `room` bytes."""

    number: int
    room: int
    buffers: local

    @property
    def buffer(self) -> memoryview:
        if not hasattr(self.buffers, "view"):
            self.buffers.view = memoryview(bytearray(self.room))
        view: memoryview = self.buffers.view
        return view


def _computed(tensors: Sequence[StoredTensor]) -> dict[str, str]:
    """Reads and hashes tensors of one file."""
    if not tensors:
        return {}
    in_order = sorted(tensors, key=lambda tensor: tensor.start)
    blocks = [(one, start, stop) for one in in_order for start, stop in blocks_of(one)]
    room = min(_READ_BYTES, max((stop - start for _, start, stop in blocks), default=0))
    path = tensors[0].file
    with _reading(path), path.open("rb", buffering=0) as opened, ExitStack() as stack:
        file = _OpenFile(opened.fileno(), room, local())
        found: Iterator[bytes]
        # Fewer bytes take less time than a thread takes to start.
        if sum(tensor.num_bytes for tensor in tensors) > PIECE_BYTES:
            num_threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
            threads = ThreadPoolExecutor(num_threads, "weight-digest", _let_others_first)
            found = stack.enter_context(threads).map(_digest, blocks, repeat(file))
        else:
            found = map(_digest, blocks, repeat(file))
        by_tensor: dict[str, list[bytes]] = {tensor.name: [] for tensor in in_order}
        for (tensor, *_), one in zip(blocks, found, strict=True):
            by_tensor[tensor.name].append(one)
    return {name: digest_of_blocks(of_tensor) for name, of_tensor in by_tensor.items()}


def blocks_of(tensor: StoredTensor) -> Iterator[tuple[int, int]]:
    """Yields the bytes [start, stop) of each block: as many rows as fit in a piece of the loader's,
    and of a stack of matrices those of one matrix."""
    stack, rows = 1, tensor.shape[0] if tensor.shape else 1
    if len(tensor.shape) > 2 and tensor.num_bytes >= _LEAST_SLICE * tensor.shape[0] > 0:
        stack, rows = tensor.shape[:2]
    size = tensor.num_bytes // stack
    step = block_bytes(size // rows) if rows else 0
    for first in range(tensor.start, tensor.stop, size) if size else ():
        for start in range(first, first + size, step):
            yield start, min(start + step, first + size)


def block_bytes(row_bytes: int) -> int:
    """Returns how many bytes a block of rows of this size has."""
    return max(1, PIECE_BYTES // max(1, row_bytes)) * row_bytes


def digest_of_blocks(blocks: Iterable[bytes]) -> str:
    """Returns the digest of a tensor, of those of its blocks in their order."""
    return xxhash.xxh3_128_hexdigest(b"".join(blocks))


def _let_others_first() -> None:
    """Takes for this thread what cores others leave: workers load the same files meanwhile, and
    need several times as long."""
    os.setpriority(os.PRIO_PROCESS, get_native_id(), _NICENESS)


def _digest(block: tuple[StoredTensor, int, int], file: _OpenFile) -> bytes:
    tensor, at, stop = block
    digest, buffer = xxhash.xxh3_128(), file.buffer
    while at < stop:
        count = os.preadv(file.number, [buffer[: stop - at]], at)
        if count == 0:
            raise CheckpointError(tensor.file, f"is cut off: {at} bytes are there", DOWNLOAD_AGAIN)
        digest.update(buffer[:count])
        at += count
    return digest.digest()


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            file, f"cannot be read ({error.strerror or error})", DOWNLOAD_AGAIN
        ) from error


def state_of(file: Path) -> tuple[int, ...]:
    """Returns what is another where the file has changed."""
    found = file.stat()
    return (
        found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns,
    )  # fmt: skip


def _store_of(file: Path) -> Path:
    name = xxhash.xxh3_128_hexdigest(os.fsencode(file.resolve()))
    return store_folder() / f"{name}.json"


def _read_store(file: Path, state: tuple[int, ...]) -> FileDigests:
    """Returns the digests of a file in this state; none where they are not known."""
    try:
        kept = msgspec.json.decode(_store_of(file).read_bytes(), type=FileDigests)
    except (OSError, RuntimeError, ValueError):
        kept = None
    name = str(file.resolve())
    if kept is None or (kept.format, kept.file, kept.state) != (_FORMAT, name, state):
        return FileDigests(name, state, {})
    return kept


def _write_store(file: Path, kept: FileDigests) -> None:
    try:
        path = _store_of(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(f".{os.getpid()}")
        beside.write_bytes(msgspec.json.encode(kept))
        beside.replace(path)
    except (OSError, RuntimeError) as error:
        logger.info("digests of %s are not kept for the next start: %s", file, error)
