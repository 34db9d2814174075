"""A model whose linear layers keep a state, on one node that is short of blocks, token for token
what transformers computes: prompts around the borders of convolutions, chunks and blocks;
preemptions; several choices; answers that are resumed from any place.
"""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from engine.config import SpeculativeConfig
from engine.executor.uniproc_executor import UniprocExecutor
from engine.models.checkpoint import load_model_config
from engine.sched.counters import PrefillRate
from engine.sched.rows.draft_length import DraftLength
from engine.worker.dummy_steps import largest_steps
from engine.worker.worker import Worker
from kv_transfer.config import KVTransferConfig
from tests.engine.kv_groups.grouped_node import GroupedNode, engine_config, hand_over, run_until
from tests.engine.models.parity_cases import VOCAB
from tests.engine.models.reference_models import (
    FAMILIES,
    GreedyAnswers,
    reference,
    save_checkpoint,
)

LENGTHS = (1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 97, 128)
NUM_TOKENS = 24
_NGRAMS = SpeculativeConfig(
    method="ngram", num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=3
)


ONE_NODE = ("qwen3_next", "granite_hybrid", "lfm3", "falcon_h1", "kimi_linear")


@pytest.fixture(scope="module", params=ONE_NODE)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    save_checkpoint(FAMILIES[request.param], folder)
    return folder


@pytest.fixture(scope="module")
def answers(folder: Path) -> GreedyAnswers:
    return GreedyAnswers(reference(folder))


qwen_alone = pytest.mark.parametrize("folder", ["qwen3_next"], indirect=True, scope="module")


def prompt_of(length: int) -> list[int]:
    return [(length * 31 + i * i * 7) % VOCAB for i in range(length)]


@pytest.mark.parametrize(
    ("folder", "num_drafts", "num_blocks"),
    [
        ("qwen3_next", 0, 36),
        ("qwen3_next", 3, 36),
        ("granite_hybrid", 3, 36),
        ("lfm3", 3, 60),  # windows are a group of their own
        ("falcon_h1", 3, 18),  # layers are in two groups
        ("kimi_linear", 3, 30),
        ("minimax_text", 3, 26),
    ],
    indirect=["folder"],
    scope="module",
)
def test_one_node_with_little_room(
    num_drafts: int, num_blocks: int, folder: Path, answers: GreedyAnswers
) -> None:
    """Kimi's latents are so short that blocks have twice as many tokens."""
    guesses = answers_without_haste(folder)
    known = {n: answers.tokens(prompt_of(n), NUM_TOKENS, guesses[n]) for n in LENGTHS}
    config = engine_config(load_model_config(folder), block_size=8, num_blocks=num_blocks, chunk=40)
    if num_drafts:
        config = replace(config, decode_query_len=1 + num_drafts, speculative=_NGRAMS)
    assert config.kv_layout.groups[-1].is_state
    with ExitStack() as stack:
        node = GroupedNode.start(config)
        stack.callback(node.shutdown)
        for n in LENGTHS:
            node.add(f"whole-{n}", prompt_of(n), NUM_TOKENS)
        # Answers that break off after a few tokens go on as requests whose prompt has them.
        for n, done in ((5, 1), (16, 5), (63, 2), (64, 17)):
            prompt = [*prompt_of(n), *known[n][:done]]
            node.add(f"resumed-{n}-{done}", prompt, NUM_TOKENS - done)
        for n in (3, 17, 65):
            node.add(f"choices-{n}", prompt_of(n), NUM_TOKENS, num_choices=3)
        run_until([node], lambda: node.ended.issuperset(node.tokens))
        assert node.core.stats().num_preemptions > 0
        # Their states were kept behind full blocks, as far as there was room.
        hits = node.core.stats().prefix_cache_hits
        for n in (65, 97, 128):
            node.add(f"again-{n}", prompt_of(n), NUM_TOKENS)
            node.add(f"more-{n}", [*prompt_of(n), *known[n][:9]], NUM_TOKENS - 9)
            run_until([node], lambda: node.ended.issuperset(node.tokens))
        # With drafts requests hold more, and less is kept.
        assert node.core.stats().prefix_cache_hits - hits >= (64 if num_drafts else 2 * 64)
        drafts = node.core.stats().drafts
        assert (drafts.num_accepted_tokens > 0) == (num_drafts > 0)
        assert drafts.num_accepted_tokens < drafts.num_draft_tokens or not num_drafts
        for name, tokens in node.tokens.items():
            kind, length, *done = name.partition(".")[0].split("-")
            expected = known[int(length)][:NUM_TOKENS]
            num_known = 9 if kind == "more" else int(done[0]) if done else 0
            assert tokens == expected[num_known:], name
        node.check_empty()


@cache
def answers_without_haste(folder: Path) -> dict[int, list[int]]:
    """Returns what a node with room for all answers to each length: a guess of what is right."""
    config = engine_config(load_model_config(folder), block_size=16, num_blocks=240)
    with ExitStack() as stack:
        node = GroupedNode.start(config)
        stack.callback(node.shutdown)
        for n in LENGTHS:
            node.add(str(n), prompt_of(n), NUM_TOKENS)
        run_until([node], lambda: node.ended.issuperset(node.tokens))
        return {n: node.tokens[str(n)] for n in LENGTHS}


