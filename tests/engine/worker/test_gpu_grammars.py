"""Grammars on a GPU: with CUDA graphs and two steps in flight a row gets what it gets alone, and a
step waits for nothing but the tokens of the one before.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from engine.config import DeviceConfig, EngineConfig
from tests.engine.worker.gpu_workers import SchedulerAndWorker, started
from tests.engine.worker.grammar_requests import (
    EOS,
    GPU_MODEL,
    GRAMMARS,
    grammar_config,
    grammar_workload,
    text_of,
    write_checkpoint,
)
from tests.engine.worker.test_gpu_no_waiting import never_waiting

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("gpu-grammars"), GPU_MODEL)


def gpu_config(folder: Path, num_blocks: int, **device: object) -> EngineConfig:
    config = grammar_config(folder, num_blocks, GPU_MODEL)
    return replace(
        config,
        cache=replace(config.cache, enable_prefix_caching=False),
        scheduler=replace(config.scheduler, async_scheduling=True),
        device=DeviceConfig(device="cuda", **device),
    )


@pytest.mark.parametrize("seed", [0, 2])
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_a_row_beside_others_gets_what_it_gets_alone(
    folder: Path, seed: int, enforce_eager: bool
) -> None:
    config = gpu_config(folder, 13, deterministic=True, enforce_eager=enforce_eager)
    requests = grammar_workload(seed)
    with started(config) as worker:
        together = SchedulerAndWorker(config, worker.start_step, depth=2)
        together.run(requests)
        assert together.scheduler.stats().num_preemptions > 0
        assert together.scheduler.check_empty() == []
        assert worker.compile_guard.late == []
        masks = worker.grammar_stats.num_masks
        assert masks > sum(bool(request.spec.sampling.grammar) for request in requests)
    with started(config) as worker:
        alone = SchedulerAndWorker(config, worker.start_step, depth=1)
        num_documents = 0
        for request in requests:
            alone.run([request])
            tokens = alone.tokens[request.request_id]
            assert together.tokens[request.request_id] == tokens
            grammar = request.spec.sampling.grammar
            if grammar and tokens[-1] in EOS:
                assert GRAMMARS[grammar](text_of(tokens))
                num_documents += 1
        assert num_documents > 2


def test_a_step_waits_for_the_tokens_before_it_alone(folder: Path) -> None:
    """Whatever else would wait for the device is an error here."""
    config = gpu_config(folder, 24)
    with started(config) as worker:
        engine = SchedulerAndWorker(config, never_waiting(worker), depth=2)
        engine.run(grammar_workload(4))
        assert engine.scheduler.check_empty() == []


def test_rows_without_a_grammar_keep_their_graphs(folder: Path) -> None:
    """Nothing of a grammar is left in the steps behind it."""
    config = gpu_config(folder, 24)
    [first, *_] = grammar_workload(0)
    plain = msgspec.structs.replace(
        first, spec=first.spec.with_sampling(grammar="", temperature=0.0, logprobs=None)
    )
    with started(config) as worker:
        engine = SchedulerAndWorker(config, worker.start_step, depth=2)
        engine.run(grammar_workload(0))
        masks = worker.grammar_stats.num_masks
        graphs = worker.runner._graphs
        assert graphs is not None
        replayed = []
        replay = graphs.replay
        graphs.replay = lambda key: (replayed.append(key), replay(key))[1]  # type: ignore[method-assign]
        engine.run([plain])
        assert replayed and all(key.samples for key in replayed)
        assert worker.grammar_stats.num_masks == masks
