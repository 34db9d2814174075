"""Unequal tensor-parallel sizes: every head is asked for once, from a rank that holds it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.planes import HeadRange, Plane

powers = st.sampled_from([1, 2, 4, 8])


@given(num_heads=powers, ours=powers, theirs=powers, replicated=st.booleans())
def test_heads_are_covered_exactly_once(
    num_heads: int, ours: int, theirs: int, replicated: bool
) -> None:
    plane = Plane("k", num_heads, 16, replicated)
    for rank in range(ours):
        wanted = plane.heads_of_rank(rank, ours)
        covered = []
        for peer_rank, heads in plane.sources(rank, ours, theirs):
            held = plane.heads_of_rank(peer_rank, theirs)
            assert held.start <= heads.start < heads.stop <= held.stop
            covered += range(heads.start, heads.stop)
        assert covered == list(range(wanted.start, wanted.stop))


def test_by_hand() -> None:
    four = Plane("k", 4, 16)
    assert four.sources(0, 1, 2) == [(0, HeadRange(0, 2)), (1, HeadRange(2, 2))]
    assert four.sources(1, 2, 1) == [(0, HeadRange(2, 2))]
    two = Plane("k", 2, 16)
    assert [two.sources(rank, 4, 2) for rank in range(4)] == [
        [(0, HeadRange(0, 1))],
        [(0, HeadRange(0, 1))],
        [(1, HeadRange(1, 1))],
        [(1, HeadRange(1, 1))],
    ]


def test_a_replicated_plane_comes_whole_from_one_rank_and_ranks_share_the_work() -> None:
    latent = Plane("latent", 1, 16, replicated=True)
    whole = HeadRange(0, 1)
    assert latent.sources(0, 1, 2) == [(0, whole)]
    assert [latent.sources(rank, 2, 1) for rank in range(2)] == [[(0, whole)]] * 2
    assert [latent.sources(rank, 4, 4) for rank in range(4)] == [
        [(rank, whole)] for rank in range(4)
    ]
