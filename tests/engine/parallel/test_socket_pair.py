"""The connection of two ranks: whatever size and kind of numbers, and what its ends do wrong."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from engine.parallel.socket_pair import _AT_ONCE, RankLostError, SocketPair

TIMEOUT = timedelta(seconds=60)


def connected(store: HashStore, address: str = "127.0.0.1") -> list[SocketPair]:
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(lambda rank: SocketPair(store, rank, address, TIMEOUT), range(2)))


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_each_gets_what_the_other_has(address: str) -> None:
    """Sizes up to far more than sockets buffer, of all kinds of numbers."""
    pair = connected(HashStore(), address)
    sizes = [(0, 4), (1,), (3, 5), (_AT_ONCE // 4,), (_AT_ONCE // 4 + 1,), (3 << 20,)]
    for size in sizes:
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
            mine = [(torch.rand(size) * 50 + rank).to(dtype) for rank in range(2)]
            with ThreadPoolExecutor(2) as threads:
                found = list(threads.map(SocketPair.exchange, pair, mine))
            assert torch.equal(found[0], mine[1]) and torch.equal(found[1], mine[0])
    for one in pair:
        one.close()


@pytest.mark.parametrize("size", [4, _AT_ONCE])
def test_a_rank_that_leaves_is_named(size: int) -> None:
    left, right = connected(HashStore())
    right.close()
    with pytest.raises(RankLostError, match="other rank of two is gone"):
        for _ in range(3):
            left.exchange(torch.ones(size))
    left.close()


@pytest.mark.parametrize("size", [4, 3 << 20])
def test_a_rank_that_hangs_is_named(size: int) -> None:
    left, right = connected(HashStore())
    left._socket.settimeout(0.05)
    with pytest.raises(RankLostError, match="has not answered"):
        left.exchange(torch.ones(size))
    left.close()
    right.close()


def test_strangers_do_not_take_the_place_of_a_rank() -> None:
    """One that says something else, and one that says nothing and leaves, before the rank comes."""
    store = HashStore()
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(SocketPair, store, 0, "127.0.0.1", TIMEOUT)
        host, port, _ = store.get("socket pair").decode().split()
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(b"x" * 16)
            assert stranger.recv(1) == b""
        socket.create_connection((host, int(port))).close()
        second = SocketPair(store, 1, "127.0.0.1", TIMEOUT)
        left = first.result()
    second._socket.sendall(torch.ones(2).numpy().tobytes())
    assert left.exchange(torch.zeros(2)).tolist() == [1.0, 1.0]
    # Nobody listens any more.
    with pytest.raises(OSError):
        socket.create_connection((host, int(port)), 1).close()
    left.close()
    second.close()


def test_ranks_that_do_not_meet_are_named() -> None:
    with pytest.raises(ConnectionError, match=r"rank 0 of 2 at 127.0.0.1 has no connection"):
        SocketPair(HashStore(), 0, "127.0.0.1", timedelta(seconds=0.05))
