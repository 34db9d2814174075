"""Graphs of decodes with drafts, on the CPU: what a graph holds is run by hand, over inputs that
were loaded before, as a replay would."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from engine.batch.input_batch import InputBuffers
from engine.config import DeviceConfig
from engine.contracts.messages import EngineCoreRequest
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from engine.contracts.steps.step_launches import GraphKey
from engine.models import recorded_steps
from engine.models.recorded_steps import capture_sizes
from engine.sched.rows.draft_length import DraftLength
from engine.worker import model_runner
from tests.engine.models.reference_models import FAMILIES, save_checkpoint
from tests.engine.worker.drafts.test_network_drafters import (
    CASES,
    engine_config,
    greedy_requests,
    watch,
    with_drafter,
)
from tests.engine.worker.drafts.test_speculation import plain_requests, with_ngrams
from tests.engine.worker.graphs.test_prompt_graphs import GraphsByHand
from tests.engine.worker.one_engine import OneEngine, check_empty


class DecodeGraphsByHand(GraphsByHand):
    has_decodes = True

    def capture(self, run: Any, report: Any) -> None:
        super().capture(run, report)
        for key in self.keys:
            if key.decodes or key.num_drafts:
                run(key)
                self._graphs[key] = None  # type: ignore[assignment]


class ThreadGraphsByHand(DecodeGraphsByHand):
    """The same where ranks are threads."""

    _replaying = threading.local()
    _upload = InputBuffers._upload

    @classmethod
    def upload(cls, buffers: InputBuffers, *arrays: Any) -> None:
        """Stands for the upload of a batch, which no graph holds."""
        if not getattr(cls._replaying, "is_on", False):
            cls._upload(buffers, *arrays)

    def replay(self, key: GraphKey) -> None:
        self.replayed.append(key)
        self._replaying.is_on = True
        self._run(key)
        self._replaying.is_on = False

    @classmethod
    def patch(cls, monkeypatch: pytest.MonkeyPatch) -> None:
        """Lets all runners have such graphs."""
        monkeypatch.setattr(model_runner, "CudaGraphManager", cls)
        monkeypatch.setattr(
            InputBuffers, "_upload", lambda buffers, *given: cls.upload(buffers, *given)
        )


def drawn_requests() -> list[EngineCoreRequest]:
    """Returns requests that need nothing but draws from their logits."""
    return [
        EngineCoreRequest(
            request_id=f"drawn-{i}",
            spec=RequestSpec(
                [5 + i, 6, 7] * 3,
                SamplingParams(seed=i, temperature=0.4 * (i % 2), max_tokens=10 + 7 * i),
            ),
        )
        for i in range(6)
    ]


@pytest.mark.parametrize("query_len", [1, 2, 4])
def test_give_the_tokens_of_single_launches(make_config, monkeypatch, query_len: int) -> None:
    monkeypatch.setattr(model_runner, "CudaGraphManager", DecodeGraphsByHand)
    monkeypatch.setattr(recorded_steps, "DRAFTED_PROMPT_TOKENS", (32, 64))
    config = with_ngrams(make_config(), query_len)
    eager, recorded = OneEngine(config, 2), OneEngine(config, 2)
    recorded.worker.runner.capture_model(lambda fraction: None)
    for engine in (eager, recorded):
        for requests in (drawn_requests(), plain_requests(query_len)):
            for request in requests:
                engine.add(request)
                engine.step()
            engine.finish()
    assert recorded.tokens == eager.tokens
    assert recorded.ended == eager.ended
    assert recorded.logprobs == eager.logprobs
    assert recorded.scheduler.stats().drafts == eager.scheduler.stats().drafts
    graphs = recorded.worker.runner._graphs
    assert isinstance(graphs, DecodeGraphsByHand)
    mixed = {key.samples for key in graphs.replayed if key.draft_width}
    assert mixed == ({True, False} if query_len > 1 else set())
    replayed = {key for key in graphs.replayed if key.decodes}
    assert {key.width for key in replayed} == {query_len}
    assert {key.samples for key in replayed} == {True, False}
    # 3 and 5 requests are padded.
    assert {key.num_reqs for key in replayed} == {1, 2, 4, 6}
    for engine in (eager, recorded):
        check_empty(engine)


@pytest.mark.parametrize(
    ("query_len", "budget", "wanted", "expected"),
    [
        (1, 16, (), (1, 2, 4, 8, 16, 24, 32, 40)),
        (1, 16, (99, 30, 2), (2, 30)),
        (4, 2048, (), (1, 2, 4, 8, 16, 24, 32, 40)),
        (4, 48, (), (1, 2, 4, 8, 12)),
        (4, 48, (16, 12, 3), (3, 12)),
        (4, 48, (16,), (1, 2, 4, 8, 12)),
        (16, 2048, (), (1, 2, 4, 8, 16, 24, 32)),
    ],
)
def test_recorded_batches_fit_a_step_and_its_memory(
    make_config, query_len: int, budget: int, wanted: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    config = make_config()
    config = replace(
        config,
        decode_query_len=query_len,
        scheduler=replace(config.scheduler, max_num_batched_tokens=budget),
        device=DeviceConfig(cudagraph_capture_sizes=wanted),
    )
    assert capture_sizes(config, 40) == expected


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("case", ["eagle3", "medusa", "second model"])
def test_recorded_passes_draft_like_single_launches(
    monkeypatch, tmp_path: Path, case: str, adaptive: bool
) -> None:
    """Drafts are the same, beside prompts, too, and so are those accepted."""
    monkeypatch.setattr(model_runner, "CudaGraphManager", DecodeGraphsByHand)
    monkeypatch.setattr(recorded_steps, "DRAFTED_PROMPT_TOKENS", (32, 64))
    method, write, _ = CASES[case]
    save_checkpoint(FAMILIES["llama"], tmp_path / "target")
    write(tmp_path / "draft")
    config = engine_config(tmp_path / "target", num_blocks=40 if case == "second model" else 26)
    config = with_drafter(config, method, tmp_path / "draft")
    assert config.speculative is not None
    config = replace(config, speculative=replace(config.speculative, adaptive=adaptive))
    requests = greedy_requests(config.model.vocab_size)
    found = []
    for is_recorded in (False, True):
        engine = OneEngine(config, depth=2)
        if is_recorded:
            engine.worker.runner.capture_model(lambda fraction: None)
        lengths = cycle([4, 2, 1, 4])
        monkeypatch.setattr(DraftLength, "choose", lambda self, rows, of=lengths: next(of))
        drafted = watch(engine.worker.runner)
        for request in requests:
            engine.add(request)
            engine.step()
        engine.finish()
        found.append((engine.tokens, drafted, engine.scheduler.stats().drafts))
        graphs = engine.worker.runner._graphs
        check_empty(engine)
    assert found[0] == found[1]
    assert isinstance(graphs, DecodeGraphsByHand)
    assert any(key.draft_width for key in graphs.replayed), "a prompt beside decodes"
    replayed = {key.num_drafts for key in graphs.replayed}
    assert replayed == ({0, 1, 3} if adaptive else {0, 3})
    # Three requests are padded.
    assert {key.num_reqs for key in graphs.replayed if key.num_drafts} == {1, 2, 4}
