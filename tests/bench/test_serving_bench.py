"""The load client: its definitions, its workloads, and a run against a server."""

from __future__ import annotations

import itertools
import json
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import record
from bench.figures import distribution_ms, percentile
from bench.serving.figures.report import Slo, Span, request_row, summarize
from bench.serving.load import Load, LoadSpec
from bench.serving.openai_stream import Outcome
from bench.workload import PRESETS, Preset, Quantiles, exactly, sessions
from tests.router.fakes import FakeDecodeNode, break_after, open_stream

SLO = Slo(ttft_ms=150, itl_ms=20)


def outcome(*chunks: float, tokens: int | None = None, **fields: Any) -> Outcome:
    return Outcome(
        due=0.0,
        sent=0.1,
        end=chunks[-1] + 0.01,
        chunks=list(chunks),
        output_tokens=tokens,
        **fields,
    )


def test_latencies_are_what_their_names_say() -> None:
    one = outcome(0.2, 0.21, 0.25, tokens=5)
    assert one.ttft_s == pytest.approx(0.1)
    assert one.gaps_s == pytest.approx([0.01, 0.04])
    assert one.tpot_s == pytest.approx(0.05 / 4)
    assert one.e2e_s == pytest.approx(0.15)
    assert outcome(0.2).tpot_s is None


def test_a_summary_counts_only_whole_answers() -> None:
    good = outcome(0.2, 0.21, tokens=2, wanted_tokens=2, prompt_tokens=10, cached_tokens=4)
    slow = outcome(0.9, 0.91, tokens=2, wanted_tokens=3, prompt_tokens=10, cached_tokens=0)
    broken = outcome(0.2, 0.3, error="HTTP 503: no")
    figures = summarize([good, slow, broken], Span(0.0, 0.5, 2.0), SLO)
    assert (figures["sent"], figures["done"], figures["num_errors"]) == (3, 2, 1)
    assert figures["errors"] == {"HTTP 503: no": 1}
    assert figures["full_length"] == 1
    assert figures["ttft_ms"]["n"] == 2
    assert figures["itl_ms"]["mean"] == pytest.approx(10.0)
    assert figures["wall_s"] == 0.92
    assert figures["good_fraction"] == pytest.approx(1 / 3, abs=1e-3)
    assert figures["cached_fraction"] == 0.2
    assert figures["late_ms"]["p50"] == pytest.approx(100.0)


def test_nothing_answered_is_a_summary_too() -> None:
    figures = summarize([Outcome(due=0.0, sent=0.0, error="x")], Span(0, 1, 2), SLO)
    assert figures["done"] == 0
    assert figures["ttft_ms"] is None
    assert figures["goodput_req_per_s"] == 0


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e4), min_size=2, max_size=50))
def test_percentiles_agree_with_the_standard_library(values: list[float]) -> None:
    ordered = sorted(values)
    cuts = statistics.quantiles(ordered, n=100, method="inclusive")
    assert percentile(ordered, 0.5) == pytest.approx(cuts[49])
    assert percentile(ordered, 0.99) == pytest.approx(cuts[98])
    figures = distribution_ms(values)
    assert figures is not None
    assert figures["p50"] <= figures["p90"] <= figures["p99"] <= figures["max"]


def test_quantiles_draw_what_their_table_says() -> None:
    rng = random.Random(1)
    table = Quantiles(((0, 10), (50, 100), (100, 1000)))
    drawn = sorted(table.draw(rng) for _ in range(20_000))
    assert drawn[0] >= 10
    assert drawn[-1] <= 1000
    assert percentile(drawn, 0.5) == pytest.approx(100, rel=0.05)
    assert percentile(drawn, 0.75) == pytest.approx(10**2.5, rel=0.05)
    assert {exactly(7).draw(rng) for _ in range(50)} == {7}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_offers_the_rate_it_was_asked_for(name: str) -> None:
    preset, rate, duration = PRESETS[name], 5.0, 1500.0
    got = list(sessions(preset, rate, duration, seed=3))
    assert got[:50] == list(itertools.islice(sessions(preset, rate, duration, seed=3), 50))
    assert [s.start_s for s in got] == sorted(s.start_s for s in got)
    assert len({s.session_id for s in got}) == len(got)
    offered = len(got) * preset.mean_turns / duration
    crowd = 1.0 if preset.flash is None else 1.6
    assert offered == pytest.approx(rate * crowd, rel=0.15)


