"""Several network interfaces: which are near to a GPU, and who uses which."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from kv_caches import layout

from edge.security.config import SecurityConfig
from edge.security.credentials import Credentials
from host.network import Network, interfaces_by_address
from kv_transfer.base import KVCacheHandle
from kv_transfer.config import KVTransferConfig
from kv_transfer.control.own_host import advertised_host, check_own, own_host, source_host
from kv_transfer.control.process_config import TransferProcessConfig
from kv_transfer.control.sizing import (
    available_cores,
    choose_num_processes,
    choose_num_streams,
    choose_receive_threads,
)
from kv_transfer.errors import KVTransferError, PeerLost
from kv_transfer.transports.stream.h2.dial import dial

ROOT_A, ROOT_B = "pci0000:16", "pci0000:97"
GPU = "0000:19:00.0"
ADDRESSES = {
    "10.0.0.1": "rail0",
    "10.0.1.1": "rail1",
    "10.0.2.1": "rail2",
    "10.0.3.1": "rail3",
    "10.0.9.1": "bond0",
    "10.0.8.1": "veth0",
}


class FakeSys:
    """A tree like /sys with what is looked at."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def device(self, path: str, numa_node: int = 0) -> Path:
        folder = self.root / "devices" / path
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{numa_node}\n")
        link = self.root / "bus/pci/devices" / folder.name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder)
        return folder

    def interface(self, name: str, device: Path | None, speed: int) -> Path:
        folder = self.root / "class/net" / name
        folder.mkdir(parents=True)
        (folder / "speed").write_text(f"{speed}\n")
        if device is not None:
            (folder / "device").symlink_to(device)
        return folder


@pytest.fixture
def sys(tmp_path: Path) -> Path:
    """A GPU and four network cards: behind its switch, below its root, on its CPU, on the other."""
    fake = FakeSys(tmp_path)
    switch = f"{ROOT_A}/0000:16:01.0/0000:17:00.0"
    fake.device(f"{switch}/0000:18:00.0/{GPU}")
    cards = [
        fake.device(f"{switch}/0000:18:01.0/0000:1a:00.0"),
        fake.device(f"{ROOT_A}/0000:16:05.0/0000:1c:00.0"),
        fake.device("pci0000:38/0000:38:01.0/0000:3a:00.0"),
        fake.device(f"{ROOT_B}/0000:97:01.0/0000:98:00.0", numa_node=1),
    ]
    for number, card in enumerate(cards):
        fake.interface(f"rail{number}", card, 100_000)
    bond = fake.interface("bond0", None, 200_000)
    for number in (1, 3):
        (bond / f"lower_rail{number}").symlink_to(tmp_path / f"class/net/rail{number}")
    fake.interface("veth0", None, 10_000)
    return tmp_path


@pytest.mark.parametrize(
    ("hosts", "nearest"),
    [
        (["10.0.3.1", "10.0.2.1", "10.0.1.1", "10.0.0.1"], ["10.0.0.1"]),
        (["10.0.3.1", "10.0.2.1", "10.0.1.1"], ["10.0.1.1"]),
        (["10.0.3.1", "10.0.2.1"], ["10.0.2.1"]),
        (["10.0.3.1", "10.0.9.1"], ["10.0.9.1"]),
        (["10.0.8.1", "10.0.3.1"], ["10.0.3.1"]),
        (["10.0.8.1", "10.0.7.1"], ["10.0.8.1", "10.0.7.1"]),
    ],
    ids=["switch", "root", "numa node", "bond", "unknown is far", "nothing known"],
)
def test_the_nearest_to_a_gpu(sys: Path, hosts: list[str], nearest: list[str]) -> None:
    network = Network(ADDRESSES, sys)
    assert network.nearest(hosts, GPU) == nearest
    assert network.nearest(hosts, "") == hosts, "without a GPU all are alike"
    assert network.nearest(hosts, "0000:ff:00.0") == hosts, "a GPU that /sys does not know"


def test_the_speed_of_real_interfaces_only(sys: Path) -> None:
    network = Network(ADDRESSES, sys)
    assert network.gb_per_s(["10.0.0.1", "10.0.1.1"]) == 25.0
    assert network.gb_per_s(["10.0.9.1"]) == 25.0
    assert network.gb_per_s(["10.0.0.1", "10.0.8.1"]) is None, "a pod's interface says anything"
    (sys / "class/net/rail0/speed").write_text("-1\n")
    assert network.gb_per_s(["10.0.0.1"]) is None


def test_addresses_of_this_host() -> None:
    assert interfaces_by_address()["127.0.0.1"] == "lo"


