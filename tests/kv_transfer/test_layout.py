"""The geometry of a KV cache: pages, windows, who takes what from whom, and what peers are told."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_caches import (
    WINDOW,
    compressed,
    full_and_window,
    latent,
    layout,
    scaled_and_latent,
    states_and_full,
)

from kv_transfer.errors import HandshakeMismatch
from kv_transfer.group_sizes import share_page_size
from kv_transfer.layout import KVGroup, KVLayout
from kv_transfer.metadata import KVPeer, RecvMeta, SendMeta
from kv_transfer.planes import HeadRange, Plane
from kv_transfer.wire.handshake import peer_from_proto, peer_to_proto

LAYOUTS = [layout, full_and_window, latent, scaled_and_latent, states_and_full, compressed]


def test_keys_and_values_lie_as_one_tensor_of_a_layer() -> None:
    """`[layers, num_blocks, 2, heads, block_size, head_dim]` in bfloat16."""
    shape = layout(tp_size=2, block_size=16, num_layers=3, num_kv_heads=4)
    assert (shape.num_slots, shape.num_layers) == (3, 3)
    assert shape.page_bytes == 2 * 2 * 16 * 8 * 2 and shape.block_bytes == 3 * shape.page_bytes
    keys, values = shape.page(0, rank=1).planes
    assert (keys.offset, values.offset) == (0, 2 * 16 * 8 * 2)
    assert keys.heads == values.heads == HeadRange(2, 2)
    assert values.offset_of(3) == (2 + 1) * 16 * 8 * 2


@pytest.mark.parametrize("make", LAYOUTS)
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_planes_fill_a_page_without_gaps_on_every_rank(make, tp_size: int) -> None:
    shape = make(tp_size=tp_size)
    for group in range(len(shape.groups)):
        sizes = set()
        for rank in range(tp_size):
            end = 0
            page = shape.page(group, rank)
            for plane in page.planes:
                assert plane.offset == end
                end += plane.num_bytes
            sizes.add(end)
        assert len(sizes) == 1 and sizes.pop() <= shape.page_bytes


def test_a_group_with_small_pages_gets_larger_blocks() -> None:
    def group(layer: int, row_bytes: int) -> KVGroup:
        planes = (Plane("k", 1, row_bytes),)
        return KVGroup(layers=(layer,), planes=planes, block_size=16, dtype="bfloat16")

    large, third, quarter = share_page_size([group(0, 48), group(1, 16), group(2, 12)], 1)
    assert (large.block_size, third.block_size, quarter.block_size) == (16, 32, 64)
    assert KVLayout(groups=(large, third, quarter), tp_size=1, model_hash="").page_bytes == 16 * 48


def test_a_state_has_one_row_and_blocks_of_tokens_grow_to_its_size() -> None:
    for tp_size, block_size in ((1, 32), (2, 32), (4, 16)):
        shape = states_and_full(tp_size=tp_size)
        full, *states = shape.groups
        assert full.block_size == block_size
        assert all(group.is_state for group in states) and not full.is_state
        assert [group.num_blocks_for(n) for group in states for n in (1, 10**6)] == [1] * 4
        assert shape.page(1, 0).block_size == 1
        assert shape.page_bytes == (8 * 160 + 2 * 4 * 12 + 8 * 10) // tp_size


@given(first=st.integers(0, 80), length=st.integers(1, 80))
def test_of_a_state_the_last_token_s_is_pulled(first: int, length: int) -> None:
    group = states_and_full().groups[1]
    assert group.tokens_to_pull(first, first + length) == range(first + length - 1, first + length)
    assert group.rows_to_pull(first, first + length) == range(1)
    assert not group.rows_to_pull(first, first)


def test_peers_agree_on_which_groups_are_states() -> None:
    ours = states_and_full()
    changed = msgspec.structs.replace(ours.groups[1], block_size=16)
    theirs = msgspec.structs.replace(ours, groups=(ours.groups[0], changed, ours.groups[2]))
    with pytest.raises(HandshakeMismatch, match=r"groups\[1\]\.is_state"):
        ours.check_compatible(theirs)


def test_a_replicated_plane_grows_against_one_that_is_split() -> None:
    sizes = [
        tuple(group.block_size for group in scaled_and_latent(tp_size=tp_size).groups)
        for tp_size in (1, 2, 4)
    ]
    assert sizes == [(16, 64), (16, 32), (16, 16)]


@given(window=st.integers(1, 50), first=st.integers(0, 80), length=st.integers(0, 80))
def test_what_is_pulled_is_what_the_next_token_sees(window: int, first: int, length: int) -> None:
    plane = Plane("k", 1, 8)
    group = KVGroup(layers=(0,), planes=(plane,), block_size=4, dtype="bfloat16", window=window)
    num_tokens = first + length
    seen = range(max(0, num_tokens - window + 1), num_tokens)
    pulled = group.tokens_to_pull(first, num_tokens)
    assert list(pulled) == [token for token in seen if token >= first]
    assert group.first_block_seen(num_tokens) * 4 <= seen.start


def test_without_a_window_everything_is_seen() -> None:
    (group,) = layout().groups
    assert group.tokens_to_pull(5, 90) == range(5, 90)
    assert group.first_block_seen(10**6) == 0
    assert full_and_window().groups[1].first_token_seen(WINDOW) == 1


@pytest.mark.parametrize("make", LAYOUTS)
@pytest.mark.parametrize("tp_sizes", [(1, 2), (2, 1), (4, 2), (2, 4), (8, 1), (1, 8)], ids=str)
def test_shares_are_what_rank_by_rank_is_asked_for(make, tp_sizes: tuple[int, int]) -> None:
    """Every head that a rank stores comes from one rank, which stores it too, and both sides count
    the same calls."""
    holder, puller = make(tp_size=tp_sizes[0]), make(tp_size=tp_sizes[1])
    asked = {rank: [0] * len(holder.groups) for rank in range(holder.tp_size)}
    for rank in range(puller.tp_size):
        heads: dict[tuple[int, int], list[int]] = {}
        for peer_rank in range(holder.tp_size):
            for group, page in enumerate(holder.share(peer_rank, rank, puller.tp_size)):
                asked[peer_rank][group] += page.num_bytes > 0
                held = holder.page(group, peer_rank)
                for index, (plane, whole) in enumerate(zip(page.planes, held.planes, strict=True)):
                    taken = range(plane.heads.start, plane.heads.stop)
                    assert set(taken) <= set(range(whole.heads.start, whole.heads.stop))
                    heads.setdefault((group, index), []).extend(taken)
        for (group, index), taken in heads.items():
            stored = puller.page(group, rank).planes[index].heads
            assert taken == list(range(stored.start, stored.stop))
    for peer_rank, counts in asked.items():
        assert holder.num_pullers(peer_rank, puller.tp_size) == tuple(counts)


@pytest.mark.parametrize("make", LAYOUTS)
def test_peers_are_told_all_of_it(make) -> None:
    peer = KVPeer(engine_id="e", epoch=7, layout=make(tp_size=2), endpoints=(("a:1",), ("b:2",)))
    assert peer_from_proto(peer_to_proto(peer)) == peer


def test_messages_of_one_group_are_no_longer_than_they_were() -> None:
    """The bounds are from before there were groups: commands of a prompt with 128 blocks, 32
    layers, one endpoint."""
    shape = layout(num_layers=32, num_kv_heads=8)
    shape = msgspec.structs.replace(shape, model_hash="0123456789abcdef")
    peer = KVPeer(engine_id="prefill-0", epoch=1 << 62, layout=shape, endpoints=(("10.0.0.1:7",),))
    encode = msgspec.msgpack.Encoder().encode
    blocks = list(range(1000, 1128))
    assert len(encode(SendMeta("0" * 32, 0, 5, 0, 2048, (blocks,)))) <= 434
    assert len(encode(RecvMeta("0" * 32, 0, peer, (blocks,), 0, 2048))) <= 617
