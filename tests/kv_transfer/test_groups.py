"""Groups and planes go from node to node: windows, latent planes, scales, unequal nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import msgspec
import pytest
from kv_caches import (
    NO_BLOCK,
    UNTOUCHED,
    WINDOW,
    GroupBlocks,
    by_group,
    compressed,
    full_and_window,
    latent,
    scaled_and_latent,
    states_and_full,
)
from kv_loopback import Loopback, LoopbackConsumer, LoopbackProducer, new_transfer_id, until
from kv_nodes import KVNode, until_empty
from late_device import LateDevice

from kv_transfer.config import KVTransferConfig
from kv_transfer.consumer.receiver import KVReceiver
from kv_transfer.group_sizes import with_draft_layers
from kv_transfer.layout import KVLayout
from kv_transfer.memory.cache_view import KVCacheView
from kv_transfer.metadata import TransferEventKind
from kv_transfer.producer.sender import KVSender

FIRST_BYTE, STAGED, RELEASED, RECEIVED, FAILED, ABORTED = TransferEventKind
MakeLayout = Callable[..., KVLayout]

NODES = [(1, 1, 16, 16), (2, 1, 16, 64), (1, 2, 64, 16), (2, 2, 16, 64), (1, 2, 16, 16)]
"""TP sizes of prefill and decode, then their block sizes."""

same_nodes = pytest.mark.parametrize("nodes", NODES, ids=str)
all_layouts = pytest.mark.parametrize(
    "make", [full_and_window, latent, scaled_and_latent, states_and_full, compressed]
)


def both(make: MakeLayout, nodes: tuple[int, int, int, int]) -> tuple[KVLayout, KVLayout]:
    return (
        make(tp_size=nodes[0], block_size=nodes[2]),
        make(tp_size=nodes[1], block_size=nodes[3]),
    )


async def finish(prefill: LoopbackProducer, decode: LoopbackConsumer, transfer_id: str) -> None:
    decode.release(prefill.peer, transfer_id)
    await prefill.until_all(RELEASED, transfer_id)
    await prefill.until_empty()
    await decode.until_empty()


@all_layouts
@same_nodes
@pytest.mark.parametrize("grpcio", [False, True])
async def test_staged_kv_arrives_byte_for_byte(
    make: MakeLayout, nodes: tuple[int, int, int, int], grpcio: bool
) -> None:
    ends = {"transport": "grpcio", "server": "grpcio"} if grpcio else {}
    processes = {"producer_processes": 2, "consumer_processes": 2} if grpcio else {}
    loopback = Loopback(*both(make, nodes), chunk_bytes=1024, **ends, **processes)
    async with loopback as (prefill, decode):
        for seed, num_tokens in enumerate([7, WINDOW, 150]):
            transfer_id = prefill.export_computed(seed, num_tokens)
            first_token = 33 if num_tokens > WINDOW else 0
            target = decode.pull(prefill.peer, transfer_id, num_tokens, first_token=first_token)
            await decode.until_all(RECEIVED, transfer_id)
            decode.check(seed, range(first_token, num_tokens), target)
            await finish(prefill, decode, transfer_id)


def num_pulls(parts: Sequence[KVSender | KVReceiver]) -> int:
    return sum(part.num_pulls for part in parts)


async def computed_while_pulled(
    prefill: LoopbackProducer, decode: LoopbackConsumer, num_tokens: int
) -> tuple[str, GroupBlocks]:
    """Pulls wait before the first layer is done, so nothing is staged. Two steps compute it."""
    transfer_id = new_transfer_id()
    source = prefill.new_blocks(num_tokens)
    target = decode.pull(prefill.peer, transfer_id, num_tokens)
    prefill.export(transfer_id, num_tokens)
    await until(lambda: num_pulls(prefill.senders) == num_pulls(decode.receivers) > 0)
    for step, tokens in enumerate((range(70), range(70, num_tokens)), start=1):
        prefill.send(transfer_id, step, tokens, source, num_tokens)
        for layer in range(prefill.layout.num_layers):
            prefill.compute(3, step, layer, tokens, source)
    return transfer_id, target


@all_layouts
@same_nodes
@pytest.mark.parametrize("is_late", [False, True])
async def test_blocks_of_a_cache_on_this_host_are_copied_byte_for_byte(
    make: MakeLayout, nodes: tuple[int, int, int, int], is_late: bool
) -> None:
    devices = (LateDevice(is_held=False), LateDevice(is_held=False)) if is_late else (None, None)
    loopback = Loopback(
        *both(make, nodes), chunk_bytes=1024, data="cuda_ipc,stream", num_streams=2, devices=devices
    )
    async with loopback as (prefill, decode):
        transfer_id, target = await computed_while_pulled(prefill, decode, 150)
        await decode.until_all(RECEIVED, transfer_id)
        decode.check(3, range(150), target)
        await finish(prefill, decode, transfer_id)


@all_layouts
async def test_a_waiting_puller_of_a_like_node_takes_it_from_the_blocks(
    make: MakeLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a copy, where pages leave something unused as well."""
    monkeypatch.setattr("kv_transfer.transports.stream.zero_copy_sends.SLOW_S", 60.0)
    monkeypatch.delattr(KVCacheView, "copy_out")
    shape = make(tp_size=2, block_size=1024)
    async with Loopback(shape, shape, chunk_bytes=64 << 10) as (prefill, decode):
        transfer_id, target = await computed_while_pulled(prefill, decode, 3000)
        await decode.until_all(RECEIVED, transfer_id)
        decode.check(3, range(3000), target)
        await finish(prefill, decode, transfer_id)


