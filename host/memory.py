"""Says how much memory of this host processes may still take, and how many the kernel has killed
because it ran out. All sizes are bytes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_FILES = (
    # (limit, usage, statistics, events) of version 2, then of version 1.
    ("memory.max", "memory.current", "memory.stat", "memory.events"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat", "memory.oom_control"),
)


class GroupMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Holds what a control group says of its memory.

    Attributes:
        limit: Bytes; None: it has none.
        used: Bytes, page cache included.
        droppable: Bytes of page cache that the kernel would drop.
        num_killed: Processes of it that the kernel has killed because memory ran out; None: it does
            not say.
    """

    limit: int | None
    used: int
    droppable: int
    num_killed: int | None


def available_memory() -> int:
    """Returns what may still be taken here, as the host and the control group allow."""
    return min(proc_field(Path("/proc/meminfo"), "MemAvailable"), cgroup_available())


def cgroup_available(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> int:
    """Returns limit minus usage, of the group that allows least; page cache that the kernel would
    drop counts as free. A host without control groups, or without a limit, has no bound here.
    """
    left = [
        max(0, group.limit - group.used + group.droppable)
        for group in groups_of_process(root, membership)
        if group.limit is not None
    ]
    return min(left, default=1 << 62)


def num_killed_for_memory(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> int:
    """Returns how many processes of this one's control group the kernel has killed because memory
    ran out; where no group says it, of the host."""
    for group in groups_of_process(root, membership):
        if group.num_killed is not None:
            return group.num_killed
    return _figure("oom_kill", _text(Path("/proc/vmstat"))) or 0


def groups_of_process(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> Iterator[GroupMemory]:
    """Yields the control groups that bound this process, its own first. A service of systemd has a
    group below the root; a container mostly sees its own as the root."""
    for folder in _folders(root, _text(membership).splitlines()):
        for limit_file, usage_file, stat_file, events_file in _FILES:
            limit, used = _text(folder / limit_file).strip(), _text(folder / usage_file).strip()
            if not used.isdigit():
                continue
            statistics = _text(folder / stat_file)
            cached = _figure("total_inactive_file", statistics)
            yield GroupMemory(
                limit=int(limit) if limit.isdigit() else None,
                used=int(used),
                droppable=cached or _figure("inactive_file", statistics) or 0,
                num_killed=_figure("oom_kill", _text(folder / events_file)),
            )


def _folders(root: Path, membership: list[str]) -> Iterator[Path]:
    """Yields the folders of a process's groups, of version 2 and of version 1, from its own up."""
    paths = {"": "/", "memory": "/"}
    for line in membership:
        _, names, path = line.split(":", 2)
        paths |= dict.fromkeys(names.split(","), path)
    for name in ("", "memory"):
        inner = Path(paths[name].lstrip("/"))
        # Of a group outside of what a container sees, the path leads out of the root.
        below = [] if ".." in inner.parts else [inner, *inner.parents]
        yield from dict.fromkeys(root / name / path for path in [*below, Path()])


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _figure(name: str, text: str) -> int | None:
    found = re.search(rf"^{name} (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else None


def proc_field(path: Path, name: str) -> int:
    """Returns a figure in kB of a /proc file, as bytes."""
    found = re.search(rf"^{name}:\s+(\d+) kB", path.read_text(encoding="ascii"), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{path} has no field {name}; is /proc mounted?")
    return int(found[1]) * 1024


def format_bytes(num_bytes: int) -> str:
    """Returns a size as people read it."""
    if num_bytes >= 1 << 30:
        return f"{num_bytes / (1 << 30):.1f} GiB"
    return f"{num_bytes / (1 << 20):.1f} MiB"
