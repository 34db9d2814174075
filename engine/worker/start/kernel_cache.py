"""Triton's cache of compiled kernels, as the processes of a host share it while an engine starts.

    1. `begin`    by the process that compiles ahead (`engine.explain.precompile`): it takes a lock;
                  not where another has it, or where all of this engine's kernels were compiled
    2. `wait`     by workers in front of their first step, until no process has the lock
    3. `finish`   by the process of 1.: engines of this kind find the note at their next start
    4. `close`    gives the lock back

The operating system gives a lock back with its process, so one that dies delays no other; what it
did not compile, workers compile when they need it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import msgspec

from engine.config import EngineConfig

_DONE = b"compiled\n"
_SOURCES = "engine", "kernels"
_LOOK_S = 0.02


class KernelCache:
    """Stands for what engines of one configuration have in a folder of compiled kernels.

    Args:
        folder: Triton's cache. None: where Triton has it.
    """

    def __init__(self, config: EngineConfig, folder: Path | None = None) -> None:
        self._folder = _folder() if folder is None else folder
        self._path = self._folder / f"tandem-{_digest(config)}"
        self._file = -1

    def begin(self) -> bool:
        """Returns whether kernels are to be compiled here, and no other process does it."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            # Another has it, or this folder takes no files or no locks.
            self.close()
            return False
        return os.read(self._file, len(_DONE)) != _DONE

    def finish(self) -> None:
        """Notes that all kernels are there."""
        os.pwrite(self._file, _DONE, 0)

    def close(self) -> None:
        """Lets workers begin. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def wait(self, limit_s: float) -> float:
        """Returns the seconds until no process compiles ahead, at most `limit_s`."""
        began = time.monotonic()
        with contextlib.suppress(OSError):
            file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                while not _is_free(file) and time.monotonic() - began < limit_s:
                    time.sleep(_LOOK_S)
            finally:
                os.close(file)
        return time.monotonic() - began


def _is_free(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _folder() -> Path:
    from triton import knobs

    return Path(knobs.cache.dir)


def _digest(config: EngineConfig) -> str:
    """Returns what differs where other kernels may be needed."""
    model = replace(config.model, path="", served_model_name="", served_aliases=(), model_hash="")
    shown = replace(config, engine_id="", epoch=0, model=model, kv_transfer=None)
    facts = [shown, sorted(_gpus()), sorted(_versions()), sorted(_sources())]
    return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:32]


def _gpus() -> Iterator[str]:
    for path in Path("/proc/driver/nvidia/gpus").glob("*/information"):
        with contextlib.suppress(OSError):
            yield from (line for line in path.read_text().splitlines() if "Model" in line)


def _versions() -> Iterator[str]:
    for name in ("torch", "triton"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            yield f"{name} {metadata.version(name)}"


def _sources() -> Iterator[str]:
    """Yields all files of our own that decide which kernels there are, and when they changed."""
    root = Path(__file__).resolve().parents[3]
    for part in _SOURCES:
        for path in (root / part).rglob("*.py"):
            stat = path.stat()
            yield f"{path.relative_to(root)} {stat.st_size} {stat.st_mtime_ns}"
