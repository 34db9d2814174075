"""Says how much memory of this host processes may still take. All figures are bytes."""

from __future__ import annotations

import re
from pathlib import Path

_CGROUPS = (
    # (limit, usage, statistics) of version 2, then of version 1.
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)


def available_memory() -> int:
    """Returns what may still be taken here, as the host and the control group allow."""
    return min(proc_field(Path("/proc/meminfo"), "MemAvailable"), cgroup_available())


def cgroup_available(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns limit minus usage; page cache that the kernel would drop counts as free. A host
    without control groups, or without a limit, has no bound here.
    """
    for limit_file, usage_file, stat_file in _CGROUPS:
        try:
            limit = (root / limit_file).read_text(encoding="ascii").strip()
            used = int((root / usage_file).read_text(encoding="ascii"))
            statistics = (root / stat_file).read_text(encoding="ascii")
        except OSError:
            continue
        if limit != "max":
            cached = re.search(r"^(?:total_)?inactive_file (\d+)", statistics, re.MULTILINE)
            return max(0, int(limit) - used + (int(cached[1]) if cached else 0))
    return 1 << 62


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
