"""Addresses of stores are read, or refused with what is wrong."""

from __future__ import annotations

import pytest

from kv_transfer.memory.pool.store_address import StoreAddress


def test_what_an_address_says() -> None:
    plain = StoreAddress.parse("mooncake://m.corp:50051")
    assert plain == StoreAddress("m.corp:50051")
    assert (plain.protocol, plain.metadata, plain.replicas, plain.connections) == (
        "tcp", "P2PHANDSHAKE", 1, 2,
    )  # fmt: skip
    whole = "mooncake://m:1?protocol=rdma&devices=a,b&metadata=http://x&replicas=2&connections=4"
    assert StoreAddress.parse(whole) == StoreAddress("m:1", "rdma", "a,b", "http://x", 2, 4)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("mooncake://m", "HOST:PORT"),
        ("redis://m:1", "mooncake://"),
        ("mooncake://m:1/x", "path"),
        ("mooncake://m:1?replica=2", "replica is none of"),
        ("mooncake://m:1?replicas=0", "replicas is a number, 1 to 8"),
        ("mooncake://m:1?connections=many", "connections is a number, 1 to 8"),
        ("mooncake://m:1?protocol=udp", "tcp, rdma"),
    ],
)
def test_what_is_wrong_is_named(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        StoreAddress.parse(url)
