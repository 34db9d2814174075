"""Says when the next step goes out: shortly before the one that workers have ends.

A step that goes out early keeps out requests that come after it. With two steps in flight, a
request whose KV has come waits for the rest of one step and all of the next before its own begins.
So the second step is held back while something may come, until

    expected end of the step in flight - lead
    lead = the most that any of the last steps would have needed: what went wrong with it, and what
           the worker's host took to start it

1. learning   every step goes out at once. Steps that follow each other tell how long such steps
              take, and workers tell how long before the end of the step in front they took each
              message: `ahead`. The expected end and `ahead` give the seconds on the way between
              processes, of late timers, and by which the expectation was wrong
2. paced      steps are held back while something may come: requests came a moment ago, KV is on its
              way, or prompts are computed, behind which a shorter one need not wait
3. awaited    the KV of a prompt came a moment ago and its first token is due: the lead is no longer
              than what most steps need. Of the few steps that wait so, some come a little late, for
              a request that need not wait for one more
-  at once    nothing may come; steps like this one are not known; most of the step would be lead;
              two steps in flight are not what workers have (pipeline stages, one step at a time)

What went wrong in any of the last 64 steps counts, also of steps that were not held back: one step
that the device had to wait for makes the lead longer than that wait was, at once. Nothing here asks
for the time: a state machine, stepped by `EngineCore`.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from engine.sched.rows.in_flight import StepShape

_NUM_STEPS = 32
"""Durations that are remembered of steps with prompts, and of others."""
_FEWEST_STEPS = 4
"""This many steps like one tell how long it takes."""
_FEW_TOKENS = 256
"""Fewer tokens of prompts take about as long as none."""
_LIKE = 1.25
"""Steps with a quarter more rows, or fewer, take about as long."""
_NUM_NEEDS = 64
_FEWEST_NEEDS = 16
_SPARE_S = 0.0002
_MOST_LEAD = 0.7
"""Holding a step back gains little where more than this part of the one in front were lead."""
_RESOLUTION_S = 0.0001
"""Less is not worth a wait, whose end takes as long."""
_RECENT_S = 1.0
"""A request that came so recently may be followed by another."""
_TOKEN_S = 0.005
"""A first token that takes longer behind its KV is not awaited."""


class StepForecast:
    """Learns how long steps take that follow another one."""

    def __init__(self) -> None:
        self._decodes: deque[tuple[int, float]] = deque(maxlen=_NUM_STEPS)
        self._prompts: deque[float] = deque(maxlen=_NUM_STEPS)

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learns from a step that the device did not have to wait for."""
        if shape.prompt_work >= _FEW_TOKENS:
            self._prompts.append(seconds / shape.prompt_work)
        else:
            self._decodes.append((shape.num_rows, seconds))

    def seconds(self, shape: StepShape) -> float:
        """Returns what the step is expected to take; 0: unknown. A step with prompts takes as long
        as its work at the best speed lately: short prompts are slower, and may end late, never
        early."""
        if shape.prompt_work >= _FEW_TOKENS:
            known = len(self._prompts) >= _FEWEST_STEPS
            return min(self._prompts) * shape.prompt_work if known else 0.0
        least, most = shape.num_rows / _LIKE, shape.num_rows * _LIKE
        like = [seconds for rows, seconds in self._decodes if least <= rows <= most]
        return statistics.median(like) if len(like) >= _FEWEST_STEPS else 0.0


class _Plan(NamedTuple):
    """When the step in flight was expected to end, and when the next one was to go out."""

    ends_at: float
    issue_at: float


@dataclass(slots=True)
class _Flight:
    """A step that workers have. `plan`: for it, behind the step in front; None: there was none, or
    nothing knew its end."""

    shape: StepShape
    sent_at: float
    plan: _Plan | None


