"""Turns single outcomes into figures, and rows of `bench.serving.goodput` or of a peer into
goodput: requests a second for which an objective holds."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.figures import Figures, distribution_ms, markdown, percentile
from bench.serving.openai_stream import Outcome


@dataclass(frozen=True, slots=True)
class Slo:
    """Says what counts as good: first token within `ttft_ms`, and 99 in 100 of an answer's times
    between tokens within `itl_ms`; of a run, 99 in 100 first tokens."""

    ttft_ms: float
    itl_ms: float

    def met_by(self, outcome: Outcome) -> bool:
        in_time = outcome.ttft_s * 1e3 <= self.ttft_ms
        return in_time and _p99_gap_s(outcome) * 1e3 <= self.itl_ms

    def met_by_run(self, row: Figures) -> bool:
        """Returns whether a run as a whole was within them; requests that failed are not."""
        ttft, itl = row["ttft_ms"], row["itl_ms"]
        if ttft is None or itl is None or row.get("errors"):
            return False
        in_time: bool = ttft["p99"] <= self.ttft_ms and itl["p99"] <= self.itl_ms
        return in_time


def _p99_gap_s(outcome: Outcome) -> float:
    gaps_s = outcome.gaps_s
    return percentile(sorted(gaps_s), 0.99) if gaps_s else 0.0


@dataclass(frozen=True, slots=True)
class Span:
    """Says when a run began, when its last request was due, when it was over (perf_counter)."""

    start: float
    last_arrival: float
    end: float


def summarize(outcomes: Sequence[Outcome], span: Span, slo: Slo) -> Figures:
    done = [outcome for outcome in outcomes if outcome.complete]
    wall_s = max((o.end for o in done if o.end is not None), default=span.end) - span.start
    tokens = sum(outcome.num_tokens for outcome in done)
    num_chunks = sum(len(outcome.chunks) for outcome in done)
    good = sum(slo.met_by(outcome) for outcome in done)
    return {
        "sent": sum(outcome.sent is not None for outcome in outcomes),
        "done": len(done),
        "full_length": sum(outcome.num_tokens == outcome.wanted_tokens for outcome in done),
        "errors": dict(Counter(o.error for o in outcomes if o.error).most_common(5)) or None,
        "num_errors": sum(outcome.error is not None for outcome in outcomes),
        "arrivals_s": round(span.last_arrival - span.start, 2),
        "wall_s": round(wall_s, 2),
        "req_per_s": _per_second(len(done), wall_s),
        "out_tok_per_s": _per_second(tokens, wall_s),
        "goodput_req_per_s": _per_second(good, wall_s),
        "good_fraction": round(good / len(outcomes), 4) if outcomes else None,
        **_latencies(done),
        "chunks_per_token": round(num_chunks / tokens, 4) if tokens else None,
        "late_ms": distribution_ms([o.sent - o.due for o in outcomes if o.sent is not None]),
        **_prompt_tokens(done),
    }


def _latencies(done: Sequence[Outcome]) -> Figures:
    return {
        "ttft_ms": distribution_ms([outcome.ttft_s for outcome in done]),
        "itl_ms": distribution_ms([gap for outcome in done for gap in outcome.gaps_s]),
        "tpot_ms": distribution_ms([o.tpot_s for o in done if o.tpot_s is not None]),
        "e2e_ms": distribution_ms([outcome.e2e_s for outcome in done]),
    }


def _prompt_tokens(done: Sequence[Outcome]) -> Figures:
    """Returns the prompt's tokens as the server counts them; None when it does not say."""
    prompts = [o.prompt_tokens for o in done if o.prompt_tokens is not None]
    cached = [o.cached_tokens for o in done if o.cached_tokens is not None]
    return {
        "prompt_tokens": sum(prompts) if prompts else None,
        "cached_tokens": sum(cached) if cached else None,
        "cached_fraction": round(sum(cached) / sum(prompts), 4) if cached and prompts else None,
    }


def _per_second(count: float, wall_s: float) -> float | None:
    return round(count / wall_s, 3) if wall_s > 0 else None


def request_row(outcome: Outcome, start: float) -> Figures:
    """Returns what became of one request, in seconds since `start` or since it was sent."""
    answered = outcome.sent is not None and outcome.chunks
    return {
        "sent": None if outcome.sent is None else round(outcome.sent - start, 4),
        "first": round(outcome.ttft_s, 4) if answered else None,
        "last": round(outcome.e2e_s, 4) if answered else None,
        "tokens": outcome.output_tokens,
        "prompt_tokens": outcome.prompt_tokens,
        "cached_tokens": outcome.cached_tokens,
        "error": outcome.error,
    }


def workload_of(row: Figures) -> str:
    return f"{row['n_in']}/{row['n_out']}"


def goodput(rows: Sequence[Figures], slo: Slo) -> list[Figures]:
    """Returns one entry for each engine and workload: the highest rate offered up to which every
    measured one was within the objective, all together and for each GPU (None: unknown number).
    0: not even the lowest was."""
    groups: defaultdict[tuple[str, str], list[Figures]] = defaultdict(list)
    for row in rows:
        groups[row["engine"], workload_of(row)].append(row)
    found = []
    for (engine, workload), members in groups.items():
        members.sort(key=lambda row: row["qps"])
        best = 0.0
        for row in members:
            if not slo.met_by_run(row):
                break
            best = row["qps"]
        gpus = members[0].get("gpus")
        found.append(
            {
                "engine": engine,
                "workload": workload,
                "gpus": gpus,
                "req_per_s": best,
                "req_per_s_per_gpu": round(best / gpus, 3) if gpus else None,
                "is_highest_measured": best == members[-1]["qps"],
                "rates": [row["qps"] for row in members],
            }
        )
    return found


def read_rows(path: Path) -> list[Figures]:
    """Reads rows of loads: JSON lines of a client, which say nothing of GPUs, or a result of
    `bench.serving.goodput`. Their engines get the file's name, so that no two are mixed up. Raises
    ValueError."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    else:
        rows = json.loads(text)["figures"]["loads"]
    rows = [row for row in rows if row.get("kind") == "load" and "ttft_ms" in row]
    if not rows:
        raise ValueError(f"{path} has no row of a load")
    return [{**row, "engine": f"{row['engine']}, {path.stem}"} for row in rows]


def tables(rows: Sequence[Figures], slo: Slo, beside: Sequence[Figures]) -> Iterator[str]:
    """Yields a table in milliseconds at the client, and a line for each goodput."""
    head = "engine, in/out, req/s, done, errors, TTFT p50/p99, ITL p50/p99/max, late p99, within"
    cells = [
        (
            row["engine"], workload_of(row), f"{row['qps']:g}", f"{row['done']}/{row['sent']}",
            str(sum((row["errors"] or {}).values())),
            _cell(row["ttft_ms"], "p50", "p99"), _cell(row["itl_ms"], "p50", "p99", "max"),
            _cell(row["late_ms"], "p99"), "yes" if slo.met_by_run(row) else "no",
        )
        for row in sorted([*rows, *beside], key=lambda row: (workload_of(row), row["qps"]))
    ]  # fmt: skip
    yield markdown(head, cells)
    for one in goodput([*rows, *beside], slo):
        each = "" if one["req_per_s_per_gpu"] is None else f", {one['req_per_s_per_gpu']:g} a GPU"
        yield f"{one['engine']} {one['workload']}: {one['req_per_s']:g} req/s{each}"


def _cell(figures: Figures | None, *names: str) -> str:
    return "" if figures is None else "/".join(f"{figures[name]:.1f}" for name in names)
