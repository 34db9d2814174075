"""Load reports and health of a node, over a real gRPC server on loopback."""

from __future__ import annotations

import asyncio
import importlib.metadata
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc
import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from edge.adapter_call import AdapterCall
from edge.security.config import Role
from edge.security.credentials import Credentials
from engine.config import EngineConfig, KVLayers
from engine.contracts.errors import EngineDeadError
from engine.contracts.messages import EngineReady
from engine.contracts.outputs import DraftStats, SchedulerStats
from engine.contracts.reports.profiles import ProfileOptions
from engine.contracts.request_spec import AdapterRef
from engine.frontend.step_history import StepHistory
from engine.node.grpc_server import NodeGrpcServer, PortInUse
from engine.node.open_requests import OpenRequests
from engine.node.status import NodeStatus, fingerprint
from host.life_signs import Silence
from kv_transfer.planes import Plane
from tandem_pb import node_pb2, node_pb2_grpc
from tests.engine.core.tiny_engine import tiny_config
from tests.engine.frontend.still_adapters import StillAdapters
from tests.engine.frontend.still_profiles import StillProfiles

LONG_S = 60.0
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass
class StillEngine:
    """An engine that only has a state."""

    config: EngineConfig = field(default_factory=tiny_config)
    stats: SchedulerStats = field(default_factory=SchedulerStats)
    ready: EngineReady = field(default_factory=lambda: EngineReady(num_blocks=96))
    is_dead: bool = False
    dead_reason: str = ""
    crash_report: str = ""
    history: StepHistory | None = None
    silence: Silence = field(default_factory=Silence)

    holds_blocks: bool = False
    profiles: StillProfiles = field(default_factory=StillProfiles)

    def __post_init__(self) -> None:
        self.adapters = StillAdapters(self.config)

    def give_up(self, reason: str) -> None:
        self.is_dead, self.dead_reason = True, reason

    async def reset_prefix_cache(self) -> bool:
        if self.is_dead:
            raise EngineDeadError(self.dead_reason)
        return not self.holds_blocks


@pytest.fixture
def engine() -> StillEngine:
    return StillEngine()


@pytest.fixture
def status(engine: StillEngine) -> NodeStatus:
    return NodeStatus(engine, node_pb2.NODE_ROLE_DECODE, stuck_after_s=5.0)


@pytest.fixture
async def channel(status: NodeStatus) -> AsyncIterator[grpc.aio.Channel]:
    server = NodeGrpcServer("127.0.0.1", 0, Credentials(), {"tandem.v1.Prefill": {Role.DECODE}})
    await server.start(status)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        yield channel
    await server.stop()
    await server.stop()


