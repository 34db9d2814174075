"""Tests goodput and what explains it, on made-up rows, steps and timelines."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from bench.figures import one_queue
from bench.router.plan_accuracy import compare, live_table
from bench.serving.clusters.node_metrics import histogram_quantile
from bench.serving.clusters.processes import cpu_seconds
from bench.serving.figures.node_history import decode_figures, gaps, prefill_figures, prompt_figures
from bench.serving.figures.report import Slo, goodput, read_rows
from bench.serving.figures.simulated import SimulatedNodes, StepTimesSeen, overheads_s, simulated
from bench.serving.goodput_arguments import (
    Workload,
    engine_of,
    itl_objective_s,
    node_args,
    parse_arguments,
)
from bench.serving.load import LoadProcesses, LoadSpec
from bench.serving.openai_stream import Outcome
from engine.contracts.steps.step_log import StepRecord
from engine.frontend.step_history import HistoryReport, PauseReport
from tests.bench.test_serving_bench import answer_as_asked
from tests.router.fakes import FakeDecodeNode

OBJECTIVES = Slo(200.0, 15.0)
PEERS = Path(__file__).parents[2] / "bench" / "results" / "goodput-2026-11-27.jsonl"


def row(qps: float, ttft: float, itl: float, **more: Any) -> dict[str, Any]:
    def figures(p99: float) -> dict[str, float]:
        return {"p50": p99 / 2, "p99": p99, "max": p99 * 2}

    return {
        "engine": "e", "qps": qps, "n_in": 20, "n_out": 5, "errors": None, "gpus": 4,
        "ttft_ms": figures(ttft), "itl_ms": figures(itl), **more,
    }  # fmt: skip


def test_goodput_is_the_highest_rate_up_to_which_all_were_within() -> None:
    rows = [row(48, 150, 12), row(24, 90, 9), row(60, 300, 12), row(70, 100, 10)]
    [found] = goodput(rows, OBJECTIVES)
    assert (found["req_per_s"], found["req_per_s_per_gpu"]) == (48, 12)
    assert found["rates"] == [24, 48, 60, 70]
    assert not found["is_highest_measured"]
    [all_within] = goodput(rows[:2], OBJECTIVES)
    assert all_within["is_highest_measured"]


@pytest.mark.parametrize(
    "bad",
    [
        row(1, 201, 1),
        row(1, 1, 16),
        row(1, 1, 1, errors={"x": 1}),
        row(1, 1, 1) | {"ttft_ms": None},
    ],
)
def test_a_run_that_is_late_or_failed_is_no_goodput(bad: dict[str, Any]) -> None:
    assert goodput([bad], OBJECTIVES)[0]["req_per_s"] == 0


def test_a_peers_lines_and_our_results_are_read_alike(tmp_path: Path) -> None:
    peers = read_rows(PEERS)
    assert {one["engine"].split(",")[0] for one in peers} > {"vllm-rep4"}
    found = {(one["engine"], one["workload"]): one for one in goodput(peers, OBJECTIVES)}
    ours = found["tandem-3p1d, goodput-2026-11-27", "2000/150"]
    assert (ours["req_per_s"], ours["req_per_s_per_gpu"]) == (24, None)
    assert found["vllm-rep4, goodput-2026-11-27", "2000/150"]["req_per_s"] == 0
    result = tmp_path / "r.json"
    result.write_text(json.dumps({"figures": {"loads": [row(24, 90, 9, kind="load")]}}))
    assert [one["engine"] for one in read_rows(result)] == ["e, r"]
    result.write_text(json.dumps({"figures": {"loads": []}}))
    with pytest.raises(ValueError, match="no row of a load"):
        read_rows(result)


def test_arguments_say_what_runs() -> None:
    args = parse_arguments(
        None, ["--nodes", "2p2d", "--load", "1000/300@30,60", "--kill", "decode"]
    )
    assert args.load == [Workload(1000, 300, (30.0, 60.0))]
    assert engine_of(args) == "tandem-2p2d-kill-decode"
    flags = node_args(args)
    assert flags[flags.index("--max-model-len") + 1] == "2048"
    assert parse_arguments(None, []).load == [Workload(2000, 150, (24.0, 48.0))]
    with pytest.raises(argparse.ArgumentTypeError):
        Workload.parse("2000@24")


def history(*steps: Any, pauses: Any = ()) -> HistoryReport:
    """Makes steps of (issued, ended, rows, prompt tokens, new rows), in milliseconds, and of the
    worker's host, which takes 2 for each unless told otherwise."""
    records = []
    host_s = 0.0
    for number, (issued, ended, rows, prompt, new, *host) in enumerate(steps):
        host_s += (host[0] if host else 2) / 1e3
        records.append(
            StepRecord(number, issued / 1e3, ended / 1e3, host_s, rows, rows, prompt, new)
        )
    return HistoryReport(99.0, records, list(pauses))


