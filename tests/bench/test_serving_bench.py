"""The load client: its definitions, its workloads, and a run against a server."""

from __future__ import annotations

import itertools
import json
import random
import statistics
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import record
from bench.figures import distribution_ms, percentile
from bench.serving.load import parse_arguments, run
from bench.serving.openai_stream import Outcome
from bench.serving.prompts import Conversation, PromptStyle
from bench.serving.report import Slo, Span, summarize
from bench.workload import PRESETS, Preset, Quantiles, Session, Turn, exactly, sessions
from tests.router.fakes import FakeDecodeNode, break_after, open_stream

SLO = Slo(ttft_ms=150, tpot_ms=20)


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
    spread = 0.5 if preset.arrival_cv > 5 else 0.15
    assert offered == pytest.approx(rate * crowd, rel=spread)


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
    preset = PRESETS[name].scaled(0.1, 0.01, limit)
    for session in sessions(preset, 5.0, 20.0, seed):
        prompt = session.shared_tokens
        for turn in session.turns:
            prompt += turn.new_tokens
            assert prompt <= limit
            prompt += turn.output_tokens


def _style(style: Any) -> PromptStyle:
    return PromptStyle(style=style, model="m", vocabulary=(10, 20))


def test_each_prompt_continues_the_one_before() -> None:
    session = Session("s", 0.0, 4, (Turn(0, 6, 3), Turn(0, 5, 2)))
    talk = Conversation(session, _style("ids"), seed=1)
    first = json.loads(talk.body(0))
    assert (len(first["prompt"]), first["max_tokens"]) == (10, 3)
    assert set(first["prompt"]) <= set(range(10, 20))
    talk.add_answer(outcome(0.2, tokens=3, token_ids=[11, 12, 13]))
    second = json.loads(talk.body(1))
    assert second["prompt"][:13] == [*first["prompt"], 11, 12, 13]
    assert len(second["prompt"]) == 18
    other = Conversation(Session("t", 0.0, 4, (Turn(0, 6, 3),)), _style("ids"), seed=1)
    prompt = json.loads(other.body(0))["prompt"]
    assert prompt[:4] == first["prompt"][:4]
    assert prompt[4:] != first["prompt"][4:]


def test_a_chat_keeps_its_messages_in_turn() -> None:
    session = Session("s", 0.0, 4, (Turn(0, 6, 3), Turn(0, 5, 2)))
    talk = Conversation(session, _style("chat"), seed=1)
    json.loads(talk.body(0))
    talk.add_answer(outcome(0.2, tokens=3, text="Yes."))
    roles = [message["role"] for message in json.loads(talk.body(1))["messages"]]
    assert roles == ["system", "user", "assistant", "user"]


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


def _arguments(node: FakeDecodeNode, *more: str) -> Namespace:
    short = ("--duration", "0.6", "--warmup", "1", "--drain", "30")
    return parse_arguments(["--url", f"http://{node.target}", *short, *more])


@pytest.mark.parametrize(
    "more",
    [
        ("--rates", "20", "--output-tokens", "4"),
        ("--concurrency", "2", "--output-tokens", "4", "--prompts", "text"),
        ("--rates", "20", "--turns", "3", "--prompts", "chat", "--session-ids", "--dump"),
        ("--rates", "20", "--workload", "agent", "--scale", "0.01", "--time-scale", "0.01"),
    ],
    ids=["ids", "closed loop", "chat sessions", "preset"],
)
async def test_a_run_against_a_server(more: tuple[str, ...]) -> None:
    node = await FakeDecodeNode("d", answer_as_asked).start()
    try:
        [row] = await run(_arguments(node, *more))
    finally:
        await node.stop()
    assert row["done"] == row["sent"] == row["full_length"] > 0
    assert row["errors"] is None
    assert row["cached_fraction"] == 0.25
    assert row["ttft_ms"]["n"] == row["done"]
    named = [headers for headers, _ in node.requests if "x-session-id" in headers]
    assert bool(named) == ("--session-ids" in more)


async def test_failures_are_counted_and_do_not_end_the_run() -> None:
    node = await FakeDecodeNode("d", break_after(b'data: {"choices": [{"text": "a"}]}\n\n')).start()
    try:
        [row] = await run(_arguments(node, "--rates", "20", "--warmup", "0"))
    finally:
        await node.stop()
    assert row["done"] == 0
    assert row["num_errors"] == row["sent"] > 0
    assert row["ttft_ms"] is None


async def test_a_server_that_fails_always_is_told_before_the_run() -> None:
    node = await FakeDecodeNode("d", break_after()).start()
    try:
        with pytest.raises(SystemExit, match="every request failed"):
            await run(_arguments(node, "--rates", "1"))
    finally:
        await node.stop()


def test_results_are_written_with_their_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(
        "sys.argv", ["bench/serving/load.py", "--api-key", "secret", "--rates", "1"]
    )
    path = record.write_result("x", {"a": 1})
    written = json.loads(path.read_text())
    assert written["figures"] == {"a": 1}
    assert written["command"] == "python -m bench.serving.load --api-key KEY --rates 1"
    assert written["machine"]["cores"] >= 1
    assert "secret" not in path.read_text()


def test_the_mean_number_of_turns_counts_shares() -> None:
    preset = Preset(description="", first=exactly(1), output=exactly(1), turns=((1, 3), (5, 1)))
    assert preset.mean_turns == 2.0