def test_what_a_report_says_of_the_layout_is_worked_out_once(
    engine: StillEngine, status: NodeStatus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reports go with each event of each prompt, in front of its first token."""
    first = status.load()
    monkeypatch.delattr(type(engine.config), "kv_layout")
    second = status.load()
    assert second.sequence == first.sequence + 1
    second.sequence = first.sequence
    assert second == first
    assert first.fingerprint
    assert first.kv_bytes_per_token > 0


def test_a_report_says_what_the_engine_does(engine: StillEngine, status: NodeStatus) -> None:
    engine.stats = SchedulerStats(
        num_running=2,
        num_waiting=3,
        num_waiting_tokens=400,
        num_free_blocks=40,
        num_total_blocks=96,
        num_waiting_for_remote_kvs=1,
        num_delayed_frees=2,
        prefill_tokens_per_s=123.0,
        prompt_tokens_computed=1000,
        prompt_tokens_cached=200,
        prompt_tokens_transferred=30,
        generation_tokens=4000,
        num_preemptions=5,
        drafts=DraftStats(num_drafts=9, num_accepted_per_pos=[6, 3] + [1] * 40),
        last_step_at=time.monotonic(),
    )
    status.work.num_queued = 4
    load = status.load()
    assert (load.node_id, load.epoch) == (engine.config.engine_id, engine.config.epoch)
    assert (load.num_running_requests, load.num_waiting_requests) == (2, 7)
    assert (load.num_free_blocks, load.num_total_blocks, load.block_size) == (40, 96, 8)
    assert (load.num_waiting_tokens, load.num_transfers) == (400, 3)
    assert load.model_name == "tiny"
    assert load.fingerprint == fingerprint(engine.config.kv_layout)
    assert (load.num_receiving, load.num_held, load.num_preemptions) == (1, 2, 5)
    assert (load.prompt_tokens_computed, load.prompt_tokens_cached) == (1000, 200)
    assert (load.prompt_tokens_transferred, load.generation_tokens) == (30, 4000)
    assert (load.num_drafts, list(load.num_accepted_per_pos)) == (9, [6, 3] + [1] * 14)
    assert load.version == importlib.metadata.version("tandem")
    assert status.load().sequence == load.sequence + 1
    assert load.max_model_len == engine.config.model.max_model_len


def test_before_the_first_step_all_blocks_are_free(status: NodeStatus) -> None:
    load = status.load()
    assert (load.num_free_blocks, load.num_total_blocks) == (96, 96)


def test_with_several_groups_a_block_counts_for_fewer_tokens() -> None:
    """Three groups alike take three blocks for eight tokens."""
    planes = (Plane("k", 2, 32), Plane("v", 2, 32))
    groups = tuple(KVLayers(layers=(layer,), planes=planes, window=8) for layer in range(3))
    engine = StillEngine(config=tiny_config(kv_layers=groups, num_layers=3))
    load = NodeStatus(engine, node_pb2.NODE_ROLE_DECODE, stuck_after_s=5.0).load()
    assert (load.num_total_blocks, load.block_size) == (96, 96 // 3 * 8 // 96)


def test_fingerprints_differ_where_kv_does_not_fit() -> None:
    layout = tiny_config().kv_layout

    (group,) = layout.groups
    large_blocks = msgspec.structs.replace(group, block_size=64)
    other_block = msgspec.structs.replace(layout, groups=(large_blocks,), tp_size=2)
    assert fingerprint(other_block) == fingerprint(layout)
    half = msgspec.structs.replace(group, dtype="bfloat16")
    for change in ({"groups": (half,)}, {"model_hash": "x"}, {"protocol_version": 99}):
        assert fingerprint(msgspec.structs.replace(layout, **change)) != fingerprint(layout)


def test_only_an_engine_with_work_can_be_stuck(engine: StillEngine, status: NodeStatus) -> None:
    long_ago = time.monotonic() - 100
    engine.stats = SchedulerStats(num_running=0, last_step_at=long_ago)
    assert status.seconds_since_progress() < 50
    assert status.fault() == ""
    engine.stats = SchedulerStats(num_running=1, last_step_at=long_ago)
    assert status.seconds_since_progress() < 50, "it was idle a moment ago"
    status._busy_since = long_ago
    assert "no step" in status.fault()
    engine.stats = SchedulerStats(num_running=1, last_step_at=time.monotonic())
    assert status.fault() == ""


def test_work_that_the_engine_never_reported_counts(
    engine: StillEngine, status: NodeStatus
) -> None:
    status.work.num_computing = 1
    status._busy_since = time.monotonic() - 100
    assert "no step" in status.fault()


def test_a_stuck_engine_is_given_up(engine: StillEngine, status: NodeStatus) -> None:
    engine.stats = SchedulerStats(num_running=1, last_step_at=time.monotonic())
    status.give_up_if_stuck()
    assert not engine.is_dead
    engine.stats = SchedulerStats(num_running=1, last_step_at=time.monotonic() - 100)
    status._busy_since = time.monotonic() - 100
    status.give_up_if_stuck()
    assert engine.is_dead and "no step" in status.fault()


def test_a_frozen_engine_is_a_fault_and_is_given_up_in_the_end(
    engine: StillEngine, status: NodeStatus
) -> None:
    engine.silence = Silence("worker 0", 0.9)
    assert not status.is_silent
    engine.silence = Silence("worker 0", 1.1)
    assert status.is_silent and not status.is_frozen and status.fault() == ""
    engine.silence = Silence("worker 0", 3.1)
    assert status.is_frozen and "worker 0 has given no sign of life for 3 s" in status.fault()
    status.give_up_if_stuck()
    assert not engine.is_dead, "it may wake"
    engine.silence = Silence("worker 0", 5.1)
    status.give_up_if_stuck()
    assert engine.is_dead and "worker 0" in engine.dead_reason


async def test_nothing_is_reported_of_an_engine_without_signs_of_life(
    engine: StillEngine, status: NodeStatus, channel: grpc.aio.Channel
) -> None:
    watch = node_pb2_grpc.NodeStatusStub(channel).Watch(node_pb2.WatchRequest(interval_s=0.02))
    async with asyncio.timeout(LONG_S):
        await watch.read()
        engine.silence = Silence("the engine core", 1.5)
        before = status.load().sequence
        for _ in range(10):
            status.notify()
            await asyncio.sleep(0.02)
        assert status.load().sequence == before + 1, "nothing else was numbered"
        engine.silence = Silence()
        while (await watch.read()).sequence <= before + 1:
            pass
    watch.cancel()


async def test_watch_reports_at_once_then_on_change(
    status: NodeStatus, channel: grpc.aio.Channel
) -> None:
    watch = node_pb2_grpc.NodeStatusStub(channel).Watch(node_pb2.WatchRequest(interval_s=LONG_S))
    async with asyncio.timeout(LONG_S / 2):
        first = await watch.read()
        status.work.draining = True
        status.notify()
        load = await watch.read()
    assert not first.draining and load.draining
    assert load.sequence > first.sequence
    watch.cancel()


async def test_who_wants_few_reports_of_changes_gets_the_urgent_ones_at_once(
    status: NodeStatus, channel: grpc.aio.Channel
) -> None:
    few = node_pb2.WatchRequest(interval_s=2 * LONG_S, change_interval_s=LONG_S)
    stub = node_pb2_grpc.NodeStatusStub(channel)
    watch, all_changes = stub.Watch(few), stub.Watch(node_pb2.WatchRequest(interval_s=LONG_S))
    async with asyncio.timeout(LONG_S / 2):
        first = await watch.read()
        await all_changes.read()
        status.work.num_queued = 3
        status.notify()
        while (await all_changes.read()).num_waiting_requests != 3:
            pass
        status.set_drained(True)
        load = await watch.read()
    assert load.drained and load.num_waiting_requests == 3
    assert load.sequence > first.sequence + 1, "the other watcher had one between"
    watch.cancel()
    all_changes.cancel()


async def test_what_changed_meanwhile_is_reported_when_the_rest_is_over(
    status: NodeStatus, channel: grpc.aio.Channel
) -> None:
    few = node_pb2.WatchRequest(interval_s=LONG_S, change_interval_s=0.1)
    watch = node_pb2_grpc.NodeStatusStub(channel).Watch(few)
    async with asyncio.timeout(LONG_S / 2):
        await watch.read()
        status.work.num_queued = 3
        status.notify()
        assert (await watch.read()).num_waiting_requests == 3
    watch.cancel()


async def test_watchers_hear_at_once_which_answers_a_router_ends(
    status: NodeStatus, channel: grpc.aio.Channel
) -> None:
    """Many names come in parts, which fit into reports. Who wants few reports of changes gets them
    as soon, and a later watcher does, too."""
    stub = node_pb2_grpc.NodeStatusStub(channel)
    names = [f"{i:05}" * 10 for i in range(8000)]
    async with asyncio.timeout(LONG_S / 2):
        watch = stub.Watch(node_pb2.WatchRequest(interval_s=LONG_S, change_interval_s=LONG_S))
        await watch.read()
        await stub.AbortAnswers(node_pb2.AbortAnswersRequest(names=["mine"]))
        await stub.AbortAnswers(node_pb2.AbortAnswersRequest(call=7, names=names))
        load = await watch.read()
        assert load.ByteSize() < 1 << 19
        watch.cancel()
        watch = stub.Watch(node_pb2.WatchRequest(interval_s=0.02))
        told = list((await watch.read()).abort_calls)
        while sum(len(one.names) for one in told) < len(names):
            told += (await watch.read()).abort_calls
        watch.cancel()
    assert sorted(name for one in told for name in one.names) == names
    assert [(one.call, one.part, one.all) for one in told] == [(7, i, False) for i in range(7)]
    assert load.abort_calls and load.abort_calls[0].names == told[0].names


async def test_a_call_that_is_made_again_ends_nothing_more(
    status: NodeStatus, channel: grpc.aio.Channel
) -> None:
    """Its connection broke before the answer was here: what has begun since goes on."""
    ended: list[object] = []
    status.abort_answers = lambda names: ended.append(names) or len(ended)  # type: ignore[func-returns-value]
    stub = node_pb2_grpc.NodeStatusStub(channel)
    calls = (7, 7, 8, 7, 0, 0)
    answers = [
        await stub.AbortAnswers(node_pb2.AbortAnswersRequest(call=call, all=True)) for call in calls
    ]
    assert [one.num_aborted for one in answers] == [1, 1, 2, 1, 3, 4]
    assert len(status.abort_calls.since(0)[0]) == 2


async def test_each_watcher_hears_of_each_computed_prompt_once(
    status: NodeStatus, channel: grpc.aio.Channel
) -> None:
    stub = node_pb2_grpc.NodeStatusStub(channel)
    status.note_prefix(0)
    status.note_prefix(1)
    async with asyncio.timeout(LONG_S):
        watches = [stub.Watch(node_pb2.WatchRequest(interval_s=0.02)) for _ in range(2)]
        firsts = [await watch.read() for watch in watches]
        status.note_prefix(2)
        for watch, first in zip(watches, firsts, strict=True):
            told = list(first.recent_prefixes)
            while 2 not in told:
                told += (await watch.read()).recent_prefixes
            assert told == [1, 2]
            watch.cancel()


async def test_each_watcher_hears_of_each_call_about_adapters_once(
    status: NodeStatus, channel: grpc.aio.Channel
) -> None:
    stub = node_pb2_grpc.NodeStatusStub(channel)
    records = status.adapters.records
    records.note(AdapterCall("poet", "a" * 64, "poet-2", 7, "demo"))
    async with asyncio.timeout(LONG_S):
        watches = [stub.Watch(node_pb2.WatchRequest(interval_s=0.02)) for _ in range(2)]
        firsts = [await watch.read() for watch in watches]
        records.note(AdapterCall("poet", "", "", 8))
        for watch, first in zip(watches, firsts, strict=True):
            told = list(first.adapter_calls)
            while len(told) < 2:
                told += (await watch.read()).adapter_calls
            assert [(one.name, one.digest, one.path, one.version, one.model) for one in told] == [
                ("poet", "a" * 64, "poet-2", 7, "demo"),
                ("poet", "", "", 8, ""),
            ]
            assert not (await watch.read()).adapter_calls
            watch.cancel()


async def test_adapters_are_left_out_of_reports_to_those_who_keep_them(
    status: NodeStatus, channel: grpc.aio.Channel
) -> None:
    """There may be thousands, and reports go to each router with each event of each prompt."""
    stub = node_pb2_grpc.NodeStatusStub(channel)
    known = status.adapters.known
    known["poet"] = AdapterRef("poet", "a" * 64)
    async with asyncio.timeout(LONG_S):
        keeps = stub.Watch(node_pb2.WatchRequest(interval_s=0.02, keeps_adapters=True))
        plain = stub.Watch(node_pb2.WatchRequest(interval_s=0.02))
        first = await keeps.read()
        assert [one.name for one in first.adapters] == ["poet"] and not first.has_same_adapters
        for _ in range(2):
            load = await keeps.read()
            assert not load.adapters and load.has_same_adapters
            load = await plain.read()
            assert [one.name for one in load.adapters] == ["poet"] and not load.has_same_adapters
        known["poet"] = AdapterRef("poet", "b" * 64)
        while (load := await keeps.read()).has_same_adapters:
            pass
        assert [(one.name, one.digest) for one in load.adapters] == [("poet", "b" * 64)]
        assert not load.adapter_changes  # A router of an earlier release does not take these.
        known.clear()
        while (load := await keeps.read()).has_same_adapters:
            pass
        assert not load.adapters
        assert (await keeps.read()).has_same_adapters
    keeps.cancel()
    plain.cancel()


async def test_changes_of_adapters_alone_are_reported_to_those_who_take_them(
    status: NodeStatus, channel: grpc.aio.Channel
) -> None:
    """A node that loads a thousand one by one would report half a million."""
    stub = node_pb2_grpc.NodeStatusStub(channel)
    known = status.adapters.known
    known.update((name, AdapterRef(name, "a" * 64)) for name in ("poet", "bard", "muse"))
    request = node_pb2.WatchRequest(
        interval_s=0.02, keeps_adapters=True, takes_adapter_changes=True
    )
    watch = stub.Watch(request)

    async def changes() -> dict[str, str]:
        while not (load := await watch.read()).adapter_changes:
            assert load.has_same_adapters and not load.adapters
        assert load.has_same_adapters and not load.adapters
        return {one.name: one.digest for one in load.adapter_changes}

    async with asyncio.timeout(LONG_S):
        first = await watch.read()
        assert len(first.adapters) == 3 and not first.has_same_adapters
        known["poet"] = AdapterRef("poet", "b" * 64)
        del known["bard"]
        assert await changes() == {"poet": "b" * 64, "bard": ""}
        known["bard"] = AdapterRef("bard", "c" * 64)
        assert await changes() == {"bard": "c" * 64}
        for i in range(2000):  # More than are remembered.
            known[f"lora-{i}"] = AdapterRef(f"lora-{i}", "d" * 64)
        while (load := await watch.read()).has_same_adapters:
            assert not load.adapter_changes
        assert len(load.adapters) == 2003 and not load.adapter_changes
    watch.cancel()


def test_what_others_than_routers_read_of_a_load_leaves_adapters_out(status: NodeStatus) -> None:
    """It goes with three events of each prompt, and decode nodes read none of it."""
    status.adapters.known["poet"] = AdapterRef("poet", "a" * 64)
    load = status.load()
    assert load.has_same_adapters and not load.adapters


def test_a_new_watcher_hears_of_the_last_prompts(status: NodeStatus) -> None:
    for prefix in range(1, 1001):
        status.note_prefix(prefix)
    new, seen = status.prefixes_since(0)
    assert (new[-1], len(new), seen) == (1000, 256, 1000)
    assert status.prefixes_since(998) == ([999, 1000], 1000)
    assert status.prefixes_since(1000) == ([], 1000)


async def test_watch_reports_every_interval(channel: grpc.aio.Channel) -> None:
    watch = node_pb2_grpc.NodeStatusStub(channel).Watch(node_pb2.WatchRequest(interval_s=0.05))
    async with asyncio.timeout(LONG_S):
        sequences = [(await watch.read()).sequence for _ in range(4)]
    assert sequences == sorted(set(sequences))
    watch.cancel()


async def test_a_drain_by_call_is_reported_and_nothing_else_changes(
    channel: grpc.aio.Channel, status: NodeStatus
) -> None:
    stub = node_pb2_grpc.NodeStatusStub(channel)

    async def ask(is_drained: bool) -> tuple[bool, bool, bool]:
        answer = await stub.SetDrained(node_pb2.SetDrainedRequest(drained=is_drained))
        assert answer.load.node_id == status.identity().node_id
        assert status.load().sequence == answer.load.sequence + 1
        return answer.changed, answer.load.draining, answer.load.drained

    assert [await ask(drained) for drained in (True, True, False, False)] == [
        (True, True, True),
        (False, True, True),
        (True, False, False),
        (False, False, False),
    ]
    await ask(True)
    health = health_pb2_grpc.HealthStub(channel)
    answer = await health.Check(health_pb2.HealthCheckRequest())
    assert answer.status == SERVING, "it still serves"
    status.work.draining = True
    load = status.load()
    assert load.draining and not load.drained, "it stops, whatever an operator said"
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.SetDrained(node_pb2.SetDrainedRequest(drained=False))
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize("service", ["", "tandem.v1.Prefill"])
async def test_health_follows_draining_and_the_engine(
    engine: StillEngine, status: NodeStatus, channel: grpc.aio.Channel, service: str
) -> None:
    watch = health_pb2_grpc.HealthStub(channel).Watch(
        health_pb2.HealthCheckRequest(service=service)
    )
    async with asyncio.timeout(LONG_S):
        assert (await watch.read()).status == SERVING
        status.work.draining = True
        status.notify()
        assert (await watch.read()).status == NOT_SERVING
        status.work.draining = False
        status.notify()
        assert (await watch.read()).status == SERVING
        engine.is_dead = True
        status.notify()
        assert (await watch.read()).status == NOT_SERVING
    watch.cancel()


async def test_a_port_in_use_is_named() -> None:
    server = NodeGrpcServer("127.0.0.1", 0, Credentials())
    with pytest.raises(PortInUse, match=str(server.port)):
        NodeGrpcServer("127.0.0.1", server.port, Credentials())
    await server.stop()


async def test_open_requests_wait_until_idle() -> None:
    open_requests = OpenRequests()
    assert await open_requests.wait_idle(0)
    open_requests.enter()
    open_requests.enter()
    open_requests.leave()
    assert not await open_requests.wait_idle(0)
    waiting = asyncio.create_task(open_requests.wait_idle(LONG_S))
    await asyncio.sleep(0)
    open_requests.leave()
    assert await waiting
    assert open_requests.count == 0


async def test_a_reset_that_may_wait_is_tried_until_blocks_are_free_too() -> None:
    """Steps and transfers hold some when the last request has ended; others hold on."""
    open_requests, answers = OpenRequests(), iter([False, False, True])

    async def reset() -> bool:
        assert open_requests.count == 0
        return next(answers)

    open_requests.enter()
    waiting = asyncio.create_task(open_requests.reset_when_idle(reset, LONG_S))
    await asyncio.sleep(0)
    open_requests.leave()
    assert await waiting and not list(answers)

    async def refuse() -> bool:
        return False

    for within_s in (0.0, 0.05):
        assert not await open_requests.reset_when_idle(refuse, within_s)


async def test_routers_may_reset_the_prefix_cache(
    channel: grpc.aio.Channel, engine: StillEngine
) -> None:
    stub = node_pb2_grpc.NodeStatusStub(channel)
    for engine.holds_blocks in (False, True):
        answer = await stub.ResetPrefixCache(node_pb2.ResetPrefixCacheRequest())
        assert answer.is_reset is not engine.holds_blocks
    engine.give_up("worker 0 is gone")
    with pytest.raises(grpc.aio.AioRpcError, match="worker 0") as error:
        await stub.ResetPrefixCache(node_pb2.ResetPrefixCacheRequest())
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_operators_profile_over_grpc(channel: grpc.aio.Channel, engine: StillEngine) -> None:
    stub = node_pb2_grpc.NodeStatusStub(channel)
    with pytest.raises(grpc.aio.AioRpcError) as none:
        await stub.StopProfile(node_pb2.StopProfileRequest())
    assert none.value.code() is grpc.StatusCode.NOT_FOUND
    profile = await stub.StartProfile(node_pb2.StartProfileRequest(num_steps=3, with_stack=True))
    assert (profile.num_steps, profile.ended_by) == (3, "")
    assert engine.profiles.asked == [ProfileOptions(num_steps=3, with_stack=True)]
    with pytest.raises(grpc.aio.AioRpcError, match="is running") as second:
        await stub.StartProfile(node_pb2.StartProfileRequest())
    assert second.value.code() is grpc.StatusCode.ALREADY_EXISTS
    (trace,) = (await stub.StopProfile(node_pb2.StopProfileRequest())).traces
    assert (trace.host, trace.path) == ("here", engine.profiles.trace.path)
