"""Unequal tensor-parallel sizes: every head is asked for once, from a rank that holds it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from kv_caches import layout

from kv_transfer.layout import HeadRange, KVLayout, head_sources

powers = st.sampled_from([1, 2, 4, 8])


@given(num_kv_heads=powers, ours=powers, theirs=powers)
def test_heads_are_covered_exactly_once(num_kv_heads: int, ours: int, theirs: int) -> None:
    mine = layout(tp_size=ours, num_kv_heads=num_kv_heads)
    peer = layout(tp_size=theirs, num_kv_heads=num_kv_heads)
    for rank in range(ours):
        wanted = mine.heads_of_rank(rank)
        covered = []
        for peer_rank, heads in head_sources(mine, rank, peer):
            held = peer.heads_of_rank(peer_rank)
            assert held.start <= heads.start < heads.stop <= held.stop
            covered += range(heads.start, heads.stop)
        assert covered == list(range(wanted.start, wanted.stop))


def test_by_hand() -> None:
    two, one = layout(tp_size=2, num_kv_heads=4), layout(tp_size=1, num_kv_heads=4)
    assert head_sources(one, 0, two) == [(0, HeadRange(0, 2)), (1, HeadRange(2, 2))]
    assert head_sources(two, 1, one) == [(0, HeadRange(2, 2))]
    replicated = layout(tp_size=4, num_kv_heads=2)
    assert [head_sources(replicated, rank, one_of_two()) for rank in range(4)] == [
        [(0, HeadRange(0, 1))],
        [(0, HeadRange(0, 1))],
        [(1, HeadRange(1, 1))],
        [(1, HeadRange(1, 1))],
    ]


def one_of_two() -> KVLayout:
    return layout(tp_size=2, num_kv_heads=2)
