"""Says what nodes did while a load ran: each notes its steps and pauses (`/steps`), and answers
tell of their prompts (`x-tandem-timeline`).

A token comes when its step ends, so the time between the ends of two steps is the time between two
tokens of every answer that runs in both. What is longer than `LATE` times the running median has a
cause, the first of these that holds:

    prompt     the step computed prompt tokens
    garbage    the engine core collected garbage between the two ends
    turn       the engine core was long at one turn of its loop
    idle       workers had nothing to do in between for more than a tenth of the median
    host       the worker's host took longer than half the median to start steps in between, and
               twice as long as it mostly takes
    join       requests entered with the step
    other      nothing of these: the GPU, or what else happens on it
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from bench.figures import Figures, distribution_ms
from bench.serving.openai_stream import Outcome
from engine.contracts.steps.step_log import StepRecord
from engine.frontend.step_history import HistoryReport, PauseReport

LATE = 1.5
_MEDIAN_OF = 101
_LEAST_FOR_MEDIAN = 9
_WORST = 12
_CORE = "engine core"


async def read_history(
    session: aiohttp.ClientSession, probes_url: str, since: float = 0.0
) -> HistoryReport:
    """Raises `aiohttp.ClientError` where nothing answers."""
    async with session.get(f"{probes_url}/steps", params={"since": repr(since)}) as response:
        response.raise_for_status()
        return msgspec.json.decode(await response.read(), type=HistoryReport)


@dataclass(frozen=True, slots=True)
class Gap:
    """The time between the ends of two steps in which an answer ran. `pauses` of the engine core
    fell into it."""

    step: StepRecord
    seconds: float
    ahead_s: float
    """How long before the step in front ended it was issued."""
    median_s: float
    idle_s: float
    host_s: float
    usual_host_s: float
    pauses: list[PauseReport] = field(default_factory=list)

    @property
    def is_late(self) -> bool:
        return self.median_s > 0 and self.seconds > LATE * self.median_s

    @property
    def cause(self) -> str:
        kinds = {pause.kind for pause in self.pauses}
        if self.step.prompt_tokens:
            return "prompt"
        if "garbage" in kinds:
            return "garbage"
        if "turn" in kinds:
            return "turn"
        if self.idle_s > 0.1 * self.median_s:
            return "idle"
        if self.host_s > max(0.5 * self.median_s, 2 * self.usual_host_s):
            return "host"
        return "join" if self.step.new_rows else "other"


def gaps(report: HistoryReport) -> Iterator[Gap]:
    """Returns the times between tokens that the steps made, as they passed."""
    recent: deque[float] = deque(maxlen=_MEDIAN_OF)
    hosts: deque[float] = deque(maxlen=_MEDIAN_OF)
    core = [pause for pause in report.pauses if pause.process == _CORE]
    ended = [step for step in report.steps if step.ended_at]
    for before, step in itertools.pairwise(ended):
        if step.rows - step.new_rows <= 0 or not before.rows:
            continue
        seconds = step.ended_at - before.ended_at
        ahead_s = before.ended_at - step.issued_at
        idle_s = max(0.0, -ahead_s)
        host_s = max(0.0, step.worker_host_s - before.worker_host_s)
        knows = len(recent) >= _LEAST_FOR_MEDIAN
        median_s = statistics.median(recent) if knows else 0.0
        gap = Gap(
            step,
            seconds,
            ahead_s,
            median_s,
            idle_s,
            host_s,
            statistics.median(hosts) if knows else 0.0,
        )
        if gap.is_late:
            gap.pauses.extend(
                pause
                for pause in core
                if pause.ended_at > before.ended_at
                and pause.ended_at - pause.seconds < step.ended_at
            )
        recent.append(seconds)
        hosts.append(host_s)
        yield gap


def decode_figures(report: HistoryReport, start: float) -> Figures:
    """Returns the steps of a node that decodes, and what made them late. Times of the worst are
    seconds since `start`."""
    found = list(gaps(report))
    late = [gap for gap in found if gap.is_late]
    lost: defaultdict[str, float] = defaultdict(float)
    counts = Counter(gap.cause for gap in late)
    for gap in late:
        lost[gap.cause] += gap.seconds - gap.median_s
    worst = sorted(late, key=lambda gap: gap.seconds, reverse=True)[:_WORST]
    return {
        "step_ms": distribution_ms([gap.seconds for gap in found]),
        "with_joins_ms": distribution_ms([g.seconds for g in found if g.step.new_rows]),
        "without_joins_ms": distribution_ms([g.seconds for g in found if not g.step.new_rows]),
        "worker_host_ms": distribution_ms([gap.host_s for gap in found]),
        "issued_ahead_ms": distribution_ms([gap.ahead_s for gap in found]),
        "rows": _spread([gap.step.rows for gap in found]),
        "joins": sum(gap.step.new_rows for gap in found),
        "prompt_steps": sum(bool(gap.step.prompt_tokens) for gap in found),
        "late_steps": {
            cause: {"count": count, "lost_ms": round(1e3 * lost[cause], 2)}
            for cause, count in counts.most_common()
        },
        "worst": [_row(gap, start) for gap in worst],
        "pauses": pause_figures(report.pauses),
    }


def _row(gap: Gap, start: float) -> Figures:
    step = gap.step
    return {
        "at_s": round(step.ended_at - start, 3),
        "ms": round(1e3 * gap.seconds, 2),
        "median_ms": round(1e3 * gap.median_s, 2),
        "cause": gap.cause,
        "rows": step.rows,
        "new_rows": step.new_rows,
        "prompt_tokens": step.prompt_tokens,
        "idle_ms": round(1e3 * gap.idle_s, 2),
        "host_ms": round(1e3 * gap.host_s, 2),
        "pauses": [f"{pause.kind} {1e3 * pause.seconds:.1f} ms" for pause in gap.pauses],
    }


def prefill_figures(report: HistoryReport, span_s: float) -> Figures:
    """Returns the steps of a node that computes prompts. `busy`: its part of `span_s`."""
    taken: defaultdict[int, list[float]] = defaultdict(list)
    busy_s, last_end = 0.0, 0.0
    for step in report.steps:
        if step.ended_at and step.prompt_tokens:
            seconds = step.ended_at - max(step.issued_at, last_end)
            last_end = step.ended_at
            busy_s += seconds
            taken[step.rows].append(seconds)
    return {
        "steps": sum(map(len, taken.values())),
        "busy": round(busy_s / span_s, 4) if span_s > 0 else None,
        "step_ms_by_prompts": {str(n): distribution_ms(taken[n]) for n in sorted(taken)},
        "pauses": pause_figures(report.pauses),
    }


def pause_figures(pauses: Iterable[PauseReport]) -> Figures:
    """Returns the pauses by process and kind; of garbage also by generation."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for pause in pauses:
        kind = f"garbage {pause.detail}" if pause.kind == "garbage" else pause.kind
        found[f"{pause.process}: {kind}"].append(pause.seconds)
    return {
        name: {
            "count": len(seconds),
            "sum_ms": round(1e3 * sum(seconds), 2),
            "max_ms": round(1e3 * max(seconds), 2),
        }
        for name, seconds in sorted(found.items())
    }


