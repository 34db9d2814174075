"""The setting `fastest` takes NIXL where there is RDMA, for peers that it reads faster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kv_caches import layout
from kv_loopback import Loopback, LoopbackConsumer, LoopbackProducer, until
from nixl_pairs import both_empty, consumers, kv_bytes, pull

from edge.security.config import SecurityConfig
from host.network import rdma_ports
from kv_transfer.config import KVTransferConfig
from kv_transfer.consumer import receiver
from kv_transfer.transports import registry
from kv_transfer.transports.nixl import environment, peers
from kv_transfer.transports.nixl.agent import NixlAgent, NixlError, Transfer
from kv_transfer.transports.nixl.peers import Peer

SHAPE = layout()
KV_BYTES = kv_bytes(SHAPE)


@pytest.fixture(autouse=True)
def tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")


@pytest.fixture
def has_rdma(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of these tests are short, and count all the same."""
    monkeypatch.setattr(registry, "is_tried", lambda config: True)
    monkeypatch.setattr(receiver, "_FEWEST_BYTES", 1)


def of_fastest() -> Loopback:
    return Loopback(SHAPE, SHAPE, data="fastest", num_streams=2)


async def compared(prefill: LoopbackProducer, decode: LoopbackConsumer) -> Peer:
    """All KV comes over the stream until it is known how fast both are."""
    assert await pull(prefill, decode, 1) > KV_BYTES
    (peer,) = (peer for one in consumers(decode) for peer in one.peers)
    await until(lambda: peer.first_word.has_ended)
    assert await pull(prefill, decode, 2) > KV_BYTES
    trial = peer.trial
    assert trial is not None
    await until(lambda: trial.rate is not None or bool(trial.error))
    return peer


async def test_a_peer_that_is_read_faster_is_read_from_then_on(
    has_rdma: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peers, "_WINS_BY", 0.0)
    caplog.set_level("INFO")
    async with of_fastest() as (prefill, decode):
        await compared(prefill, decode)
        for seed in (3, 4):
            assert 0 < await pull(prefill, decode, seed) < KV_BYTES // 4
        await both_empty(prefill, decode)
    assert any("GB/s through NIXL, and at" in line for line in caplog.messages)
    assert sum("is read through NIXL from now on" in line for line in caplog.messages) == 1


async def test_a_peer_that_is_not_stays_with_the_stream(
    has_rdma: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peers, "_WINS_BY", 1e9)
    caplog.set_level("INFO")
    async with of_fastest() as (prefill, decode):
        peer = await compared(prefill, decode)
        for seed in (3, 4):
            assert await pull(prefill, decode, seed) > KV_BYTES
        assert peer.is_slower and not peer.is_lost
        await both_empty(prefill, decode)
    assert sum("GB/s through NIXL, and at" in line for line in caplog.messages) == 1
    assert not any("from now on" in line for line in caplog.messages)


async def test_a_trial_that_fails_ends_it(
    has_rdma: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read = NixlAgent.read

    def fails_with_data(agent: NixlAgent, name: str, *rest: object) -> Transfer:
        sizes = rest[2]
        if int(sizes[0]) > 4:  # type: ignore[index]
            raise NixlError("a read could not begin: no such device")
        return read(agent, name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(NixlAgent, "read", fails_with_data)
    async with of_fastest() as (prefill, decode):
        peer = await compared(prefill, decode)
        assert await pull(prefill, decode, 3) > KV_BYTES
        assert peer.is_lost
        await both_empty(prefill, decode)
    assert any("no such device" in line for line in caplog.messages)


async def test_without_rdma_nixl_is_left_out() -> None:
    async with of_fastest() as (prefill, decode):
        assert await pull(prefill, decode, 1) > KV_BYTES
        assert not list(consumers(decode))


def test_who_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def tried(transports: str = "fastest", **settings: Any) -> bool:
        config = KVTransferConfig(kv_role="kv_producer", transports=transports, **settings)
        return environment.is_tried(config)

    assert not tried()
    monkeypatch.setattr(environment, "rdma_ports", lambda: ["mlx5_0:1"])
    assert tried()
    assert not tried("auto"), "UCX listens where it is told to, and nowhere else"
    assert not tried("nixl,stream"), "what is named need not win"
    certificates = SecurityConfig(tls_cert_file="a", tls_key_file="b", tls_ca_file="c")
    assert not tried(security=certificates)
    monkeypatch.setattr(environment, "PACKAGES", ("a_package_that_nobody_has",))
    assert not tried()


def test_ports_of_rdma_devices(tmp_path: Path) -> None:
    assert rdma_ports(tmp_path) == []
    for port in ("mlx5_1/ports/1", "mlx5_0/ports/1", "mlx5_0/ports/2"):
        (tmp_path / "class/infiniband" / port).mkdir(parents=True)
    assert rdma_ports(tmp_path) == ["mlx5_0:1", "mlx5_0:2", "mlx5_1:1"]
