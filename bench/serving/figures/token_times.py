"""Says where the time between two tokens at a client comes from, where one node decodes:

    step ─── the step that computed the token ended, as the node notes (`/steps`)
      │ engine_core: what it decides and sends before the message with the token
      │ to_node_server: until the node server's event loop has the message
      │ node_server: it makes the events and writes them, those of other answers first
      │ router_and_client: two connections, the router, and the client's own process
    client

A delivery that takes longer than the one before makes a gap longer than its step, and the next one
shorter: it is put down to the part that has grown most. Behind the first token comes a gap of its
own kind: the prompt's KV joins a batch. How late the event loops of router, nodes and clients were
all the time stands in `event_loops` (`bench.serving.clusters.processes`).
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from bench.serving.figures.report import Figures, distribution_ms
from bench.serving.openai_stream import Outcome
from engine.frontend.step_history import HistoryReport

LONG = 1.25
"""A gap is long from this multiple of the median step on."""


class TokenWay(NamedTuple):
    """The seconds of one token from the end of its step to the client."""

    engine_core: float
    to_node_server: float
    node_server: float
    router_and_client: float

    @property
    def total(self) -> float:
        return sum(self)

    def grown_most_since(self, before: TokenWay) -> str:
        """Names the part that takes longer than it did, by most."""
        grown = [later - one for one, later in zip(before, self, strict=True)]
        return self._fields[grown.index(max(grown))]


class TokenWays:
    """Finds the way of tokens in what a node tells of its steps and messages."""

    def __init__(self, report: HistoryReport) -> None:
        self.ends = sorted(step.ended_at for step in report.steps if step.ended_at)
        self._messages = sorted(report.deliveries)
        self._sent = [message.sent_at for message in self._messages]

    def of(self, chunk: float) -> TokenWay | None:
        """Returns the way of a token that was with the client at `chunk`: that of the last step
        whose message was there before. None: the node tells nothing of that time."""
        last = bisect_right(self.ends, chunk) - 1
        while last >= 0:
            ended_at = self.ends[last]
            index = bisect_left(self._sent, ended_at)
            if index < len(self._messages) and self._sent[index] <= chunk:
                sent_at, received_at, written_at = self._messages[index]
                written_at = min(written_at, chunk)  # It notes so behind the last of its answers.
                received_at = min(received_at, written_at)
                return TokenWay(
                    sent_at - ended_at,
                    received_at - sent_at,
                    written_at - received_at,
                    chunk - written_at,
                )
            last -= 1
        return None


def token_figures(
    outcomes: Sequence[Outcome], report: HistoryReport, median_step_s: float
) -> Figures:
    """Returns the gaps behind first tokens and all others, the times of delivery in all and by
    part, and what share of all gaps is long: by their kind, and where it is the delivery by its
    part."""
    ways = TokenWays(report)
    seconds: list[float] = []
    others: list[float] = []
    found: list[TokenWay] = []
    num_long = dict.fromkeys(("behind_first", "steps", *TokenWay._fields), 0)
    limit = LONG * median_step_s
    for outcome in outcomes:
        if not (outcome.complete and len(outcome.chunks) > 2):
            continue
        chunks = outcome.chunks
        second = chunks[1] - chunks[0]
        seconds.append(second)
        num_long["behind_first"] += second > limit
        earlier = ways.of(chunks[1])
        for before, chunk in itertools.pairwise(chunks[1:]):
            gap = chunk - before
            others.append(gap)
            way = ways.of(chunk)
            if way is not None:
                found.append(way)
                if gap > limit and earlier is not None:
                    is_step = gap - (way.total - earlier.total) > limit
                    num_long["steps" if is_step else way.grown_most_since(earlier)] += 1
            earlier = way
    num_gaps = max(1, len(seconds) + len(others))
    return {
        "gaps_behind_first_ms": distribution_ms(seconds),
        "other_gaps_ms": distribution_ms(others),
        "delivery_ms": distribution_ms([way.total for way in found]),
        "delivery_parts_ms": {
            part: distribution_ms([getattr(way, part) for way in found])
            for part in TokenWay._fields
        },
        "long_gaps": {kind: round(count / num_gaps, 5) for kind, count in num_long.items()},
    }
