"""A prefill node with data-parallel groups says which of them has a prompt, and KV is pulled from
there: the proxy's part, event by event, and what goes over the wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from decode_node.disagg.prefill_client import _message
from decode_node.disagg.prefill_events import PrefillError, PrefillEvents, PromptPlaced
from engine.contracts.errors import EngineDeadError
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from kv_transfer.metadata import KVPeer, KVTransferParams, group_of_transfer
from kv_transfer.wire.handshake import peer_from_proto, peer_to_proto
from tandem_pb import prefill_pb2
from tests.decode_node.decode_fakes import kv_peer, until
from tests.decode_node.test_proxy import Bench, check_complete
from tests.engine.core.tiny_engine import tiny_config

ALONE = kv_peer(tiny_config())
SECOND = msgspec.structs.replace(ALONE, engine_id="second")
GROUPS = msgspec.structs.replace(ALONE, groups=(SECOND,), names_group=True)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    bench.nodes.peer = GROUPS
    yield bench
    await bench.check_empty()


@pytest.mark.parametrize("group", [0, 1])
async def test_kv_is_pulled_from_the_group_that_was_named(bench: Bench, group: int) -> None:
    task = bench.start()
    call = await bench.nodes.called()
    assert call.params.peer == GROUPS
    await asyncio.sleep(0)
    assert not bench.engine.requests, "nobody knows yet where the KV will be"
    call.placed(group)
    fake = await bench.engine.added()
    assert fake.request.kv_transfer_params is not None
    assert fake.request.kv_transfer_params.peer == (ALONE, SECOND)[group]
    call.first_token()
    await until(lambda: fake.has_first_token, "token one")
    bench.engine.kv_arrives(fake)
    bench.engine.produce_all(fake)
    check_complete(bench, await task)
    assert len(bench.nodes.calls) == 1


async def test_the_next_node_is_asked_when_none_is_named(bench: Bench) -> None:
    task = bench.start()
    (await bench.nodes.called()).fail("resource_exhausted")
    second = await bench.nodes.called(2)
    second.first_token()  # It names no group before.
    fake = await bench.engine.added()
    assert fake.request.kv_transfer_params is None, "it is computed here"
    bench.engine.produce_all(fake)
    check_complete(bench, await task)
    assert bench.records[0].prefill.failures == ["resource_exhausted", "wrong_answer"]


async def test_a_later_attempt_may_come_to_another_group(bench: Bench) -> None:
    task = bench.start()
    first = await bench.nodes.called()
    first.placed(0)
    fake = await bench.engine.added()
    first.first_token()
    await until(lambda: fake.has_first_token, "token one")
    bench.engine.kv_arrives(fake, ok=False)
    second = await bench.nodes.called(2)
    assert [name for name, _ in fake.calls].count("retry") == 0
    second.placed(1)
    await until(lambda: "retry" in [name for name, _ in fake.calls], "it is pulled again")
    retry = next(what for name, what in fake.calls if name == "retry")
    assert isinstance(retry, KVTransferParams)
    assert (retry.peer, retry.attempt) == (SECOND, 1)
    second.first_token()
    bench.engine.kv_arrives(fake, attempt=1)
    bench.engine.produce_all(fake)
    check_complete(bench, await task)


@pytest.mark.parametrize("is_placed", [False, True])
async def test_the_client_may_leave_before_and_behind_the_name(
    bench: Bench, is_placed: bool
) -> None:
    task = bench.start()
    call = await bench.nodes.called()
    if is_placed:
        call.placed(1)
        await bench.engine.added()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not call.is_open, "the call is given up")
    assert bool(bench.engine.requests) == is_placed


async def test_a_dead_engine_leaves_no_call_behind(bench: Bench) -> None:
    """It dies between the name of the group and the request that would pull."""
    task = bench.start()
    call = await bench.nodes.called()
    bench.engine.die()
    call.placed(1)
    with pytest.raises(EngineDeadError):
        await task
    await until(lambda: not call.is_open, "the call is given up")


async def test_one_token_needs_no_group(bench: Bench) -> None:
    task = bench.start(max_tokens=1)
    call = await bench.nodes.called()
    assert call.params.first_token_only
    call.first_token()
    assert len(await task) == 1


# On the wire -------------------------------------------------------------------------------------


def test_names_of_groups_are_checked() -> None:
    spec = RequestSpec([5, 6], SamplingParams())
    second = prefill_pb2.PrefillEvent(accepted=prefill_pb2.Accepted(group=1))
    assert PrefillEvents(spec, 64, 2).read(second) == PromptPlaced(1)
    assert PrefillEvents(spec, 64).read(second) is None, "it has one group"
    third = prefill_pb2.PrefillEvent(accepted=prefill_pb2.Accepted(group=2))
    with pytest.raises(PrefillError, match="a group that it does not have"):
        PrefillEvents(spec, 64, 2).read(third)


@pytest.mark.parametrize("peer", [GROUPS, msgspec.structs.replace(GROUPS, names_group=False)])
def test_a_node_of_an_older_release_keeps_to_the_id_of_the_transfer(peer: KVPeer) -> None:
    """Then the caller asks for no name, and pulls as the id means."""
    told = peer_from_proto(peer_to_proto(peer))
    assert told == peer
    transfer_id = "00000001" + "0" * 24
    params = KVTransferParams(do_remote_prefill=True, transfer_id=transfer_id, peer=told)
    bench = Bench()
    sent = prefill_pb2.PrefillRequest.FromString(_message(bench.request(), params))
    assert sent.reads_group == peer.names_group
    assert told.of(transfer_id) == SECOND
    assert group_of_transfer(transfer_id, 2) == 1
