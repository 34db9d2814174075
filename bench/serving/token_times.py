"""Says where the time between two tokens at a client comes from, where one node decodes:

    step ─── the step that computed the token ended, as the node notes (`/steps`)
      │ delivery: engine core, node server, router, two connections, and the client's own process
    client

A delivery that takes longer than the one before makes a gap longer than its step, and the next one
shorter. Behind the first token comes a gap of its own kind: the prompt's KV joins a batch.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence

from bench.serving.openai_stream import Outcome
from bench.serving.report import Figures, distribution_ms
from engine.frontend.step_history import HistoryReport

LONG = 1.25
"""A gap is long from this multiple of the median step on."""


def token_figures(
    outcomes: Sequence[Outcome], report: HistoryReport, median_step_s: float
) -> Figures:
    """Returns the gaps behind first tokens and all others, the times of delivery, and what share of
    all gaps is long: by their kind, and by whether the steps or deliveries were."""
    ends = sorted(step.ended_at for step in report.steps if step.ended_at)
    seconds: list[float] = []
    others: list[float] = []
    deliveries: list[float] = []
    num_long = {"behind_first": 0, "steps": 0, "delivery": 0}
    limit = LONG * median_step_s
    for outcome in outcomes:
        if not (outcome.complete and len(outcome.chunks) > 2):
            continue
        chunks = outcome.chunks
        second = chunks[1] - chunks[0]
        seconds.append(second)
        num_long["behind_first"] += second > limit
        for before, chunk in itertools.pairwise(chunks[1:]):
            gap = chunk - before
            others.append(gap)
            if (index := bisect_right(ends, chunk)) < 2:
                continue
            deliveries.append(chunk - ends[index - 1])
            if gap > limit:
                is_step = ends[index - 1] - ends[index - 2] > limit
                num_long["steps" if is_step else "delivery"] += 1
    num_gaps = max(1, len(seconds) + len(others))
    return {
        "gaps_behind_first_ms": distribution_ms(seconds),
        "other_gaps_ms": distribution_ms(others),
        "delivery_ms": distribution_ms(deliveries),
        "long_gaps": {kind: round(count / num_gaps, 5) for kind, count in num_long.items()},
    }
