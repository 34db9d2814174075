"""Orders of prompts to compare, each in its simplest form.

arrival         in order of arrival; with the whole budget, as before there was an order
shortest first  what is left to compute, and nothing else
aged            the earliest due first: arrival, and a multiple of the prompt's own time
urgency         the least slack until the objective first; what misses it anyway comes last
                (Kairos, arXiv 2605.02329)
two queues      short and long prompts in turn, each in order of arrival (LAPS, 2601.11589)
layers          tandem's order, and parts as short as a layer at no cost (FlowPrefill, 2602.16603)
staggered       prompts wait until a node is between two steps (staggered batches, 2512.16134)
tandem          `engine.sched.prompts.prompt_order`
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.sched.prompts.even_chunks import EvenChunks
from engine.sched.prompts.prompt_order import PromptOrder, StepRoom
from planner.simulation.cluster import ClusterShape, MakePolicy, SimCluster
from planner.simulation.jobs import Job
from planner.simulation.nodes import SimPrefillNode
from planner.simulation.step_filling import (
    InOrderOfArrival,
    InPromptOrder,
    StepFilling,
    full_tokens_of,
    linear_cost,
    prompt_order,
    shortest_of,
)
from planner.simulation.step_times import MeasuredTimes, Part

BUDGET = 8192
_SLO_TIMES, _LEAST_SLO_S = 5.0, 0.2
_PATIENCE = 8.0
_PIECES = 8


@dataclass(slots=True)
class Node:
    """Holds what orders are made from: a node's times."""

    times: MeasuredTimes
    full_tokens: int = field(init=False)
    chunks: EvenChunks = field(init=False)
    tokens_per_s: float = field(init=False)
    _alone_s: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        cost = linear_cost(self.times)
        self.full_tokens = full_tokens_of(self.times, BUDGET)
        self.chunks, self.tokens_per_s = EvenChunks(cost, BUDGET), 1 / cost.flops_per_token

    def order(self) -> PromptOrder:
        return PromptOrder(chunks=self.chunks, full_tokens=self.full_tokens)

    def without_cost_of_parts(self) -> FreeParts:
        return FreeParts(self.times, self.full_tokens // _PIECES)

    def alone_s(self, num_tokens: int) -> float:
        if num_tokens not in self._alone_s:
            self._alone_s[num_tokens] = self.times.prompt_s(num_tokens, num_tokens)
        return self._alone_s[num_tokens]

    def left_s(self, job: Job) -> float:
        return self.chunks.worth(job.num_before, job.num_left) / self.tokens_per_s


class Sorted:
    """Fills steps in the order of `key(job, now)`, with the same parts as `PromptOrder`."""

    def __init__(self, order: PromptOrder, key: Callable[[Job, float], Any]) -> None:
        self._order = order
        self._key = key

    def begin_step(
        self, now: float, jobs: Sequence[Job], budget: int
    ) -> tuple[Sequence[Job], StepRoom]:
        ranked = sorted(jobs, key=lambda job: self._key(job, now))
        shortest = shortest_of(self._order, jobs)
        return ranked, self._order.room(now, budget, budget, len(jobs), shortest)


class TwoQueues:
    """Serves short prompts and long ones in turn."""

    def __init__(self, order: PromptOrder) -> None:
        self._order = order
        self._long_is_next = False

    def begin_step(
        self, now: float, jobs: Sequence[Job], budget: int
    ) -> tuple[Sequence[Job], StepRoom]:
        short = [job for job in jobs if job.request.num_prompt <= self._order.full_tokens]
        long = [job for job in jobs if job.request.num_prompt > self._order.full_tokens]
        begins_long = bool(long) and (self._long_is_next or not short)
        self._long_is_next = not begins_long
        ranked = long + short if begins_long else short + long
        shortest = shortest_of(self._order, jobs)
        return ranked, self._order.room(now, budget, budget, len(jobs), shortest)


class PieceRoom(StepRoom):
    """Fills a step as ever, or computes a piece of a prompt that takes several steps."""

    def __init__(self, budget: int, order: PromptOrder) -> None:
        full = order.full_tokens
        super().__init__(budget, budget, order.chunks, full=full, whole=2 * full)
        self._order, self._is_cut = order, False

    @property
    def is_full(self) -> bool:
        return self._is_cut or super().is_full

    def part(self, context: int, remaining: int) -> int:
        count = super().part(context, remaining)
        if self._used or count >= remaining:
            return count
        self._is_cut = True
        return self._order.chunks.longest(context, self._order.full_tokens // _PIECES)


class BetweenLayers(InPromptOrder):
    """Is tandem's order, with a choice after each eighth of a full step."""

    def begin_step(
        self, now: float, jobs: Sequence[Job], budget: int
    ) -> tuple[Sequence[Job], StepRoom]:
        ranked, _ = super().begin_step(now, jobs, budget)
        return ranked, PieceRoom(budget, self.order)


@dataclass(slots=True)
class FreeParts:
    """Gives the times of a node that stops a prompt between two layers at no cost: a part takes its
    share of a full step, however short it is."""

    times: MeasuredTimes
    piece: int

    def decode_s(self, num_sequences: int, num_kv: float) -> float:
        return self.times.decode_s(num_sequences, num_kv)

    def step_s(self, parts: Sequence[Part], num_sequences: int, num_kv: float) -> float:
        if len(parts) > 1 or not parts[0].num_before or parts[0].num_new > self.piece:
            return self.times.step_s(parts, num_sequences, num_kv)
        part, full = parts[0], self.piece * _PIECES
        pairs = part.num_new * (part.num_before + part.num_new / 2)
        return part.num_new * self.times.tokens_s(full) / full + self.times.pair_s * pairs


class StaggeredCluster(SimCluster):
    """Holds prompts back until a node has none, and gives it about a full step of them."""

    def __init__(self, shape: ClusterShape, make_policy: MakePolicy, seed: int) -> None:
        super().__init__(shape, make_policy, seed)
        self._held: deque[Job] = deque()
        for node in self.prefills:
            node.engine.first = self._then_hand_out(node, node.engine.first)

    def _then_hand_out(
        self, node: SimPrefillNode, first: Callable[[Job], None]
    ) -> Callable[[Job], None]:
        def ended(job: Job) -> None:
            first(job)
            self._hand_out(node)

        return ended

    def _enqueue(self, node: SimPrefillNode, job: Job) -> None:
        self._held.append(job)
        idle = next((one for one in self.prefills if one.engine.is_idle), None)
        if idle is not None:
            self._hand_out(idle)

    def _hand_out(self, node: SimPrefillNode) -> None:
        if self._held and not node.engine.waiting and not node.engine.computing:
            super()._enqueue(node, self._held.popleft())


def order_of(name: str, node: Node) -> StepFilling:
    """Makes the order of one engine."""

    def due_at(job: Job, now: float) -> float:
        return job.came_at + _PATIENCE * node.alone_s(job.request.num_prompt)

    def urgency(job: Job, now: float) -> tuple[bool, float]:
        limit_s = max(_LEAST_SLO_S, _SLO_TIMES * node.alone_s(job.request.num_prompt))
        slack_s = job.came_at + limit_s - now - node.left_s(job)
        return slack_s < 0, slack_s

    def left(job: Job, now: float) -> float:
        return node.left_s(job)

    match name:
        case "arrival, budget 8192":
            return InOrderOfArrival()
        case "arrival" | "staggered":
            return Sorted(node.order(), lambda job, now: job.came_at)
        case "shortest first":
            return Sorted(node.order(), left)
        case "aged":
            return Sorted(node.order(), due_at)
        case "urgency":
            return Sorted(node.order(), urgency)
        case "two queues":
            return TwoQueues(node.order())
        case "layers":
            return BetweenLayers(node.order(), node.tokens_per_s)
        case "tandem":
            return prompt_order(node.times, BUDGET)
    raise ValueError(f"there is no order {name!r}")
