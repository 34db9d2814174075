"""One definition: flag, variable, help; and what becomes of it in the engine's configuration."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import pytest

from decode_node.config import DecodeNodeSettings
from edge.security.config import PlaintextRefused, SecurityError
from engine.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from engine.contracts.errors import CannotStartError
from engine.models.errors import CheckpointError
from engine.node.settings import engine_settings as settings_module
from engine.node.settings.engine_settings import EngineSettings, SettingsError, detect_device
from engine.node.settings.speculative_settings import parse_speculative_config
from prefill_node.config import PrefillNodeSettings

ALL = [EngineSettings, PrefillNodeSettings, DecodeNodeSettings]


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ALL:
        for name in kind.model_fields:
            monkeypatch.delenv(f"TANDEM_{name.upper()}", raising=False)


def test_a_flag_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_MODEL", "from-environment")
    monkeypatch.setenv("TANDEM_BLOCK_SIZE", "32")
    assert EngineSettings.from_args("x", []).block_size == 32
    settings = EngineSettings.from_args("x", ["--block-size", "64", "--no-enable-prefix-caching"])
    assert (settings.model, settings.block_size) == ("from-environment", 64)
    assert not settings.enable_prefix_caching


@pytest.mark.parametrize("kind", ALL)
def test_every_setting_is_described_and_in_the_help(
    kind: type[EngineSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    for name, field in kind.model_fields.items():
        assert field.description and field.description.endswith((".", "?")), name
    with pytest.raises(SystemExit) as ended:
        kind.from_args("python -m node", ["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "(default: None)" not in text
    for name in kind.model_fields:
        assert f"--{name.replace('_', '-')}" in text
        assert f"TANDEM_{name.upper()}" in text.upper()


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ([], "--model"),
        (["--model", "x", "--block-size", "0"], "--block-size"),
        (["--model", "x", "--dtype", "float8"], "--dtype"),
        (["--model", "x", "--port", "70000"], "--port"),
        (["--model", "x", "--nonsense", "1"], "--nonsense"),
    ],
)
def test_wrong_settings_are_named(
    args: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        DecodeNodeSettings.from_args("python -m decode_node", args)
    assert ended.value.code == 2
    assert named in capsys.readouterr().err


def test_engine_config_of_the_demo_checkpoint(demo_checkpoint: Path) -> None:
    args = ["--model", str(demo_checkpoint), "--tensor-parallel-size", "2", "--device", "cpu"]
    args += ["--max-model-len", "64", "--kv-streams", "8", "--served-model-name", "demo"]
    settings = EngineSettings.from_args("x", args)
    config = settings.to_engine_config("kv_producer")
    assert config.model.served_model_name == "demo"
    assert (config.model.max_model_len, config.parallel.tensor_parallel_size) == (64, 2)
    assert config.kv_transfer is not None
    assert (config.kv_transfer.kv_role, config.kv_transfer.num_streams) == ("kv_producer", 8)
    assert config.device.num_threads >= 1
    again = settings.to_engine_config("kv_producer")
    assert (again.engine_id, again.epoch) != (config.engine_id, config.epoch)
    assert again.kv_layout == config.kv_layout
    assert settings.to_engine_config(None).kv_transfer is None


@pytest.mark.parametrize("part", [CacheConfig, ParallelConfig, DeviceConfig, SchedulerConfig])
def test_every_part_of_the_engine_can_be_told(part: type[Any]) -> None:
    names = {field.name for field in fields(part)} - {"policy", "kv_scales", "eplb"}
    assert names <= EngineSettings.model_fields.keys()


def test_values_reach_the_engine(demo_checkpoint: Path) -> None:
    args = ["--model", str(demo_checkpoint), "--device", "cpu", "--block-size", "32"]
    args += ["--scheduling-policy", "priority", "--max-num-seqs", "9", "--deterministic"]
    args += ["--gpu-memory-utilization", "0.3", "--async-scheduling"]
    config = EngineSettings.from_args("x", args).to_engine_config(None)
    assert (config.cache.block_size, config.cache.gpu_memory_utilization) == (32, 0.3)
    scheduler = config.scheduler
    assert (scheduler.policy, scheduler.max_num_seqs, scheduler.async_scheduling) == (
        "priority", 9, True,
    )  # fmt: skip
    assert (config.device.device, config.device.deterministic) == ("cpu", True)
    plain = EngineSettings.from_args("x", args[:4]).to_engine_config(None)
    assert not plain.scheduler.async_scheduling, "only on a GPU"


def test_ranks_that_cannot_share_the_model_are_refused_before_any_starts(
    demo_checkpoint: Path,
) -> None:
    args = ["--model", str(demo_checkpoint), "--tensor-parallel-size", "3", "--device", "cpu"]
    with pytest.raises(CheckpointError, match="3 tensor-parallel ranks cannot share"):
        EngineSettings.from_args("x", args).to_engine_config(None)


def test_auto_device_follows_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_module, "_GPU_DRIVER", tmp_path / "gpus")
    assert detect_device() == "cpu"
    (tmp_path / "gpus").mkdir()
    assert detect_device() == "cpu"
    (tmp_path / "gpus" / "0000:01:00.0").mkdir()
    assert detect_device() == "cuda"


def test_keys_do_not_show() -> None:
    settings = DecodeNodeSettings.from_args("x", ["--model", "m", "--api-keys", "secret-key"])
    assert "secret-key" not in repr(settings)


def test_a_prefill_node_on_every_address_must_say_where_its_kv_is(demo_checkpoint: Path) -> None:
    def hosts(host: str, kv_host: str | None = None) -> tuple[str, ...]:
        settings = PrefillNodeSettings(
            model=str(demo_checkpoint), host=host, kv_host=kv_host, allow_plaintext=True
        )
        transfer = settings.to_engine_config("kv_producer").kv_transfer
        assert transfer is not None
        return transfer.hosts

    with pytest.raises(SettingsError, match="--kv-host"):
        hosts("0.0.0.0")
    assert hosts("0.0.0.0", "10.0.0.5") == ("10.0.0.5",)
    assert hosts("10.0.0.6") == ("10.0.0.6",)
    assert hosts("127.0.0.1", "10.0.0.5, fd00::5") == ("10.0.0.5", "fd00::5")


def test_peers_may_reach_kv_at_another_address(demo_checkpoint: Path) -> None:
    def advertised(**given: Any) -> tuple[str, ...]:
        settings = PrefillNodeSettings(
            model=str(demo_checkpoint), host="0.0.0.0", allow_plaintext=True, **given
        )
        transfer = settings.to_engine_config("kv_producer").kv_transfer
        assert transfer is not None
        return transfer.advertised_hosts

    assert advertised(kv_host="10.0.0.5") == ()
    assert advertised(kv_advertise_host="gpu7.example", kv_port=7000) == ("gpu7.example",)
    two = {"kv_host": "10.0.0.5,10.0.1.5", "kv_port": 7000}
    assert advertised(kv_advertise_host="a, b", **two) == ("a", "b")
    with pytest.raises(SettingsError, match="1 addresses for the 2 of --kv-host"):
        advertised(kv_advertise_host="a", **two)
    with pytest.raises(SettingsError, match="needs --kv-port"):
        advertised(kv_advertise_host="a")


@pytest.mark.parametrize("given", [{"host": "10.0.0.6"}, {"kv_host": "10.0.0.6"}])
def test_listening_for_others_in_plaintext_must_be_wanted(
    given: dict[str, Any], demo_checkpoint: Path, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef" * 4)
    refused = PrefillNodeSettings(model=str(demo_checkpoint), **given)
    assert refused.print_checked("kv_producer") == 2
    with pytest.raises(PlaintextRefused, match="--allow-plaintext"):
        refused.to_engine_config("kv_producer")
    for cure in ({"allow_plaintext": True}, {"cluster_token_file": str(token)}):
        assert PrefillNodeSettings(model="m", **given, **cure).print_checked("kv_producer") == 0


def test_certificates_are_named_all_or_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert DecodeNodeSettings(model="m", tls_key_file="k").print_checked("kv_consumer") == 2
    assert "--tls-cert-file and --tls-ca-file not given" in capsys.readouterr().err


def test_a_roll_to_tls_needs_a_server_that_serves_both(
    demo_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {f"tls_{name}_file": "x" for name in ("cert", "key", "ca")}
    given = {"model": str(demo_checkpoint), "accept_missing_tls": True, **files}
    grpcio = PrefillNodeSettings(kv_pull_transport="grpcio", **given)
    with pytest.raises(SecurityError, match="--kv-pull-transport must be h2"):
        grpcio.to_engine_config("kv_producer")
    PrefillNodeSettings(**given).to_engine_config("kv_producer")
    missing = DecodeNodeSettings(model="m", accept_missing_tls=True)
    assert missing.print_checked("kv_consumer") == 2
    assert "give --tls-cert-file" in capsys.readouterr().err


def test_memory_for_kv_is_shared_by_the_processes_of_a_worker(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = {"model": "m", "kv_processes": 4, "kv_chunk_bytes": 1 << 20}
    enough = DecodeNodeSettings(kv_staging_bytes=32 << 20, **given)
    assert enough.print_checked("kv_consumer") == 0
    scarce = DecodeNodeSettings(kv_staging_bytes=31 << 20, **given)
    assert scarce.print_checked("kv_consumer") == 2
    assert str(32 << 20) in capsys.readouterr().err


@pytest.mark.parametrize(("shares", "fewest"), [("off", 4 << 20), ("auto", 8 << 20)])
def test_windows_hold_a_chunk_in_each_process_and_direction(
    shares: str, fewest: int, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {
        "model": "m", "kv_processes": 4, "kv_chunk_bytes": 1 << 20, "enable_prefix_caching": True,
        "kv_share_prefixes": shares, "kv_transports": "nixl,stream",
    }  # fmt: skip
    enough = DecodeNodeSettings(kv_nixl_window_bytes=fewest, **given)
    assert enough.print_checked("kv_consumer") == 0
    scarce = DecodeNodeSettings(kv_nixl_window_bytes=fewest - 1, **given)
    assert scarce.print_checked("kv_consumer") == 2
    assert f"{fewest} --kv-nixl-window-bytes" in capsys.readouterr().err
    unused = {**given, "kv_transports": "auto"}
    scarce = DecodeNodeSettings(kv_nixl_window_bytes=fewest - 1, **unused)
    assert scarce.print_checked("kv_consumer") == 0, "none is taken"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": "m", "kv_host_memory_bytes": 10**6}, "--enable-prefix-caching"),
        ({"model": "m", "kv_disk_bytes": 10**6}, "belong together"),
        ({"kv_host_memory_bytes": 1, "enable_prefix_caching": True}, "less than one block"),
        ({"max_model_len": 10**6}, "choose max_model_len from 1 to"),
        ({"tensor_parallel_size": 3}, "cannot start: "),
        ({"num_blocks": 127}, "max_model_len is 2048, which takes 128 blocks"),
        ({"kv_cache_memory_bytes": 10**6}, "raise kv_cache_memory_bytes (now 1000000)"),
        ({"attention_backend": "flash-attn", "deterministic": True}, "no deterministic mode"),
        ({"attention_backend": "flash-attn", "kv_cache_dtype": "fp8"}, "does not read an FP8 KV"),
    ],
)
def test_a_check_says_what_the_node_would_refuse(
    given: dict[str, Any], words: str, demo_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = DecodeNodeSettings(**{"model": str(demo_checkpoint), "device": "cpu", **given})
    assert settings.print_checked("kv_consumer") == 2
    assert words in capsys.readouterr().err
    with pytest.raises((SettingsError, CannotStartError)):
        settings.to_engine_config("kv_consumer")


def test_a_check_downloads_and_converts_nothing(
    demo_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.models.files.hub.snapshot_download", None)
    monkeypatch.setattr("engine.models.gguf.convert.converted", None)
    drafter = '{"method": "eagle3", "model": "org/drafter", "num_speculative_tokens": 3}'
    (tmp_path / "model.gguf").touch()
    for given in ({"speculative_config": drafter}, {"model": str(tmp_path)}):
        settings = DecodeNodeSettings(**{"model": str(demo_checkpoint), "device": "cpu", **given})
        assert settings.print_checked("kv_consumer") == 0


@pytest.mark.parametrize("model", ["m", "checkpoint"])
def test_a_check_of_the_trace_file_makes_none(
    model: str, demo_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"model": str(demo_checkpoint) if model == "checkpoint" else model, "device": "cpu"}
    fine = PrefillNodeSettings(trace_file=tmp_path / "spans", **given)
    assert fine.print_checked("kv_producer") == 0 and not fine.trace_file.exists()
    missing = PrefillNodeSettings(trace_file=tmp_path / "none/spans", **given)
    assert missing.print_checked("kv_producer") == 2
    assert "make its folder" in capsys.readouterr().err


def test_a_range_of_ports_for_kv_ends_with_the_last_port() -> None:
    settings = PrefillNodeSettings(
        model="m", kv_port=65_530, kv_processes=2, tensor_parallel_size=4
    )
    assert settings.print_checked("kv_producer") == 2


NGRAM = (
    '{"method": "ngram", "num_speculative_tokens": 3, '
    '"prompt_lookup_max": 4, "prompt_lookup_min": 2}'
)


@pytest.mark.parametrize("kind", ALL)
def test_speculation_is_the_decode_nodes(kind: type[EngineSettings], demo_checkpoint: Path) -> None:
    args = ["--model", str(demo_checkpoint), "--device", "cpu", "--speculative-config", NGRAM]
    settings = kind.from_args("x", args)
    decode = settings.to_engine_config("kv_consumer")
    expected = SpeculativeConfig(
        method="ngram", num_speculative_tokens=3, prompt_lookup_max=4, prompt_lookup_min=2
    )
    assert (decode.decode_query_len, decode.speculative) == (4, expected)
    prefill = settings.to_engine_config("kv_producer")
    assert (prefill.decode_query_len, prefill.speculative) == (1, None)
    crossed = msgspec.json.decode(msgspec.json.encode(decode), type=EngineConfig)
    assert crossed.speculative == expected
    off = kind.from_args("x", args[:4]).to_engine_config("kv_consumer")
    assert (off.decode_query_len, off.speculative) == (1, None)


def test_steps_must_hold_a_request_with_its_drafts(demo_checkpoint: Path) -> None:
    args = ["--model", str(demo_checkpoint), "--device", "cpu", "--speculative-config", NGRAM]
    settings = EngineSettings.from_args("x", [*args, "--max-num-batched-tokens", "3"])
    with pytest.raises(SettingsError, match="--max-num-batched-tokens is 3; raise it"):
        settings.to_engine_config("kv_consumer")


@pytest.mark.parametrize(
    ("given", "lookup"),
    [
        ("", (4, 3)),
        (', "prompt_lookup_max": 2', (2, 2)),
        (', "prompt_lookup_min": 6', (6, 6)),
        (', "prompt_lookup_max": 8, "prompt_lookup_min": 1', (8, 1)),
    ],
)
def test_lookups_have_defaults_that_fit(given: str, lookup: tuple[int, int]) -> None:
    found = parse_speculative_config(f'{{"method": "ngram", "num_speculative_tokens": 1{given}}}')
    assert (found.prompt_lookup_max, found.prompt_lookup_min) == lookup


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("ngram", "is not JSON"),
        ("3", "JSON object"),
        ("{}", "method is missing; those that exist: ngram"),
        ('{"method": "eagle4"}', "no method 'eagle4'; those that exist: ngram, draft_model, "),
        ('{"method": "eagle3", "num_speculative_tokens": 3}', "model is missing: name or folder"),
        ('{"method": "medusa", "num_speculative_tokens": 3, "model": 3}', "model must be a name"),
        ('{"method": "mtp", "num_speculative_tokens": 3, "model": "m"}', "'model' is no field"),
        ('{"method": ["ngram"]}', "those that exist: ngram"),
        ('{"method": "ngram"}', "num_speculative_tokens is missing"),
        ('{"method": "ngram", "num_speculative_tokens": 16}', "from 1 to 15, not 16"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "num_speculative_tokens must be"),
        ('{"method": "ngram", "num_speculative_tokens": 2.5}', "not 2.5"),
        (NGRAM.replace('"prompt_lookup_max": 4', '"prompt_lookup_max": 1'), "prompt_lookup_min"),
        (NGRAM.replace("prompt_lookup_max", "model"), "'model' is no field of method 'ngram'"),
    ],
)
def test_a_wrong_speculative_config_is_named(
    text: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        DecodeNodeSettings.from_args("x", ["--model", "m", "--speculative-config", text])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert named in said and "--speculative-config" in said


@pytest.mark.parametrize(
    ("kind", "more", "why"),
    [
        (DecodeNodeSettings, [], "--enable-prefix-caching"),
        (PrefillNodeSettings, ["--kv-host-memory-bytes", "9"], "less than one block"),
        (PrefillNodeSettings, ["--kv-disk-path", "/d", "--kv-disk-bytes", "9"], "kv-disk-bytes 9"),
        (PrefillNodeSettings, ["--kv-disk-path", "/d"], "belong together"),
        (PrefillNodeSettings, ["--kv-disk-bytes", "9000000"], "belong together"),
        (
            PrefillNodeSettings,
            ["--kv-host-memory-bytes", "0", "--kv-host-memory-path", "/dev/shm"],
            "need --kv-host-memory-bytes",
        ),
    ],
)
def test_host_memory_for_kv_that_could_hold_nothing_is_refused(
    kind: type[EngineSettings], more: list[str], why: str, demo_checkpoint: Path
) -> None:
    args = ["--model", str(demo_checkpoint), "--device", "cpu", "--kv-host-memory-bytes", "9000000"]
    settings = kind.from_args("x", [*args, *more])
    role = "kv_consumer" if kind is DecodeNodeSettings else "kv_producer"
    with pytest.raises(SettingsError, match=why):
        settings.to_engine_config(role)  # type: ignore[arg-type]
