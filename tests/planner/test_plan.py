"""Checks `tandem plan`: cases that can be computed by hand, its files, and its errors."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from bench.record import RESULTS
from engine.speed.profile import (
    DecodePoint,
    PrefillPoint,
    ProfileError,
    SpeedProfile,
    read_profile,
)
from planner.__main__ import main
from planner.errors import MetricsError, NoPlan, TraceError, TrafficError
from planner.evaluation import Evaluator, Forecast, Nodes, Objectives
from planner.kv_store import store_sentence
from planner.live_metrics import profile_of
from planner.search import Plan, Search
from planner.shipped_profiles import shipped_profile, shipped_profiles
from planner.traffic.described import Description, read_lengths
from planner.traffic.trace_file import read_trace
from planner.traffic.traffic import Arrival, Traffic

HAND = SpeedProfile(
    name="by hand",
    model="m",
    kv_tokens=1_000_000,
    max_batched_tokens=1000,
    overhead_s=0.0,
    prefill=(PrefillPoint(1, 1000, 1.0),),
    decode=(DecodePoint(1, 1000, 0.01), DecodePoint(101, 1000, 0.11)),
)
"""A prompt of 1000 tokens takes a second, and no two share a step. A decode step of n sequences
takes 9 + n milliseconds."""


def plan(traffic: Traffic, ttft_s: float, itl_s: float, profile: SpeedProfile = HAND) -> Plan:
    return Search(Evaluator(profile, traffic, Objectives(ttft_s, itl_s)), 16, lambda _: None).plan()


def test_the_fewest_nodes_of_a_case_computed_by_hand() -> None:
    """Ten prompts in three seconds, evenly, each of a second: four prefill nodes are busy 83 % of
    the time, and with three the queue grows without end. Answers of 51 tokens: on one decode node n
    running sequences solve n = 10/3 · 50 · (9 + n) / 1000, which is 1.8: a step of 11 ms."""
    traffic = Traffic("even", tuple(Arrival(0.3 * i, 1000, 51) for i in range(400)))
    found = plan(traffic, ttft_s=3.0, itl_s=0.020)
    assert found.best.nodes == Nodes(4, 1)
    assert found.best.ttft_p50_s >= 1.0
    assert 0.009 < found.best.itl_p50_s < 0.013
    less = {outcome.nodes: outcome for outcome in found.around}[Nodes(3, 1)]
    assert not less.meets(Objectives(3.0, 0.020)) and less.ttft_tail_s > 10
    assert found.same_undivided.itl_tail_s > 0.5, "a prompt of a second stands before tokens"
    assert found.best.prefill_busy == pytest.approx(0.83, abs=0.05)


def test_a_queue_that_grows_is_none_that_was_short_for_as_long_as_was_simulated() -> None:
    """Every other prompt takes four seconds, as few as 10 tokens nothing: of one in 0.96 s four
    nodes are 4 % too few, by the mean length three would do. Where nothing follows, four do."""
    profile = msgspec.structs.replace(
        HAND,
        max_batched_tokens=2000,
        prefill=(PrefillPoint(1, 10, 0.01), *HAND.prefill, PrefillPoint(1, 2000, 4.0)),
    )
    arrivals = tuple(Arrival(0.48 * i, 2000 if i % 2 else 10, 51) for i in range(120))
    whole = Traffic("odd and even", arrivals)
    assert plan(whole, 12.0, 0.030, profile).best.nodes == Nodes(4, 1)
    found = plan(replace(whole, goes_on=True), 12.0, 0.030, profile)
    assert found.best.nodes == Nodes(5, 1) and found.best.keeps_up
    less = {outcome.nodes: outcome for outcome in found.around}[Nodes(4, 1)]
    assert less.ttft_tail_s < 12.0 and not less.keeps_up and less.prefill_busy == 1.0


def test_as_many_requests_are_simulated_as_come_while_nodes_fill_up(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fast = ["--input", "10", "--output", "2", "--rate", "310", "--json", "--max-nodes", "64"]
    assert main(fast) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["traffic"]["simulated"] == 3100
    assert main([*fast, "--requests", "200"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["traffic"]["simulated"] == 200
    assert any("Give --requests 3" in sentence for sentence in plan["recommendation"])


def test_of_a_trace_too_the_part_is_long_enough_to_fill_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = '{"arrival_s": %f, "input_tokens": 10, "output_tokens": 2}\n'
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(line % (i / 310) for i in range(4000)))
    assert main(["--trace", str(path), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["traffic"]["simulated"] == pytest.approx(3100, abs=1)
    assert not any("Give --requests" in sentence for sentence in plan["recommendation"])


def test_the_time_between_tokens_sets_decode_nodes() -> None:
    """Twenty short prompts a second with answers of 501 tokens. On D nodes each n solves
    n = 20/D · 500 · (9 + n) / 1000: 45 on 12 nodes, 30 on 13. A step of 45.5 ms has 36."""
    traffic = Traffic("long answers", tuple(Arrival(i / 20, 10, 501) for i in range(2400)))
    profile = msgspec.structs.replace(HAND, prefill=(PrefillPoint(1, 10, 0.001), *HAND.prefill))
    evaluator = Evaluator(profile, traffic, Objectives(5.0, 0.0455))
    assert evaluator.batch_limit() == 36
    found = Search(evaluator, 16, lambda _: None).plan()
    assert found.best.nodes == Nodes(1, 13)
    assert found.best.itl_p50_s == pytest.approx(0.039, abs=0.003)


def test_what_cannot_be_is_told() -> None:
    traffic = Traffic("even", tuple(Arrival(i / 4, 1000, 51) for i in range(200)))
    with pytest.raises(NoPlan, match=r"take 1000 ms on an idle node, and --slo-ttft-ms is 500"):
        plan(traffic, 0.5, 0.02)
    with pytest.raises(NoPlan, match=r"a decode step of one sequence takes up to 10\.0 ms"):
        plan(traffic, 5.0, 0.005)
    many = Traffic("many", tuple(Arrival(i / 40, 1000, 2) for i in range(400)))
    with pytest.raises(NoPlan, match=r"up to 16 nodes of a tier: 16P .* raise --max-nodes"):
        plan(many, 1.5, 0.02)


def test_shipped_profiles_are_what_was_measured() -> None:
    """Each point stands in the result that the profile names."""
    assert "h200-llama-3.1-8b" in shipped_profiles()
    for profile in map(shipped_profile, shipped_profiles()):
        named = re.search(r"bench/results/([\w.-]+\.json)", profile.note)
        assert named is not None
        figures = json.loads((RESULTS / named[1]).read_text())["figures"]
        values = {case["case"]: case["value"] for case in figures["cases"]}
        for point in profile.decode:
            assert values[f"decode {point.sequences}"] == pytest.approx(1e3 * point.seconds)
        for one in profile.prefill:
            alone, tokens = values.get(f"prefill {one.tokens} alone"), one.prompts * one.tokens
            speed = values.get(f"prefill {one.prompts} x {one.tokens}")
            seconds = alone / 1e3 if one.prompts == 1 else tokens / speed / 1e3
            assert seconds == pytest.approx(one.seconds, rel=1e-4)
        assert profile.kv_tokens == 128 * figures["num_blocks"], "blocks have 128 tokens"


def test_a_description_is_kept() -> None:
    description = Description(
        rate=5, prompt=read_lengths("2000~0.5"), output=read_lengths("100-300"),
        hit_share=0.4, burstiness=2.0, count=4000,
    )  # fmt: skip
    traffic = description.traffic()
    assert traffic.rate == pytest.approx(5, rel=0.1)
    assert traffic.mean_prompt == pytest.approx(2000, rel=0.05)
    assert traffic.mean_output == pytest.approx(200, rel=0.05)
    assert traffic.hit_limit() == pytest.approx(0.39, abs=0.02)
    gaps = [b.at_s - a.at_s for a, b in zip(traffic.arrivals, traffic.arrivals[1:], strict=False)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert spread / mean == pytest.approx(2.0, rel=0.15)


@pytest.mark.parametrize("text", ["", "x", "-5", "0", "10-5", "1e99", "5~", "5~99"])
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(TrafficError):
        read_lengths(text)


MOONCAKE = '{"timestamp": %d, "input_length": 1200, "output_length": 9, "hash_ids": [1, 2, 3]}'


def write(folder: Path, *lines: str) -> Path:
    path = folder / "t.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_traces_of_every_format(tmp_path: Path) -> None:
    mooncake = read_trace(write(tmp_path, MOONCAKE % 3000, MOONCAKE % 1000, ""))
    assert [a.at_s for a in mooncake.arrivals] == [0.0, 2.0]
    assert mooncake.arrivals[0] == Arrival(0.0, 1200, 9, "", (1, 2)), "a part of a block is none"
    own = '{"arrival_s": %s, "input_tokens": 70, "output_tokens": 3, "session": "a"}'
    tandem = read_trace(write(tmp_path, own % 0.5, own % 1.75))
    assert tandem.arrivals[1] == Arrival(1.25, 70, 3, "a")
    later = tandem.sim_requests()[1].info
    assert later.is_later_turn and later.session_key == b"a"
    rows = [{"sent": 0.1, "prompt_tokens": 5, "tokens": 7, "error": None},
            {"sent": None, "prompt_tokens": None, "tokens": 0, "error": "refused"},
            {"sent": 0.4, "prompt_tokens": 6, "tokens": 8, "error": None}]  # fmt: skip
    loads = [{"load": "1/s", "requests": rows}, {"load": "2/s", "requests": rows}]
    path = tmp_path / "serving.json"
    path.write_text(json.dumps({"date": "", "figures": {"loads": loads}}, indent=1))
    bench = read_trace(path, load="2/s")
    assert [(a.num_prompt, a.num_output) for a in bench.arrivals] == [(5, 7), (6, 8)]
    with pytest.raises(TraceError, match=r"choose a load of it with --load: '1/s', '2/s'"):
        read_trace(path)


GOOD = '{"arrival_s": 1, "input_tokens": 70, "output_tokens": 3}'


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("{", ":2: this is not JSON"),
        ("[1]", ":2: this is [1], and no JSON object"),
        ("[" * 100_000, ":2: this is not JSON"),
        (GOOD.replace("1,", "9" * 400 + ","), ":2: arrival_s is 999"),
        ('{"arrival_s": 1}', ":2: input_tokens (a number of tokens) is missing"),
        (GOOD.replace("70", "-3"), ":2: input_tokens is -3; it is a number of tokens"),
        (GOOD.replace("70", "0"), ":2: input_tokens is 0; it is a whole number of tokens, 1 or"),
        (GOOD.replace("70", "1.5"), ":2: input_tokens is 1.5; it is a whole number"),
        (GOOD.replace("70", '"70"'), ":2: input_tokens is '70'; it is a number of tokens"),
        (GOOD.replace("70", "true"), ":2: input_tokens is True"),
        (GOOD.replace("1,", "NaN,"), ":2: arrival_s is nan; it is seconds, from 0"),
        (GOOD.replace("1,", "-1,"), ":2: arrival_s is -1; it is seconds"),
        (GOOD[:-1] + ', "prefix_hashes": 5}', ":2: prefix_hashes is 5; it is a list of hashes"),
        (GOOD.replace("1,", "1e9,"), "are its times in another unit? arrival_s is in seconds"),
        (GOOD, ": at least two requests at different times are needed"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, text: str) -> None:
    path = write(tmp_path, GOOD, line)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert f"{path}{text}" in str(caught.value) or text in str(caught.value)


@pytest.mark.parametrize("requests", ["5", "[1, 2]"])
def test_a_result_whose_requests_are_none(tmp_path: Path, requests: str) -> None:
    line = f'{{"figures": {{"loads": [{{"load": "a", "requests": {requests}}}]}}}}'
    with pytest.raises(TraceError, match="requests of load 'a' are .*, no JSON objects"):
        read_trace(write(tmp_path, line))


def test_requests_at_almost_the_same_time_have_a_rate() -> None:
    close = Traffic("t", (Arrival(0.0, 10, 5), Arrival(1e-320, 10, 5)))
    assert math.isfinite(close.rate)


def test_times_that_hardly_vary_are_regular() -> None:
    length = read_lengths("10")
    made = Description(rate=2.0, prompt=length, output=length, burstiness=1e-200, count=100)
    assert made.traffic().arrivals[2].at_s == 1.0


def test_the_busiest_part_of_a_long_trace() -> None:
    times = [0, 10, 20, 21, 22, 23, 40]
    traffic = Traffic("t", tuple(Arrival(float(t), 5, 5) for t in times)).busiest(4)
    assert [arrival.at_s for arrival in traffic.arrivals] == [0.0, 1.0, 2.0, 3.0]


def test_profiles_that_are_none() -> None:
    good = json.loads(HAND.encode())
    for change, text in (
        ({"prefill": []}, "at least one measured point"),
        ({"decode": [{"sequences": 1, "context": 5, "seconds": -1}]}, r"\$\.decode\[0\]: seconds"),
        ({"prefill": [{"prompts": 2, "tokens": 5, "seconds": 1}]}, "one prompt alone"),
        ({"kv_tokens": "many"}, r"\$\.kv_tokens"),
        ({"format": "other"}, "its format is 'other'"),
        ({"overhead_s": -1}, "overhead_s is -1"),
        ({"unknown": 1}, "unknown"),
    ):
        with pytest.raises(ProfileError, match=text):
            read_profile(json.dumps(good | change).encode(), "p.json")


PREFILL_PAGE = 'tandem_prefill_tokens_per_second{model_name="m"} 40000\n'
DECODE_PAGE = """\
vllm:inter_token_latency_seconds_sum{model_name="m"} 8
vllm:inter_token_latency_seconds_count{model_name="m"} 1000
vllm:num_requests_running{model_name="m"} 20
vllm:kv_cache_usage_perc{model_name="m"} 0.25
vllm:cache_config_info{block_size="16",num_gpu_blocks="10000"} 1
"""


def test_speeds_of_a_running_cluster() -> None:
    found = profile_of([("p", PREFILL_PAGE), ("d", DECODE_PAGE)])
    assert found.prefill[0].tokens / found.prefill[0].seconds == pytest.approx(40_000)
    assert found.decode == (DecodePoint(20, 2000.0, 0.008),)
    assert (found.kv_tokens, found.model) == (160_000, "m")
    with pytest.raises(MetricsError, match="give the /metrics of a prefill node"):
        profile_of([("d", DECODE_PAGE)])
    with pytest.raises(MetricsError, match="of a decode node while it answers"):
        profile_of([("p", PREFILL_PAGE)])
    with pytest.raises(MetricsError, match="--metrics d: these are no Prometheus metrics"):
        profile_of([("d", "<html>")])


ASKED = ["--rate", "10", "--requests", "300", "--slo-ttft-ms", "500", "--slo-itl-ms", "20"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "plan.svg"
    assert main([*ASKED, "--json", "--price", "3", "--plot", str(picture)]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["profile"]["is_example"] and "another's measurement" in said["recommendation"][-1]
    best = said["outcomes"][0]
    assert best["meets"] and best["label"] == "recommended"
    hourly = 3 * (said["prefill"] + said["decode"])
    per_million = 1e6 * hourly / (3600 * best["output_tokens_per_s"])
    assert best["cost_per_million_output_tokens"] == pytest.approx(per_million)
    drawn = ElementTree.fromstring(picture.read_text())
    assert f"{said['prefill']}P + {said['decode']}D" in "".join(drawn.itertext())
    assert main([*ASKED, "--price", "3"]) == 0
    table = capsys.readouterr().out
    counts = [said["prefill"], said["decode"]]
    nodes = [
        f"{count} {tier} node{'s' * (count > 1)}"
        for count, tier in zip(counts, ("prefill", "decode"), strict=True)
    ]
    assert f"Recommended: {' and '.join(nodes)}: TTFT" in " ".join(table.split())
    assert "undivided" in table and "bottleneck" in table
    assert "✓" in table and "1M out" in table, "all columns are there at 80 columns"


def test_one_node_that_is_enough_is_told_in_the_singular(
    capsys: pytest.CaptureFixture[str],
) -> None:
    traffic = "--rate 5 --input 200 --output 10 --requests 200"
    assert main([*traffic.split(), "--profile", "h200-llama-3.1-8b"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "; 1 of them meets both objectives already: for this traffic do not divide" in said


def test_the_percentile_of_the_objectives(capsys: pytest.CaptureFixture[str]) -> None:
    """One prompt in five takes 20 s alone, which no number of nodes changes: at the 90th percentile
    that is too much, at the 75th it is not asked about."""
    lengths = [20_000 if i % 5 == 0 else 100 for i in range(400)]
    traffic = Traffic("uneven", tuple(Arrival(4.0 * i, n, 5) for i, n in enumerate(lengths)))

    def best_at(percentile: float) -> Forecast:
        evaluator = Evaluator(HAND, traffic, Objectives(3.0, 0.050, percentile))
        return Search(evaluator, 16, lambda _: None).plan().best

    with pytest.raises(NoPlan, match="the p90 of prompts has 20000 tokens.*lower --percentile"):
        best_at(90)
    best = best_at(75)
    assert best.ttft_tail_s <= 3.0 < 0.9 * 20
    assert main([*ASKED, "--percentile", "95", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["objectives"] == {"ttft_s": 0.5, "itl_s": 0.02, "percentile": 95.0}
    assert "TTFT p95" in said["recommendation"][0]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--rate", "1", "--percentile", "100"], "--percentile 100: it is 50 to less than 100"),
        (["--rate", "1", "--requests", "99"], "--requests 99: percentile 99 needs 100 at least"),
        ([], "say what the traffic is: --trace FILE, or --rate"),
        (["--rate", "0"], "--rate 0: it is requests in a second, more than 0"),
        (["--rate", "nan"], "--rate nan"),
        (["--rate", "1e-9"], "3000 requests would take 34722222 days to come, and 400 are the mo"),
        (["--rate", "1", "--hit-share", "30"], "it is a part of 1, such as 0.3 for 30 %"),
        (["--rate", "1", "--input", "2k"], "'2k' is no length"),
        (["--rate", "1", "--slo-ttft-ms", "0"], "--slo-ttft-ms 0: it is in milliseconds"),
        (["--rate", "1", "--profile", "nothing"], "there is no such file, and the profiles that"),
        (["--rate", "1000", "--requests", "100000000"], "at most 1000000 are simulated"),
        (
            ["--trace", "/nowhere.jsonl", "--block-tokens", "0"],
            "--block-tokens 0: it is the tokens",
        ),
        (["--rate", "1", "--metrics", "http://a b/"], "--metrics http://a b/: "),
        (["--trace", "/nowhere.jsonl"], "/nowhere.jsonl: No such file"),
        (["--rate", "1", "--metrics", "ftp://x"], "it must begin with http"),
        (["--rate", "1", "--requests", "100", "--plot", "/nowhere/p.svg"], "--plot /nowhere/p.svg"),
        (["--rate", "1", "--metrics", "http://127.0.0.1:9/metrics"], "refused"),
    ],
)
def test_wrong_questions(flags: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("share", "rate", "said"),
    [
        (0.0, 9.0, "a KV store has nothing to give"),
        (0.5, 0.0, "would pay if it gave a node more than 10.0 GB/s"),
        (0.5, 9.0, "A KV store of 9 GB/s a node does not pay"),
        (0.5, 30.0, "gives KV in 1/3.0 of the time"),
    ],
)
def test_a_store_pays_where_it_is_sooner_than_computing(
    share: float, rate: float, said: str
) -> None:
    profile = msgspec.structs.replace(
        HAND,
        kv_bytes_per_token=100_000.0,
        prefill=(PrefillPoint(1, 1000, 0.1), PrefillPoint(10, 1000, 0.1)),
    )
    assert said in store_sentence(profile, share, rate)
    assert store_sentence(HAND, share, rate) == "", "nothing is known of its KV"
