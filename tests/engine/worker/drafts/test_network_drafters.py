"""Drafters with weights on the real CPU engine: they draft what their references in plain torch do,
wherever a request begins, and no bit of an answer depends on them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from engine.config import (
    CacheConfig,
    DeviceConfig,
    DrafterName,
    EngineConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from engine.contracts.messages import EngineCoreRequest
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from engine.contracts.scheduler_output import NewRequestData, PulledDrafts, SchedulerOutput
from engine.models.checkpoint import load_model_config
from engine.models.draft_checkpoint import read_draft
from engine.worker.model_runner import ModelRunner
from tandem_kernels.batch.batch_tables import RowTables
from tests.engine.models.reference_models import FAMILIES, reference, save_checkpoint
from tests.engine.worker.drafts import draft_checkpoints as drafts
from tests.engine.worker.drafts import hybrid_mtp_checkpoints as hybrid_mtp
from tests.engine.worker.drafts.drafters import KnowingDrafter
from tests.engine.worker.drafts.stream_drafts import v4_mtp_reference, write_v4_with_mtp
from tests.engine.worker.drafts.test_speculation import run
from tests.engine.worker.one_engine import OneEngine, check_empty
from tests.engine.worker.test_choices import forked
from tests.engine.worker.test_grammars import TwoRanks
from tests.processes import free_address

BLOCK_SIZE, MAX_LEN, NUM_DRAFTS = 8, 96, 3
CASES: dict[str, tuple[DrafterName, Callable[[Path], None], Callable[..., Any]]] = {
    "eagle": ("eagle", drafts.write_eagle, drafts.eagle_reference),
    "eagle3": ("eagle3", drafts.write_eagle3, drafts.eagle3_reference),
    "eagle3 of speculators 0.9": (
        "eagle3",
        lambda folder: drafts.write_eagle3(folder, speculators=True, is_newer=True),
        drafts.eagle3_reference,
    ),
    "eagle3 of speculators": (
        "eagle3",
        lambda folder: drafts.write_eagle3(folder, speculators=True),
        drafts.eagle3_reference,
    ),
    "medusa": ("medusa", drafts.write_medusa, drafts.medusa_reference),
    "second model": (
        "draft_model",
        drafts.write_second_model,
        drafts.second_model_reference,
    ),
    "mtp of glm4_moe": (
        "mtp",
        lambda folder: drafts.write_with_mtp(folder, "glm4_moe"),
        drafts.mtp_reference,
    ),
    "mtp of deepseek_v3": (
        "mtp",
        lambda folder: drafts.write_with_mtp(folder, "deepseek_v3_yarn"),
        drafts.mtp_reference,
    ),
    "mtp of deepseek_v32": (
        "mtp",
        lambda folder: drafts.write_with_mtp(folder, "deepseek_v32"),
        drafts.mtp_reference,
    ),
    "mtp of deepseek_v4": (
        "mtp",
        lambda folder: write_v4_with_mtp(folder, FAMILIES["deepseek_v4"]),
        v4_mtp_reference,
    ),
    "mtp of qwen3_next": (
        "mtp",
        lambda folder: drafts.write_hybrid_with_mtp(folder, "qwen3_next"),
        drafts.hybrid_mtp_reference,
    ),
    "mtp of ling3": (
        "mtp",
        lambda folder: hybrid_mtp.write_ling(folder, "ling3"),
        hybrid_mtp.reference_of("model.layers.4.", "model.layers.4.final_layernorm", 1),
    ),
    "mtp of nemotron_h": (
        "mtp",
        hybrid_mtp.write_nemotron,
        hybrid_mtp.reference_of("mtp.layers.0.", "mtp.layers.1.final_layernorm", 2),
    ),
    "mtp of glm_moe_dsa, which chooses once": (
        "mtp",
        drafts.write_with_one_choice,
        drafts.mtp_reference,
    ),
    "mtp with a layer for each of two drafts": (
        "mtp",
        lambda folder: drafts.write_with_mtp(folder, "deepseek_v3_yarn", 2),
        drafts.mtp_reference,
    ),
    "mtp with a layer for each draft and more": (
        "mtp",
        lambda folder: drafts.write_with_mtp(folder, "glm4_moe", NUM_DRAFTS + 1),
        drafts.mtp_reference,
    ),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    save_checkpoint(FAMILIES["llama"], folder)
    return folder


def engine_config(target: Path, max_len: int = MAX_LEN, **cache: Any) -> EngineConfig:
    return EngineConfig(
        engine_id="drafting",
        epoch=1,
        model=load_model_config(target, max_model_len=max_len),
        cache=CacheConfig(**{"block_size": BLOCK_SIZE, "num_blocks": 96, **cache}),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32),
        device=DeviceConfig(deterministic=True),
    )


def with_drafter(
    config: EngineConfig, method: DrafterName, folder: Path, count: int = NUM_DRAFTS
) -> EngineConfig:
    draft = read_draft(method, str(folder), config.model, count)
    speculative = SpeculativeConfig(
        method=method,
        num_speculative_tokens=count,
        prompt_lookup_max=3,
        prompt_lookup_min=2,
        draft=draft,
    )
    return replace(config, decode_query_len=count + 1, speculative=speculative)


def watch(
    runner: ModelRunner, answers: list[list[int]] | None = None
) -> list[tuple[list[int], list[int], int]]:
    """Returns (known tokens, drafts, how many of them have a place and blocks) of each step and row
    that goes on, as they will come. With `answers`, these are what is drafted instead, and some
    are wrong."""
    drafter, found = runner.drafts.drafter, []
    assert drafter is not None
    propose = drafter.propose
    slots = runner._block_tables[0].num_slots
    knowing = KnowingDrafter(answers or [], lies=0.4, gaps=0.1, seed=3)

    def watching(idx_mapping: torch.Tensor, rows: RowTables) -> torch.Tensor:
        lengths, ends = rows.total_len.tolist(), rows.max_len.tolist()
        at = idx_mapping.tolist()
        known = [rows.token_ids[row, : lengths[row]].tolist() for row in at]
        proposed = propose(idx_mapping, rows)
        for row, tokens, guessed in zip(at, known, proposed.tolist(), strict=True):
            if len(tokens) < ends[row]:
                room = int(slots(np.array([row]))[0]) - len(tokens) + 1
                left = ends[row] - len(tokens)
                found.append((tokens, guessed, min(room, left, NUM_DRAFTS)))
        return knowing.propose(idx_mapping, rows) if answers else proposed

    drafter.propose = watching  # type: ignore[method-assign]
    return found


def prompts_of(requests: list[EngineCoreRequest]) -> list[tuple[str, list[int]]]:
    """Returns (name of an answer, prompt)."""
    return [
        (name, list(request.spec.prompt_token_ids))
        for request in requests
        for name in request.choice_ids or [request.request_id]
    ]


def greedy_requests(vocab_size: int) -> list[EngineCoreRequest]:
    """Prompts longer than a chunk, prompts that begin alike, and choices that share one."""
    rng = random.Random(7)
    shared = [rng.randrange(vocab_size) for _ in range(2 * BLOCK_SIZE)]
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    lengths = (1, 3, 40)
    prompts = [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]
    prompts += [[*shared, 5], [*shared, 6, 7]]
    made = [
        EngineCoreRequest(request_id=f"r{i}", spec=RequestSpec(prompt, greedy))
        for i, prompt in enumerate(prompts)
    ]
    return [*made, forked("c", prompts[1] * 4, 2, max_tokens=9, temperature=0.0, ignore_eos=True)]


@pytest.mark.parametrize("case", CASES)
def test_drafts_are_those_of_the_reference(case: str, target: Path, tmp_path: Path) -> None:
    """Also behind hits of the prefix cache, in copied blocks, and after preemptions. Drafts behind
    the last place of a row, or without blocks yet, may be anything."""
    method, write, make_reference = CASES[case]
    write(tmp_path / "draft")
    folder = tmp_path / "draft"
    whole = folder if method == "mtp" else target
    oracle = make_reference(reference(whole), folder)
    requests = greedy_requests(engine_config(whole).model.vocab_size)
    longer, repeated, max_len = case == "mtp of deepseek_v4", requests[4], MAX_LEN
    if longer:  # Rows of several tokens are found again behind long prompts alone.
        tokens = [*range(101), *range(35)]
        sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        repeated = EngineCoreRequest(request_id="long", spec=RequestSpec(tokens, sampling))
        requests, max_len = [*requests, repeated], 150
    alone = run(engine_config(whole, max_len, num_blocks=300 if longer else 96), 1, requests)
    answers = [known + alone.tokens[name] for name, known in prompts_of(requests)]
    again = msgspec.structs.replace(repeated, request_id="again")
    num_hits = num_preemptions = 0
    # A second model has blocks of its own. States have, too, and are kept where there is room, as
    # windows are beside rows of several tokens.
    rooms = {
        "second model": (20,),
        "mtp of qwen3_next": (17, 40),
        "mtp of deepseek_v4": (70,),
        "mtp of ling3": (10, 40),
        "mtp of nemotron_h": (9, 24),
    }
    size = 1 if longer else BLOCK_SIZE
    for num_blocks in rooms.get(case, (13,)):
        cache = {"num_blocks": num_blocks, "block_size": size}
        config = with_drafter(engine_config(whole, max_len, **cache), method, folder)
        engine = OneEngine(config, depth=2)
        found = watch(engine.worker.runner, answers)
        for request in requests:
            engine.add(request)
            engine.step()
        engine.finish()
        engine.add(again)
        engine.finish()
        stats = engine.scheduler.stats()
        num_hits += stats.prefix_cache_hits
        num_preemptions += stats.num_preemptions
        assert 0 < stats.drafts.num_accepted_tokens < stats.drafts.num_draft_tokens
        assert engine.tokens == {**alone.tokens, "again": alone.tokens[repeated.request_id]}
        check_empty(engine)
        num_checked = 0
        for known, proposed, count in found[::6]:
            num_checked += count
            assert proposed[:count] == oracle.drafts(known, count), len(known)
        # Only the last prompt token and the end of a sequence come without blocks for what follows.
        assert num_checked > 0.8 * NUM_DRAFTS * len(found) / 6
    assert num_hits > 0 and num_preemptions > 0


def test_ranks_draft_alike(target: Path, tmp_path: Path) -> None:
    """Each computes its heads of the drafter's layer and its part of the vocabulary."""
    drafts.write_eagle3(tmp_path)
    config = with_drafter(engine_config(target), "eagle3", tmp_path)
    requests = greedy_requests(config.model.vocab_size)
    engines = []
    for tp_size in (1, 2):
        config = replace(config, parallel=ParallelConfig(tensor_parallel_size=tp_size))
        worker = TwoRanks(config, free_address()) if tp_size == 2 else None
        engines.append(OneEngine(config, 2, worker))
    found = [watch(engine.worker.runner) for engine in engines]
    for engine in engines:
        for request in requests:
            engine.add(request)
        engine.finish()
        check_empty(engine)
    assert found[0] == found[1]
    assert engines[0].tokens == engines[1].tokens


