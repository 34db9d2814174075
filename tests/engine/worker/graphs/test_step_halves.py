"""Steps that no graph holds are run as two that graphs hold, on the CPU: what these hold is run by
hand. Answers, drafts and what is accepted are those of single launches."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.batch.input_batch import BatchOrder
from engine.contracts.messages import EngineCoreRequest
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from engine.contracts.scheduler_output import SchedulerOutput
from engine.contracts.steps.step_launches import GraphKey, LaunchTime, StepLaunches
from engine.sample.sampler import SamplerOutput
from engine.sched.rows.draft_length import DraftLength
from engine.worker import model_runner
from engine.worker.kv_connector import OnLayer
from engine.worker.step_halves import Part, joined, parts_of
from tests.engine.worker.drafts.test_draft_graphs import DecodeGraphsByHand
from tests.engine.worker.drafts.test_network_drafters import (
    CASES,
    engine_config,
    greedy_requests,
    watch,
    with_drafter,
)
from tests.engine.worker.drafts.test_speculation import with_ngrams
from tests.engine.worker.one_engine import OneEngine, check_empty

DECODES = GraphKey.of_decodes(4, 3, samples=True)
PROMPTS = GraphKey(8, 16, True)
ONE_BY_ONE = LaunchTime(33)


def order_of(num_decodes: int, lengths: list[int], num_ending: int = 0) -> BatchOrder:
    """Returns a step of decodes with two drafts each, and of prompts."""
    count = num_decodes + len(lengths)
    query_lens = np.array([3] * num_decodes + lengths, np.int32)
    return BatchOrder(
        rows=np.arange(10, 10 + count, dtype=np.int32),
        query_lens=query_lens,
        seq_lens=query_lens + 100,
        num_decodes=num_decodes,
        num_sampled=num_decodes + num_ending,
        decode_query_len=3,
        has_pending=num_decodes > 0,
    )


def halves_alone(order: BatchOrder) -> GraphKey | None:
    """Finds no graph that holds both decodes and prompts."""
    if order.num_decodes == len(order.rows):
        return DECODES
    return PROMPTS if order.num_decodes == 0 and not order.has_pending else None


def parts(
    order: BatchOrder,
    find: Any = halves_alone,
    *,
    draws: bool = True,
    one_by_one: LaunchTime = ONE_BY_ONE,
) -> list[Part]:
    return parts_of(order, find, StepLaunches(one_by_one=one_by_one), lambda rows: draws)


def test_a_step_is_cut_in_front_of_its_prompts() -> None:
    (decodes, first), (prompts, second) = parts(order_of(2, [5, 1, 7], num_ending=2))
    assert (first, second) == (DECODES, PROMPTS)
    assert decodes.rows.tolist() == [10, 11] and prompts.rows.tolist() == [12, 13, 14]
    assert decodes.query_lens.tolist() == [3, 3] and prompts.query_lens.tolist() == [5, 1, 7]
    assert decodes.seq_lens.tolist() == [103, 103] and prompts.seq_lens.tolist() == [105, 101, 107]
    assert (decodes.num_decodes, decodes.num_sampled, decodes.has_pending) == (2, 2, True)
    assert (prompts.num_decodes, prompts.num_sampled, prompts.has_pending) == (0, 2, False)


@pytest.mark.parametrize(
    ("order", "find", "draws"),
    [
        (order_of(2, []), lambda order: None, True),
        (order_of(0, [5]), lambda order: None, True),
        (order_of(2, [5]), lambda order: None, True),
        (order_of(2, [5]), lambda order: PROMPTS, True),
        (order_of(2, [5]), lambda order: None if order.num_decodes else PROMPTS, True),
        (order_of(2, [5]), halves_alone, False),
        (order_of(2, [17]), halves_alone, True),
    ],
    ids=["decodes", "prompts", "no graphs", "one graph", "one half", "logits", "many tokens"],
)
def test_others_are_whole(order: BatchOrder, find: Any, draws: bool) -> None:
    ((found, key),) = parts(order, find, draws=draws)
    assert found is order and key is find(order)


def test_prompts_that_attend_to_much_are_many_tokens() -> None:
    """The GPU computes eight tokens behind 100 others for as long as 25 that begin a prompt."""
    order = order_of(2, [8])
    assert len(parts(order)) == 2
    assert len(parts(order, one_by_one=ONE_BY_ONE._replace(pair=0.02))) == 1


def test_results_are_joined() -> None:
    decodes = SamplerOutput(
        torch.tensor([[5, 6, -1], [7, -1, -1]]),
        None,
        num_drafts=torch.tensor([2, 1], dtype=torch.int32),
        draft_features=torch.ones(2, 4),
    )
    prompts = SamplerOutput(torch.tensor([[8]]), None, draft_features=torch.zeros(1, 4))
    both = joined([decodes, prompts])
    assert both is not None and both.num_drafts is not None and both.draft_features is not None
    assert both.token_ids.tolist() == [[5, 6, -1], [7, -1, -1], [8, -1, -1]]
    assert both.num_drafts.tolist() == [2, 1, 0] and both.draft_features.shape == (3, 4)
    assert joined([decodes, None]) is decodes and joined([None]) is None


def late_requests(vocab_size: int) -> list[EngineCoreRequest]:
    """Returns greedy requests, drawn ones, and one that wants more than draws."""
    others = [
        SamplingParams(seed=3, temperature=0.8, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=2),
    ]
    prompts = [[(7 * i + 3) % vocab_size for i in range(count)] for count in (11, 1)]
    return [
        *greedy_requests(vocab_size),
        *(
            EngineCoreRequest(request_id=f"late-{index}", spec=RequestSpec(prompt, sampling))
            for index, (prompt, sampling) in enumerate(zip(prompts, others, strict=True))
        ),
    ]


def test_layers_are_handed_on_when_both_have_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Saved layers have the KV of prompts, too, and each is saved once."""
    monkeypatch.setattr(model_runner, "CudaGraphManager", DecodeGraphsByHand)
    CASES["mtp of qwen3_next"][1](tmp_path)
    config = with_ngrams(engine_config(tmp_path, num_blocks=96), 3)
    engine = OneEngine(config, depth=2)
    runner = engine.worker.runner
    runner.capture_model(lambda fraction: None)
    graphs = runner._graphs
    assert isinstance(graphs, DecodeGraphsByHand)
    replays_of_layers: list[list[int]] = []

    def pre_forward(step: SchedulerOutput) -> OnLayer:
        before, found = len(graphs.replayed), list[int]()
        replays_of_layers.append(found)
        return lambda layer: found.append(len(graphs.replayed) - before)

    monkeypatch.setattr(runner._connector, "pre_forward", pre_forward)
    for request in late_requests(config.model.vocab_size):
        engine.add(request)
        engine.step()
    engine.finish()
    cut = [found for found in replays_of_layers if 2 in found]
    assert len(cut) > 2 and all(found == [2] * config.model.num_layers for found in cut)


