"""Measures how much memory there is, and how much a run takes at its peak.

On the CPU the answer comes from /proc and the control group of this process; on a GPU from the
driver and torch's allocator.
"""

from __future__ import annotations

import re
import resource
from collections.abc import Callable
from pathlib import Path

import torch

_CGROUPS = (
    # (limit, usage, statistics) of version 2, then of version 1.
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)
_RESET_PEAK = "5"
"""Written to clear_refs: the peak of resident memory starts anew."""


class MemoryProfiler:
    """Memory of one device, as far as this process may use it. All figures are bytes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def give_back(self) -> None:
        """Returns to the GPU what torch holds of it and nobody uses, as after loading."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def available(self) -> int:
        """Returns what may still be taken."""
        if self._device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self._device)
            return free
        return min(_host_available(), _cgroup_available())

    def total(self) -> int:
        """Returns what the device has."""
        if self._device.type == "cuda":
            _, total = torch.cuda.mem_get_info(self._device)
            return total
        return _field(Path("/proc/meminfo"), "MemTotal")

    def in_use(self) -> int:
        """Returns what this process holds; of a GPU, as far as torch knows."""
        if self._device.type == "cuda":
            return torch.cuda.memory_reserved(self._device)
        return _resident()

    def peak_growth(self, run: Callable[[], object]) -> int:
        """Returns how far `run` goes beyond what is in use now."""
        if self._device.type == "cuda":
            return self._cuda_growth(run)
        before = _resident()
        restarted = _restart_peak()
        run()
        peak = _field(Path("/proc/self/status"), "VmHWM") if restarted else _lifetime_peak()
        return max(0, peak - before)

    def _cuda_growth(self, run: Callable[[], object]) -> int:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_reserved(self._device)
        run()
        torch.cuda.synchronize(self._device)
        growth = torch.cuda.max_memory_reserved(self._device) - before
        torch.cuda.empty_cache()
        return growth


def format_bytes(num_bytes: int) -> str:
    """Returns a size as people read it."""
    if num_bytes >= 1 << 30:
        return f"{num_bytes / (1 << 30):.1f} GiB"
    return f"{num_bytes / (1 << 20):.1f} MiB"


def _host_available() -> int:
    return _field(Path("/proc/meminfo"), "MemAvailable")


def _cgroup_available(root: Path = Path("/sys/fs/cgroup")) -> int:
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


def _resident() -> int:
    return _field(Path("/proc/self/status"), "VmRSS")


def _lifetime_peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _restart_peak() -> bool:
    """Restarts the measurement of the peak; False where the kernel or a sandbox does not let us."""
    try:
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK, encoding="ascii")
    except OSError:
        return False
    return True


def _field(path: Path, name: str) -> int:
    """Returns a figure in kB of a /proc file, as bytes."""
    found = re.search(rf"^{name}:\s+(\d+) kB", path.read_text(encoding="ascii"), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{path} has no field {name}; is /proc mounted?")
    return int(found[1]) * 1024
