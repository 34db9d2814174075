"""Tests what the sweep of lengths says of each: padding to graphs, rows of tiles, and times
beside those of a peer."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from bench import record
from bench.engine import lengths
from bench.engine.models.shapes import shape_config
from bench.engine.timing.length_costs import length_costs
from engine.speed import measurements
from engine.speed.offline_engine import StepResult


def test_padding_is_that_of_the_graph_that_is_taken() -> None:
    config = shape_config("llama-3.1-8b")
    found = {cost.length: cost for cost in length_costs(config, [300, 512, 513, 700, 1025])}
    assert [(one.graph, one.wasted) for one in found.values()] == [
        (320, 20), (512, 0), (640, 127), (768, 68), (0, 0),
    ]  # fmt: skip
    assert [one.wasted_in_tiles for one in found.values()] == [84, 0, 127, 68, 127]
    assert found[300].narrow_share == round(3 * 16 / 132, 3)
    assert found[1025].narrow_share == round(9 * 16 / 264, 3)


def test_models_of_many_launches_have_graphs_for_longer_prompts() -> None:
    every = list(range(300, 4097))
    dense, mixture = (
        length_costs(shape_config(shape), every) for shape in ("llama-3.1-8b", "qwen3-30b-a3b")
    )
    assert max(cost.wasted for cost in dense) == 127 and not dense[-1].graph
    assert max(cost.wasted for cost in mixture) == 511 and mixture[-1].graph == 4096


class TimedEngine:
    """Answers each prompt after as many milliseconds as it has tokens, by a clock of its own; its
    host needs two."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.now = 0.0
        self.executor = SimpleNamespace(host_s=0.0)

    def request(self, num_prompt_tokens: int, max_tokens: int) -> int:
        assert max_tokens == 1
        return num_prompt_tokens

    def run(self, requests: list[int]) -> list[StepResult]:
        self.asked += requests
        self.now += sum(requests) / 1000
        self.executor.host_s += 0.002
        return [StepResult(self.now, len(requests))]


def test_a_sweep_writes_times_beside_a_peers(tmp_path, monkeypatch, capsys) -> None:
    engine = TimedEngine()
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(lengths, "offline_engine", lambda config, executor: nullcontext(engine))
    monkeypatch.setattr(measurements.time, "perf_counter", lambda: engine.now)
    peer = tmp_path / "peer.json"
    peer.write_text(json.dumps({"337": 674.0}))
    flags = "--first 300 --last 337 --step 37 --turns 2 --name swept --peer"
    monkeypatch.setattr(sys, "argv", ["lengths", *flags.split(), str(peer)])
    lengths.main()
    assert engine.asked == [300, 337] * 3
    written = json.loads((tmp_path / "swept.json").read_text())["figures"]["lengths"]
    assert [(entry["length"], entry["median_ms"]) for entry in written] == [(300, 300), (337, 337)]
    assert [entry["host_ms"] for entry in written] == [2.0, 2.0]
    assert "against_peer" not in written[0] and written[1]["against_peer"] == 0.5
    assert "padding" in capsys.readouterr().out


@pytest.mark.parametrize("shape", ["llama-3.1-8b", "qwen3-30b-a3b"])
def test_the_plan_needs_no_gpu(shape, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["lengths", "--plan", "--shape", shape])
    lengths.main()
    written = json.loads((tmp_path / f"lengths-{shape}-plan.json").read_text())["figures"]
    assert len(written["lengths"]) == 38 and "median_ms" not in written["lengths"][0]
