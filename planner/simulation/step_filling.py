"""Says which prompts a simulated engine's step computes, with the scheduler's own rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from engine.contracts.steps.step_shapes import counts_to_measure
from engine.contracts.steps.step_work import AttentionCost, ModelCost
from engine.sched.prompts.even_chunks import EvenChunks
from engine.sched.prompts.prompt_order import Line, PromptOrder, StepRoom, full_tokens
from planner.simulation.jobs import Job
from planner.simulation.step_times import MeasuredTimes


class StepFilling(Protocol):
    """Fills steps with prompts that wait or are half computed."""

    def begin_step(
        self, now: float, jobs: Sequence[Job], budget: int
    ) -> tuple[Sequence[Job], StepRoom]:
        """Returns `jobs`, of which there is one at least, in the order in which they go on, and the
        room that the step has for them."""


class InOrderOfArrival:
    """Fills steps to the budget: those under way first, then those that wait."""

    def begin_step(
        self, now: float, jobs: Sequence[Job], budget: int
    ) -> tuple[Sequence[Job], StepRoom]:
        return jobs, StepRoom(budget, budget)


class InPromptOrder:
    """Fills steps as the scheduler does, with `PromptOrder`. `tokens_per_s`: of a full step."""

    def __init__(self, order: PromptOrder, tokens_per_s: float) -> None:
        self.order = order
        self._tokens_per_s = tokens_per_s

    def begin_step(
        self, now: float, jobs: Sequence[Job], budget: int
    ) -> tuple[Sequence[Job], StepRoom]:
        line = self.order.turn(now, min(map(self._due_at, jobs)))
        key = self._due_at if line is Line.DUE else self._left
        shortest = shortest_of(self.order, jobs)
        in_turn = sorted(jobs, key=lambda job: (job.request.info.is_idle_class, key(job)))
        return in_turn, self.order.room(now, budget, budget, len(jobs), shortest)

    def _left(self, job: Job) -> float:
        return self.order.chunks.worth(job.num_before, job.num_left)

    def _due_at(self, job: Job) -> float:
        new = job.request.num_prompt - job.num_cached
        worth = self.order.chunks.worth(job.num_cached, new)
        return self.order.due_at(job.came_at, worth / self._tokens_per_s)


def shortest_of(order: PromptOrder, jobs: Sequence[Job]) -> float:
    """Returns the least work of those that no step has begun; infinite: all are begun."""
    new = (job for job in jobs if job.num_before == job.num_cached)
    works = (order.chunks.worth(job.num_cached, job.num_left) for job in new)
    return min(works, default=math.inf)


def prompt_order(times: MeasuredTimes, budget: int) -> InPromptOrder:
    """Returns the filling of an engine that has measured itself at the start to have `times`."""
    cost = linear_cost(times)
    order = PromptOrder(chunks=EvenChunks(cost, budget), full_tokens=full_tokens_of(times, budget))
    return InPromptOrder(order, 1 / cost.flops_per_token)


def full_tokens_of(times: MeasuredTimes, budget: int) -> int:
    """Returns the tokens that fill a step, as an engine finds them that measures itself."""
    return full_tokens([(count, times.tokens_s(count)) for count in counts_to_measure(budget)])


def linear_cost(times: MeasuredTimes) -> ModelCost:
    """Returns the seconds of a token and of a pair of tokens as a model's cost."""
    most = times.profile.max_batched_tokens
    pairs = AttentionCost(
        window=None, flops_of_prompts=times.pair_s, flops_of_decodes=0.0, kv_bytes=0.0
    )
    return ModelCost(
        flops_per_token=times.tokens_s(most) / most,
        flops_per_sample=0.0,
        weight_bytes=0.0,
        token_bytes=0.0,
        attention=(pairs,),
    )