def process(hosts: tuple[str, ...], rank: int, index: int, of: int = 2) -> TransferProcessConfig:
    return TransferProcessConfig(
        transfer=KVTransferConfig(kv_role="kv_consumer", hosts=hosts, num_processes=of),
        engine_id="e",
        epoch=1,
        layout=layout(),
        handle=KVCacheHandle(rank=rank, pid=1, num_blocks=1),
        index=index,
    )


def test_processes_share_addresses_out(sys: Path) -> None:
    network = Network(ADDRESSES, sys)
    hosts = ("10.0.2.1", "10.0.3.1", "10.0.0.1")

    def own(rank: int, index: int, gpu: str) -> str:
        return own_host(process(hosts, rank, index), gpu, network)

    everywhere = [own(rank, index, "") for rank in range(3) for index in range(2)]
    assert everywhere == [*hosts, *hosts], "all ranks together use all of them"
    assert [own(1, index, GPU) for index in range(2)] == ["10.0.0.1"] * 2
    assert own_host(process(("name",), 1, 1), GPU, network) == "name", "one is never looked up"


def test_one_address_is_left_to_the_kernel_and_foreign_ones_are_refused() -> None:
    assert source_host(process(("192.0.2.77",), 0, 0), "") == ""
    assert source_host(process(("127.0.0.1", "127.0.0.2"), 0, 1), "") == "127.0.0.2"
    with pytest.raises(OSError):
        source_host(process(("127.0.0.1", "192.0.2.77"), 0, 1), "")


def test_peers_are_told_the_advertised_address_of_each() -> None:
    config = process(("127.0.0.1", "127.0.0.2"), 0, 0)
    assert advertised_host(config, "127.0.0.2") == "127.0.0.2"
    transfer = replace(config.transfer, advertised_hosts=("gpu7.example", "192.0.2.7"))
    config = msgspec.structs.replace(config, transfer=transfer)
    assert advertised_host(config, "127.0.0.1") == "gpu7.example"
    assert advertised_host(config, "127.0.0.2") == "192.0.2.7"


def test_a_foreign_address_is_refused_with_the_cure() -> None:
    check_own(["127.0.0.1", "0.0.0.0"])
    with pytest.raises(KVTransferError, match="192.0.2.77, which is no address of this host"):
        check_own(["127.0.0.1", "192.0.2.77"])


async def test_connections_leave_from_the_address_they_were_told() -> None:
    credentials = Credentials(SecurityConfig())
    accepted: asyncio.Queue[str] = asyncio.Queue()

    async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.put_nowait(writer.get_extra_info("peername")[0])
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        for source, seen in (("127.0.0.3", "127.0.0.3"), ("", "127.0.0.1"), ("::1", "127.0.0.1")):
            (await dial(address, credentials, source)).close()
            assert await accepted.get() == seen
        with pytest.raises(PeerLost):
            await dial(address, credentials, "192.0.2.77")


# How many of them ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "ranks", "link", "hosts", "wanted"),
    [
        (2, 1, None, 1, 1),
        (16, 1, None, 1, 4),
        (32, 1, None, 1, 8),
        (64, 1, None, 1, 8),
        (32, 4, None, 1, 2),
        (128, 8, 12.5, 1, 1),
        (32, 1, 3.125, 1, 2),
        (64, 1, 12.5, 1, 5),
        (4, 1, None, 3, 3),
        (64, 8, None, 8, 2),
    ],
)
def test_processes_by_cores_link_and_ranks(
    cores: int, ranks: int, link: float | None, hosts: int, wanted: int
) -> None:
    assert choose_num_processes(cores, ranks, link, hosts) == wanted


def test_streams_by_processes() -> None:
    assert [choose_num_streams(n) for n in (1, 2, 4, 8)] == [4, 4, 8, 16]


@pytest.mark.parametrize(
    ("cores", "processes", "wanted"),
    [(2, 1, 0), (4, 1, 2), (16, 4, 2), (32, 4, 2), (32, 8, 2), (31, 8, 0), (64, 1, 2), (32, 32, 0)],
)
def test_threads_receive_where_there_are_cores_for_two(
    cores: int, processes: int, wanted: int
) -> None:
    assert choose_receive_threads(cores, processes) == wanted


def test_cores_of_a_container(tmp_path: Path) -> None:
    mine = available_cores(tmp_path)
    assert mine >= 1
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert available_cores(tmp_path) == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert available_cores(tmp_path) == mine


def test_loopback_has_many_addresses() -> None:
    """The tests above, and those of whole nodes, rest on this."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.2", 0))
