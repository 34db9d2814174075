"""Measures how much memory there is, and how much a run takes at its peak.

On the CPU the answer comes from /proc and the control group of this process; on a GPU from the
driver and torch's allocator.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import torch

from host.memory import available_memory, proc_field

_RESET_PEAK = "5"
"""Written to clear_refs: the peak of resident memory starts anew."""


class MemoryProfiler:
    """Memory of one device, as far as this process may use it. All figures are bytes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def give_back(self) -> None:
        """Returns to the GPU what torch holds of it and nothing uses, as after loading."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def available(self) -> int:
        """Returns what may still be taken."""
        if self._device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self._device)
            return free
        return available_memory()

    def total(self) -> int:
        """Returns what the device has."""
        if self._device.type == "cuda":
            _, total = torch.cuda.mem_get_info(self._device)
            return total
        return proc_field(Path("/proc/meminfo"), "MemTotal")

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
        peak = proc_field(Path("/proc/self/status"), "VmHWM") if restarted else _lifetime_peak()
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


def _resident() -> int:
    return proc_field(Path("/proc/self/status"), "VmRSS")


def _lifetime_peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _restart_peak() -> bool:
    """Restarts the measurement of the peak; False where the kernel or a sandbox does not let us."""
    try:
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK, encoding="ascii")
    except OSError:
        return False
    return True
