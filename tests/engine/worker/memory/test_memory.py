"""Figures of memory come from the kernel and mean what they say."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch

from engine.config import EngineConfig
from engine.worker import worker
from engine.worker.memory.profiler import MemoryProfiler
from host.memory import cgroup_available, num_killed_for_memory
from kv_transfer.config import KVTransferConfig

CPU = torch.device("cpu")
MIB = 1 << 20


def test_available_is_part_of_total() -> None:
    profiler = MemoryProfiler(CPU)
    assert 0 < profiler.available() < profiler.total()


def test_peak_growth_counts_what_is_gone_again() -> None:
    def take_and_give_back() -> None:
        # A tensor may lie in memory that earlier tests freed and the allocator kept resident.
        with mmap.mmap(-1, 64 * MIB) as pages:
            pages.write(b"x" * (64 * MIB))

    growth = MemoryProfiler(CPU).peak_growth(take_and_give_back)
    assert 60 * MIB < growth < 200 * MIB


def test_peak_growth_of_nothing_is_small() -> None:
    assert MemoryProfiler(CPU).peak_growth(lambda: None) < 30 * MIB


@pytest.mark.parametrize(
    ("limit", "usage", "expected"),
    [("1000000", 600_000, 450_000), ("1000000", 2_000_000, 0), ("max", 600_000, 1 << 62)],
)
def test_a_control_group_limits_memory(
    tmp_path: Path, limit: str, usage: int, expected: int
) -> None:
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{usage}\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 50000\nactive_file 7\n")
    assert cgroup_available(tmp_path) == expected


def test_the_older_control_groups_are_read_too(tmp_path: Path) -> None:
    folder = tmp_path / "memory"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text("9000\n")
    (folder / "memory.usage_in_bytes").write_text("5000\n")
    (folder / "memory.stat").write_text("total_inactive_file 100\n")
    assert cgroup_available(tmp_path) == 4100


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert cgroup_available(tmp_path) == 1 << 62


def test_a_service_has_a_group_of_its_own_below_the_root(tmp_path: Path) -> None:
    """As systemd makes them: the root says nothing of memory. The group that allows least counts,
    and of kills a process's own."""
    member = tmp_path / "membership"
    member.write_text("4:cpu,memory:/old/one\n1:name=systemd:/\n0::/a.slice/b.service\n")
    inner = tmp_path / "a.slice" / "b.service"
    inner.mkdir(parents=True)
    for folder, limit, used, killed in ((inner, "max", 100, 3), (inner.parent, "900", 300, 5)):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text("inactive_file 50\n")
        (folder / "memory.events").write_text(f"oom 9\noom_kill {killed}\noom_group_kill 1\n")
    assert cgroup_available(tmp_path, member) == 650
    assert num_killed_for_memory(tmp_path, member) == 3
    older = tmp_path / "memory" / "old" / "one"
    older.mkdir(parents=True)
    (older / "memory.limit_in_bytes").write_text("400\n")
    (older / "memory.usage_in_bytes").write_text("300\n")
    (older / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 7\n")
    assert cgroup_available(tmp_path, member) == 100
    member.write_text("4:cpu,memory:/old/one\n0::/../outside\n")
    assert num_killed_for_memory(tmp_path, member) == 7
    assert num_killed_for_memory(tmp_path / "none", member) >= 0, "the host's"


def test_of_a_gpu_windows_of_nixl_have_room_beside_the_cache() -> None:
    def reserve(**settings: Any) -> int:
        transfer = KVTransferConfig(kv_role="kv_producer", num_processes=4, **settings)
        return worker._cuda_reserve(create_autospec(EngineConfig, kv_transfer=transfer))

    without = reserve()
    assert reserve(nixl_window_bytes=1 << 30) == without, "none is taken"
    assert reserve(nixl_window_bytes=1 << 30, transports="nixl,stream") == without + (1 << 30)
    assert worker._cuda_reserve(create_autospec(EngineConfig, kv_transfer=None)) < without
