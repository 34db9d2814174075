"""Addresses of this host by the name of an interface, or of a network of Multus."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from edge.command_line import SettingsError
from host.named_addresses import NamedAddresses, NoSuchAddress
from prefill_node.config import PrefillNodeSettings

INTERFACES = {
    "127.0.0.1": "lo",
    "fe80::1": "eth0",
    "10.0.0.5": "eth0",
    "fd00::5": "eth0",
    "10.1.0.5": "net1",
    "10.2.0.5": "net2",
    "fd00::9": "six",
    "fe80::2": "bare",
}
NETWORKS = [
    {"name": "cilium", "interface": "eth0", "ips": ["10.0.0.5"], "default": True},
    {"name": "fabric/rail0", "interface": "net1", "ips": ["fe80::3", "fd00:1::5", "10.1.0.5"]},
    {"name": "fabric/rail1", "interface": "net2", "ips": ["10.2.0.5"], "mac": "02:00"},
    {"name": "fabric/bare", "interface": "net3"},
]


def resolve(*hosts: str, family: int = 4) -> tuple[str, ...]:
    return NamedAddresses(family, interfaces=lambda: INTERFACES).resolve(hosts)


def test_interfaces_by_name() -> None:
    assert resolve("interface:eth0") == ("10.0.0.5",)
    assert resolve("interface:eth0", family=6) == ("fd00::5",)
    assert resolve("interface:six") == ("fd00::9",), "the only family that it has"
    assert resolve("interface:net*", "10.9.9.9", "interface:net1") == (
        "10.1.0.5", "10.2.0.5", "10.9.9.9",
    )  # fmt: skip
    assert resolve("10.0.0.5", "a.name") == ("10.0.0.5", "a.name")


@pytest.mark.parametrize("name", ["rail0", "lo", "bare", "eth"])
def test_an_interface_that_others_cannot_reach_is_refused(name: str) -> None:
    with pytest.raises(NoSuchAddress, match=r"this host has eth0 \(10.0.0.5\), net1"):
        resolve(f"interface:{name}")


def by_network(folder: Path, text: str | None, *hosts: str, wait_s: float = 0.0) -> tuple[str, ...]:
    file = folder / "network-status"
    if text is not None:
        file.write_text(text)
    return NamedAddresses(4, status_file=file, wait_s=wait_s).resolve(hosts)


def test_networks_of_multus(tmp_path: Path) -> None:
    text = json.dumps(NETWORKS)
    assert by_network(tmp_path, text, "network:fabric/rail0") == ("10.1.0.5",)
    assert by_network(tmp_path, text, "network:fabric/rail*") == ("10.1.0.5", "10.2.0.5")
    for name in ("fabric/rail9", "fabric/bare", "rail0"):
        with pytest.raises(NoSuchAddress, match="names cilium, fabric/rail0, fabric/rail1"):
            by_network(tmp_path, text, f"network:{name}")


@pytest.mark.parametrize(
    ("text", "told"), [("", "empty or missing"), ("[{", "is not JSON"), ('{"a": 1}', "not a list")]
)
def test_a_status_that_tells_nothing(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(NoSuchAddress, match=told):
        by_network(tmp_path, text, "network:rail0")


def test_a_status_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    """The kubelet makes an empty file of an annotation that is not there yet."""
    file = tmp_path / "network-status"
    file.write_text("")
    late = threading.Timer(0.3, file.write_text, [json.dumps(NETWORKS)])
    late.start()
    assert by_network(tmp_path, None, "network:fabric/rail1", wait_s=30.0) == ("10.2.0.5",)
    late.join()


def test_a_prefill_node_finds_its_address_when_it_starts(
    demo_checkpoint: Path, tmp_path: Path
) -> None:
    status = tmp_path / "network-status"
    status.write_text(json.dumps(NETWORKS))

    def settings(kv_host: str) -> PrefillNodeSettings:
        return PrefillNodeSettings(
            model=str(demo_checkpoint),
            kv_host=kv_host,
            kv_network_status=status,
            allow_plaintext=True,
        )

    transfer = settings("network:fabric/rail*").to_engine_config("kv_producer").kv_transfer
    assert transfer is not None
    assert transfer.hosts == ("10.1.0.5", "10.2.0.5")
    assert transfer.named_hosts == ("network:fabric/rail*",)
    assert transfer.num_processes >= 2, "one for each address"
    with pytest.raises(SettingsError, match="--kv-host interface:none0: no network interface"):
        settings("interface:none0").to_engine_config("kv_producer")
    # Whoever checks settings may do so on another host.
    assert settings("interface:none0").print_checked("kv_producer") == 0
