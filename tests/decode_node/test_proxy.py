"""The proxy's state machine, event by event, without sockets.

Whatever happens, the client sees the fixed sequence of tokens once and in order, or a clear
error; and afterwards no call is open, no request in the engine, no room taken.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from decode_node.disagg.cached_prefixes import CachedPrefixes
from decode_node.disagg.credits import KVCredits
from decode_node.disagg.prefill_headers import prefill_headers
from decode_node.disagg.prefill_join import JoinState
from decode_node.disagg.proxy import DisaggProxy
from decode_node.disagg.remote_prefill import RemotePrefillLimits
from decode_node.errors import Overloaded, Unavailable
from decode_node.observe.timeline import RequestRecord
from engine.contracts.errors import EngineDeadError
from engine.contracts.outputs import SchedulerStats
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from engine.frontend.input_processor import GenerationRequest
from engine.frontend.output_processor import RequestOutput
from kv_transfer.metadata import KVPeer
from router.config import RouterSettings
from tests.decode_node.decode_fakes import (
    FakeEngine,
    FakePrefillNodes,
    collect,
    expected_tokens,
    outputs_of,
    until,
)
from tests.engine.core.tiny_engine import NUM_BLOCKS

A, B, C = "a:1", "b:1", "c:1"
PROMPT = [5, 6, 7, 8, 9]
MAX_TOKENS = 6


@dataclass
class Bench:
    """A proxy between a fake engine and fake prefill nodes."""

    engine: FakeEngine = field(default_factory=FakeEngine)
    nodes: FakePrefillNodes = field(default_factory=FakePrefillNodes)
    credits: KVCredits = field(default_factory=lambda: KVCredits(NUM_BLOCKS, 8, 8))
    threshold: int = 0
    limits: RemotePrefillLimits = field(
        default_factory=lambda: RemotePrefillLimits(first_token_s=60, kv_s=60, lost_call_s=60)
    )

    def __post_init__(self) -> None:
        self.proxy = DisaggProxy(
            self.engine,
            self.nodes,
            self.credits,
            layout=self.engine.config.kv_layout,
            prefix_index=CachedPrefixes(NUM_BLOCKS, 8),
            limits=self.limits,
            default_prefill_nodes=(A, B),
            local_prefill_threshold=self.threshold,
            max_waiting_requests=4,
        )
        self._names = itertools.count()
        self.records: list[RequestRecord] = []

    def request(self, prompt: Sequence[int] = PROMPT, **sampling: object) -> GenerationRequest:
        params = SamplingParams(**{"max_tokens": MAX_TOKENS, "seed": 3, **sampling})
        spec = RequestSpec(list(prompt), params)
        return GenerationRequest(f"r{next(self._names)}", spec, eos_token_ids=(0,))

    def stream(
        self, *, prefill_nodes: list[str] | None = None, **sampling: object
    ) -> AsyncIterator[RequestOutput]:
        record = RequestRecord(num_prompt_tokens=len(PROMPT))
        self.records.append(record)
        return outputs_of(self.proxy, self.request(**sampling), [record], prefill_nodes)

    def start(self, **kwargs: object) -> asyncio.Task[list[RequestOutput]]:
        return asyncio.create_task(collect(self.stream(**kwargs)))

    async def check_empty(self) -> None:
        await self.nodes.check_empty()
        await until(lambda: self.proxy.num_remote == 0, "no prefill task")
        self.engine.check_empty()
        assert self.proxy.open.count == 0
        assert (self.credits.num_free, self.credits.num_claims) == (NUM_BLOCKS, 0)
        assert self.credits.num_waiting == 0


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    await bench.check_empty()


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def check_complete(bench: Bench, outputs: list[RequestOutput], count: int = MAX_TOKENS) -> None:
    assert tokens_of(outputs) == expected_tokens(bench.engine.only, count)
    assert outputs[-1].finish_reason == "length"
    assert sum(output.finished for output in outputs) == 1


# The usual way ---------------------------------------------------------------------------------


@pytest.mark.parametrize("token_first", [True, False])
async def test_token_and_kv_join_in_any_order(bench: Bench, token_first: bool) -> None:
    task = bench.start()
    fake, call = await bench.engine.added(), await bench.nodes.called()
    assert call.address == A
    assert fake.params is not None and fake.params.do_remote_prefill
    assert (call.params.transfer_id, call.params.attempt) == (fake.params.transfer_id, 0)
    if token_first:
        call.first_token()
        await until(lambda: fake.has_first_token, "token one in the engine")
        bench.engine.kv_arrives(fake)
    else:
        bench.engine.kv_arrives(fake)
        call.first_token()
        await until(lambda: fake.has_first_token, "token one in the engine")
    call.taken()
    record = bench.records[0]
    await until(lambda: record.prefill.kv is not None, "the transfer is noted")
    bench.engine.produce_all(fake)
    check_complete(bench, await task)
    timeline = record.timeline()
    assert (timeline.path, timeline.prefill_node, timeline.attempts) == ("remote", A, 1)
    assert (timeline.cached_tokens, timeline.kv_bytes, timeline.kv_streams) == (3, 4096, 2)
    assert timeline.prefill_s == 0.02
    assert timeline.first_token_s <= (timeline.second_token_s or 0) <= timeline.total_s


async def test_token_one_reaches_the_client_before_any_kv(bench: Bench) -> None:
    async with aclosing(bench.stream()) as stream:
        first = asyncio.ensure_future(anext(stream))
        call = await bench.nodes.called()
        call.first_token()
        output = await first
        assert output.token_ids == expected_tokens(bench.engine.only, 1)
        assert not bench.engine.only.has_kv


@pytest.mark.parametrize(
    ("sampling", "token", "reason"),
    [
        ({"max_tokens": 1}, None, "length"),
        ({}, 0, "stop"),
        ({"stop_token_ids": (77,)}, 77, "stop"),
    ],
)
async def test_token_one_may_end_it(
    bench: Bench, sampling: dict[str, object], token: int | None, reason: str
) -> None:
    task = bench.start(**sampling)
    call = await bench.nodes.called()
    call.first_token(token)
    outputs = await task
    assert outputs[-1].finish_reason == reason
    assert len(tokens_of(outputs)) == 1


async def test_a_token_that_ends_it_is_the_end_of_the_call_too(bench: Bench) -> None:
    """The KV is called off before the client has read on, which is no failure by then."""
    async with aclosing(bench.stream()) as stream:
        first = asyncio.ensure_future(anext(stream))
        call = await bench.nodes.called()
        call.first_token(0)
        assert (await first).finish_reason == "stop"
        bench.engine.kv_arrives(bench.engine.only, ok=False)
        await until(lambda: bench.proxy.num_remote == 0, "nobody waits for KV")
    assert not call.is_open
    assert not bench.records[0].prefill.failures
    assert len(bench.nodes.calls) == 1


# One token is asked for -------------------------------------------------------------------------


async def test_one_token_needs_neither_kv_nor_room(bench: Bench) -> None:
    blocker = bench.credits.claim_now(NUM_BLOCKS * 8, 1)
    task = bench.start(max_tokens=1)
    call = await bench.nodes.called()
    assert call.params.first_token_only
    call.fail("resource_exhausted")
    second = await bench.nodes.called(2)
    assert (second.address, second.params.first_token_only) == (B, True)
    second.first_token()
    check_complete(bench, await task, 1)
    assert bench.records[0].prefill.failures == ["resource_exhausted"]
    blocker.release()


async def test_one_token_that_no_node_gives_is_computed_here(bench: Bench) -> None:
    bench.nodes.unreachable = {B}
    task = bench.start(max_tokens=1)
    (await bench.nodes.called()).fail()
    await until(lambda: bench.engine.only.has_kv, "prefill here")
    bench.engine.produce_all(bench.engine.only)
    check_complete(bench, await task, 1)
    bench.nodes.unreachable = {A, B}
    task = bench.start(max_tokens=1)
    fake = await bench.engine.added(2)
    assert fake.params is None
    assert bench.credits.num_free == NUM_BLOCKS - 1, "it has the room that it needs"
    bench.engine.produce_all(fake)
    await task


# Local or remote -------------------------------------------------------------------------------


async def test_short_prompts_stay_here() -> None:
    bench = Bench(threshold=len(PROMPT))
    task = bench.start()
    bench.engine.produce_all(await bench.engine.added())
    check_complete(bench, await task)
    assert not bench.nodes.handshakes
    assert bench.records[0].timeline().path == "local"
    await bench.check_empty()


async def test_only_what_is_not_cached_here_counts() -> None:
    """The second turn of a conversation begins with the first one, question and answer."""
    bench = Bench(threshold=8)
    first = bench.request(range(20), max_tokens=6)
    task = asyncio.create_task(
        collect(outputs_of(bench.proxy, first, [RequestRecord(num_prompt_tokens=20)], [A]))
    )
    fake, call = await bench.engine.added(), await bench.nodes.called()
    call.first_token()
    await until(lambda: fake.has_first_token, "token one")
    bench.engine.kv_arrives(fake)
    bench.engine.produce_all(fake)
    answer = tokens_of(await task)
    second = bench.request([*range(20), *answer[:4], 1, 2, 3, 4])
    stream = outputs_of(bench.proxy, second, [RequestRecord(num_prompt_tokens=28)], [A])
    task = asyncio.create_task(collect(stream))
    fake = await bench.engine.added(2)
    assert fake.params is None, "24 of 28 tokens are here"
    bench.engine.produce_all(fake)
    await task
    await bench.check_empty()


async def test_what_is_cached_in_a_group_is_computed_there() -> None:
    """Wherever there is more room: in the other group, all of the prompt would be computed."""
    bench = Bench(threshold=8, credits=KVCredits(NUM_BLOCKS // 2, 8, 8, num_groups=2))
    bench.proxy._prefix_index = CachedPrefixes(NUM_BLOCKS, 8, num_groups=2)
    claims = [bench.credits.claim_now(8, 0) for _ in range(2)]
    assert [claim.group for claim in claims] == [0, 1]
    claims[1].grow_to(64)
    bench.proxy._prefix_index.add(list(range(24)), RequestSpec(), group=1)
    request = bench.request(range(30))
    stream = outputs_of(bench.proxy, request, [RequestRecord(num_prompt_tokens=30)], [A])
    task = asyncio.create_task(collect(stream))
    fake = await bench.engine.added()
    assert fake.params is None and fake.request.group == 1
    bench.engine.produce_all(fake)
    await task
    other = bench.request([*range(24), *range(40, 60)])
    stream = outputs_of(bench.proxy, other, [RequestRecord(num_prompt_tokens=44)], [A])
    task = asyncio.create_task(collect(stream))
    call, fake = await bench.nodes.called(), await bench.engine.added(2)
    assert fake.params is not None and fake.request.group == 0, "eight blocks against three"
    call.first_token()
    await until(lambda: fake.has_first_token, "token one")
    bench.engine.kv_arrives(fake)
    bench.engine.produce_all(fake)
    await task
    for claim in claims:
        claim.release()
    await bench.check_empty()


async def test_named_nodes_replace_our_own(bench: Bench) -> None:
    task = bench.start(prefill_nodes=[C])
    call = await bench.nodes.called()
    assert call.address == C
    call.fail()
    await until(lambda: bench.engine.only.has_kv, "prefill here")
    bench.engine.produce_all(bench.engine.only)
    check_complete(bench, await task)


async def test_no_named_node_means_here(bench: Bench) -> None:
    task = bench.start(prefill_nodes=[])
    fake = await bench.engine.added()
    assert fake.params is None
    bench.engine.produce_all(fake)
    check_complete(bench, await task)


async def test_unreachable_nodes_are_passed_over(bench: Bench) -> None:
    bench.nodes.unreachable = {A}
    task = bench.start()
    call = await bench.nodes.called()
    assert (call.address, bench.nodes.handshakes) == (B, [A, B])
    call.first_token()
    fake = bench.engine.only
    bench.engine.kv_arrives(fake)
    await until(lambda: fake.has_first_token, "token one")
    bench.engine.produce_all(fake)
    check_complete(bench, await task)
    assert bench.records[0].prefill.failures == ["unreachable"]
    assert prefill_headers(bench.records[0])["x-tandem-prefill-failed"] == f"{A}=unreachable"


async def test_no_reachable_node_means_here(bench: Bench) -> None:
    bench.nodes.unreachable = {A, B}
    task = bench.start()
    fake = await bench.engine.added()
    assert fake.params is None
    bench.engine.produce_all(fake)
    check_complete(bench, await task)
    assert bench.records[0].timeline().attempts == 0


# Failures ---------------------------------------------------------------------------------------


async def test_the_call_fails_before_the_token(bench: Bench) -> None:
    task = bench.start()
    (await bench.nodes.called()).fail("resource_exhausted")
    second = await bench.nodes.called(2)
    assert (second.address, second.params.attempt) == (B, 1)
    fake = bench.engine.only
    assert [name for name, _ in fake.calls] == ["retry"]
    second.first_token()
    await until(lambda: fake.has_first_token, "token one")
    bench.engine.kv_arrives(fake, attempt=1)
    bench.engine.produce_all(fake)
    check_complete(bench, await task)
    assert bench.records[0].timeline().attempts == 2


async def test_the_call_fails_after_the_token_and_the_kv_still_arrives(bench: Bench) -> None:
    task = bench.start()
    fake, call = await bench.engine.added(), await bench.nodes.called()
    call.first_token()
    call.fail()
    await until(lambda: fake.has_first_token, "token one")
    bench.engine.kv_arrives(fake)
    bench.engine.produce_all(fake)
    check_complete(bench, await task)
    assert len(bench.nodes.calls) == 1


async def test_the_kv_fails_after_the_token(bench: Bench) -> None:
    """The second node samples the same token one; the client must not see it again."""
    task = bench.start()
    fake, call = await bench.engine.added(), await bench.nodes.called()
    call.first_token()
    await until(lambda: fake.has_first_token, "token one")
    bench.engine.kv_arrives(fake, ok=False)
    second = await bench.nodes.called(2)
    assert bench.nodes.forgotten == [call.address], "its endpoints may have changed"
    await until(lambda: not call.is_open, "the first call is cancelled")
    second.first_token()
    second.taken()
    bench.engine.kv_arrives(fake, attempt=1)
    bench.engine.produce_all(fake)
    check_complete(bench, await task)
    assert [name for name, _ in fake.calls].count("first_token") == 1


async def test_with_kv_but_no_token_no_other_node_is_asked(bench: Bench) -> None:
    task = bench.start()
    fake, call = await bench.engine.added(), await bench.nodes.called()
    bench.engine.kv_arrives(fake)
    call.fail()
    await until(lambda: ("local", None) in fake.calls, "prefill here")
    bench.engine.produce_all(fake)
    check_complete(bench, await task)
    assert len(bench.nodes.calls) == 1
    assert bench.records[0].timeline().path == "remote"


async def test_a_call_that_just_ends_has_failed(bench: Bench) -> None:
    task = bench.start(prefill_nodes=[A])
    (await bench.nodes.called()).end()
    await until(lambda: ("local", None) in bench.engine.only.calls, "prefill here")
    bench.engine.produce_all(bench.engine.only)
    check_complete(bench, await task)
    assert bench.records[0].prefill.failures == ["cut_off"]


async def test_a_request_that_is_at_fault_itself_is_not_tried_on_every_node(bench: Bench) -> None:
    """A grammar that leaves no first token fails here as there; this engine says so."""
    task = bench.start(prefill_nodes=[A, B, C])
    (await bench.nodes.called()).fail("cannot_follow")
    await until(lambda: ("local", None) in bench.engine.only.calls, "prefill here")
    assert bench.nodes.handshakes == [A]
    bench.engine.produce_all(bench.engine.only)
    check_complete(bench, await task)
    assert bench.records[0].prefill.failures == ["cannot_follow"]


async def test_a_restarted_node_has_another_handshake_and_is_asked_again(bench: Bench) -> None:
    task = bench.start(prefill_nodes=[A])
    (await bench.nodes.called()).fail("failed_precondition")
    second = await bench.nodes.called(2)
    assert (second.address, bench.nodes.handshakes) == (A, [A, A])
    second.first_token()
    fake = bench.engine.only
    bench.engine.kv_arrives(fake, attempt=1)
    await until(lambda: fake.has_first_token, "token one")
    bench.engine.produce_all(fake)
    check_complete(bench, await task)


async def test_a_node_of_another_release_is_asked_once_more_and_then_the_next(
    bench: Bench,
) -> None:
    """It refuses what it is sent as one that has restarted does, whenever it is asked."""
    bench.nodes.on_call = lambda call: (
        call.fail("failed_precondition") if call.address == A else None
    )
    task = bench.start(prefill_nodes=[A, B])
    third = await bench.nodes.called(3)
    assert (third.address, bench.nodes.handshakes) == (B, [A, A, B])
    third.first_token()
    fake = bench.engine.only
    bench.engine.kv_arrives(fake, attempt=2)
    await until(lambda: fake.has_first_token, "token one")
    bench.engine.produce_all(fake)
    check_complete(bench, await task)


async def test_attempts_are_limited(bench: Bench) -> None:
    bench.nodes.on_call = lambda call: call.fail()
    task = bench.start(prefill_nodes=[A, B, C, "d:1", "e:1"])
    fake = await bench.engine.added()
    await until(lambda: ("local", None) in fake.calls, "prefill here")
    bench.engine.produce_all(fake)
    check_complete(bench, await task)
    assert [call.params.attempt for call in bench.nodes.calls] == [0, 1, 2]


async def test_results_of_older_attempts_mean_nothing(bench: Bench) -> None:
    task = bench.start()
    fake, call = await bench.engine.added(), await bench.nodes.called()
    call.fail()
    second = await bench.nodes.called(2)
    bench.engine.kv_arrives(fake, attempt=0, ok=False)
    second.first_token()
    bench.engine.kv_arrives(fake, attempt=1)
    await until(lambda: fake.has_first_token, "token one")
    bench.engine.produce_all(fake)
    check_complete(bench, await task)
    assert len(bench.nodes.calls) == 2


@pytest.mark.parametrize("phase", ["token", "kv", "lost call"])
async def test_every_phase_has_a_limit(phase: str) -> None:
    short = {"token": "first_token_s", "kv": "kv_s", "lost call": "lost_call_s"}[phase]
    limits = {"first_token_s": 60, "kv_s": 60, "lost_call_s": 60, short: 0.05}
    bench = Bench(limits=RemotePrefillLimits(**limits))
    task = bench.start(prefill_nodes=[A])
    fake, call = await bench.engine.added(), await bench.nodes.called()
    if phase != "token":
        call.first_token()
    if phase == "lost call":
        call.fail()
    await until(lambda: ("local", None) in fake.calls, "prefill here")
    bench.engine.produce_all(fake)
    check_complete(bench, await task)
    assert bench.records[0].prefill.failures == ["timeout"]
    await bench.check_empty()


def test_a_million_tokens_have_minutes_and_less_than_routers_wait_for() -> None:
    limits = RemotePrefillLimits().of_prompt(1 << 20)
    routers = RouterSettings.model_fields["read_timeout_s"].default
    assert 500 < limits.of(JoinState.PREFILLING) < routers


async def test_an_error_of_our_own_still_ends_in_an_answer(bench: Bench) -> None:
    def raise_bug(call: object) -> None:
        raise ZeroDivisionError

    bench.nodes.on_call = raise_bug
    task = bench.start()
    fake = await bench.engine.added()
    await until(lambda: ("local", None) in fake.calls, "prefill here")
    bench.engine.produce_all(fake)
    check_complete(bench, await task)
    for call in bench.nodes.calls:
        call.is_open = False


async def test_an_error_of_our_own_in_a_later_choice_still_ends_in_an_answer(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def raise_bug(address: str) -> KVPeer:
        raise ZeroDivisionError

    task = bench.start()
    fake, call = await bench.engine.added(), await bench.nodes.called()
    monkeypatch.setattr(bench.nodes, "handshake", raise_bug)
    call.fail()
    await until(lambda: ("local", None) in fake.calls, "prefill here")
    bench.engine.produce_all(fake)
    check_complete(bench, await task)
    await bench.check_empty()


@pytest.mark.parametrize("progress", ["nothing", "token", "joined"])
async def test_a_dead_engine_ends_it_with_an_error(bench: Bench, progress: str) -> None:
    task = bench.start()
    fake, call = await bench.engine.added(), await bench.nodes.called()
    if progress != "nothing":
        call.first_token()
        await until(lambda: fake.has_first_token, "token one")
    if progress == "joined":
        bench.engine.kv_arrives(fake)
    bench.engine.die()
    with pytest.raises(EngineDeadError):
        await task


# The client leaves -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "moment", ["waiting", "calling", "token", "kv", "joined", "streaming", "retrying"]
)
async def test_the_client_may_leave_at_any_moment(bench: Bench, moment: str) -> None:
    blocker = bench.credits.claim_now(NUM_BLOCKS * 8, 1) if moment == "waiting" else None
    task = bench.start()
    if blocker is not None:
        await until(lambda: bench.credits.num_waiting == 1, "it waits")
    else:
        fake, call = await bench.engine.added(), await bench.nodes.called()
        if moment in ("token", "joined", "streaming"):
            call.first_token()
            await until(lambda: fake.has_first_token, "token one")
        if moment in ("kv", "joined", "streaming"):
            bench.engine.kv_arrives(fake)
        if moment == "streaming":
            bench.engine.produce(fake, 2)
        if moment == "retrying":
            call.fail()
            await bench.nodes.called(2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    if blocker is not None:
        blocker.release()
        assert not bench.engine.requests and not bench.nodes.calls
    else:
        assert bench.engine.only.aborted


async def test_leaving_during_a_handshake(bench: Bench) -> None:
    reached = asyncio.Event()

    async def never_answers(address: str) -> None:
        reached.set()
        await asyncio.Event().wait()

    bench.nodes.handshake = never_answers  # type: ignore[assignment, method-assign]
    task = bench.start()
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not bench.engine.requests


# Room -------------------------------------------------------------------------------------------


async def test_without_room_no_prefill_node_works(bench: Bench) -> None:
    blocker = bench.credits.claim_now((NUM_BLOCKS - 1) * 8 - 64, 64)
    first, second = bench.start(), bench.start()
    await until(lambda: bench.credits.num_waiting == 2, "both wait")
    assert not bench.nodes.handshakes and not bench.engine.requests
    blocker.release()
    await bench.nodes.called(2)
    order = [call.request.request_id for call in bench.nodes.calls]
    assert order == sorted(order)
    for call in bench.nodes.calls:
        call.first_token()
    for fake in list(bench.engine.requests.values()):
        bench.engine.kv_arrives(fake)
        await until(lambda fake=fake: fake.has_first_token, "token one")
        bench.engine.produce_all(fake)
    await asyncio.gather(first, second)


async def test_a_local_request_does_not_overtake_those_that_wait(bench: Bench) -> None:
    blocker = bench.credits.claim_now((NUM_BLOCKS - 1) * 8 - 64, 64)
    remote = bench.start()
    await until(lambda: bench.credits.num_waiting == 1, "it waits")
    local = bench.start(prefill_nodes=[])
    await until(lambda: bench.credits.num_waiting == 2, "it waits behind")
    blocker.release()
    bench.nodes.on_call = lambda call: call.first_token()
    await bench.engine.added(2)
    for fake in list(bench.engine.requests.values()):
        if fake.params is not None:
            bench.engine.kv_arrives(fake)
            await until(lambda fake=fake: fake.has_first_token, "token one")
        bench.engine.produce_all(fake)
    await asyncio.gather(remote, local)


async def test_answers_that_grow_take_more_room(bench: Bench) -> None:
    task = bench.start(prefill_nodes=[], max_tokens=90)
    fake = await bench.engine.added()
    free = bench.credits.num_free
    bench.engine.produce(fake, 89)
    await until(lambda: bench.credits.num_free < free, "more room taken")
    bench.engine.produce_all(fake)
    await task


async def test_a_long_queue_is_refused(bench: Bench) -> None:
    bench.proxy.check_room(4)
    with pytest.raises(Overloaded):
        bench.proxy.check_room(5)
    bench.engine.stats = SchedulerStats(num_waiting=4)
    with pytest.raises(Overloaded):
        bench.proxy.check_room(1)


async def test_abort_all_ends_every_stream(bench: Bench) -> None:
    tasks = [bench.start(), bench.start(prefill_nodes=[])]
    await bench.engine.added(2)
    bench.proxy.abort_all()
    for outputs in await asyncio.gather(*tasks):
        assert outputs[-1].finish_reason == "abort"


async def test_abort_all_ends_those_that_have_no_prefill_node_yet(bench: Bench) -> None:
    """The engine does not know them, nobody is waited for any more, and who comes later is refused
    likewise."""
    answers = asyncio.Event()

    async def handshake(address: str) -> KVPeer:
        await answers.wait()
        return bench.nodes.peer

    bench.nodes.handshake = handshake  # type: ignore[method-assign]
    task = bench.start()
    await until(lambda: bench.credits.num_claims == 1, "room for the request")
    bench.proxy.abort_all()
    with pytest.raises(Unavailable, match="stopping"):
        await task
    with pytest.raises(Unavailable, match="stopping"):
        await bench.start(prefill_nodes=[])
    assert not bench.engine.requests


# Everything at once ----------------------------------------------------------------------------

EVENTS = st.lists(
    st.sampled_from(["token", "kv", "kv_fails", "call_fails", "late_kv", "call_ends", "taken"]),
    max_size=12,
)


@given(events=EVENTS, leaves=st.booleans(), max_tokens=st.integers(1, 4))
@example(events=["kv_fails", "token", "late_kv", "late_kv"], leaves=False, max_tokens=2)
@example(events=["taken"], leaves=False, max_tokens=1)
@settings(max_examples=150, deadline=None)
def test_any_order_of_events_gives_each_token_once(
    events: list[str], leaves: bool, max_tokens: int
) -> None:
    async def scenario() -> None:
        bench = Bench(engine=FakeEngine(auto=True))
        task = bench.start(prefill_nodes=[A, B, C], max_tokens=max_tokens)
        await bench.nodes.called()
        fake = bench.engine.only
        for event in events:
            call = bench.nodes.calls[-1]
            attempt = call.params.attempt
            match event:
                case "token":
                    call.first_token()
                case "kv" | "kv_fails":
                    if fake.params is not None and not fake.finished and not fake.has_kv:
                        bench.engine.kv_arrives(fake, attempt, ok=event == "kv")
                case "late_kv" if attempt > 0 and not fake.finished:
                    bench.engine.kv_arrives(fake, attempt=0, ok=False)
                case "call_fails":
                    call.fail()
                case "call_ends":
                    call.end()
                case "taken":
                    call.taken()
            for _ in range(20):
                await asyncio.sleep(0)
        if leaves:
            task.cancel()
        else:
            for call in bench.nodes.calls:
                call.fail()
            bench.nodes.on_call = lambda call: call.fail()
            if not fake.finished and fake.has_first_token and fake.params is not None:
                bench.engine.kv_arrives(fake, fake.params.attempt, ok=False)
        try:
            async with asyncio.timeout(40):
                outputs = await task
        except asyncio.CancelledError:
            assert leaves
        else:
            check_complete(bench, outputs, max_tokens)
        await bench.check_empty()

    asyncio.run(scenario())