def _after_transfer(
    prefill: OneEngine, decode: OneEngine, prompt: list[int], pulled: PulledDrafts
) -> tuple[list[int], list[int]]:
    """Computes a prompt on one engine and goes on from its KV on another. Returns all tokens known
    there with the second, and what is drafted behind them."""
    num_tokens, found = len(prompt), watch(decode.worker.runner)
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    of_prefill, of_decode = [7, 3, 9, 11], [20, 2, 31, 5]

    def step(
        tokens: list[int], blocks: list[int], num_computed: int, **new: Any
    ) -> SchedulerOutput:
        request = NewRequestData(
            row=1,
            epoch=1,
            prompt_len=num_tokens,
            prefill_token_ids=np.array(tokens, "<i4").tobytes(),
            num_computed_tokens=num_computed,
            block_ids=blocks,
            max_len=MAX_LEN,
            sampling=greedy,
            **new,
        )
        chunks = [(1, len(tokens) - num_computed)]
        return SchedulerOutput(0, new_reqs=[request], prefill_chunks=chunks)

    prefill.worker.runner._hands_over = True
    first = prefill.worker.execute_model(step(prompt, of_prefill, 0))
    assert first.drafts is not None
    sent = first.drafts.features[1] if pulled.feature else b""
    pages = prefill.worker.runner.kv_pages[:, of_prefill]
    if not pulled.has_kv:
        pages[-1].zero_()
    decode.worker.runner.kv_pages[:, of_decode] = pages
    known = [*prompt, *first.token_ids]
    pulled = PulledDrafts(pulled.first_token, pulled.has_kv, sent)
    decode.worker.execute_model(step(known, of_decode, num_tokens, pulled=pulled))
    prefill.worker.shutdown()
    decode.worker.shutdown()
    ((tokens, drafted, _),) = found
    return tokens, drafted