class Between(NamedTuple):
    """Says how a prefill and a decode node differ, and the blocks of the latter."""

    tp_sizes: tuple[int, int]
    block_sizes: tuple[int, int]
    transports: str
    num_blocks: int = 240


WIDER = Between((1, 2), (8, 2), "stream")
NARROWER = Between((2, 1), (2, 16), "cuda_ipc,stream")


@pytest.mark.parametrize(
    ("folder", "between"),
    [
        *((name, between) for name in ONE_NODE for between in (WIDER, NARROWER)),
        ("bamba", WIDER),
        ("lfm2", NARROWER),
        ("lfm2_moe", WIDER),
        ("olmo_hybrid", NARROWER),
        ("ling3", WIDER),
        ("ring2_5", WIDER),
        ("minimax_text", NARROWER),
        ("kimi_k3", WIDER),
        ("kimi_k3", NARROWER),
    ],
    indirect=["folder"],
    scope="module",
)
def test_conversations_from_prefill_to_decode(
    between: Between, folder: Path, answers: GreedyAnswers
) -> None:
    """States are cut anew for other ranks, and prefill goes on from states that it has kept; decode
    has the beginning of a prompt, pulls the rest and the states, and drafts behind them."""
    with ExitStack() as stack:
        prefill, decode = start_pair(stack, folder, between)
        hand_over(prefill, decode, {f"first-{n}": prompt_of(n) for n in (3, 17, 65)}, answers)
        longer = {
            f"longer-{n}": [*prompt_of(n), *decode.tokens[f"first-{n}"], *range(20)]
            for n in (17, 65)
        }
        hand_over(prefill, decode, longer, answers)
        assert prefill.core.stats().prefix_cache_hits >= 16 + 64
        assert decode.core.stats().prefix_cache_hits >= 16 + 64
        hand_over(prefill, decode, {"choices": prompt_of(64)}, answers, num_choices=3)
        assert decode.core.stats().prompt_tokens_computed == 0
        assert decode.core.stats().drafts.num_accepted_tokens > 0
        assert all(result.ok for node in (prefill, decode) for result in node.results)


def start_pair(stack: ExitStack, folder: Path, between: Between) -> tuple[GroupedNode, GroupedNode]:
    """Starts a prefill node, and a decode node that drafts; `stack` ends both."""
    model, nodes = load_model_config(folder), []
    for role, ranks, block_size, num_blocks in zip(
        ("kv_producer", "kv_consumer"),
        between.tp_sizes,
        between.block_sizes,
        (240, between.num_blocks),
        strict=True,
    ):
        kv = KVTransferConfig(kv_role=role, transports=between.transports, num_streams=2)  # type: ignore[arg-type]
        config = engine_config(
            model, block_size=block_size, num_blocks=num_blocks, tp_size=ranks, kv_transfer=kv
        )
        if role == "kv_consumer":
            config = replace(config, decode_query_len=4, speculative=_NGRAMS)
        nodes.append(GroupedNode.start(config))
        stack.callback(nodes[-1].shutdown)
    prefill, decode = nodes
    return prefill, decode


@pytest.mark.parametrize(
    ("folder", "num_blocks"),
    [("qwen3_next", 36), ("granite_hybrid", 44), ("lfm2", 36), ("kimi_linear", 30)],
    indirect=["folder"],
    scope="module",
)
def test_pulled_states_that_are_preempted(
    num_blocks: int, folder: Path, answers: GreedyAnswers
) -> None:
    """A request whose state was pulled loses it to others, and its prompt is computed here. Which
    pulls come first is not the test's to say: where each found room, others follow."""
    with ExitStack() as stack:
        between = Between((1, 1), (16, 8), "stream", num_blocks)
        prefill, decode = start_pair(stack, folder, between)
        for first in range(1, 5):
            prompts = {f"{first}-{n}": [first, *prompt_of(n)] for n in LENGTHS}
            hand_over(prefill, decode, prompts, answers)
            stats = decode.core.stats()
            if stats.num_preemptions > 0 and stats.prompt_tokens_computed > 0:
                break
        assert stats.num_preemptions > 0 and stats.prompt_tokens_computed > 0
        assert all(result.ok for node in (prefill, decode) for result in node.results)


