"""Digests of what tensors of a checkpoint hold, of every byte of them.

    1. the file is as it was when its digests were last computed: they are taken from the store
    2. else its tensors are read, several at once, and hashed
    3. the file is still as it was in 2.: its digests are stored

Files are the same while device, inode, size and the times of their last changes are; one of these
times cannot be set back. The store is beside the hub's cache, in `tandem/digests` of `HF_HOME`, a
file for each weight file. Where it cannot be written, the next start reads the weights once more.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import local

import msgspec
import xxhash

from engine.models.errors import CheckpointError
from engine.models.stored_tensors import DOWNLOAD_AGAIN, StoredTensor

logger = logging.getLogger(__name__)

_LEAST_STORED = 64 << 20
"""Files below this size are hashed quicker than it is worth to remember."""
_READ_BYTES = 1 << 20
"""This much stays in a core's cache between reading and hashing."""
_PIECE_BYTES = 64 << 20
"""A thread takes this much at a time of a file that is hashed as a whole."""
_MAX_THREADS = 8
_FORMAT = 1


def store_folder() -> Path:
    """Returns where digests are kept. Small checkpoints never ask, so the library is not imported
    for them."""
    from huggingface_hub.constants import HF_HOME

    return Path(HF_HOME) / "tandem" / "digests"


class _StoredDigests(msgspec.Struct):
    """A file of the store: by name of tensor, of a weight file in this state."""

    format: int
    file: str
    state: tuple[int, ...]
    digests: dict[str, str]


def content_digests(tensors: Iterable[StoredTensor]) -> dict[str, str]:
    """Returns 128 bits in hexadecimal for each tensor, by the name that its file has for it.

    Raises:
        CheckpointError: A file cannot be read, or is cut off.
    """
    by_file: dict[Path, list[StoredTensor]] = {}
    for tensor in tensors:
        by_file.setdefault(tensor.file, []).append(tensor)
    found: dict[str, str] = {}
    for file, own in sorted(by_file.items()):
        found |= _of_file(file, own)
    return found


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
        StoredTensor(f"bytes from {start}", file, "", (), start, min(start + _PIECE_BYTES, size))
        for start in range(0, size, _PIECE_BYTES)
    ]
    digests = _of_file(file, pieces)
    whole = "".join(digests[piece.name] for piece in pieces)
    return xxhash.xxh3_128(whole.encode()).hexdigest()


def _of_file(file: Path, tensors: list[StoredTensor]) -> dict[str, str]:
    state = _state_of(file)
    kept = _read_store(file, state)
    missing = [tensor for tensor in tensors if tensor.name not in kept.digests]
    if missing:
        kept.digests |= _computed(missing)
        if sum(tensor.num_bytes for tensor in missing) >= _LEAST_STORED and (
            _state_of(file) == state
        ):
            _write_store(file, kept)
    return {tensor.name: kept.digests[tensor.name] for tensor in tensors}


def _computed(tensors: Sequence[StoredTensor]) -> dict[str, str]:
    num_threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    buffers = local()
    with ThreadPoolExecutor(num_threads, "weight-digest") as pool:
        in_order = sorted(tensors, key=lambda tensor: tensor.start)
        digests = pool.map(lambda tensor: _digest(tensor, buffers), in_order)
        return {tensor.name: digest for tensor, digest in zip(in_order, digests, strict=True)}


def _digest(tensor: StoredTensor, buffers: local) -> str:
    if not hasattr(buffers, "view"):
        buffers.view = memoryview(bytearray(_READ_BYTES))
    view: memoryview = buffers.view
    digest, at = xxhash.xxh3_128(), tensor.start
    try:
        with tensor.file.open("rb", buffering=0) as file:
            while at < tensor.stop:
                count = os.preadv(file.fileno(), [view[: tensor.stop - at]], at)
                if count == 0:
                    raise CheckpointError(
                        tensor.file, f"is cut off: {at} bytes are there", DOWNLOAD_AGAIN
                    )
                digest.update(view[:count])
                at += count
    except OSError as error:
        raise CheckpointError(
            tensor.file, f"cannot be read ({error.strerror or error})", DOWNLOAD_AGAIN
        ) from error
    return digest.hexdigest()


def _state_of(file: Path) -> tuple[int, ...]:
    found = file.stat()
    return (
        found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns,
    )  # fmt: skip


def _store_of(file: Path) -> Path:
    name = xxhash.xxh3_128_hexdigest(os.fsencode(file.resolve()))
    return store_folder() / f"{name}.json"


def _read_store(file: Path, state: tuple[int, ...]) -> _StoredDigests:
    """Returns the digests of a file in this state; none where they are not known."""
    try:
        kept = msgspec.json.decode(_store_of(file).read_bytes(), type=_StoredDigests)
    except (OSError, RuntimeError, ValueError):
        kept = None
    name = str(file.resolve())
    if kept is None or (kept.format, kept.file, kept.state) != (_FORMAT, name, state):
        return _StoredDigests(_FORMAT, name, state, {})
    return kept


def _write_store(file: Path, kept: _StoredDigests) -> None:
    try:
        path = _store_of(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(f".{os.getpid()}")
        beside.write_bytes(msgspec.json.encode(kept))
        beside.replace(path)
    except (OSError, RuntimeError) as error:
        logger.info("digests of %s are not kept for the next start: %s", file, error)
