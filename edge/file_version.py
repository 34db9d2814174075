"""Tells whether a file is still the one that was read."""

from __future__ import annotations

from pathlib import Path

FileVersion = tuple[int, ...]


def file_version(path: Path) -> FileVersion:
    """Returns what changes with the file, and when a link on the way points elsewhere (a mounted
    ConfigMap or Secret changes so). Raises OSError."""
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_ino, stat.st_size


def version_if_there(path: Path | None) -> FileVersion:
    """Returns the same, and nothing where there is no file or none is wanted."""
    if path is None:
        return ()
    try:
        return file_version(path)
    except OSError:
        return ()