def _spread(values: Sequence[int]) -> Figures | None:
    if not values:
        return None
    return {"p50": statistics.median(values), "max": max(values)}


def prompt_figures(outcomes: Sequence[Outcome]) -> Figures:
    """Returns where the time to the first token went, over all prompts and by prefill node.

    outside: the client, the router, and HTTP until the decode node had the request, and back;
    admission: the decode node reads the request, and has room for its KV; queue: waiting on the
    prefill node for its turn; prefill: from its first step to the token; path: the rest, between
    the two nodes and inside them.
    """
    told = [(one, one.timeline) for one in outcomes if one.complete and one.timeline]
    parts: defaultdict[str, list[float]] = defaultdict(list)
    by_node: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for outcome, timeline in told:
        inside = timeline["first_token_s"]
        parts["outside"].append(outcome.ttft_s - inside)
        admitted_s = min(timeline["admitted_s"], timeline["queue_s"])
        parts["admission"].append(admitted_s)
        parts["queue"].append(timeline["queue_s"] - admitted_s)
        parts["prefill"].append(timeline["prefill_s"])
        parts["path"].append(inside - timeline["queue_s"] - timeline["prefill_s"])
        if timeline["second_token_s"] is not None:
            parts["second_token_after"].append(timeline["second_token_s"] - inside)
        if timeline["kv_last_byte_s"] is not None:
            parts["kv_after_first_token"].append(timeline["kv_last_byte_s"] - inside)
        by_node[timeline["prefill_node"] or "local"].append(timeline)
    return {
        "ttft_parts_ms": {name: distribution_ms(values) for name, values in parts.items()},
        "by_prefill_node": {
            node: {
                "prompts": len(timelines),
                "queue_ms": distribution_ms([one["queue_s"] for one in timelines]),
                "prefill_ms": distribution_ms([one["prefill_s"] for one in timelines]),
                "retried": sum(one["attempts"] > 1 for one in timelines),
            }
            for node, timelines in sorted(by_node.items())
        },
    }
