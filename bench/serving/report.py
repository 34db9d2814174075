"""Turns single outcomes into figures and a table."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from bench.figures import Figures, distribution_ms, percentile
from bench.serving.openai_stream import Outcome


@dataclass(frozen=True, slots=True)
class Slo:
    """Says what counts as good: first token within `ttft_ms`, `tpot_ms` per token after that, and
    99 in 100 of an answer's times between tokens within `itl_ms`."""

    ttft_ms: float
    tpot_ms: float = math.inf
    itl_ms: float = math.inf

    def met_by(self, outcome: Outcome) -> bool:
        tpot_s = outcome.tpot_s or 0.0
        return (
            outcome.ttft_s * 1e3 <= self.ttft_ms
            and tpot_s * 1e3 <= self.tpot_ms
            and _p99_gap_s(outcome) * 1e3 <= self.itl_ms
        )


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


def one_line(row: Figures) -> str:
    return (
        f"{row['load']}: {row['done']} done, {row['num_errors']} failed, "
        f"TTFT p50/p99 {_p50_p99(row['ttft_ms']) or '-'} ms, "
        f"ITL {_p50_p99(row['itl_ms']) or '-'} ms, {row['out_tok_per_s'] or 0:.0f} tok/s"
    )


def print_table(rows: Sequence[Figures], console: Console) -> None:
    table = Table(title="milliseconds at the client, p50/p99", box=SIMPLE, padding=(0, 1, 0, 0))
    for heading in ("load", "done", "errors", "TTFT", "ITL", "TPOT", "E2E", "tok/s", "cached"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        cached = row["cached_fraction"]
        table.add_row(
            row["load"],
            str(row["done"]),
            str(row["num_errors"]),
            *(_p50_p99(row[name]) for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms")),
            f"{row['out_tok_per_s'] or 0:.0f}",
            "" if cached is None else f"{cached:.0%}",
        )
    console.print(table)


def _p50_p99(figures: Figures | None) -> str:
    if figures is None:
        return ""
    return "/".join(f"{figures[q]:.{0 if figures[q] >= 100 else 1}f}" for q in ("p50", "p99"))
