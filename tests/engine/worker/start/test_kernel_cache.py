"""Tests of who compiles ahead, who waits for it, and when nobody does."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

from bench.engine.models.shapes import shape_config
from engine.config import EngineConfig
from engine.worker.start.kernel_cache import KernelCache


def config_of(shape: str = "tiny-experts") -> EngineConfig:
    return shape_config(shape, device="cpu", num_layers=1)


def test_one_process_compiles_and_the_next_start_needs_none(tmp_path: Path) -> None:
    config, cache = config_of(), tmp_path / "cache"
    first = KernelCache(config, cache)
    assert first.begin()
    assert not KernelCache(config, cache).begin(), "another does"
    first.finish()
    first.close()
    again = replace(config, engine_id="another", epoch=7)
    assert not KernelCache(again, cache).begin(), "all is there"
    other = replace(config, scheduler=replace(config.scheduler, max_num_seqs=7))
    assert KernelCache(other, cache).begin(), "may need others"


def test_workers_wait_for_the_one_that_compiles(tmp_path: Path) -> None:
    config = config_of()
    assert KernelCache(config, tmp_path).wait(60.0) < 30.0, "nobody does"
    compiles = KernelCache(config, tmp_path)
    assert compiles.begin()
    assert 0.05 <= KernelCache(config, tmp_path).wait(0.05) < 30.0, "not for ever"
    waiting = threading.Thread(target=KernelCache(config, tmp_path).wait, args=(60.0,))
    waiting.start()
    assert waiting.is_alive()
    compiles.close()
    waiting.join(60.0)
    assert not waiting.is_alive()


def test_a_folder_that_takes_no_files_leaves_compiling_to_workers(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    cache = KernelCache(config_of(), blocked / "cache")
    assert not cache.begin()
    assert cache.wait(60.0) < 30.0