def steady(count: int, every: float = 10.0) -> list[tuple[float, float, int, int, int]]:
    return [(every * (i + 1) - 15, every * (i + 1), 4, 0, 0) for i in range(count)]


@pytest.mark.parametrize(
    ("step", "pause", "cause"),
    [
        ((205, 240, 5, 0, 0), None, "idle"),
        ((195, 240, 5, 0, 0), None, "other"),
        ((195, 240, 5, 0, 1), None, "join"),
        ((195, 240, 5, 0, 1, 12), None, "host"),
        ((195, 240, 5, 100, 1), None, "prompt"),
        ((195, 240, 5, 0, 1), ("engine core", "garbage", 0.215, 0.01), "garbage"),
        ((205, 240, 5, 0, 1), ("engine core", "turn", 0.245, 0.01), "turn"),
        ((195, 240, 5, 0, 0), ("engine core", "garbage", 0.199, 0.01), "other"),
        ((195, 240, 5, 0, 0), ("node server", "garbage", 0.215, 0.01), "other"),
    ],
)
def test_a_late_step_has_a_cause(step: Any, pause: Any, cause: str) -> None:
    told = [PauseReport(*pause, 2)] if pause else []
    report = history(*steady(20), step, pauses=told)
    late = [gap for gap in gaps(report) if gap.is_late]
    assert [gap.cause for gap in late] == [cause]
    figures = decode_figures(report, start=0.1)
    assert figures["late_steps"] == {cause: {"count": 1, "lost_ms": 30.0}}
    assert figures["worst"][0]["at_s"] == 0.14
    assert figures["step_ms"]["max"] == pytest.approx(40)


def test_a_pause_of_answers_is_no_time_between_tokens() -> None:
    """In the step after it every row is new."""
    report = history(*steady(12), (985, 1000, 2, 0, 2), (990, 1010, 2, 0, 0))
    assert max(gap.seconds for gap in gaps(report)) == pytest.approx(0.010)


def test_a_prefill_node_is_busy_while_steps_run() -> None:
    report = history((0, 40, 1, 100, 1), (20, 80, 1, 100, 1), (100, 170, 2, 200, 2))
    figures = prefill_figures(report, span_s=0.2)
    assert figures["busy"] == 0.75
    assert figures["step_ms_by_prompts"]["1"]["p50"] == pytest.approx(40)
    assert figures["step_ms_by_prompts"]["2"]["n"] == 1


def test_the_time_to_the_first_token_is_divided() -> None:
    timeline = {
        "queue_s": 0.02, "prefill_s": 0.05, "first_token_s": 0.08, "second_token_s": 0.1,
        "admitted_s": 0.004,
        "kv_last_byte_s": 0.085, "prefill_node": "p0", "attempts": 1,
    }  # fmt: skip
    told = Outcome(0.0, sent=1.0, end=2.0, chunks=[1.09, 1.1], timeline=timeline)
    silent = Outcome(0.0, sent=1.0, end=2.0, chunks=[1.5])
    figures = prompt_figures([told, silent])
    parts = {name: found["p50"] for name, found in figures["ttft_parts_ms"].items()}
    assert parts == pytest.approx(
        {
            "outside": 10, "admission": 4, "queue": 16, "prefill": 50, "path": 10,
            "second_token_after": 20, "kv_after_first_token": 5,
        }
    )  # fmt: skip
    assert figures["by_prefill_node"]["p0"]["prompts"] == 1


def test_one_queue_serves_whoever_comes_first() -> None:
    prompts = [(at_s, 0.05) for at_s in (0.0, 0.01, 0.02, 1.0)]
    assert one_queue(prompts, 2) == pytest.approx([0.05, 0.05, 0.08, 0.05])


def answer_at(at: float, first: float, queue: float = 0.0) -> Outcome:
    timeline = {
        "queue_s": queue, "prefill_s": 0.04, "first_token_s": first, "second_token_s": None,
        "admitted_s": 0.0,
        "kv_last_byte_s": None, "prefill_node": "p0", "attempts": 1,
    }  # fmt: skip
    chunks = [at + first, at + first + 0.01]
    return Outcome(at, sent=at, end=chunks[-1], chunks=chunks, timeline=timeline)


def test_a_load_without_queues_is_what_virtual_time_says() -> None:
    """Prompts take 40 ms, steps of decode 10 ms, and everything else 5 ms."""
    prompts = history(*((100.0 * i, 100.0 * i + 40, 1, 20, 1) for i in range(20)))
    times = StepTimesSeen.of([prompts, history(*steady(40))])
    assert set(times.prompts) == {64} and set(times.decodes) == {4}
    outcomes = [answer_at(float(second), 0.045) for second in range(20)]
    load = row(1, 45, 10) | {"ttft_ms": {"p50": 45.0, "p99": 45.0}}
    load |= {"itl_ms": {"p50": 10.0, "p99": 10.0}}
    nodes = SimulatedNodes(prefill=1, decode=1, kv_tokens=10_000)
    found = simulated(load, outcomes, 0.0, times, nodes)["simulated"]
    assert found["live_over_simulated"]["ttft_p50"] == pytest.approx(1, abs=0.01)
    assert found["overhead_ms"]["p50"] == pytest.approx(5, abs=0.01)
    assert found["ideal_ttft_ms"]["max"] == pytest.approx(40, abs=0.01)
    table = live_table([load | {"simulated": found}])
    assert "45 / 45 (1.00) |" in table and "*" not in table
    late = load | {"simulated": found, "ttft_ms": {"p50": 60.0, "p99": 55.0}}
    assert "60 / 45 (1.33)* | 55 / 45 (1.22) |" in live_table([late])
    assert simulated(load, outcomes, 0.0, StepTimesSeen({}, {}), nodes) == {}