@pytest.mark.parametrize("first_token", [0, 100, 140])
async def test_tokens_that_a_window_does_not_see_never_travel(first_token: int) -> None:
    shape = full_and_window()
    full, window = shape.groups
    async with Loopback(shape, shape, chunk_bytes=1024) as (prefill, decode):
        transfer_id = prefill.export_computed(1, 150)
        target = decode.pull(prefill.peer, transfer_id, 150, first_token=first_token)
        await decode.until_all(RECEIVED, transfer_id)
        assert NO_BLOCK in by_group(target)[1], "what is behind the window has no block at all"
        decode.check(1, range(first_token, 150), target)
        blocks = [
            (len(group.layers) * page.num_bytes)
            * (group.num_blocks_for(150) - max(first_token, seen) // group.block_size)
            for group, page, seen in (
                (full, shape.page(0, 0), 0),
                (window, shape.page(1, 0), 150 - WINDOW + 1),
            )
        ]
        assert decode.receivers[0].received.total() == sum(blocks)
        await finish(prefill, decode, transfer_id)


async def test_replicated_planes_come_from_one_rank_only() -> None:
    """Ranks of a prefill node with equal latents share the work of those of decode."""
    for tp_sizes, num_served in [((2, 1), [1, 0]), ((1, 2), [2]), ((2, 2), [1, 1])]:
        theirs, ours = latent(tp_size=tp_sizes[0]), latent(tp_size=tp_sizes[1])
        async with Loopback(theirs, ours, num_streams=1) as (prefill, decode):
            transfer_id = prefill.export_computed(1, 64)
            target = decode.pull(prefill.peer, transfer_id, 64)
            await decode.until_all(RECEIVED, transfer_id)
            decode.check(1, range(64), target)
            one = theirs.num_layers * 4 * theirs.page(0, 0).num_bytes
            assert [sender.bytes_sent for sender in prefill.senders] == [
                times * one for times in num_served
            ]
            await finish(prefill, decode, transfer_id)


async def part_kept(shape: KVLayout, num_tokens: int, num_bytes: int) -> int:
    """Returns what is kept of a prompt whose first 35 tokens were computed when it is called off,
    after `num_bytes` of them have come."""
    async with Loopback(shape, shape, chunk_bytes=1, num_streams=1) as (prefill, decode):
        transfer_id = new_transfer_id()
        source = prefill.new_blocks(num_tokens)
        prefill.compute_all(1, num_tokens, source)
        decode.pull(prefill.peer, transfer_id, num_tokens)
        prefill.export(transfer_id, num_tokens)
        prefill.send(transfer_id, -1, range(35), source, num_tokens)
        await until(lambda: decode.receivers[0].received.total() == num_bytes)
        decode.abort(transfer_id)
        (event,) = await decode.until_all(ABORTED, transfer_id)
        prefill.abort(transfer_id)
        await prefill.until_all(ABORTED, transfer_id)
        return event.num_tokens_kept


async def test_what_is_kept_of_a_part_has_all_groups() -> None:
    """Blocks have 16 tokens in the first group and 32 in the second. A window that left something
    out would need it in the middle of the prompt: then nothing is kept."""
    shape = full_and_window()
    full, window = (
        len(group.layers) * page.num_bytes
        for group, page in zip(shape.groups, (shape.page(0, 0), shape.page(1, 0)), strict=True)
    )
    assert await part_kept(shape, WINDOW - 1, 2 * full + window) == 32
    assert await part_kept(shape, 150, 2 * full) == 0


async def test_a_part_without_its_state_is_nothing() -> None:
    """All that is computed of full attention has come; a state is sent behind the last token."""
    shape = states_and_full()
    full = len(shape.groups[0].layers) * shape.page(0, 0).num_bytes
    assert shape.groups[0].block_size == 32
    assert await part_kept(shape, 150, full) == 0


@pytest.fixture
def make_node() -> Iterator[Callable[..., KVNode]]:
    with ExitStack() as nodes:

        def make(role: str, shape: KVLayout, data: str) -> KVNode:
            config = KVTransferConfig(
                kv_role=role,  # type: ignore[arg-type]
                chunk_bytes=1024,
                staging_bytes=4 << 20,
                stall_timeout_s=20.0,
                transports=data,
            )
            node = KVNode(config, shape)
            nodes.callback(node.close)
            return node

        yield make


@pytest.mark.parametrize(
    ("make", "nodes", "data"),
    [
        (full_and_window, (2, 1, 16, 64), "stream"),
        (scaled_and_latent, (1, 2, 64, 16), "cuda_ipc,stream"),
        (states_and_full, (4, 1, 16, 64), "stream"),
    ],
)
def test_whole_nodes_with_real_processes(
    make_node: Callable[..., KVNode],
    make: MakeLayout,
    nodes: tuple[int, int, int, int],
    data: str,
) -> None:
    theirs, ours = both(make, nodes)
    prefill = make_node("kv_producer", theirs, data)
    decode = make_node("kv_consumer", ours, data)
    for seed, num_tokens in enumerate([150, 20]):
        request = prefill.export(num_tokens)
        target = decode.blocks.take_all(ours, num_tokens)
        decode.pull(prefill.peer, request.transfer_id, num_tokens, target)
        prefill.prefill(request, seed, prefill.blocks.take_all(theirs, num_tokens), chunk=64)
        until_empty(prefill, decode)
        assert decode.done.received[seed:] == [request.transfer_id]
        decode.check(seed, range(num_tokens), target)


@pytest.mark.parametrize("has_same_drafter", [True, False])
async def test_the_window_of_a_drafter_s_layer_travels_with_the_model_s(
    has_same_drafter: bool,
) -> None:
    """It is one more layer of a window's group, beside groups that it is not in."""
    groups = compressed().groups
    own = msgspec.structs.replace(groups[0], layers=(0,))
    shape = KVLayout(
        groups=tuple(with_draft_layers(groups, [own])), tp_size=1, model_hash="model",
        num_draft_layers=1, draft_hash="drafter",
    )  # fmt: skip
    assert shape.groups_of(4) == (0,) and shape.num_layers == 5
    other = shape if has_same_drafter else msgspec.structs.replace(shape, draft_hash="another")
    async with Loopback(shape, other, chunk_bytes=1024) as (prefill, decode):
        for num_tokens in (31, 32, 150):
            transfer_id = prefill.export_computed(2, num_tokens)
            target = decode.pull(prefill.peer, transfer_id, num_tokens)
            await decode.until_all(RECEIVED, transfer_id)
            if has_same_drafter:
                decode.check(2, range(num_tokens), target)
            else:
                slot = other.groups[0].layers.index(4)
                assert (decode.caches[0].pages[slot] == UNTOUCHED).all()
            await finish(prefill, decode, transfer_id)


@pytest.mark.parametrize("nodes", [(2, 1, 16, 64), (1, 2, 64, 16)], ids=str)
async def test_rows_and_windows_travel_at_every_edge(nodes: tuple[int, int, int, int]) -> None:
    """Prompts end inside and at the edge of rows of 4 and 32 tokens and of the window, with and
    without a beginning that is here already."""
    lengths = [1, 3, 4, 5, 31, 32, 33, 36, WINDOW - 1, WINDOW, WINDOW + 1, 64, 127, 128, 129]
    cases = [(stop, first) for stop in lengths for first in sorted({0, min(32, stop - 1)})]
    for some in (cases[i : i + 3] for i in range(0, len(cases), 3)):
        async with Loopback(*both(compressed, nodes), chunk_bytes=512) as (prefill, decode):
            for num_tokens, first_token in some:
                transfer_id = prefill.export_computed(num_tokens, num_tokens)
                target = decode.pull(prefill.peer, transfer_id, num_tokens, first_token=first_token)
                await decode.until_all(RECEIVED, transfer_id)
                decode.check(num_tokens, range(first_token, num_tokens), target)
                await finish(prefill, decode, transfer_id)
