"""The processes of a cluster on this machine: which there are, and what each of them holds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Usage:
    """The use of one process. `private_mib`: memory that is its own, in RAM; `fds`: open files."""

    private_mib: float
    fds: int


def below(root: int) -> Iterator[int]:
    """Returns `root` and all of its descendants that run now."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    left = [root]
    while left:
        yield (pid := left.pop())
        left += children.get(pid, [])


def module_of(pid: int) -> str:
    """Returns what `python -m` was asked to run, of a node's child its module; empty for another
    program, or for none."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    words = words[words.index("-m") + 1 :] if "-m" in words[:-1] else [""]
    return words[1] if words[0] == "edge.program" else words[0]


def usage(root: int) -> dict[str, Usage]:
    """Returns usage by module and process id: one that was started again is another one."""
    found: dict[str, Usage] = {}
    for pid in below(root):
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            num_fds = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
        except OSError:
            continue
        kib = sum(int(line.split()[1]) for line in status.splitlines() if "RssAnon" in line)
        if name := module_of(pid):
            found[f"{name} {pid}"] = Usage(round(kib / 1024, 3), num_fds)
    return found


def cpu_seconds(root: int) -> dict[str, float]:
    """Returns the CPU time of `root` and its descendants since their start, by module; of all of a
    module's processes together."""
    found: dict[str, float] = {}
    for pid in below(root):
        with suppress(OSError):
            name = module_of(pid) or "others"
            found[name] = found.get(name, 0.0) + own_cpu_seconds(pid)
    return found


def own_cpu_seconds(pid: int) -> float:
    """Returns the CPU time of one process since its start."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
