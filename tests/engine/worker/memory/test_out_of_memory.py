"""A device without enough memory: what it was for and what to change are named at each stage."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.config import EngineConfig
from engine.contracts.scheduler_output import SchedulerOutput
from engine.kv_cache.capacity import KVCacheMemoryError, check_one_sequence_fits
from engine.worker import worker as worker_module
from engine.worker.memory.budget import MemoryBudget
from engine.worker.memory.out_of_memory import DeviceMemoryError, cure_of_full_cache, cure_of_graphs
from engine.worker.model_runner import ModelRunner
from engine.worker.worker import Worker

GIB = 1 << 30


def fails(*args: object, **kwargs: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


def started(config: EngineConfig) -> Worker:
    worker = Worker(config, rank=0, rendezvous="")
    worker.init_device()
    worker.load_model(lambda fraction: None)
    return worker


def test_loading(make_config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "load_weights", fails)
    with pytest.raises(DeviceMemoryError) as caught:
        started(make_config())
    for words in ("while loading the model", "are free", "raise tensor_parallel_size (now 1)"):
        assert words in str(caught.value)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_the_largest_step(make_config, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = started(make_config(num_blocks=None))
    monkeypatch.setattr(ModelRunner, "dummy_run", fails)
    with pytest.raises(DeviceMemoryError, match=r"lower max_num_batched_tokens \(now 160\)"):
        worker._memory_budget()
    worker.shutdown()


def test_the_kv_cache_and_a_step(make_config, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = started(make_config())
    with monkeypatch.context() as patch:
        patch.setattr(worker_module, "KVCache", fails)
        with pytest.raises(DeviceMemoryError, match=r"KV cache.*lower num_blocks \(now 64\)"):
            worker.initialize_kv_cache(64)
    worker.initialize_kv_cache(64)
    monkeypatch.setattr(ModelRunner, "execute_model", fails)
    with pytest.raises(DeviceMemoryError, match="while computing a step"):
        worker.start_step(SchedulerOutput(step_id=0))
    worker.shutdown()


def test_the_cure_is_what_set_the_size(make_config) -> None:
    assert "num_blocks (now 64)" in cure_of_full_cache(make_config())
    by_bytes = make_config(num_blocks=None, kv_cache_memory_bytes=5000)
    assert "kv_cache_memory_bytes (now 5000)" in cure_of_full_cache(by_bytes)
    measured = make_config(num_blocks=None, gpu_memory_utilization=0.8)
    measured = replace(measured, device=replace(measured.device, device="cuda"))
    assert "gpu_memory_utilization (now 0.8)" in cure_of_full_cache(measured)
    assert "enforce_eager" in cure_of_graphs(measured)


def budget(**changes: float) -> MemoryBudget:
    plain = MemoryBudget(
        total=140 * GIB, share=0.5, free=120 * GIB, held=15 * GIB, step=3 * GIB, reserve=2 * GIB
    )
    return replace(plain, **changes)


def test_the_cache_gets_what_its_share_and_others_leave() -> None:
    assert budget().kv_cache == 50 * GIB
    assert budget(free=30 * GIB).kv_cache == 25 * GIB, "another has the rest of the GPU"
    assert budget(share=0.1).kv_cache == 0
    words = str(budget())
    for part in ("140.0 GiB", "use 0.5", "15.0 GiB hold", "3.0 GiB", "2.0 GiB", "50.0 GiB for the"):
        assert part in words


def test_no_room_at_all_says_where_the_memory_went(make_config) -> None:
    config = make_config(num_blocks=None)
    config = replace(config, device=replace(config.device, device="cuda"))
    with pytest.raises(KVCacheMemoryError) as caught:
        check_one_sequence_fits(config, 0, budget(share=0.1))
    message = str(caught.value)
    assert "at most 0" not in message
    assert "raise gpu_memory_utilization (now 0.9)" in message
    assert "15.0 GiB hold the model" in message
