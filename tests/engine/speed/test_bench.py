"""Measures the demo checkpoint on a CPU, and writes what comes of it where it is wanted."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import trustme

from engine.calibration.__main__ import main as calibrate
from engine.models.checkpoint import load_model_config
from engine.speed import __main__ as command
from engine.speed import config_map
from engine.speed.config_map import ClusterError, write_config_map
from engine.speed.measurements import MeasurementPlan
from engine.speed.profile import load_profile

DEMO = Path(__file__).parents[3] / "cli" / "demo_checkpoint"
FLAGS = [
    *(
        "--model",
        str(DEMO),
        "--device",
        "cpu",
        "--quick",
        "--block-size",
        "16",
        "--name",
        "demo-cpu",
    ),
    *("--max-model-len", "256", "--max-num-seqs", "4", "--max-num-batched-tokens", "64"),
]


def test_a_profile_of_the_demo_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = MeasurementPlan(
        lengths=(8, 16), many=(16,), batches=(1, 2, 8), contexts=(8, 16), num_steps=4
    )
    monkeypatch.setattr(command, "_QUICK", plan)
    output = tmp_path / "profile.json"
    assert command.main([*FLAGS, "--output", str(output)]) == 0, capsys.readouterr().err
    profile = load_profile(output)
    assert [(p.prompts, p.tokens) for p in profile.prefill] == [(1, 8), (1, 16), (16, 16)]
    steps = [(p.sequences, p.context) for p in profile.decode]
    assert steps == [(1, 10), (2, 10), (2, 18)], "eight sequences are more than the node takes"
    assert all(p.p99_seconds >= 0.5 * p.seconds > 0 for p in profile.decode)
    assert (profile.name, profile.gpus, profile.max_sequences) == ("demo-cpu", 1, 4)
    assert "torch" in profile.versions and profile.kv_tokens > 256


def test_a_model_with_fewer_positions_is_measured_with_those_it_has() -> None:
    arguments = command.make_parser().parse_args(["--model", str(DEMO), "--device", "cpu"])
    own = load_model_config(DEMO).max_model_len
    assert own < arguments.max_model_len
    assert command._config(arguments).model.max_model_len == own


def test_what_cannot_be_measured_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--model", "/nowhere/at-all", "--device", "cpu"]) == 1
    assert "tandem bench: " in capsys.readouterr().err


@pytest.mark.parametrize("main", [command.main, calibrate])
def test_where_it_writes_is_looked_at_first(
    main: Callable[[list[str]], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that is not there would be told otherwise, or measured for minutes."""
    for output, words in ((tmp_path / "no" / "p", "make it first"), (tmp_path, "is a folder")):
        assert main(["--model", "/nowhere/at-all", "--output", str(output)]) == 1
        assert words in capsys.readouterr().err


def test_a_profile_that_cannot_be_written_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = load_profile(DEMO.parents[1] / "planner/profiles/h200-llama-3.1-8b.json")
    monkeypatch.setattr(command, "measure", lambda arguments: profile)
    assert command.main([*FLAGS, "--config-map", "calibration"]) == 1
    said = capsys.readouterr()
    assert said.out == profile.encode().decode() and "standard output has" in said.err


class _Api(BaseHTTPRequestHandler):
    seen: list[tuple[str, str, dict[str, str], bytes]]
    answers = 200
    url = ""

    def do_PATCH(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.seen.append((self.command, self.path, dict(self.headers.items()), body))
        self.send_response(self.answers)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def api(tmp_path: Path) -> Iterator[type[_Api]]:
    """Serves a Kubernetes API over TLS, with a service account in `tmp_path`."""
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    handler = type("Api", (_Api,), {"seen": []})
    server = HTTPServer(("127.0.0.1", 0), handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    authority.cert_pem.write_to_path(tmp_path / "ca.crt")
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "namespace").write_text("llm")
    handler.url = f"https://127.0.0.1:{server.server_port}"
    yield handler
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_config_map_gets_one_key(
    api: type[_Api], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    write_config_map("speed", {"profile.json": "{}"}, tmp_path, api.url)
    [(_, path, headers, body)] = api.seen
    assert path == "/api/v1/namespaces/llm/configmaps/speed"
    sent = {name.lower(): value for name, value in headers.items()}
    assert sent["authorization"] == "Bearer secret"
    assert sent["content-type"] == "application/merge-patch+json"
    assert json.loads(body) == {"data": {"profile.json": "{}"}}


@pytest.mark.parametrize("answers", [429, 500, 503])
def test_what_was_measured_is_written_once_the_api_is_back(
    api: type[_Api], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: int
) -> None:
    pauses = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        api.answers = 200 if len(pauses) == 2 else answers

    monkeypatch.setattr(config_map, "time", SimpleNamespace(sleep=pause))
    api.answers = answers
    write_config_map("speed", {"profile.json": "{}"}, tmp_path, api.url)
    assert len(api.seen) == 3 and pauses == sorted(pauses)
    monkeypatch.setattr(config_map, "_PAUSES_S", (0.0,))
    with pytest.raises(ClusterError, match="cannot be reached"):
        write_config_map("speed", {}, tmp_path, "https://127.0.0.1:9")


def test_a_refusal_says_what_to_do(api: type[_Api], tmp_path: Path) -> None:
    api.answers = 403
    with pytest.raises(ClusterError, match="answered 403 to a patch of the ConfigMap speed in llm"):
        write_config_map("speed", {}, tmp_path, api.url)
    assert len(api.seen) == 1
    (tmp_path / "token").unlink()
    with pytest.raises(ClusterError, match="set automountServiceAccountToken"):
        write_config_map("speed", {}, tmp_path, api.url)