def test_chunks_beside_answers_are_no_prompts_alone() -> None:
    """Beside 4 rows, whose steps take 10 ms, 64 tokens take 16; and requests join with one each."""
    steps = steady(40)
    steps += [(400 + 16.0 * i, 416 + 16.0 * i, 68, 64, 0) for i in range(6)]
    steps += [(496 + 10.0 * i, 506 + 10.0 * i, 5, 1, 1) for i in range(6)]
    prompts = history(*((100.0 * i, 100.0 * i + 40, 1, 20, 1) for i in range(6)))
    times = StepTimesSeen.of([prompts, history(*steps)])
    assert times.chunk_s == pytest.approx({64: 0.006})
    assert times.prompts == {64: pytest.approx([0.040] * 6)}
    undivided = StepTimesSeen.of([history(*steps)])
    assert len(undivided.prompts[64]) == 12, "none was alone"
    assert itl_objective_s(["--itl-objective-ms", "15", "--block-size", "128"]) == 0.015


def test_who_met_another_prompt_says_nothing_of_what_a_first_token_takes_besides() -> None:
    """A wait that counted as overhead would be added to simulated waits."""
    alone, behind = answer_at(0.0, 0.045), answer_at(0.02, 0.065, queue=0.02)
    on_another_node = answer_at(0.03, 0.05)
    assert on_another_node.timeline is not None
    on_another_node.timeline["prefill_node"] = "p1"
    later, failed = answer_at(1.0, 0.047), Outcome(1.01, sent=1.01, error="503")
    deflected = answer_at(0.5, 0.2)
    assert deflected.timeline is not None
    deflected.timeline["prefill_node"] = None
    found = overheads_s([later, behind, deflected, failed, on_another_node, alone], 0.04)
    assert found == pytest.approx([0.005, 0.01, 0.007])


def test_a_quantile_of_a_histogram_is_of_what_was_counted_in_between() -> None:
    before = {"0.01": 5.0, "0.02": 5.0, "+Inf": 5.0}
    after = {"0.01": 5.0, "0.02": 105.0, "+Inf": 105.0}
    assert histogram_quantile(before, after, 0.5) == pytest.approx(0.015)
    assert histogram_quantile({}, after, 0.01) == pytest.approx(0.01 * 1.05 / 5 * 1.0)
    assert histogram_quantile(after, after, 0.5) is None
    assert histogram_quantile({}, {"0.01": 0.0, "+Inf": 4.0}, 0.5) == 0.01


def test_the_cpu_time_of_a_process_counts() -> None:
    before = sum(cpu_seconds(os.getpid()).values())
    began = time.process_time()
    while time.process_time() - began < 0.05:
        sum(range(1000))
    assert sum(cpu_seconds(os.getpid()).values()) - before >= 0.03


async def test_processes_send_one_load_between_them() -> None:
    node = await FakeDecodeNode("d", answer_as_asked).start()
    clients = LoadProcesses(2)
    spec = LoadSpec(
        urls=[f"http://{node.target}"], model="m", n_in=6, n_out=3, rate=20.0, duration_s=0.5,
        drain_s=30.0, seed=1, vocabulary=(10, 20), headers={"x-tandem-timeline": "1"},
    )  # fmt: skip
    try:
        outcomes, span = await clients.run(spec)
    finally:
        clients.close()
        await node.stop()
    assert len(outcomes) == len(node.requests) > 2
    assert all(outcome.complete and len(outcome.chunks) == 3 for outcome in outcomes)
    assert [one.due for one in outcomes] == sorted(one.due for one in outcomes)
    assert span.start < span.last_arrival <= span.end
    assert all(headers["x-tandem-timeline"] == "1" for headers, _ in node.requests)
    prompts = [tuple(json.loads(body)["prompt"]) for _, body in node.requests]
    assert len(set(prompts)) == len(prompts)


def test_a_plan_is_compared_with_what_was_measured() -> None:
    quiet, busy = compare("pd_qwen3_30b")
    assert (quiet["nodes"], quiet["rate"], busy["rate"]) == ("1P + 1D", 1.0, 16.0)
    assert quiet["simulated_requests"] == quiet["requests"]
    assert abs(quiet["ttft_p50"]["error"]) < 0.15 and abs(busy["itl_p99"]["error"]) < 0.3
