"""Grammars in a worker: what a row gets under one does not depend on anything else."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from engine.config import EngineConfig, ParallelConfig
from engine.contracts.messages import EngineCoreRequest
from engine.contracts.outputs import ModelRunnerOutput
from engine.contracts.scheduler_output import SchedulerOutput
from engine.grammar.compiler import CompiledGrammar, GrammarCompiler
from engine.worker.async_output import AsyncOutput
from engine.worker.drafts.drafter import Drafter
from engine.worker.worker import Worker
from kv_transfer.base import KVCacheHandle
from tests.engine.worker.drafts.drafters import KnowingDrafter, RandomDrafter
from tests.engine.worker.grammar_requests import (
    CHOICE,
    DEAD_END,
    EOS,
    GRAMMARS,
    JSON,
    NOTES,
    REGEX,
    VOCAB,
    backend,
    grammar_config,
    grammar_workload,
    make_request,
    text_of,
    write_checkpoint,
)
from tests.engine.worker.one_engine import OneEngine, check_empty, run_traffic
from tests.processes import free_address


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("grammars"))


@pytest.fixture(scope="module")
def alone(folder: Path) -> Callable[[int], OneEngine]:
    """Returns an engine that had one request of `grammar_workload(seed)` after another."""

    @cache
    def run(seed: int) -> OneEngine:
        engine = OneEngine(grammar_config(folder), depth=1)
        for request in grammar_workload(seed):
            engine.add(request)
            engine.finish()
        check_empty(engine)
        return engine

    return run


def check_documents(engine: OneEngine, seed: int) -> int:
    """Every document that ended by itself is one of its grammar. Returns how many there are."""
    count = 0
    for request in grammar_workload(seed):
        sampling, name = request.spec.sampling, request.request_id
        tokens = engine.tokens[name]
        if sampling.grammar and engine.ended[name] == "stop" and tokens[-1] in EOS:
            assert GRAMMARS[sampling.grammar](text_of(tokens)), text_of(tokens)
            count += 1
    return count


@pytest.mark.parametrize(("seed", "depth"), [(0, 1), (2, 2), (4, 2)])
def test_a_row_beside_others_gets_what_it_gets_alone(
    folder: Path, alone: Callable[[int], OneEngine], seed: int, depth: int
) -> None:
    """Rows with and without grammars, preempted, resumed and aborted, with steps in flight."""
    engine = OneEngine(grammar_config(folder, num_blocks=13), depth)
    run_traffic(engine, seed, alone(seed), grammar_workload(seed))
    assert check_documents(alone(seed), seed) > 2
    assert set(engine.errors.values()) == {""}


class TwoRanks(Worker):
    """Rank 0, beside which rank 1 does the same in a thread. They must say the same."""

    def __init__(self, config: EngineConfig, rendezvous: str) -> None:
        super().__init__(config, 0, rendezvous)
        self._other = Worker(config, 1, rendezvous)
        self._threads = ThreadPoolExecutor(1)

    def init_device(self) -> None:
        other = self._threads.submit(self._other.init_device)
        super().init_device()
        other.result()

    def load_model(self, report: Callable[[float], None]) -> None:
        other = self._threads.submit(self._other.load_model, lambda fraction: None)
        super().load_model(report)
        other.result()

    def initialize_kv_cache(self, num_blocks: int) -> KVCacheHandle:
        self._other.initialize_kv_cache(num_blocks)
        return super().initialize_kv_cache(num_blocks)

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        other = self._threads.submit(self._other.execute_model, step)
        output = super().execute_model(step)
        assert other.result() == output
        return output

    def load_adapter(self, digest: str, path: str) -> None:
        self._other.load_adapter(digest, path)
        super().load_adapter(digest, path)

    def drop_adapter(self, digest: str) -> None:
        self._other.drop_adapter(digest)
        super().drop_adapter(digest)

    def shutdown(self) -> None:
        self._other.shutdown()
        super().shutdown()
        self._threads.shutdown()


def test_ranks_choose_the_same_tokens_each_for_itself(
    folder: Path, alone: Callable[[int], OneEngine]
) -> None:
    seed = 4
    config = grammar_config(folder, num_blocks=13, parallel=ParallelConfig(tensor_parallel_size=2))
    engine = OneEngine(config, 2, TwoRanks(config, free_address()))
    run_traffic(engine, seed, alone(seed), grammar_workload(seed))


def _drafter(kind: str, alone: OneEngine, seed: int) -> Drafter | None:
    answers = [
        [*request.spec.prompt_token_ids, *alone.tokens[request.request_id]]
        for request in grammar_workload(seed)
    ]
    match kind:
        case "knowing":
            return KnowingDrafter(answers)
        case "lying":
            return KnowingDrafter(answers, lies=0.3, gaps=0.3, seed=1)
        case "random":
            return RandomDrafter(VOCAB)
    return None


@pytest.mark.parametrize(
    ("kind", "query_len", "depth"),
    [("knowing", 4, 2), ("lying", 4, 1), ("lying", 2, 2), ("random", 4, 2), ("none", 4, 2)],
)
def test_no_token_under_a_grammar_depends_on_drafts(
    folder: Path, alone: Callable[[int], OneEngine], kind: str, query_len: int, depth: int
) -> None:
    seed = 2
    config = grammar_config(folder, num_blocks=14, decode_query_len=query_len)
    engine = OneEngine(config, depth)
    engine.worker.runner.drafts.drafter = _drafter(kind, alone(seed), seed)
    run_traffic(engine, seed, alone(seed), grammar_workload(seed))
    if kind in ("knowing", "lying"):
        assert all(engine.counts[count] > 0 for count in range(1, query_len + 1)), engine.counts


def run(engine: OneEngine, *requests: EngineCoreRequest) -> None:
    for request in requests:
        engine.add(request)
    engine.finish()


@pytest.fixture
def engine(folder: Path) -> Iterator[OneEngine]:
    engine = OneEngine(grammar_config(folder), depth=2)
    yield engine
    check_empty(engine)


@pytest.mark.parametrize(
    ("grammar", "limits", "count", "says"),
    [
        ("start: nobody", {}, 0, "cannot be compiled.*nobody"),
        ("%%%", {}, 0, "cannot be compiled"),
        (DEAD_END, {}, 2, "no token of the model can follow the output"),
        (CHOICE, {"allowed_token_ids": (200, 201)}, 0, "and its allowed_token_ids"),
    ],
)
@pytest.mark.parametrize("query_len", [1, 4])
def test_a_grammar_that_cannot_be_followed_ends_its_request_alone(
    folder: Path,
    grammar: str,
    limits: dict[str, Any],
    count: int,
    says: str,
    query_len: int,
) -> None:
    """Tokens before the place at which it fails are the client's, with drafts or without."""
    engine = OneEngine(grammar_config(folder, decode_query_len=query_len), depth=2)
    known = [9, 8, 7, *backend().encode("ab").ids]
    engine.worker.runner.drafts.drafter = KnowingDrafter([known])
    free = {"temperature": 0.0, "max_tokens": 12}
    run(engine, make_request("b", REGEX, **free), make_request("c", "", **free))
    beside = dict(engine.tokens), dict(engine.ended)
    run(
        engine,
        make_request("a", grammar, max_tokens=9, **limits),
        make_request("b2", REGEX, **free),
        make_request("c2", "", **free),
    )
    assert engine.ended["a"] == "error"
    assert re.search(says, engine.errors["a"])
    assert len(engine.tokens["a"]) == count
    for name in ("b", "c"):
        assert engine.tokens[name + "2"] == beside[0][name]
        assert engine.ended[name + "2"] == beside[1][name]
        assert engine.errors[name + "2"] == ""
    assert engine.worker.grammar_stats.num_failed == 1
    check_empty(engine)