@pytest.mark.parametrize("lengths", [(), (4, 1, 2)], ids=["all drafts", "adaptive"])
@pytest.mark.parametrize("case", ["mtp of qwen3_next", "mtp of nemotron_h", "ngrams"])
def test_answers_and_drafts_are_those_of_single_launches(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    case: str,
    lengths: tuple[int, ...],
) -> None:
    """States of decodes that draft lack tokens, which no graph with prompts allows for. Some
    prompts are chunks that get no token. `lengths`: tokens of decodes that differ by
    step."""
    monkeypatch.setattr(model_runner, "CudaGraphManager", DecodeGraphsByHand)
    method, write, _ = CASES["mtp of qwen3_next" if case == "ngrams" else case]
    write(tmp_path)
    config = engine_config(tmp_path, num_blocks=96)
    drafts_by_layers = case != "ngrams"
    config = with_drafter(config, method, tmp_path) if drafts_by_layers else with_ngrams(config, 4)
    assert config.speculative is not None
    config = replace(config, speculative=replace(config.speculative, adaptive=bool(lengths)))
    cut: list[list[GraphKey | None]] = []

    def note(*given: Any) -> list[Part]:
        found = parts_of(*given)
        if len(found) > 1:
            cut.append([key for _, key in found])
        return found

    monkeypatch.setattr(model_runner, "parts_of", note)
    results = []
    for is_recorded in (False, True):
        engine = OneEngine(config, depth=2)
        turns = cycle(lengths)
        monkeypatch.setattr(DraftLength, "choose", lambda self, rows, of=turns: next(of))
        if is_recorded:
            assert not cut
            engine.worker.runner.capture_model(lambda fraction: None)
        drafted = watch(engine.worker.runner) if drafts_by_layers else None
        for request in late_requests(config.model.vocab_size):
            engine.add(request)
            engine.step()
        engine.finish()
        results.append(
            (
                engine.tokens,
                engine.logprobs,
                drafted,
                engine.scheduler.stats().drafts,
                engine.counts,
            )
        )
        check_empty(engine)
    assert results[0] == results[1]
    assert len(cut) > 2 and all(first and first.decodes for first, _ in cut)
    widths = {first.decode_query_len for first, _ in cut if first is not None}
    assert len(widths) > 1 if lengths else widths == {4}
    assert {second.samples for _, second in cut if second is not None} == {True, False}