def test_what_blocks_hold_before_they_are_written_changes_nothing(
    folder: Path, answers: GreedyAnswers
) -> None:
    """Blocks change hands between keys, values and states, and are not cleared: what lies there may
    be no numbers, or another answer's state."""
    plain = engine_config(load_model_config(folder), block_size=8, num_blocks=80, chunk=40)
    with ExitStack() as stack:
        node = GroupedNode.start(replace(plain, decode_query_len=4, speculative=_NGRAMS))
        stack.callback(node.shutdown)
        assert isinstance(node.executor, UniprocExecutor)
        pages = node.executor._worker.runner.kv_pages
        pages.fill_(255)
        assert pages.view(torch.float32).isnan().all()
        for n in (2, 17, 65):
            node.add(f"choices-{n}", prompt_of(n), NUM_TOKENS, num_choices=2)
        run_until([node], lambda: node.ended.issuperset(node.tokens))
        for name, tokens in node.tokens.items():
            prompt = prompt_of(int(name.partition(".")[0].removeprefix("choices-")))
            assert tokens == answers.tokens(prompt, NUM_TOKENS, tokens), name


@qwen_alone
def test_choices_share_a_state_that_has_the_last_token(
    folder: Path, answers: GreedyAnswers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts whose last chunk is one token, in steps that make no drafts where others do: decodes'
    tokens go into their states one step later, and prompts' at once."""
    monkeypatch.setattr(DraftLength, "choose", lambda self, num_rows: 1)
    plain = engine_config(load_model_config(folder), block_size=8, num_blocks=60, chunk=40)
    adaptive = replace(_NGRAMS, adaptive=True)
    with ExitStack() as stack:
        node = GroupedNode.start(replace(plain, decode_query_len=4, speculative=adaptive))
        stack.callback(node.shutdown)
        lengths = (1, 9, 41, 81)
        for n in lengths:
            node.add(f"choices-{n}", prompt_of(n), NUM_TOKENS, num_choices=3)
        run_until([node], lambda: node.ended.issuperset(node.tokens))
        for n in lengths:
            for choice in range(3):
                tokens = node.tokens[f"choices-{n}.{choice}"]
                assert tokens == answers.tokens(prompt_of(n), NUM_TOKENS, tokens), n


@qwen_alone
def test_conversations_come_back_from_behind_the_cache(
    folder: Path, answers: GreedyAnswers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host memory holds fewer blocks than they have, the disk the rest, and what a killed transfer
    process and a node of before have left is used. The engine drafts behind what it loaded. Beside
    a second for each token that it would compute, every read is the quicker way."""
    monkeypatch.setattr(PrefillRate, "tokens_per_s", 1.0)
    model = load_model_config(folder)
    plain = engine_config(model, block_size=8, num_blocks=30, chunk=64)
    block_bytes = plain.kv_layout.block_bytes
    tiers = KVTransferConfig(
        kv_role="kv_producer",
        num_processes=2,
        host_tier_bytes=72 * block_bytes,
        host_tier_path=str(tmp_path / "memory"),
        disk_tier_bytes=200 * block_bytes,
        disk_tier_path=str(tmp_path / "disk"),
    )
    config = replace(plain, kv_transfer=tiers, decode_query_len=4, speculative=_NGRAMS)
    for life in range(2):
        with ExitStack() as stack:
            node = GroupedNode.start(config)
            stack.callback(node.shutdown)
            loaded = [ask_all(node, answers, f"{life}-{turn}") for turn in range(2)]
            assert loaded[1] > 0 and (loaded[0] > 0) == (life > 0)
            assert node.core.stats().prompt_tokens_from_disk > 0
            os.kill(node.core.connector.process_pids[0], signal.SIGKILL)
            assert ask_all(node, answers, f"{life}-after") > 0


def ask_all(node: GroupedNode, answers: GreedyAnswers, turn: str) -> int:
    """Asks for prompts one by one, each behind the answer before; returns the tokens loaded."""
    before = node.core.stats().prompt_tokens_loaded
    for n in range(41, 61, 2):
        name, prompt = f"{turn}-{n}", prompt_of(n)
        node.add(name, prompt, 8)
        run_until([node], lambda: name in node.ended)  # noqa: B023
        found = node.tokens[name]
        assert found == answers.tokens(prompt, 8, found), name
        # What is stored later than the cache forgets it is not stored at all.
        run_until([node], lambda: not node.core.scheduler.check_empty())
    return node.core.stats().prompt_tokens_loaded - before


@qwen_alone
def test_warming_up_lets_no_attention_read_a_state(folder: Path) -> None:
    """As keys and values its bytes may be no numbers, and samplers search among logits."""
    config = engine_config(load_model_config(folder), block_size=8, num_blocks=40)
    with ExitStack() as stack:
        worker = Worker(config, 0, "")
        stack.callback(worker.shutdown)
        worker.init_device()
        worker.load_model(lambda fraction: None)
        worker.initialize_kv_cache(40)
        worker.runner.warm_up(lambda fraction: None)
        pages = worker.runner.kv_pages
        attention = pages[:, 0].view(torch.float32)
        assert attention.any() and attention.isfinite().all()
        assert pages[:, 1].any() and not pages[:, 2:].any()


@qwen_alone
def test_memory_is_measured_with_many_chunks_that_are_not_full(folder: Path) -> None:
    model = load_model_config(folder)
    *_, step = largest_steps(150, 6, model, expands_contexts=False)
    assert (step.lengths, step.num_cached) == ([25] * 6, 0)
