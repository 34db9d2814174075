"""A client that leaves at any point of the way from prompt to answer leaves nothing behind.

Processes are stopped (SIGSTOP) to hold a request at the point in question. Leases and timeouts take
an hour here, so that nothing but the abort itself can free what is free in the end: how busy the
machine is does not matter.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from engine.frontend.async_llm import AsyncLLM
from engine.node.metrics.engine_metrics import EngineCollector
from kv_transfer.metadata import Reclaim
from tests.engine.core.pd_pair import Pair, start_engine, start_engines, tokens_of
from tests.engine.core.tiny_engine import Oracle, make_request, until, until_empty
from tests.processes import is_gone, stopped

pytestmark = pytest.mark.asyncio(loop_scope="module")

ONLY_THE_ABORT_FREES = {"lease_s": 3600.0, "stall_timeout_s": 3600.0, "frozen_after_s": 3600.0}
SEED = 7
"""The lengths of a prompt that fills blocks and of an answer with enough tokens to leave in
between.
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair() -> AsyncIterator[Pair]:
    roles = ("prefill", "decode")
    starting = (start_engine(role, **ONLY_THE_ABORT_FREES) for role in roles)
    pair = Pair(*await start_engines(*starting))
    yield pair
    for llm in (pair.prefill, pair.decode):
        await ended(llm)


async def ended(llm: AsyncLLM) -> None:
    pids = [llm.core_pid, *llm.ready.worker_pids, *llm.ready.transfer_pids]
    await llm.shutdown()
    assert all(is_gone(pid) for pid in pids)


def counter(llm: AsyncLLM, name: str) -> float:
    """Returns the counter as last reported; nothing is, before anything has happened."""
    return llm.stats.kv_transfer.get(name, 0.0)


async def nothing_is_left(pair: Pair, oracle: Oracle) -> None:
    """Checks that everything is free on both sides, and the next request is served."""
    for llm in (pair.prefill, pair.decode):
        await until_empty(llm)
        for name in ("live_transfers", "staged_bytes", "leases", "open_pulls"):
            await until(lambda: counter(llm, name) == 0, name)  # noqa: B023
    export, pull = pair.request(SEED)
    stream = pair.decode.generate(pull)
    prefill = asyncio.create_task(pair.run_prefill(export))
    assert await tokens_of(stream) == oracle.tokens(SEED)
    assert (await prefill).ok


async def test_before_the_prefill_node_has_accepted(pair: Pair, oracle: Oracle) -> None:
    _, pull = pair.request(SEED)
    stream = pair.decode.generate(pull)
    await until(lambda: counter(pair.decode, "open_pulls") > 0, "a pull without export")
    stream.close()
    await nothing_is_left(pair, oracle)


async def test_queued_on_the_prefill_node(pair: Pair, oracle: Oracle) -> None:
    with stopped(pair.prefill.ready.worker_pids[0]):
        prefills, streams = [], []
        for _ in range(30):
            export, pull = pair.request(SEED)
            streams.append(pair.decode.generate(pull))
            prefills.append(asyncio.create_task(pair.run_prefill(export)))
        await until(lambda: pair.prefill.stats.num_waiting > 0, "a queue")
        for stream, prefill in zip(streams, prefills, strict=True):
            stream.close()
            prefill.cancel()
        await asyncio.wait(prefills)
    await nothing_is_left(pair, oracle)


async def test_in_the_middle_of_the_prompt(pair: Pair, oracle: Oracle) -> None:
    with stopped(pair.prefill.ready.worker_pids[0]):
        export, pull = pair.request(SEED)
        stream = pair.decode.generate(pull)
        prefill = asyncio.create_task(pair.run_prefill(export))
        await until(lambda: pair.prefill.stats.num_running > 0, "a step that does not end")
        stream.close()
        prefill.cancel()
        await asyncio.wait([prefill])
    await nothing_is_left(pair, oracle)


@pytest.mark.parametrize("gives_first_token", [False, True], ids=["without", "with first token"])
async def test_while_kv_is_on_its_way(pair: Pair, oracle: Oracle, gives_first_token: bool) -> None:
    with stopped(pair.prefill.ready.transfer_pids[0]):
        export, pull = pair.request(SEED)
        stream = pair.decode.generate(pull)
        tokens = [token async for o in pair.prefill.generate(export) for token in o.token_ids]
        assert tokens == oracle.tokens(SEED)[:1]
        if gives_first_token:
            pair.decode.supply_first_token(pull.request_id, tokens[0])
            await until(lambda: pair.decode.stats.num_free_rows > 0, "an idle engine")
        stream.close()
        pair.prefill.abort(export.request_id)
    await nothing_is_left(pair, oracle)


async def test_kv_is_complete_but_the_first_token_missing(pair: Pair, oracle: Oracle) -> None:
    export, pull = pair.request(SEED)
    stream = pair.decode.generate(pull)
    async for _ in pair.prefill.generate(export):
        pass
    assert (await pair.decode.wait_kv_result(pull.request_id)).ok
    stream.close()
    await nothing_is_left(pair, oracle)


