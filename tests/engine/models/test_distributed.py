"""Collectives between real processes, and what happens when a rank is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.distributed import TensorParallelGroup
from tests.engine.models.conftest import free_ports, run_ranks


@pytest.mark.parametrize("size", [2, 3])
def test_collectives(size: int, tmp_path: Path) -> None:
    ranks = run_scene("collectives", size, tmp_path)
    assert all(rank["listening"] == ["0100007F"] for rank in ranks), "only on 127.0.0.1"
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


def test_a_rank_that_leaves_is_noticed(tmp_path: Path) -> None:
    assert run_scene("dead_peer", 2, tmp_path) == ["noticed", "left"]


def run_scene(scene: str, size: int, out: Path) -> list[Any]:
    """What each rank returned."""
    run_ranks("tests.engine.models.collective_rank", size, scene, str(out))
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(size)]


def test_a_group_of_one_opens_nothing() -> None:
    with TensorParallelGroup(0, 1) as group:
        x = torch.ones(2)
        assert group.all_reduce(x) is x
        assert group.all_gather(x) is x


def test_missing_ranks_are_named() -> None:
    (port,) = free_ports(1)
    with pytest.raises(ConnectionError, match=rf"rank 1 of 2 .* 127.0.0.1:{port}"):
        TensorParallelGroup(1, 2, "cpu", f"127.0.0.1:{port}", timeout_s=0.2)
