"""Tests which processes a cluster is made of."""

from __future__ import annotations

import itertools
import random
import socket

import pytest

import cli.local_cluster.cluster as cluster_module
from cli.local_cluster.cluster import UpSettings, cluster_specs, free_ports
from cli.local_cluster.gpu_placement import placement_args
from cli.up import main as up_main
from kv_transfer.memory.devices.device import DeviceError


def option(argv: tuple[str, ...], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_every_node_is_known_to_the_router_and_ports_are_distinct() -> None:
    specs = cluster_specs(UpSettings(prefill=2, decode=3, port=8123), ["--block-size", "32"])
    assert [s.name for s in specs] == [
        "router", "decode-0", "decode-1", "decode-2", "prefill-0", "prefill-1",
    ]  # fmt: skip
    router, decodes, prefills = specs[0], specs[1:4], specs[4:]
    assert option(router.argv, "--port") == "8123"
    assert option(router.argv, "--prefill") == ",".join(
        f"127.0.0.1:{option(s.argv, '--port')}" for s in prefills
    )
    assert option(router.argv, "--decode") == ",".join(
        f"127.0.0.1:{option(s.argv, '--port')}/{option(s.argv, '--grpc-port')}" for s in decodes
    )
    ports = [option(s.argv, "--port") for s in specs]
    ports += [option(s.argv, "--grpc-port") for s in decodes]
    ports += [option(s.argv, "--metrics-port") for s in prefills]
    assert len(set(ports)) == len(ports)
    assert all(option(s.argv, "--block-size") == "32" for s in specs[1:])
    assert "--block-size" not in router.argv


def test_nodes_have_folders_for_kv_of_their_own() -> None:
    """Two nodes that shared one would take its files from each other."""
    settings = UpSettings(prefill=2, decode=1, switchable=1, device="cpu")
    flags = ["--kv-disk-path", "/kv/disk", "--kv-host-memory-path", "shm", "--kv-disk-bytes", "9"]
    _, *nodes = cluster_specs(settings, flags)
    for node in nodes:
        assert option(node.argv, "--kv-disk-path") == f"/kv/disk/{node.name}"
        assert option(node.argv, "--kv-host-memory-path") == f"shm/{node.name}"
        assert option(node.argv, "--kv-disk-bytes") == "9"


def test_switchable_nodes_begin_as_prefill_nodes_and_stop_between_the_tiers() -> None:
    settings = UpSettings(prefill=1, decode=1, switchable=2, device="cpu")
    specs = cluster_specs(settings, ["--block-size", "32"], ["--strict-fields"])
    router, decode, *switchable, prefill = specs
    assert [s.name for s in specs[1:]] == ["decode-0", "node-0", "node-1", "prefill-0"]
    assert [s.stop_stage for s in specs] == [0, 1, 2, 2, 3]
    for spec in switchable:
        assert spec.argv[1:3] == ("-m", "role_node") and "--role" not in spec.argv
        assert option(spec.argv, "--block-size") == "32" and "--strict-fields" in spec.argv
        assert spec.endpoint == f"grpc://127.0.0.1:{option(spec.argv, '--grpc-port')}"
    addresses = [f"127.0.0.1:{option(s.argv, '--grpc-port')}" for s in switchable]
    fixed = f"127.0.0.1:{option(prefill.argv, '--port')}"
    assert option(router.argv, "--prefill").split(",") == [fixed, *addresses]
    assert option(router.argv, "--decode").count(",") == 0
    names = ("--port", "--grpc-port", "--metrics-port")
    ports = [option(s.argv, name) for s in switchable for name in names]
    assert len(set(ports) | {option(s.argv, "--port") for s in (decode, prefill)}) == 8


def test_keys_reach_the_router_and_no_command_line() -> None:
    router, *nodes = cluster_specs(UpSettings(api_key="k1,k2"), [], ["--strict-fields"])
    assert router.env == {"TANDEM_ROUTER_API_KEYS": "k1,k2"}
    assert not any(node.env for node in nodes)
    assert not any("k1" in word for spec in (router, *nodes) for word in spec.argv)
    assert [spec.name for spec in nodes if "--strict-fields" in spec.argv] == ["decode-0"]


def test_settings_come_from_flags_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_UP_DECODE", "4")
    settings = UpSettings(_cli_parse_args=["some/model", "--prefill", "2", "--verbose"])
    assert (settings.model, settings.prefill, settings.decode, settings.verbose) == (
        "some/model", 2, 4, True,
    )  # fmt: skip


@pytest.mark.parametrize(
    "bad",
    [
        ["--prefill", "-1"],
        ["--decode", "0"],
        ["--switchable", "-1"],
        ["--port", "70000"],
        ["--device", "gpu"],
    ],
)
def test_impossible_settings_are_named(bad: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        up_main(bad)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert bad[0] in said and f"TANDEM_UP_{bad[0][2:].upper()}" in said


def test_a_port_is_given_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    (first,) = free_ports(1)
    draw = random.randrange
    drawn = itertools.chain([first, first], (draw(10_000, 30_000) for _ in itertools.count()))
    monkeypatch.setattr(random, "randrange", lambda *_: next(drawn))
    assert first not in free_ports(2)


def test_who_is_told_of_a_port_can_listen_there_again_and_again() -> None:
    (port,) = free_ports(1)
    for _ in range(2):
        with (
            socket.create_server(("127.0.0.1", port)) as listener,
            socket.create_connection(("127.0.0.1", port)),
            listener.accept()[0],
        ):
            pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(("127.0.0.1", port))


@pytest.mark.parametrize(
    ("num_nodes", "tp_size", "num_gpus", "expected"),
    [
        (2, 1, 1, [(0, 0.45), (0, 0.45)]),
        (2, 1, 2, [(0, None), (1, None)]),
        (3, 1, 2, [(0, 0.45), (1, 0.45), (0, 0.45)]),
        (2, 2, 4, [(0, None), (2, None)]),
        (2, 2, 3, [(0, 0.45), (0, 0.45)]),
        (1, 4, 2, [(0, None)]),
    ],
)
def test_nodes_have_gpus_of_their_own_or_share_their_memory(
    num_nodes: int, tp_size: int, num_gpus: int, expected: list[tuple[int, float | None]]
) -> None:
    found = []
    for flags in placement_args(num_nodes, tp_size, num_gpus, None):
        named = dict(zip(flags[::2], flags[1::2], strict=True))
        share = named.get("--gpu-memory-utilization")
        found.append((int(named["--first-gpu"]), float(share) if share else None))
    assert found == expected
    for flags in placement_args(num_nodes, tp_size, num_gpus, 0.3):
        assert flags[-2:] == ["--gpu-memory-utilization", "0.300"]


def test_gpus_that_are_not_there_are_an_error_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_driver() -> None:
        raise DeviceError("the CUDA driver cannot be loaded; is this a GPU host?")

    monkeypatch.setattr(cluster_module, "cuda_driver", no_driver)
    assert up_main(["--device", "cuda"]) == 1
    assert "is this a GPU host?" in capsys.readouterr().err


def test_on_cpu_no_node_hears_of_gpus() -> None:
    for spec in cluster_specs(UpSettings(device="cpu", gpu_memory_utilization=0.4), []):
        assert "--first-gpu" not in spec.argv


def test_ray_chooses_gpus_and_the_share_that_is_given_reaches_each_node() -> None:
    settings = UpSettings(device="cuda", tp=2, gpu_memory_utilization=0.4)
    for spec in cluster_specs(settings, ["--distributed-executor-backend", "ray"])[1:]:
        assert option(spec.argv, "--gpu-memory-utilization") == "0.400"
        assert "--first-gpu" not in spec.argv
