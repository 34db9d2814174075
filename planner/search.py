"""Finds how many nodes of each tier meet the objectives with the fewest in all.

1. prefill    the fewest with which first tokens come in time, while decode nodes abound
2. decode     the fewest with which tokens come in time, with those prefill nodes
3. together   both as found; whichever objective fails takes one more of its tier
4. around     one more and one less of each, to say what they would change
5. undivided  as many nodes that do both, and the fewest of them that do

Each step begins at the number that the measured speeds ask for without any queueing, and looks
upwards, in steps that grow, then between the last two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from planner.errors import NoPlan
from planner.evaluation import Evaluator, Forecast, Nodes

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Holds what was found.

    Attributes:
        best: The fewest nodes, divided into tiers, that meet the objectives.
        around: One node more or less of one tier.
        same_undivided: As many undivided nodes as `best` has.
        fewest_undivided: The fewest undivided nodes that meet the objectives; None: none up to
            the limit do.
    """

    best: Forecast
    around: tuple[Forecast, ...]
    same_undivided: Forecast
    fewest_undivided: Forecast | None


@dataclass(slots=True)
class Search:
    """Searches up to `max_nodes` of a tier. `progress` is called with what is being simulated."""

    evaluator: Evaluator
    max_nodes: int
    progress: Progress

    def plan(self) -> Plan:
        """Raises `NoPlan` when no number of nodes up to the limit is enough."""
        self._check_idle()
        best = self._best()
        around = tuple(self._try(nodes) for nodes in _around(best.nodes))
        total = best.nodes.total
        same = self._try(Nodes(0, total))
        return Plan(
            best=best, around=around, same_undivided=same, fewest_undivided=self._undivided(total)
        )

    def _check_idle(self) -> None:
        """Raises `NoPlan` when even idle nodes would be too slow."""
        evaluator = self.evaluator
        times, profile, limits = evaluator.times, evaluator.profile, evaluator.objectives
        lengths = sorted(arrival.num_prompt for arrival in evaluator.traffic.arrivals)
        length = lengths[int(limits.percentile / 100 * (len(lengths) - 1))]
        new = max(1, round(length * (1 - evaluator.traffic.hit_limit())))
        alone_s = times.prompt_s(new, length) + profile.overhead_s
        step_s = times.decode_s(1, evaluator.traffic.mean_prompt) * times.spread
        if alone_s > limits.ttft_s:
            raise NoPlan(
                f"the {limits.tail} of prompts has {length} tokens, which take "
                f"{1e3 * alone_s:.0f} ms on an idle node, and --slo-ttft-ms is "
                f"{1e3 * limits.ttft_s:.0f}: allow more time, use faster nodes, or lower "
                "--percentile"
            )
        if step_s > limits.itl_s:
            raise NoPlan(
                f"a decode step of one sequence takes up to {1e3 * step_s:.1f} ms, and "
                f"--slo-itl-ms is {1e3 * limits.itl_s:g}: allow more time, or use faster nodes"
            )

    def _best(self) -> Forecast:
        least_prefill, least_decode = self._least()
        plenty = min(self.max_nodes, 2 * least_decode + 2)
        objectives = self.evaluator.objectives
        prefill = self._fewest(
            least_prefill,
            lambda count: self._try(Nodes(count, plenty)).begins_in_time(objectives),
        )
        if prefill is None:
            raise NoPlan(self._why("TTFT", Nodes(self.max_nodes, plenty)))
        enough = prefill
        decode = self._fewest(
            least_decode,
            lambda count: self._try(Nodes(enough, count)).itl_tail_s <= objectives.itl_s,
        )
        if decode is None:
            raise NoPlan(self._why("ITL", Nodes(prefill, self.max_nodes)))
        outcome = self._try(Nodes(prefill, decode))
        while not outcome.meets(objectives):
            prefill, decode = outcome.nodes.prefill, outcome.nodes.decode
            decode_waits = self._try(Nodes(prefill, decode + 1)).begins_in_time(objectives)
            late = not (outcome.begins_in_time(objectives) or decode_waits)
            following = Nodes(prefill + 1, decode) if late else Nodes(prefill, decode + 1)
            if max(following.prefill, following.decode) > self.max_nodes:
                raise NoPlan(self._why("TTFT and ITL together", outcome.nodes))
            outcome = self._try(following)
        return outcome

    def _undivided(self, total: int) -> Forecast | None:
        objectives = self.evaluator.objectives
        count = self._fewest(
            max(self._least()), lambda n: self._try(Nodes(0, n)).meets(objectives),
            min(self.max_nodes, 4 * total),
        )  # fmt: skip
        return None if count is None else self._try(Nodes(0, count))

    def _least(self) -> tuple[int, int]:
        """Returns the nodes that the work alone takes, were every one always busy."""
        evaluator, traffic = self.evaluator, self.evaluator.traffic
        speed = evaluator.times.tokens_per_s(max(1, round(traffic.mean_prompt)))
        new = traffic.rate * traffic.mean_prompt * (1 - traffic.hit_limit())
        batch = evaluator.batch_limit()
        context = traffic.mean_prompt + traffic.mean_output / 2
        step_s = evaluator.times.decode_s(batch, batch * context)
        tokens = traffic.rate * traffic.mean_output
        return max(1, math.ceil(new / speed)), max(1, math.ceil(tokens * step_s / batch))

    def _fewest(
        self, low: int, is_enough: Callable[[int], bool], most: int | None = None
    ) -> int | None:
        """Returns the smallest number for which `is_enough`, if more never hurts; None when not
        even `most` is."""
        most = most or self.max_nodes
        low = min(low, most)
        high, step = low, 1
        while not is_enough(high):
            if high == most:
                return None
            low, high, step = high + 1, min(most, high + step), step * 2
        while low < high:
            middle = (low + high) // 2
            if is_enough(middle):
                high = middle
            else:
                low = middle + 1
        return high

    def _try(self, nodes: Nodes) -> Forecast:
        self.progress(str(nodes))
        return self.evaluator.outcome(nodes)

    def _why(self, what: str, nodes: Nodes) -> str:
        outcome, limits = self.evaluator.outcome(nodes), self.evaluator.objectives
        text = (
            f"{what} cannot be met with up to {self.max_nodes} nodes of a tier: {nodes} would have "
            f"a TTFT {limits.tail} of {1e3 * outcome.ttft_tail_s:.0f} ms (objective "
            f"{1e3 * limits.ttft_s:.0f} ms) and an ITL {limits.tail} of "
            f"{1e3 * outcome.itl_tail_s:.1f} ms (objective {1e3 * limits.itl_s:.1f} ms). "
        )
        if not outcome.keeps_up:
            text += "Prompts come faster than they are computed, so ever more would wait. "
        return text + "Allow more time, use faster nodes (more GPUs each), or raise --max-nodes"


def _around(nodes: Nodes) -> list[Nodes]:
    near = [
        Nodes(nodes.prefill + more, nodes.decode + other)
        for more, other in ((1, 0), (-1, 0), (0, 1), (0, -1))
    ]
    return [found for found in near if found.prefill > 0 and found.decode > 0]
