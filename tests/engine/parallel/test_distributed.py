"""Collectives of a group, and what happens when a rank is missing. Ranks are threads here;
`test_greedy_parity` has them as processes."""

from __future__ import annotations

import pytest
import torch

from engine.parallel.distributed import ParallelGroup
from tests.engine.models.conftest import free_ports
from tests.engine.parallel.collective_scenes import (
    collectives,
    dead_peer,
    draws_of_parts,
    listening,
    play,
    sum_of_rows,
)


@pytest.mark.parametrize("size", [2, 3])
def test_collectives(size: int) -> None:
    before = listening()
    ranks, sockets = zip(*play(collectives, size), strict=True)
    opened = {inode: at for found in sockets for inode, at in found.items() if inode not in before}
    assert set(opened.values()) == {"0100007F"}, "only on 127.0.0.1"
    assert all(rank == ranks[0] for rank in ranks), "ranks must agree in every bit"
    total = sum(range(size))
    assert ranks[0]["half"] == [[float(total + size)] * 5] * 3
    assert ranks[0]["strided"] == [
        [0.0, 3.0 * total],
        [total, 4.0 * total],
        [2.0 * total, 5.0 * total],
    ]
    assert ranks[0]["gathered"][0] == [x for rank in range(size) for x in (rank, -rank)]
    assert ranks[0]["gathered"][1] == [x for rank in range(size) for x in (0.5, rank)]
    assert ranks[0]["gathered_strided"][2] == [x + r for r in range(size) for x in (2.0, 5.0)]
    assert ranks[0]["empty"] == [0, 4 * size]
    expected = sum(
        torch.randn(7, 33, generator=torch.Generator().manual_seed(rank)) for rank in range(size)
    )
    torch.testing.assert_close(torch.tensor(ranks[0]["noise"]), expected)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_in_fixed_order_a_row_does_not_depend_on_the_others(size: int) -> None:
    assert play(sum_of_rows, size, fixed_order=True) == [[True] * 4] * size


def test_ranks_draw_from_their_parts_of_the_vocabulary() -> None:
    assert play(draws_of_parts, 2) == [[True, True, False]] * 2


def test_a_rank_that_leaves_is_noticed() -> None:
    assert play(dead_peer, 2) == ["noticed", "left"]


def test_a_group_of_one_opens_nothing() -> None:
    with ParallelGroup(0, 1) as group:
        x = torch.ones(2)
        assert group.all_reduce(x) is x
        assert group.all_gather(x) is x


def test_missing_ranks_are_named() -> None:
    (port,) = free_ports(1)
    with pytest.raises(ConnectionError, match=rf"rank 1 of 2 .* 127.0.0.1:{port}"):
        ParallelGroup(1, 2, "cpu", f"127.0.0.1:{port}", timeout_s=0.2)
