"""Facts about processes of this host and its memory, from /proc and the control group."""

from __future__ import annotations

from pathlib import Path

import msgspec

from host.memory import groups_of_process

_STATUS = {"VmRSS": "rss_kib", "VmHWM": "peak_rss_kib", "Threads": "num_threads"}


class ProcessFacts(msgspec.Struct, kw_only=True):
    """One process. `state` is the kernel's letter: R running, S sleeping, D in the kernel, T
    stopped, Z ended."""

    pid: int
    name: str = ""
    state: str = ""
    rss_kib: int = 0
    peak_rss_kib: int = 0
    num_threads: int = 0
    stack: list[str] = []
    """Lines of the stacks of its threads; empty: it gave none."""


def descendants_of(pid: int) -> list[int]:
    """Returns the children of a process, theirs, and so on."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (fields := _stat(int(folder.name))):
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    found: list[int] = []
    left = [pid]
    while left:
        next_ones = children.get(left.pop(), [])
        found += next_ones
        left += next_ones
    return found


def facts_of(pid: int) -> ProcessFacts | None:
    """Returns the facts, or None when there is no such process."""
    fields = _stat(pid)
    if not fields:
        return None
    facts = ProcessFacts(pid=pid, state=fields[0])
    for line in _lines(Path(f"/proc/{pid}/status")):
        name, _, value = line.partition(":")
        if name in _STATUS:
            setattr(facts, _STATUS[name], int(value.split()[0]))
    return facts


def memory_facts() -> dict[str, int]:
    """Returns what is left of the host's memory, and what the control group says of its limit:
    `group_oom_kill` counts processes that the kernel killed for it."""
    found = {
        f"host_{name}_kib": int(value.split()[0])
        for name, _, value in (line.partition(":") for line in _lines(Path("/proc/meminfo")))
        if name in ("MemTotal", "MemAvailable")
    }
    for group in groups_of_process():
        found["group_memory_current"] = group.used
        if group.limit is not None:
            found["group_memory_max"] = group.limit
        if group.num_killed is not None:
            found["group_oom_kill"] = group.num_killed
        break
    return found


def _stat(pid: int) -> list[str]:
    """Returns the fields behind the name: state, parent, ..."""
    text = "".join(_lines(Path(f"/proc/{pid}/stat")))
    return text.rpartition(")")[2].split()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
