"""`--speculative-config` on the real CPU engine, in deterministic mode: each request gets, to the
last bit, what it gets without, whatever it asks for and whoever gets in its way."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from llguidance import LLMatcher

from engine.batch.places import Places
from engine.config import DeviceConfig, EngineConfig, SchedulerConfig
from engine.contracts.messages import EngineCoreRequest
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from engine.node.settings.speculative_settings import parse_speculative_config
from engine.sched.rows.draft_length import DraftLength
from engine.worker.worker import Worker
from tandem_kernels.batch.batch_tables import RowTables
from tests.engine.worker import grammar_requests
from tests.engine.worker.drafts.drafters import RandomDrafter
from tests.engine.worker.one_engine import EOS, KINDS, OneEngine, check_empty
from tests.engine.worker.test_choices import forked

FEW_TOKENS = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=48)

Requests = Callable[[int], list[EngineCoreRequest]]


def with_ngrams(config: EngineConfig, query_len: int) -> EngineConfig:
    """Returns `config` with what the setting makes of it; with 1 token a step, without drafts. On
    the CPU in deterministic mode."""
    if config.device.device == "cpu":
        config = replace(config, device=DeviceConfig(deterministic=True))
    if query_len == 1:
        return config
    speculative = parse_speculative_config(
        f'{{"method": "ngram", "num_speculative_tokens": {query_len - 1}, "prompt_lookup_min": 1}}'
    )
    return replace(config, decode_query_len=query_len, speculative=speculative)


def repeating(rng: random.Random, vocab_size: int) -> list[int]:
    """Returns a prompt that says the same several times, and a beginning that others share."""
    part = [rng.randrange(5, vocab_size) for _ in range(rng.choice([1, 3, 7]))]
    shared = [5, 6, 7, 8] * 4 if rng.random() < 0.5 else []
    return shared + part * rng.choice([2, 3])


def plain_requests(seed: int) -> list[EngineCoreRequest]:
    """All kinds of sampling, log probabilities of prompts, and outputs that others have begun."""
    rng = random.Random(seed)
    kinds: list[dict[str, Any]] = [
        *KINDS,
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.3, "logprobs": 5, "prompt_logprobs": 1},
        {"temperature": 0.2, "presence_penalty": 1.5, "min_tokens": 9, "stop_token_ids": (8, 9)},
        {"temperature": 0.7, "allowed_token_ids": (5, 6, 7), "ignore_eos": True, "logprobs": 1},
    ]
    requests = []
    for i in range(16):
        sampling = SamplingParams(
            seed=rng.randrange(2**64),
            max_tokens=rng.choice([1, 30, 45, 60]),
            **kinds[i % len(kinds)],
        )
        spec = RequestSpec(repeating(rng, 211), sampling)
        if i % 4 == 3 and sampling.max_tokens > 1:
            spec = spec.resumed_after([rng.randrange(5, 211)] * 3)
        requests.append(EngineCoreRequest(request_id=f"r{i}", spec=spec, eos_token_ids=(EOS,)))
    return requests


def choices_requests(seed: int) -> list[EngineCoreRequest]:
    rng = random.Random(seed)
    kinds: list[dict[str, Any]] = [
        KINDS[0],
        KINDS[3],
        {"temperature": 0.2, "logprobs": 2, "ignore_eos": True},
        {"temperature": 0.7, "allowed_token_ids": (5, 6, 7), "ignore_eos": True},
    ]
    return [
        forked(f"c{i}", repeating(rng, 211), 4, max_tokens=36, **kind)
        for i, kind in enumerate(kinds)
    ]


def run(config: EngineConfig, depth: int, requests: list[EngineCoreRequest]) -> OneEngine:
    engine = OneEngine(config, depth)
    for request in requests:
        engine.add(request)
        engine.step()
    engine.finish()
    return engine


def check_same(one: OneEngine, several: OneEngine) -> None:
    assert several.tokens == one.tokens
    assert several.ended == one.ended
    assert several.logprobs == one.logprobs
    stats = several.scheduler.stats().drafts
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    for engine in (one, several):
        check_empty(engine)


@pytest.mark.parametrize(
    ("requests", "query_len", "depth"),
    [
        (plain_requests, 2, 2),
        (plain_requests, 4, 1),
        (plain_requests, 8, 2),
        (choices_requests, 4, 2),
    ],
)
def test_no_bit_depends_on_ngrams(
    make_config: Any, requests: Requests, query_len: int, depth: int
) -> None:
    """Prompts come in chunks, few blocks make requests wait and start again."""
    config = replace(make_config(num_blocks=13), scheduler=FEW_TOKENS)
    one = run(with_ngrams(make_config(), 1), 1, requests(query_len))
    several = run(with_ngrams(config, query_len), depth, requests(query_len))
    stats = several.scheduler.stats()
    assert stats.num_preemptions > 0
    assert stats.prefix_cache_hits > 0 or requests is choices_requests
    check_same(one, several)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return grammar_requests.write_checkpoint(tmp_path_factory.mktemp("grammar"))


@pytest.mark.parametrize(("query_len", "depth"), [(4, 1), (8, 2)])
def test_no_bit_under_a_grammar_depends_on_ngrams(folder: Path, query_len: int, depth: int) -> None:
    requests = grammar_requests.grammar_workload(query_len)
    plain = grammar_requests.grammar_config(folder)
    few = grammar_requests.grammar_config(folder, num_blocks=14)
    one = run(with_ngrams(plain, 1), 1, requests)
    several = run(with_ngrams(few, query_len), depth, requests)
    assert several.scheduler.stats().num_preemptions > 0
    check_same(one, several)


def test_a_text_that_repeats_itself_takes_fewer_steps(make_config: Any) -> None:
    """Forbidding all but one token makes the answer repeat it, and every draft is right then."""
    sampling = SamplingParams(max_tokens=61, allowed_token_ids=(7,), ignore_eos=True)
    request = EngineCoreRequest(request_id="a", spec=RequestSpec([7, 7, 7], sampling))
    engine = run(with_ngrams(make_config(), 4), 1, [request])
    assert engine.tokens["a"] == [7] * 61
    stats = engine.scheduler.stats()
    assert stats.num_steps == 1 + 60 // 4
    drafts = stats.drafts
    assert (drafts.num_drafts, drafts.num_draft_tokens, drafts.num_accepted_tokens) == (15, 45, 45)
    assert drafts.num_accepted_per_pos == [15, 15, 15]
    check_empty(engine)


def test_rows_without_a_match_draft_nothing(make_config: Any) -> None:
    """They compute what they cannot keep, and nobody counts it as a draft."""
    sampling = SamplingParams(max_tokens=3, allowed_token_ids=(50,), bad_words=((50, 50),))
    allowed = EngineCoreRequest(request_id="a", spec=RequestSpec([9, 8, 7, 6], sampling))
    config = with_ngrams(make_config(), 4)
    assert config.speculative is not None
    config = replace(config, speculative=replace(config.speculative, prompt_lookup_min=3))
    engine = run(config, 2, [allowed])
    assert engine.tokens["a"] == [50, 50, 50]
    assert engine.scheduler.stats().drafts.num_draft_tokens == 0
    check_empty(engine)


def test_what_a_grammar_forces_is_drafted(folder: Path) -> None:
    """No n-gram comes again, and yet steps bring four tokens each."""
    sampling = SamplingParams(
        max_tokens=40,
        grammar=LLMatcher.grammar_from_regex("abcdefghijklmnopq[xy]"),
        temperature=0.0,
    )
    config = grammar_requests.grammar_config(folder)
    spec = RequestSpec([200, 201, 202], sampling)
    request = EngineCoreRequest(request_id="a", spec=spec, eos_token_ids=(EOS,))
    one, several = (run(with_ngrams(config, count), 2, [request]) for count in (1, 4))
    assert several.tokens == one.tokens
    assert one.counts[1] == len(one.tokens["a"]) > 14
    assert several.counts[4] >= 3
    for engine in (one, several):
        check_empty(engine)


def test_no_bit_depends_on_how_many_are_drafted(
    make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps choose any length, in any order; few blocks make requests start again."""
    rng = random.Random(1)
    chosen: list[int] = []

    def choose(self: DraftLength, num_rows: int) -> int:
        chosen.append(rng.choice(self.lengths))
        return chosen[-1]

    monkeypatch.setattr(DraftLength, "choose", choose)
    config = with_ngrams(replace(make_config(num_blocks=13), scheduler=FEW_TOKENS), 8)
    assert config.speculative is not None
    config = replace(config, speculative=replace(config.speculative, adaptive=True))
    one = run(with_ngrams(make_config(), 1), 1, plain_requests(3))
    several = run(config, 2, plain_requests(3))
    assert set(chosen) == {1, 2, 4, 8}
    assert several.scheduler.stats().num_preemptions > 0
    check_same(one, several)


