"""The processes of a cluster on this machine: which there are, and what each of them holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class Usage:
    """The use of one process. `private_mib`: memory that is its own, in RAM; `fds`: open files."""

    private_mib: float
    fds: int


def below(root: int) -> Iterator[psutil.Process]:
    """Returns `root` and all of its descendants that run now."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(root)
        yield from (process, *process.children(recursive=True))


def module_of(process: psutil.Process) -> str:
    """Returns what `python -m` was asked to run, of a node's child its module; empty for another
    program, or for none."""
    try:
        words = process.cmdline()
    except psutil.Error:
        return ""
    words = words[words.index("-m") + 1 :] if "-m" in words[:-1] else [""]
    return words[1] if words[0] == "edge.program" else words[0]


def usage(root: int) -> dict[str, Usage]:
    """Returns usage by module and process id: one that was started again is another one."""
    found: dict[str, Usage] = {}
    for process in below(root):
        with suppress(psutil.Error):
            memory, num_fds = process.memory_info(), process.num_fds()
            if name := module_of(process):
                own = round((memory.rss - memory.shared) / 2**20, 3)
                found[f"{name} {process.pid}"] = Usage(own, num_fds)
    return found


def cpu_seconds(root: int) -> dict[str, float]:
    """Returns the CPU time of `root` and its descendants since their start, by module; of all of a
    module's processes together."""
    found: dict[str, float] = {}
    for process in below(root):
        with suppress(psutil.Error):
            times, name = process.cpu_times(), module_of(process) or "others"
            found[name] = found.get(name, 0.0) + times.user + times.system
    return found
