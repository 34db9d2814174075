"""Prompts whose KV does not arrive, or not in time, between a fake engine and fake nodes."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from decode_node.disagg.prefill_headers import prefill_headers
from decode_node.disagg.remote_prefill import RemotePrefillLimits
from engine.contracts.outputs import SchedulerStats
from kv_transfer.errors import KV_DAMAGED, KV_STALLED
from tests.decode_node.decode_fakes import FakeCall, until
from tests.decode_node.test_proxy import A, B, Bench, check_complete, tokens_of
from tests.engine.core.tiny_engine import NUM_BLOCKS

LIMITS = RemotePrefillLimits(first_token_s=60, kv_s=60, lost_call_s=60, patience_s=0.05)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench(limits=LIMITS)
    yield bench
    await bench.check_empty()


async def joined(bench: Bench, count: int = 1, bytes_per_s: float = 0.0) -> FakeCall:
    """Serves a prompt with a prefill node, the KV before the token."""
    task = bench.start()
    fake, call = await bench.engine.added(count), await bench.nodes.called(count)
    bench.engine.kv_arrives(fake, bytes_per_s=bytes_per_s)
    await until(lambda: bench.records[-1].prefill.kv is not None, "the transfer is noted")
    call.first_token()
    await until(lambda: fake.has_first_token, "token one in the engine")
    call.taken()
    bench.engine.produce_all(fake)
    await task
    return call


async def test_kv_that_does_not_follow_its_token_is_computed_here(bench: Bench) -> None:
    task = bench.start()
    fake, call = await bench.engine.added(), await bench.nodes.called()
    call.first_token()
    await until(lambda: ("local", None) in fake.calls, "computed here")
    bench.engine.produce_all(fake)
    check_complete(bench, await task)
    record = bench.records[0].prefill
    assert (record.path, record.failures) == ("local", ["kv_late"])
    assert [address for address, _ in record.failed_nodes] == [A], "no other node is tried"
    assert (await joined(bench, 2)).address == B
    assert prefill_headers(bench.records[1])["x-tandem-prefill-failed"] == f"{A}=kv_avoided"


@pytest.mark.parametrize("code", [KV_STALLED, KV_DAMAGED])
async def test_after_a_failure_other_requests_stay_away(bench: Bench, code: str) -> None:
    task = bench.start()
    fake, call = await bench.engine.added(), await bench.nodes.called()
    bench.engine.kv_arrives(fake, ok=False, code=code)
    second = await bench.nodes.called(2)
    assert (call.address, second.address) == (A, B)
    bench.engine.kv_arrives(fake, 1)
    second.first_token()
    await until(lambda: fake.has_first_token, "token one in the engine")
    second.taken()
    bench.engine.produce_all(fake)
    await task
    assert bench.records[0].prefill.failures == [code]
    (path,) = [path for path in bench.proxy.paths.report() if path.avoided_s]
    assert path.prefill_node == A


async def test_without_a_path_left_the_prompt_is_computed_here(bench: Bench) -> None:
    for address in (A, B):
        bench.proxy.paths.began(address, "one", 4096)
        bench.proxy.paths.failed(address, "one", KV_STALLED)
    task = bench.start()
    fake = await bench.engine.added()
    assert fake.params is None and not bench.nodes.calls
    bench.engine.produce_all(fake)
    assert tokens_of(await task)
    assert bench.records[0].prefill.failures == ["kv_avoided", "kv_avoided"]


async def test_a_prompt_whose_kv_takes_longer_is_computed_here(bench: Bench) -> None:
    await joined(bench, bytes_per_s=1000.0)
    bench.engine.stats = SchedulerStats(
        num_free_blocks=NUM_BLOCKS, num_total_blocks=NUM_BLOCKS, prefill_tokens_per_s=1000.0
    )
    task = bench.start(prefill_nodes=[A])
    fake = await bench.engine.added(2)
    assert fake.params is None and len(bench.nodes.calls) == 1
    bench.engine.produce_all(fake)
    await task
    assert bench.records[-1].prefill.failures == ["kv_slow"]


async def test_an_answer_of_one_token_needs_no_path(bench: Bench) -> None:
    bench.proxy.paths.began(A, "one", 4096)
    bench.proxy.paths.failed(A, "one", KV_STALLED)
    task = bench.start(max_tokens=1)
    call = await bench.nodes.called()
    assert call.address == A
    call.first_token()
    call.taken()
    await task