def test_the_conversation_preset_looks_like_its_trace() -> None:
    got = list(sessions(PRESETS["conversation"], 10.0, 1500.0, seed=1))
    first = sorted(s.shared_tokens + s.turns[0].new_tokens for s in got)
    answers = sorted(turn.output_tokens for s in got for turn in s.turns)
    turns = [len(s.turns) for s in got]
    assert percentile(first, 0.5) == pytest.approx(5933, rel=0.1)
    assert percentile(first, 0.9) == pytest.approx(26279, rel=0.1)
    assert percentile(answers, 0.5) == pytest.approx(350, rel=0.05)
    assert statistics.fmean(turns) == pytest.approx(1.49, rel=0.1)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(PRESETS)), st.integers(50, 4000), st.integers(0, 100))
def test_no_prompt_grows_beyond_the_limit(name: str, limit: int, seed: int) -> None:
    preset = replace(PRESETS[name], max_prompt=limit)
    for session in sessions(preset, 5.0, 20.0, seed):
        prompt = session.shared_tokens
        for turn in session.turns:
            prompt += turn.new_tokens
            assert prompt <= limit
            prompt += turn.output_tokens


async def answer_as_asked(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    assert body["ignore_eos"] is True
    response = await open_stream(request)
    for _ in range(body["max_tokens"]):
        piece = {"delta": {"content": "w "}} if "messages" in body else {"text": "w "}
        await response.write(b"data: %b\n\n" % json.dumps({"choices": [piece]}).encode())
    usage = {
        "prompt_tokens": 400,
        "completion_tokens": body["max_tokens"],
        "prompt_tokens_details": {"cached_tokens": 100},
    }
    last = json.dumps({"choices": [], "usage": usage}).encode()
    await response.write(b"data: %b\n\ndata: [DONE]\n\n" % last)
    return response


async def run(node: FakeDecodeNode) -> tuple[list[Outcome], Span]:
    spec = LoadSpec(
        urls=[f"http://{node.target}"], model="m", n_in=400, n_out=4, rate=20.0, duration_s=0.6,
        drain_s=30.0, seed=7, vocabulary=(10, 20), extra={"top_k": 1},
    )  # fmt: skip
    async with ClientSession() as client:
        load = Load(client, spec)
        span = await load.send(load.arrivals(), time.perf_counter())
    return load.outcomes, span


async def test_a_run_against_a_server() -> None:
    node = await FakeDecodeNode("d", answer_as_asked).start()
    try:
        outcomes, span = await run(node)
    finally:
        await node.stop()
    row = summarize(outcomes, span, SLO)
    assert row["done"] == row["sent"] == row["full_length"] > 0
    assert row["errors"] is None
    assert row["cached_fraction"] == 0.25
    assert row["ttft_ms"]["n"] == row["done"]
    bodies = [json.loads(body) for _, body in node.requests]
    assert all(len(body["prompt"]) == 400 and body["top_k"] == 1 for body in bodies)
    told = [request_row(outcome, span.start) for outcome in outcomes]
    assert [one["sent"] for one in told] == sorted(one["sent"] for one in told)
    assert {(one["prompt_tokens"], one["tokens"]) for one in told} == {(400, 4)}


async def test_failures_are_counted_and_do_not_end_the_run() -> None:
    node = await FakeDecodeNode("d", break_after(b'data: {"choices": [{"text": "a"}]}\n\n')).start()
    try:
        row = summarize(*await run(node), SLO)
    finally:
        await node.stop()
    assert row["done"] == 0
    assert row["num_errors"] == row["sent"] > 0
    assert row["ttft_ms"] is None


def test_results_are_written_with_their_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["bench/serving/goodput.py", "--nodes", "1p1d"])
    path = record.write_result("x", {"a": 1})
    written = json.loads(path.read_text())
    assert written["figures"] == {"a": 1}
    assert written["command"] == "python -m bench.serving.goodput --nodes 1p1d"
    assert written["machine"]["cores"] >= 1


def test_the_mean_number_of_turns_counts_shares() -> None:
    preset = Preset(description="", first=exactly(1), output=exactly(1), turns=((1, 3), (5, 1)))
    assert preset.mean_turns == 2.0
