"""Two engines, prefill and decode, with all their processes: the join, failures, and nothing left.

The test plays both node servers: it starts a request on both sides and carries the first token.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import re
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from llguidance import LLMatcher
from prometheus_client import CollectorRegistry

from engine.config import SpeculativeConfig
from engine.contracts.errors import EngineDeadError
from engine.contracts.outputs import TokenLogprobs
from engine.frontend.async_llm import AsyncLLM
from engine.models.draft_checkpoint import read_draft
from engine.node.metrics.engine_metrics import EngineCollector
from tests.engine.core.pd_pair import Pair, start_engine, start_engines, tokens_by_choice, tokens_of
from tests.engine.core.tiny_engine import TINY, VOCAB, Oracle, until, until_empty
from tests.engine.core.tiny_tokenizer import save_tokenizer, text_of
from tests.processes import find_processes, is_gone

NGRAMS = SpeculativeConfig(
    method="ngram", num_speculative_tokens=3, prompt_lookup_max=3, prompt_lookup_min=1
)
EAGLE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(path: str) -> AsyncIterator[Pair]:
    """Both look for leftovers whenever they are idle, and die when they find some."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.DEBUG)
    starting = (start_engine(role, path=path) for role in ("prefill", "decode"))
    pair = Pair(*await start_engines(*starting))
    root.setLevel(level)
    yield pair
    for llm in (pair.prefill, pair.decode):
        assert not llm.is_dead, llm.dead_reason
        await until_empty(llm)
        transfers = llm.stats.kv_transfer
        assert transfers["live_transfers"] == 0, transfers
        await until(lambda: llm.stats.kv_transfer["staged_bytes"] == 0, "no staged KV")  # noqa: B023
        pids = [llm.core_pid, *llm.ready.worker_pids, *llm.ready.transfer_pids]
        await llm.shutdown()
        assert all(is_gone(pid) for pid in pids)


async def test_joined_requests_equal_one_engine(pair: Pair, oracle: Oracle) -> None:
    async def one(seed: int) -> None:
        export, pull = pair.request(seed)
        stream = pair.decode.generate(pull)
        prefill = asyncio.create_task(pair.run_prefill(export))
        received = asyncio.create_task(pair.decode.wait_kv_result(pull.request_id))
        assert await tokens_of(stream) == oracle.tokens(seed), seed
        assert (await prefill).ok
        result = await received
        assert result.ok
        assert result.stats.num_bytes > 0
        assert 0 < result.stats.first_byte_at <= result.stats.last_byte_at

    computed = pair.decode.stats.prompt_tokens_computed
    await asyncio.gather(*(one(seed) for seed in range(40)))
    await until_empty(pair.decode)
    stats = pair.decode.stats
    assert stats.prompt_tokens_transferred > stats.prompt_tokens_computed - computed


async def test_a_decode_engine_may_draft(pair: Pair, oracle: Oracle) -> None:
    """Prefill, which knows nothing of it, gives first tokens; some requests are aborted."""
    decode = await start_engine("decode", speculative=NGRAMS)
    await _run_drafting(Pair(pair.prefill, decode, num_started=10_000), oracle)
    _check_draft_metrics(decode)
    await decode.shutdown()


