"""`tandem up` understands what people type who know vLLM, and refuses before it loads anything."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

import cli.local_cluster.cluster
import cli.local_cluster.memory_check
import cli.up
from cli.__main__ import main as tandem
from cli.local_cluster.cluster import UpSettings, cluster_specs
from cli.local_cluster.memory_check import TooFewGpus, TooLarge, check_memory
from cli.local_cluster.node_args import NodeArgs, UsageError, read_args
from cli.local_cluster.service_checks import check_services
from cli.local_cluster.supervisor import ServiceFailed, ServiceSpec
from cli.up import wait_routable
from edge.command_line import parse_settings
from engine.models.checkpoint import resolve_model
from engine.models.errors import CheckpointError

GIB = 1 << 30


@pytest.mark.parametrize(
    ("typed", "own", "common", "decode"),
    [
        ("m -- --block-size 32", "m", "--block-size 32", ""),
        ("--model m --tensor-parallel-size 2", "m --tp 2", "", ""),
        ("m -tp 2 --api-key k", "m --tp 2 --api-key k", "", ""),
        ("--tensor-parallel-size=2 --model=m", "m --tp 2", "", ""),
        ("m --max-model-len 4096 --verbose", "m --verbose", "--max-model-len 4096", ""),
        ("--enforce-eager m --dtype=float32", "m", "--enforce-eager --dtype float32", ""),
        ("--verbose m", "m --verbose", "", ""),
        ("m --switchable 2 --strict-fields", "m --switchable 2", "", "--strict-fields"),
        ("m --strict-fields --prefill 2", "m --prefill 2", "", "--strict-fields"),
        ("m --generation-config none", "m", "", "--generation-config none"),
        ("m --no-enable-prefix-caching", "m", "--no-enable-prefix-caching", ""),
        ("m -- --port 7 --strict-fields", "m", "", "--port 7 --strict-fields"),
        ("m --kv-port -1", "m", "--kv-port -1", ""),
        ("--help", "--help", "", ""),
        ("", "", "", ""),
    ],
)
def test_each_argument_reaches_whom_it_concerns(
    typed: str, own: str, common: str, decode: str
) -> None:
    found, nodes = read_args(typed.split())
    assert (found, nodes.common, nodes.decode) == (own.split(), common.split(), decode.split())
    if "--help" not in own:
        settings = parse_settings(UpSettings, "tandem up", found)
        assert settings.model.endswith("m" if own else "demo_checkpoint")


def only_line(text: str) -> str:
    lines = text.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["m", "--", "--blok-size", "32"], ["--blok-size", "--block-size"]),
        (["m", "--decodes", "2"], ["--decodes", "--decode"]),
        (["m", "--strict-feilds"], ["--strict-feilds", "--strict-fields"]),
    ],
)
def test_an_unknown_flag_is_one_line_with_the_nearest_known_one(
    args: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert tandem(["serve", *args]) == 2
    line = only_line(capsys.readouterr().err)
    assert line.startswith("tandem up: there is no ")
    assert all(word in line for word in words)


def test_several_models_are_led_to_where_they_are_served(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert tandem(["up", "a", "--decode", "2", "b"]) == 2
    line = only_line(capsys.readouterr().err)
    assert "one model" in line and "a, b" in line and "Several models" in line


def test_a_check_starts_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli.up, "running_cluster", Mock(side_effect=AssertionError))
    assert tandem(["up", "--check", "--decode", "2"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["decode"] == 2 and not said.err
    (tmp_path / "config.json").write_text('{"architectures": ["Nonesuch"]}')
    assert tandem(["up", str(tmp_path), "--check"]) == 2
    assert "Nonesuch" in capsys.readouterr().err


@pytest.mark.parametrize("check", [["--check"], []])
@pytest.mark.parametrize(
    ("model", "words"),
    [("/nonexistent", "does not exist; check the path"), (__file__, "is a file; name the folder")],
)
def test_a_model_that_is_nowhere_is_refused_before_anything_starts(
    model: str,
    words: str,
    check: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cli.up, "running_cluster", Mock(side_effect=AssertionError))
    assert tandem(["up", model, *check]) == (2 if check else 1)
    line = only_line(capsys.readouterr().err)
    assert line.startswith(f"{model}: ") and words in line


@pytest.mark.parametrize(
    ("flags", "kind", "words"),
    [
        ("--tp 3", "decode", "4 attention heads, which 3 tensor-parallel ranks cannot share"),
        ("--prefill 0 --num-blocks 8", "decode", "room for 128 tokens"),
        ("--switchable 1 --generation-config /nonexistent", "decode", "generation_config.json"),
    ],
)
def test_a_check_says_what_the_start_would(
    flags: str, kind: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tandem(["up", "--check", "--device", "cpu", *flags.split()]) == 2
    line = only_line(capsys.readouterr().err)
    assert line.startswith(f"{kind}: cannot start: ") and words in line


async def test_each_kind_of_service_is_asked_once() -> None:
    def spec(name: str, code: str) -> ServiceSpec:
        return ServiceSpec(name, (sys.executable, "-c", code), "", env={"WORD": name})

    refuses = "import os, sys; sys.exit('tandem x: ' + os.environ['WORD'] + ' ' + sys.argv[1])"
    await check_services([spec("router", ""), spec("decode-0", "")])
    with pytest.raises(ServiceFailed, match="^decode: decode-1 --check$"):
        await check_services([spec("router", ""), *(spec(f"decode-{i}", refuses) for i in (0, 1))])


def test_the_demo_checks_flags_of_nodes_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert tandem(["demo", "--blok-size", "32"]) == 2
    line = only_line(capsys.readouterr().err)
    assert line.startswith("tandem demo: there is no --blok-size; did you mean --block-size?")


async def test_flags_of_nodes_are_checked_before_anything_starts() -> None:
    await NodeArgs(["--block-size", "32"], ["--strict-fields"]).check()
    with pytest.raises(UsageError, match="--block-size"):
        await NodeArgs(["--block-size", "many"]).check()
    stages = NodeArgs(["--pipeline-parallel-size", "2"])
    with pytest.raises(UsageError, match="--pipeline-parallel-size.*`tandem prefill`"):
        await stages.check(are_switchable=True)


def checkpoint(folder: Path, gib: float) -> Path:
    """Makes weights that take room in no file system."""
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(int(gib * GIB))
    return folder


@pytest.mark.parametrize(
    ("free_gib", "prefill", "switchable", "words"),
    [
        (40, 1, 0, None),
        (25, 1, 0, ["15.0 GiB", "2 nodes need 30.0 GiB", "25.0 GiB left", "--decode 1, or"]),
        (40, 1, 1, ["3 nodes need 45.0 GiB", "--prefill 0 --decode 1 --switchable 0"]),
        (25, 0, 0, None),
        (9, 0, 0, ["1 nodes need 15.0 GiB", "9.0 GiB left", "smaller model"]),
    ],
)
def test_a_model_that_cannot_fit_this_machine(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    free_gib: int,
    prefill: int,
    switchable: int,
    words: list[str] | None,
) -> None:
    monkeypatch.setattr(cli.local_cluster.memory_check, "available_memory", lambda: free_gib * GIB)
    folder = checkpoint(tmp_path, 15)
    settings = UpSettings(model=str(folder), prefill=prefill, switchable=switchable, device="cpu")
    if words is None:
        check_memory(settings)
        return
    with pytest.raises(TooLarge) as refusal:
        check_memory(settings)
    assert all(word in str(refusal.value) for word in words), refusal.value


@pytest.mark.parametrize(
    ("num_gpus", "gib", "tp", "fits"),
    [(1, 20, 1, True), (1, 50, 1, False), (2, 70, 1, True), (2, 150, 2, False), (4, 150, 2, True)],
)
def test_a_model_that_cannot_fit_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_gpus: int, gib: int, tp: int, fits: bool
) -> None:
    class Driver:
        def device_uuids(self) -> list[bytes]:
            return [b"gpu"] * num_gpus

        def total_memory(self, index: int) -> int:
            return 80 * GIB

    monkeypatch.setattr(cli.local_cluster.memory_check, "cuda_driver", Driver)
    settings = UpSettings(model=str(checkpoint(tmp_path, gib)), tp=tp, device="cuda")
    if fits:
        check_memory(settings)
        return
    with pytest.raises(TooLarge, match=r"80\.0 GiB"):
        check_memory(settings)
    with pytest.raises(TooFewGpus, match="8 tensor-parallel ranks"):
        check_memory(UpSettings(model="org/unknown", tp=8, device="cuda"))


def test_ray_hands_out_more_gpus_than_this_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Mock(**{"device_uuids.return_value": [b"gpu"] * 8, "total_memory.return_value": GIB})
    for module in (cli.local_cluster.memory_check, cli.local_cluster.cluster):
        monkeypatch.setattr(module, "cuda_driver", lambda: driver)
    typed = "org/model --tp 16 --device cuda -- --distributed-executor-backend"
    for backend in ("ray", "mp"):
        own, nodes = read_args([*typed.split(), backend])
        settings = parse_settings(UpSettings, "tandem up", own)
        if backend == "mp":
            with pytest.raises(TooFewGpus, match="16 tensor-parallel ranks"):
                check_memory(settings, nodes.common)
            continue
        check_memory(settings, nodes.common)
        _, *services = cluster_specs(settings, nodes.common)
        assert len(services) == 2
        for service in services:
            assert "--distributed-executor-backend" in service.argv
            assert not {"--first-gpu", "--gpu-memory-utilization"} & set(service.argv)
    monkeypatch.setenv("TANDEM_DISTRIBUTED_EXECUTOR_BACKEND", "ray")
    check_memory(settings)
    with pytest.raises(TooFewGpus):
        check_memory(settings, ["--distributed-executor-backend=mp"])


def test_it_is_said_before_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli.local_cluster.memory_check, "available_memory", lambda: GIB)
    assert tandem(["up", str(checkpoint(tmp_path, 2)), "--device", "cpu"]) == 1
    line = only_line(capsys.readouterr().err)
    assert "of weights" in line


@pytest.mark.parametrize("name", ["org/model-GGUF", "org/model-gguf:Q4_K_M", "model.gguf"])
def test_gguf_is_not_downloaded_and_a_broken_file_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.models.files.hub.snapshot_download", None)
    monkeypatch.setattr("engine.models.gguf.convert.STORE", tmp_path / "store")
    with pytest.raises(CheckpointError, match="GGUF format, of which no file is here"):
        resolve_model(name)
    monkeypatch.setitem(sys.modules, "gguf", Mock())
    file = tmp_path / "weights.gguf"
    for data in (b"", b"GGUF", b"GGUF" + bytes(20), b"GGUF\x03\0\0\0" + b"\xff" * 40):
        file.write_bytes(data)
        for path in (tmp_path, file):
            with pytest.raises(CheckpointError, match="no GGUF file that can be read") as caught:
                resolve_model(str(path))
            assert str(file) in str(caught.value)
    (tmp_path / "more.gguf").touch()
    with pytest.raises(CheckpointError, match="several files in the GGUF format"):
        resolve_model(str(tmp_path))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match=r"install tandem\[gguf\]"):
        resolve_model(str(file))


async def test_a_cluster_is_there_when_its_router_knows_the_switchable_nodes_too() -> None:
    known = iter([{"prefill_nodes": 1, "decode_nodes": 1}, {"prefill_nodes": 3, "decode_nodes": 1}])

    async def ready(_: web.Request) -> web.Response:
        return web.json_response(next(known))

    app = web.Application()
    app.router.add_get("/ready", ready)
    async with TestServer(app) as server:
        settings = UpSettings(prefill=1, decode=1, switchable=2)
        await wait_routable(f"http://127.0.0.1:{server.port}", settings)
    assert list(known) == [], "it was there too early"