@pytest.mark.parametrize("has_kv", [True, False])
def test_drafting_goes_on_behind_the_kv_of_another_node(
    target: Path, tmp_path: Path, has_kv: bool
) -> None:
    """Goes on with the feature that came along, as if the prompt had been computed here. A node
    without the drafter leaves its layer empty, and n-grams draft instead."""
    drafts.write_eagle3(tmp_path)
    config = with_drafter(engine_config(target), "eagle3", tmp_path)
    oracle = drafts.eagle3_reference(reference(target), tmp_path)
    prompt = [11, 12, 13, 14, 15, 16, 17, 18, 19, 11, 12, 13, 14, 60, 61, 11, 12, 13]
    pulled = PulledDrafts(0, has_kv, b"some")
    engines = OneEngine(config, 1), OneEngine(config, 1)
    tokens, drafted = _after_transfer(*engines, prompt, pulled)
    expected = oracle.drafts(tokens, NUM_DRAFTS)
    if has_kv:
        assert drafted == expected
    else:
        assert drafted == [-1] * NUM_DRAFTS != expected  # Nothing like the new token came before.


def test_a_second_model_drafts_behind_the_kv_of_another_node(target: Path, tmp_path: Path) -> None:
    """It reads nothing but its own KV, so nothing else comes along."""
    known = FAMILIES["llama"]
    save_checkpoint(replace(known, changes={**known.changes, "num_hidden_layers": 1}), tmp_path)
    config = with_drafter(engine_config(target), "draft_model", tmp_path)
    prompt = [11, 12, 13, 14, 15, 16, 17, 18, 19, 11, 12, 13, 14, 60, 61, 11, 12, 13]
    engines = OneEngine(config, 1), OneEngine(config, 1)
    tokens, drafted = _after_transfer(*engines, prompt, PulledDrafts(0, True, b""))
    assert drafted == drafts.second_model_reference(reference(target), tmp_path).drafts(
        tokens, NUM_DRAFTS
    )