class StepPace:
    """Paces the steps of one engine, of which two may be in flight. All times are CLOCK_MONOTONIC
    seconds. `shape_of_last`: gives that of the step that was decided last; `may_join`: says whether
    something waits for KV; `lacks_token`: whether something has its KV and waits for its first
    token.

    Attributes:
        num_held: Steps that were held back.
        num_late: Steps whose message workers took after the step in front had ended.
    """

    def __init__(
        self,
        shape_of_last: Callable[[], StepShape],
        may_join: Callable[[], bool],
        lacks_token: Callable[[], bool] = lambda: False,
    ) -> None:
        self._shape_of_last = shape_of_last
        self._may_join = may_join
        self._lacks_token = lacks_token
        self.num_held = self.num_late = 0
        self._forecast = StepForecast()
        self._flights: deque[_Flight] = deque()
        self._needs: deque[float] = deque(maxlen=_NUM_NEEDS)
        self._host_s = self._total_host_s = 0.0
        self._ended_at = self._came_at = self._kv_came_at = float("-inf")
        self._held: _Plan | None = None
        """The plan by which the next step is held back."""

    @property
    def lead_s(self) -> float:
        """Returns how long before the end of a step the next one must go out; 0: unknown."""
        if len(self._needs) < _FEWEST_NEEDS:
            return 0.0
        return max(0.0, *self._needs) + _SPARE_S

    def request_came(self, now: float) -> None:
        """Records that a request came."""
        self._came_at = now

    def kv_came(self, now: float) -> None:
        """Records that all KV of a prompt is here."""
        self._kv_came_at = now

    def issue_at(self, now: float) -> float:
        """Returns when to issue the next step; `now`: at once."""
        if len(self._flights) != 1:
            return now
        plan, lead_s = self._plan(now), self.lead_s
        shape = self._flights[0].shape
        if plan is None or not lead_s or lead_s > _MOST_LEAD * self._forecast.seconds(shape):
            return now
        if now - self._came_at > _RECENT_S and not (shape.prompt_work or self._may_join()):
            return now
        if now - self._kv_came_at < _TOKEN_S and self._lacks_token():
            usual_s = min(lead_s, statistics.median(self._needs))
            plan = plan._replace(issue_at=max(now, plan.ends_at - usual_s))
        if plan.issue_at - now < _RESOLUTION_S:
            return now
        self.num_held += self._held is None
        self._held = plan
        return plan.issue_at

    def _plan(self, now: float) -> _Plan | None:
        """Returns the plan for a step behind the only one in flight; None: its end is unknown."""
        first = self._flights[0]
        seconds = self._forecast.seconds(first.shape)
        if not seconds:
            return None
        ends_at = max(first.sent_at, self._ended_at) + seconds
        return _Plan(ends_at, max(now, ends_at - self.lead_s))

    def issued(self, decided_at: float, sent_at: float) -> None:
        """Records that workers were given a step, on which the scheduler decided first."""
        shape = self._shape_of_last()
        plan, self._held = self._held, None
        if plan is None and len(self._flights) == 1:
            plan = self._plan(decided_at)
        if plan is not None:
            plan = _Plan(plan.ends_at, min(plan.issue_at, decided_at))
        self._flights.append(_Flight(shape, sent_at, plan))

    def ended(self, now: float, total_host_s: float, ahead_s: float | None) -> None:
        """Records that the result of the oldest step has come. `total_host_s`, `ahead_s`: see
        `Executor`."""
        flight = self._flights.popleft()
        # The host's time was this step's, or that of the one behind it, started meanwhile.
        before_s, self._host_s = self._host_s, max(0.0, total_host_s - self._total_host_s)
        self._total_host_s = total_host_s
        follows = flight.sent_at < self._ended_at
        if ahead_s is not None and flight.plan is not None:
            loss_s = flight.plan.ends_at - flight.plan.issue_at - ahead_s
            self._needs.append(loss_s + max(before_s, self._host_s))
            self.num_late += ahead_s < 0
        if follows and (ahead_s is None or ahead_s >= 0):
            self._forecast.observe(flight.shape, now - self._ended_at)
        self._ended_at = now