async def test_engines_hand_a_drafters_kv_over(pair: Pair, oracle: Oracle, tmp_path: Path) -> None:
    """Both have an EAGLE head, or only one of them: answers are the same, and KV never is that of
    another layer."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(EAGLE))
    head = read_draft("eagle", str(tmp_path), TINY)
    speculative = replace(NGRAMS, method="eagle", draft=head)
    both = [await start_engine(role, speculative=speculative) for role in ("prefill", "decode")]
    pairs = ((both[0], both[1]), (pair.prefill, both[1]), (both[0], pair.decode))
    for index, (prefill, decode) in enumerate(pairs):
        await _run_drafting(Pair(prefill, decode, num_started=20_000 + 100 * index), oracle)
    assert both[1].stats.drafts.num_draft_tokens > 0
    for engine in both:
        await engine.shutdown()


async def _run_drafting(pair: Pair, oracle: Oracle) -> None:
    """Runs requests on both engines, some of which are aborted."""

    async def one(seed: int) -> None:
        export, pull = pair.request(seed)
        stream = pair.decode.generate(pull)
        prefill = asyncio.create_task(pair.run_prefill(export))
        if seed % 5 == 0:
            await anext(stream)
            stream.close()
        else:
            assert await tokens_of(stream) == oracle.tokens(seed), seed
        result = await prefill
        assert result.ok or (seed % 5 == 0 and result.is_called_off)

    before = pair.decode.stats.prompt_tokens_transferred
    await asyncio.gather(*(one(seed) for seed in range(20)))
    await until_empty(pair.decode)
    assert pair.decode.stats.prompt_tokens_transferred > before


def _check_draft_metrics(llm: AsyncLLM) -> None:
    registry = CollectorRegistry()
    registry.register(EngineCollector(llm))

    def value(name: str, **labels: str) -> float:
        labels = {"model_name": "tiny", "engine": "0", **labels}
        found = registry.get_sample_value(f"vllm:spec_decode_{name}_total", labels)
        assert found is not None, name
        return found

    drafts = llm.stats.drafts
    assert value("num_drafts") == drafts.num_drafts > 0
    assert value("num_draft_tokens") == drafts.num_draft_tokens == 3 * drafts.num_drafts
    assert value("num_accepted_tokens") == drafts.num_accepted_tokens > 0
    by_place = [value("num_accepted_tokens_per_pos", position=str(at)) for at in range(3)]
    assert by_place == sorted(by_place, reverse=True)
    assert sum(by_place) == drafts.num_accepted_tokens


def choices_prompt(seed: int) -> list[int]:
    return [1 + (seed * 13 + i * i) % (VOCAB - 1) for i in range(61)]


async def run_choices(pair: Pair, prompt: list[int], seeds: range) -> tuple[list[list[int]], int]:
    """Returns the tokens of each choice, and the bytes of KV that decode received."""
    export, pull = pair.choices(prompt, seeds, max_tokens=12, temperature=1.0, ignore_eos=True)
    stream = pair.decode.generate(pull)
    received = asyncio.create_task(pair.decode.wait_kv_result(pull.request_id))
    prefill = asyncio.create_task(pair.run_prefill(export))
    found = await tokens_by_choice(stream)
    assert (await prefill).ok
    return [found[name] for name in sorted(found)], (await received).stats.num_bytes


async def test_choices_are_computed_once_and_pulled_once(pair: Pair) -> None:
    """The transfer processes count what comes over their streams."""
    alone, num_bytes = [], 0
    for seed in range(40, 48):
        (tokens,), num_bytes = await run_choices(pair, choices_prompt(1), range(seed, seed + 1))
        alone.append(tokens)
        await until_empty(pair.decode)
    await until_empty(pair.prefill)
    before, of_decode = pair.prefill.stats, pair.decode.stats
    together, num_bytes_of_all = await run_choices(pair, choices_prompt(1), range(40, 48))
    assert together == alone
    assert len({tuple(tokens) for tokens in alone}) == 8
    await until_empty(pair.prefill)
    await until_empty(pair.decode)
    assert pair.prefill.stats.prompt_tokens_computed - before.prompt_tokens_computed == 61
    assert pair.decode.stats.prompt_tokens_computed == of_decode.prompt_tokens_computed
    assert 0 < num_bytes_of_all <= 1.02 * num_bytes
    total = pair.decode.stats.kv_transfer["bytes"] - of_decode.kv_transfer["bytes"]
    assert total == num_bytes_of_all


async def test_choices_outlive_each_other_and_their_kv(pair: Pair) -> None:
    """Some choices are aborted, wherever they are; of every third prompt no KV comes, with its
    first tokens or without. The others give what they give alone."""
    rng = random.Random(3)

    async def one(number: int) -> None:
        prompt, seeds = choices_prompt(number), range(100 * number, 100 * number + 5)
        sampling = {"max_tokens": 12, "temperature": 1.0, "ignore_eos": True}
        export, pull = pair.choices(prompt, seeds, **sampling)
        if number % 3 == 0:
            stream = pair.decode.generate(pull)
            if number % 2:
                outputs = [o async for o in pair.prefill.generate(replace(export))]
                pair.decode.supply_first_token(
                    pull.request_id, outputs[0].token_ids[0], siblings=outputs[0].siblings
                )
            pair.decode.prefill_locally(pull.request_id)
            pair.prefill.abort(export.request_id)
            prefill = None
        else:
            stream = pair.decode.generate(pull)
            prefill = asyncio.create_task(pair.run_prefill(export))
        found: dict[str, list[int]] = {}
        aborted = set(rng.sample(pull.choice_ids, 2))
        when = {name: rng.randint(0, 12) for name in aborted}
        num_outputs = 0
        for name in [name for name in aborted if when[name] == 0]:
            pair.decode.abort(name)
        async for output in stream:
            num_outputs += 1
            found.setdefault(output.request_id, []).extend(output.token_ids)
            for name in [name for name in aborted if when[name] == num_outputs]:
                pair.decode.abort(name)
        expected, _ = await run_choices(pair, prompt, seeds)
        for name, tokens in zip(pull.choice_ids, expected, strict=True):
            got = found.get(name, [])
            assert got == tokens[: len(got)] and (len(got) == 12 or name in aborted)
        if prefill is not None:
            await prefill

    await asyncio.gather(*(one(number) for number in range(2, 12)))
    await until_empty(pair.decode)
    await until_empty(pair.prefill)


async def test_nobody_prefills_so_decode_does_it_itself(pair: Pair, oracle: Oracle) -> None:
    _, pull = pair.request(20)
    stream = pair.decode.generate(pull)
    pair.decode.prefill_locally(pull.request_id)
    assert await tokens_of(stream) == oracle.tokens(20)


async def test_prompt_logprobs_are_the_same_on_either_side(pair: Pair, oracle: Oracle) -> None:
    async def one(*, is_remote: bool) -> list[TokenLogprobs]:
        export, pull = pair.request(27, prompt_logprobs=2)
        stream = pair.decode.generate(pull)
        if is_remote:
            assert (await pair.run_prefill(export)).ok
        else:
            pair.decode.prefill_locally(pull.request_id)
        first, *others = [output async for output in stream]
        tokens = [token for output in (first, *others) for token in output.token_ids]
        assert tokens == oracle.tokens(27)
        assert all(output.prompt_logprobs is None for output in others)
        found = [token for part in first.prompt_logprobs or () for token in part.unpack()]
        assert len(found) == len(pull.spec.prompt_token_ids) - 1
        return found

    for remote, local in zip(await one(is_remote=True), await one(is_remote=False), strict=True):
        assert (remote.token_ids, remote.rank) == (local.token_ids, local.rank)
        assert remote.logprobs == pytest.approx(local.logprobs, abs=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_limits_on_tokens_hold_on_both_nodes(pair: Pair, temperature: float) -> None:
    """The first token is sampled on prefill, the others on decode, or all of them here."""
    free = {"temperature": temperature, "max_tokens": 20}

    async def one(*, is_remote: bool, **limits: Any) -> list[int]:
        export, pull = pair.request(27, **free, **limits)
        stream = pair.decode.generate(pull)
        if is_remote:
            assert (await pair.run_prefill(export)).ok
        else:
            pair.decode.prefill_locally(pull.request_id)
        return await tokens_of(stream)

    said = await one(is_remote=False)
    words = tuple({(said[0],), *pairwise(said)})
    allowed = tuple(set(range(1, VOCAB, 2)) | set(said))
    limits = {"allowed_token_ids": allowed, "bad_words": words}
    remote = await one(is_remote=True, **limits)
    assert remote == await one(is_remote=False, **limits)
    assert remote[0] != said[0] and set(remote) <= set(allowed)
    assert not set(pairwise(remote)) & set(words)


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "s": {"type": "string", "maxLength": 9}},
    "required": ["a", "s"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
GRAMMARS = [LLMatcher.grammar_from_json_schema(SCHEMA), "start: /[a-d]{3,7}/", "start: /x?/"]
NOTHING = "start: /a/ NOTHING\nNOTHING: /b/ & /c/"


async def grammar_answer(
    pair: Pair, grammar: str, seed: int, *, is_remote: bool, **sampling: Any
) -> tuple[list[int], str | None, str]:
    """Returns the tokens of a request under a grammar, its finish reason and its error."""
    limits = {"temperature": 1.0, "max_tokens": 40, "ignore_eos": False, **sampling}
    export, pull = pair.request(seed, grammar=grammar, **limits)
    export.eos_token_ids = pull.eos_token_ids = (0,)
    stream = pair.decode.generate(pull)
    if is_remote:
        prefill = asyncio.create_task(pair.run_prefill(export))
    else:
        pair.decode.prefill_locally(pull.request_id)
    outputs = [output async for output in stream]
    if is_remote:
        await asyncio.wait([prefill])
    tokens = [token for output in outputs for token in output.token_ids]
    return tokens, outputs[-1].finish_reason, outputs[-1].error


@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize("max_tokens", [1, 40])
async def test_grammars_hold_on_both_nodes(pair: Pair, grammar: str, max_tokens: int) -> None:
    """Prefill masks the first token, which decode replays. The answer may end with it."""

    async def one(seed: int) -> None:
        limits = {"max_tokens": max_tokens}
        remote = await grammar_answer(pair, grammar, seed, is_remote=True, **limits)
        assert remote == await grammar_answer(pair, grammar, seed, is_remote=False, **limits)
        tokens, finish_reason, _ = remote
        if finish_reason == "stop":
            ended.append(len(tokens))
            assert tokens[-1] == 0
            text = text_of(tokens)
            if grammar == GRAMMARS[0]:
                found = json.loads(text)
                assert isinstance(found["a"], bool) and len(found["s"]) <= 9
            else:
                assert re.fullmatch(grammar.split("/")[1], text)

    ended: list[int] = []
    masks = pair.prefill.stats.grammar.num_masks
    await asyncio.gather(*(one(seed) for seed in range(6)))
    assert len(ended) == 6 or max_tokens == 1
    assert 1 in ended or grammar != GRAMMARS[2]
    await until(lambda: pair.prefill.stats.grammar.num_masks >= masks + 6, "masks on prefill")


async def test_a_grammar_that_cannot_be_followed_is_an_error_of_its_request(pair: Pair) -> None:
    failed = pair.decode.stats.grammar.num_failed
    beside = asyncio.create_task(grammar_answer(pair, GRAMMARS[1], 3, is_remote=True))
    tokens, finish_reason, error = await grammar_answer(pair, NOTHING, 3, is_remote=True)
    assert text_of(tokens) == "a" and finish_reason == "error"
    assert "no token of the model can follow" in error
    tokens, finish_reason, error = await grammar_answer(pair, "nonsense", 3, is_remote=False)
    assert (tokens, finish_reason) == ([], "error") and "cannot be compiled" in error
    assert (await beside)[1:] == ("stop", "")
    await until(lambda: pair.decode.stats.grammar.num_failed == failed + 2, "failures counted")


async def test_what_grammars_cost_is_told(pair: Pair) -> None:
    await grammar_answer(pair, GRAMMARS[0], 1, is_remote=True)
    registry = CollectorRegistry()
    registry.register(EngineCollector(pair.decode))

    def value(name: str, **labels: str) -> float:
        found = registry.get_sample_value(
            f"tandem_grammar_{name}", {"model_name": "tiny", "engine": "0", **labels}
        )
        assert found is not None, name
        return found

    await until(lambda: value("masks_total") > 0, "masks")
    for name in ("compile", "wait", "mask"):
        assert value(f"{name}_seconds_bucket", le="+Inf") == value(f"{name}_seconds_count") > 0
        assert value(f"{name}_seconds_sum") > 0
    assert value("compile_seconds_count") == value("wait_seconds_count")
    assert value("mask_seconds_count") <= value("masks_total")


async def test_aborts_on_either_side_at_any_moment(pair: Pair, oracle: Oracle) -> None:
    draw = random.Random(5)

    async def one(index: int) -> None:
        export, pull = pair.request(index)
        stream = pair.decode.generate(pull)
        prefill = asyncio.create_task(pair.run_prefill(export))
        await asyncio.sleep(draw.random() * 0.3)
        if index % 3 == 0:
            stream.close()
        if index % 3 <= 1:
            prefill.cancel()
        if index % 3 == 1:
            await asyncio.wait([prefill])
            pair.decode.prefill_locally(pull.request_id)
        if index % 3 > 0:
            assert await tokens_of(stream) == oracle.tokens(index), index
        await asyncio.wait([prefill])

    await asyncio.gather(*(one(i) for i in range(36)))
    await until_empty(pair.prefill)
    await until_empty(pair.decode)


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_killed_transfer_process(pair: Pair, oracle: Oracle, side: str) -> None:
    """A result says so, the request goes on here, and the process comes back for the next one."""
    export, pull = pair.request(30)
    stream = pair.decode.generate(pull)
    received = asyncio.create_task(pair.decode.wait_kv_result(pull.request_id))
    llm = pair.prefill if side == "prefill" else pair.decode
    restarts = llm.stats.kv_transfer["process_restarts"]
    os.kill(_transfer_pid(llm), signal.SIGKILL)
    if side == "prefill":
        prefill = asyncio.create_task(pair.run_prefill(export))
        result = await received
        if not result.ok:
            pair.decode.prefill_locally(pull.request_id)
        assert await tokens_of(stream) == oracle.tokens(30)
        prefill.cancel()
        await asyncio.wait([prefill])
    else:
        assert not (await received).ok
        pair.decode.prefill_locally(pull.request_id)
        assert await tokens_of(stream) == oracle.tokens(30)

    async def succeeds() -> bool:
        export, pull = pair.request(31)
        stream = pair.decode.generate(pull)
        prefill = asyncio.create_task(pair.run_prefill(export))
        result = await pair.decode.wait_kv_result(pull.request_id)
        if not result.ok:
            pair.decode.prefill_locally(pull.request_id)
        assert await tokens_of(stream) == oracle.tokens(31)
        prefill.cancel()
        await asyncio.wait([prefill])
        return result.ok

    async with asyncio.timeout(60):
        while not await succeeds():
            await asyncio.sleep(0.1)
    await until_empty(llm)
    assert llm.stats.kv_transfer["process_restarts"] > restarts


def _transfer_pid(llm: AsyncLLM) -> int:
    """Returns its process id, which `ready` no longer names after a restart: looks below
    the core.
    """
    (pid,) = find_processes(llm.core_pid, "kv_transfer")
    return pid


async def test_prefill_engine_dies_and_decode_goes_on(pair: Pair, oracle: Oracle) -> None:
    doomed = Pair(await start_engine("prefill"), pair.decode, num_started=1000)
    export, pull = doomed.request(40)
    stream = pair.decode.generate(pull)
    os.kill(doomed.prefill.ready.worker_pids[0], signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="worker 0 was killed by SIGKILL"):
        await doomed.run_prefill(export)
    assert not (await pair.decode.wait_kv_result(pull.request_id)).ok
    pair.decode.prefill_locally(pull.request_id)
    assert await tokens_of(stream) == oracle.tokens(40)
    ready = doomed.prefill.ready
    pids = [doomed.prefill.core_pid, *ready.worker_pids, *ready.transfer_pids]
    await doomed.prefill.shutdown()
    await until(lambda: all(is_gone(pid) for pid in pids), "the end of all processes")