@pytest.fixture(scope="module")
def two_ahead(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a model with two layers that predict ahead."""
    folder = tmp_path_factory.mktemp("two_ahead") / "model"
    drafts.write_with_mtp(folder, "deepseek_v3_yarn", 2)
    return folder


def test_each_layer_of_a_chain_goes_on_behind_the_kv_of_another_node(two_ahead: Path) -> None:
    """The layers draft from what they have made of the last token, which comes along."""
    config = with_drafter(engine_config(two_ahead), "mtp", two_ahead)
    prompt = [11, 12, 13, 14, 15, 16, 17, 18, 19, 11, 12, 13, 14, 60, 61, 11, 12, 13]
    engines = OneEngine(config, 1), OneEngine(config, 1)
    tokens, drafted = _after_transfer(*engines, prompt, PulledDrafts(0, True, b"some"))
    oracle = drafts.mtp_reference(reference(two_ahead), two_ahead)
    assert drafted == oracle.drafts(tokens, NUM_DRAFTS)


@pytest.mark.parametrize(
    ("named", "num_drafts", "taken"), [(2, 1, 1), (2, 3, 2), (3, 3, 2)], ids=str
)
def test_layers_that_predict_ahead_are_no_more_than_drafts_and_weights(
    named: int, num_drafts: int, taken: int, two_ahead: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    config = json.loads((two_ahead / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": named}))
    (folder / "model.safetensors").symlink_to(two_ahead / "model.safetensors")
    model = engine_config(folder).model
    draft = read_draft("mtp", str(folder), model, num_drafts)
    assert draft.num_layers == taken
    assert draft.feature_size == taken * drafts.HIDDEN
    # Nodes that take as many hand their KV over; one layer is what it has always been.
    name = "mtp" if taken == 1 else f"mtp-{taken}"
    assert draft.model.model_hash == f"{name}-{model.model_hash}"