def test_resumed_at_any_token(engine: OneEngine) -> None:
    """The output that another node gave is replayed, its last token included."""
    for index, grammar in enumerate(GRAMMARS):
        whole = make_request(f"whole-{index}", grammar, seed=index, max_tokens=24)
        run(engine, whole)
        tokens = engine.tokens[whole.request_id]
        for cut in {1, len(tokens) // 2, len(tokens) - 1} - {0, len(tokens)}:
            name = f"{index}-{cut}"
            rest = make_request(name, grammar, seed=index, max_tokens=24)
            rest.spec = rest.spec.resumed_after(tokens[:cut])
            run(engine, rest)
            assert engine.tokens[name] == tokens[cut:]
            assert engine.ended[name] == engine.ended[whole.request_id]


def test_output_that_does_not_follow_the_grammar_is_not_continued(engine: OneEngine) -> None:
    request = make_request("a", REGEX)
    request.spec = request.spec.resumed_after(backend().encode("xyz").ids)
    run(engine, request)
    assert engine.ended["a"] == "error" and engine.tokens["a"] == []
    assert "does not follow the grammar" in engine.errors["a"]


def test_one_token_and_an_end_as_the_first(engine: OneEngine) -> None:
    run(
        engine,
        make_request("one", JSON, max_tokens=1),
        make_request("end", NOTES, logit_bias={3: 100.0}, temperature=0.0),
    )
    assert text_of(engine.tokens["one"]).startswith("{") and engine.ended["one"] == "length"
    assert engine.tokens["end"] == [3] and engine.ended["end"] == "stop"


def test_an_end_waits_for_min_tokens_unless_nothing_else_is_left(engine: OneEngine) -> None:
    """The grammar wins: a complete document ends however few tokens it has."""
    ends = dict.fromkeys(EOS, 100.0)
    run(
        engine,
        make_request("open", NOTES, min_tokens=9, logit_bias=ends, temperature=0.0),
        make_request("closed", CHOICE, min_tokens=30, temperature=0.0),
        make_request("soon", CHOICE, min_tokens=30, temperature=0.0, max_tokens=30),
    )
    assert len(engine.tokens["open"]) == 10 and engine.tokens["open"][-1] in EOS
    for name in ("closed", "soon"):
        assert engine.ended[name] == "stop"
        assert GRAMMARS[CHOICE](text_of(engine.tokens[name]))
        assert engine.tokens[name][-1] in EOS
    assert not set(engine.tokens["open"][:-1]) & set(EOS)


def test_log_probabilities_are_the_models_own(engine: OneEngine) -> None:
    """They are those before the mask, as with all other limits."""
    run(engine, make_request("free", "", temperature=0.0, max_tokens=1, logprobs=3))
    run(engine, make_request("held", CHOICE, temperature=0.0, max_tokens=1, logprobs=3))
    [free], [held] = engine.logprobs["free"], engine.logprobs["held"]
    assert held.token_ids[1:] == free.token_ids[1:]
    assert held.logprobs[1:] == pytest.approx(free.logprobs[1:], abs=1e-5)
    assert held.rank > 1 and held.token_ids[0] == engine.tokens["held"][0]


def test_a_step_waits_for_a_grammar_that_is_not_compiled_yet(
    engine: OneEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No row is ever sampled without its mask."""
    is_held, may_go_on = threading.Event(), threading.Event()
    compile_now = GrammarCompiler.compile_now

    def compile_late(*args: Any) -> CompiledGrammar:
        is_held.set()
        assert may_go_on.wait(60)
        return compile_now(*args)

    monkeypatch.setattr(GrammarCompiler, "compile_now", compile_late)
    steps = threading.Thread(target=run, args=(engine, make_request("a", CHOICE)), daemon=True)
    steps.start()
    assert is_held.wait(60)
    assert engine.tokens == {"a": []}
    may_go_on.set()
    steps.join(60)
    assert GRAMMARS[CHOICE](text_of(engine.tokens["a"]))


def test_rows_without_a_grammar_keep_the_whole_step_graph(engine: OneEngine) -> None:
    """The sampler says so by which a graph of a whole step is chosen."""
    sampler = engine.worker.runner.sampler
    engine.add(make_request("a", NOTES))
    engine.add(make_request("b", ""))
    engine.step()
    assert sampler.only_draws(np.array([1], np.int32))
    assert not sampler.only_draws(np.array([0, 1], np.int32))
    engine.abort("a")
    engine.step()
    engine.step()
    assert sampler.only_draws(np.array([0, 1], np.int32))
    assert sampler.grammars.num_held == 0
    engine.finish()


def for_choices(request: EngineCoreRequest, count: int) -> EngineCoreRequest:
    """Asks for `count` answers, c0, c1 and so on, with seeds that follow the request's own."""
    request.choice_ids = tuple(f"c{i}" for i in range(count))
    seed = request.spec.sampling.seed
    siblings = tuple(seed + i for i in range(1, count))
    request.spec = msgspec.structs.replace(request.spec, sibling_seeds=siblings)
    return request


@pytest.mark.parametrize("grammar", [JSON, REGEX, NOTES])
def test_choices_of_one_prompt_follow_the_grammar_each_alone(
    engine: OneEngine, grammar: str
) -> None:
    """Their first tokens come from one mask, and each goes on with a matcher of its own."""
    request = for_choices(make_request("all", grammar, seed=7, max_tokens=20), 3)
    run(engine, request)
    for index, name in enumerate(request.choice_ids):
        single = make_request(f"single-{name}", grammar, seed=7 + index, max_tokens=20)
        run(engine, single)
        assert engine.tokens[name] == engine.tokens[single.request_id]
        assert engine.ended[name] == engine.ended[single.request_id]


def test_a_grammar_that_leaves_nothing_ends_every_choice(engine: OneEngine) -> None:
    request = for_choices(make_request("all", "start: nobody"), 2)
    run(engine, request, make_request("beside", CHOICE))
    assert [engine.ended[name] for name in ("c0", "c1", "beside")] == ["error", "error", "stop"]
    assert "cannot be compiled" in engine.errors["c0"] and engine.tokens["c1"] == []
    assert "all" not in engine.ended


def test_waiting_for_tokens_is_no_host_time(
    engine: OneEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device works meanwhile: a step says what it waited, and that is left out."""
    grammars, clock = engine.worker.runner.sampler.grammars, [0.0]
    wait_for_tokens = AsyncOutput.wait_for_tokens

    def wait_long(output: AsyncOutput) -> list[tuple[int, int, list[int]]]:
        clock[0] += 1000.0
        return wait_for_tokens(output)

    for module in ("engine.sample.grammars", "engine.worker.worker"):
        monkeypatch.setattr(f"{module}.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(AsyncOutput, "wait_for_tokens", wait_long)
    run(engine, make_request("a", JSON, temperature=0.0, max_tokens=9))
    assert grammars.waited_s >= 8 * 1000.0
    assert engine.worker.host_s == 0.0