def test_no_output_ends_too_early_however_many_are_drafted(
    make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a step without drafts, too, hosts know no lengths: drafts of earlier steps were wrong."""
    lengths = cycle((8, 1, 1))
    monkeypatch.setattr(DraftLength, "choose", lambda self, num_rows: next(lengths))
    config = with_ngrams(make_config(), 8)
    assert config.speculative is not None
    config = replace(config, speculative=replace(config.speculative, adaptive=True))
    engines = [OneEngine(with_ngrams(make_config(), 1), 1), OneEngine(config, 2)]
    engines[1].worker.runner.drafts.drafter = RandomDrafter(211)
    sampling = SamplingParams(
        temperature=1.0, max_tokens=60, min_tokens=50, stop_token_ids=tuple(range(10, 200))
    )
    for engine in engines:
        for seed in range(4):
            spec = RequestSpec([5, 6, 7, seed], sampling).with_sampling(seed=seed)
            engine.add(EngineCoreRequest(request_id=str(seed), spec=spec))
        engine.finish()
    one, several = engines
    assert several.tokens == one.tokens
    assert all(len(tokens) >= 50 for tokens in one.tokens.values())
    for engine in engines:
        check_empty(engine)


def test_rows_run_on_behind_the_end_of_a_context(
    make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that is out already when a row's context ends computes it once more, maybe without
    drafts. Bad words are looked for in the tokens before each place."""
    lengths = cycle((8, 1))
    monkeypatch.setattr(DraftLength, "choose", lambda self, num_rows: next(lengths))
    config = with_ngrams(make_config(), 8)
    assert config.speculative is not None
    config = replace(config, speculative=replace(config.speculative, adaptive=True))
    most = config.model.max_model_len
    requests = []
    for count in range(1, 9):
        # Drafts are always right, also those behind the end.
        sampling = SamplingParams(
            max_tokens=most - count, allowed_token_ids=(8,), bad_words=((5, 6),)
        )
        spec = RequestSpec([8] * count, sampling)
        requests.append(EngineCoreRequest(request_id=str(count), spec=spec))
    engine = run(config, 2, requests)
    assert all(engine.tokens[str(count)] == [8] * (most - count) for count in range(1, 9))
    check_empty(engine)


def test_off_nobody_counts_drafts(make_config: Any) -> None:
    requests = plain_requests(0)
    engine = run(make_config(), 2, requests)
    assert engine.scheduler.stats().drafts.num_drafts == 0
    assert engine.worker.runner.drafts.drafter is None
    check_empty(engine)


def test_memory_is_measured_with_as_many_drafts_as_there_may_be(make_config: Any) -> None:
    """Every row chooses at all of its places, with all that a request may ask of them."""
    config = with_ngrams(make_config(), 4)
    config = replace(config, scheduler=replace(config.scheduler, max_num_batched_tokens=20))
    worker = Worker(config, 0, "")
    worker.init_device()
    worker.load_model(lambda fraction: None)
    worker.initialize_kv_cache(64)
    num_places: list[int] = []
    runner = worker.runner
    sample = runner.sampler._change_logits

    def noting(logits: torch.Tensor, places: Places) -> Any:
        num_places.append(len(places.rows))
        return sample(logits, places)

    runner.sampler._change_logits = noting  # type: ignore[method-assign]
    runner.dummy_run(20)
    # A prompt's end of each of 6 rows, then decodes of as many rows as a step holds.
    assert num_places == [6, 5 * 4]
    runner.warm_up(lambda fraction: None)
    assert not runner.states.is_live_np.any()
    worker.shutdown()


def test_warm_up_makes_drafts_of_every_number_that_steps_may_make(make_config: Any) -> None:
    """Kernels that write drafts are compiled for each number of them; no recorded step has them."""
    config = with_ngrams(make_config(), 6)
    assert config.speculative is not None
    config = replace(config, speculative=replace(config.speculative, adaptive=True))
    worker = Worker(config, 0, "")
    worker.init_device()
    worker.load_model(lambda fraction: None)
    worker.initialize_kv_cache(64)
    runner, drafter = worker.runner, worker.runner.drafts.drafter
    assert drafter is not None
    seen: set[tuple[int, int]] = set()
    propose = drafter.propose

    def noting(idx_mapping: torch.Tensor, rows: RowTables) -> torch.Tensor:
        seen.add((len(idx_mapping), rows.max_drafts))
        return propose(idx_mapping, rows)

    drafter.propose = noting  # type: ignore[method-assign]
    runner.warm_up(lambda fraction: None)
    lengths = DraftLength(6).lengths
    for num_rows in (1, 2, 4):
        of_rows = {num_drafts for count, num_drafts in seen if count == num_rows}
        assert of_rows == {length - 1 for length in lengths if length > 1}, num_rows
    assert not runner.states.is_live_np.any()
    # The next step's decodes have room for as many drafts as an engine begins with.
    assert runner._query_len == config.decode_query_len
    worker.shutdown()