async def test_joined(pair: Pair, oracle: Oracle) -> None:
    export, pull = pair.request(SEED)
    stream = pair.decode.generate(pull)
    prefill = asyncio.create_task(pair.run_prefill(export))
    found: list[int] = []
    async for output in stream:
        found += output.token_ids
        if len(found) >= 3:
            stream.close()
            break
    assert found == oracle.tokens(SEED)[: len(found)]
    await prefill
    await nothing_is_left(pair, oracle)


async def test_one_token_moves_no_kv(pair: Pair, oracle: Oracle) -> None:
    await nothing_is_left(pair, oracle)
    before = [counter(llm, "transfers") for llm in (pair.prefill, pair.decode)]
    export, pull = pair.request(SEED, max_tokens=1)
    stream = pair.decode.generate(pull)
    (token,) = [token async for o in pair.prefill.generate(export) for token in o.token_ids]
    pair.decode.supply_first_token(pull.request_id, token)
    assert await tokens_of(stream) == oracle.tokens(SEED)[:1]
    for llm in (pair.prefill, pair.decode):
        await until_empty(llm)
    assert before == [counter(llm, "transfers") for llm in (pair.prefill, pair.decode)]
    _, pull = pair.request(SEED, max_tokens=1)
    stream = pair.decode.generate(pull)
    pair.decode.prefill_locally(pull.request_id)
    assert await tokens_of(stream) == oracle.tokens(SEED)[:1], "without any prefill node"


@pytest.mark.parametrize("knows", ["both", "decode"])
async def test_first_token_ends_the_answer(pair: Pair, oracle: Oracle, knows: str) -> None:
    """The answer ends by a stop token, or by a stop string, of which prefill knows nothing. Decode
    lets go of the KV, and no call is cancelled here.
    """
    token = oracle.tokens(SEED)[0]
    export, pull = pair.request(SEED, stop_token_ids=(token,))
    if knows == "decode":
        export.spec = export.spec.with_sampling(stop_token_ids=())
    stream = pair.decode.generate(pull)
    outputs = [output async for output in pair.prefill.generate(export)]
    assert outputs[-1].finish_reason == ("stop" if knows == "both" else "length")
    assert not pair.decode.supply_first_token(pull.request_id, token)
    assert await tokens_of(stream) == [token]
    await pair.prefill.wait_kv_result(export.request_id)
    await nothing_is_left(pair, oracle)


async def test_metrics_tell_what_transfers_did(pair: Pair, oracle: Oracle) -> None:
    def exported(llm: AsyncLLM) -> dict[str, float]:
        registry = CollectorRegistry()
        registry.register(EngineCollector(llm))
        samples = (sample for family in registry.collect() for sample in family.samples)
        names = {sample.name: sample.value for sample in samples}
        prefix = "tandem_kv_transfer_"
        return {
            k.removeprefix(prefix).removesuffix("_total"): v
            for k, v in names.items()
            if k.startswith(prefix)
        }

    await nothing_is_left(pair, oracle)
    _, pull = pair.request(SEED)
    stream = pair.decode.generate(pull)
    await until(lambda: exported(pair.decode)["open_pulls"] > 0, "a pull without export")
    stream.close()
    await nothing_is_left(pair, oracle)
    for llm, moved in (
        (pair.prefill, ["transfers", "bytes_moved", "reclaimed_released"]),
        (pair.decode, ["transfers", "bytes", "bytes_moved", "aborts"]),
    ):
        await until(lambda: all(exported(llm)[name] > 0 for name in moved), str(moved))  # noqa: B023
        for name in ("staged_bytes", "leases", "open_pulls"):
            await until(lambda: exported(llm)[name] == 0, name)  # noqa: B023
        values = exported(llm)
        assert values["corrupt_chunks"] == 0
        assert {f"reclaimed_{why}" for why in Reclaim} <= set(values)
    assert exported(pair.prefill)["failures"] == 0, "whoever leaves is no failure"


async def test_while_requests_are_put_back_for_others(pair: Pair, oracle: Oracle) -> None:
    """In a pool that holds little more than one request, the others are preempted over and over."""
    decode = await start_engine("decode", num_blocks=14, **ONLY_THE_ABORT_FREES)
    small = Pair(pair.prefill, decode, num_started=5000)
    try:
        streams, prefills = [], []
        for seed in range(8):
            export, pull = small.request(seed)
            pull.spec = make_request("", seed, max_tokens=50).spec
            streams.append(decode.generate(pull))
            prefills.append(asyncio.create_task(small.run_prefill(export)))
        await until(lambda: decode.stats.num_preemptions > 0, "a preemption")
        for stream in streams:
            stream.close()
        for prefill in prefills:
            prefill.cancel()
        await asyncio.wait(prefills)
        await until(lambda: decode.stats.num_free_blocks == 14, "all blocks free")
        await until(lambda: counter(decode, "live_transfers") == 0, "no transfer")
    finally:
        await ended(decode)
    await nothing_is_left(pair, oracle)
