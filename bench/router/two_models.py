#!/usr/bin/env python3
"""Measures what a flood on one model does to another behind the same routers, in virtual time.

Two models have half of the nodes each. One is asked for less than its nodes can compute, the other
for several times of it. With one line for all, as routers had it, requests for the quiet model wait
behind a flood that its own nodes never see. Prompts are short, so that slots and line fill before a
node's own queue is too long (long prompts are refused by the estimate of their wait either way).

    python -m bench.router.two_models        a minute; writes bench/results/two_models.json
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from bench.record import write_result
from bench.router.requests import at_load, make_requests
from bench.workload import PRESETS
from planner.simulation.cluster import ClusterShape, SimCluster
from planner.simulation.jobs import Job, SimRouter
from planner.simulation.requests import SimRequest
from planner.simulation.step_times import PrefillCost
from router.admission.admission_gate import GateLimits
from router.admission.model_gates import ModelGates
from router.nodes.address import NodeAddress
from router.nodes.report import NodeReport
from router.placement.choose_policy import PolicyName, choose_policy
from router.placement.tandem_policy import TandemParameters

SLO_S = 5.0
QUIET, FLOODED = "quiet", "flooded"
LOADS = (0.5, 1.0, 2.0, 4.0)
_QUIET_LOAD = 0.6
_NODES = 8
"""Prefill nodes of each model."""
_COUNT = 8000
_WARM_PART = 0.15
_GATE = GateLimits(num_routers=4)
"""The settings as they come; requests name no deadline."""


@dataclass(slots=True)
class Seen:
    """Holds what clients of one model see, after the warm-up."""

    ttft_s: list[float] = field(default_factory=list)
    num_refused: int = 0

    @property
    def slo(self) -> float:
        """Returns the share of first tokens in time, of all requests that came."""
        return sum(t < SLO_S for t in self.ttft_s) / max(1, len(self.ttft_s) + self.num_refused)

    @property
    def refused(self) -> float:
        return self.num_refused / max(1, len(self.ttft_s) + self.num_refused)


class TwoModelCluster(SimCluster):
    """Gives even nodes to one model, odd ones to the other. With `lines_apart` each model has a
    line and slots of its own, else there is one line with all slots."""

    def __init__(self, seed: int, *, lines_apart: bool) -> None:
        shape = ClusterShape(num_prefill=2 * _NODES, num_decode=_NODES)
        super().__init__(
            shape,
            lambda registry, rng: choose_policy(
                PolicyName.TANDEM, registry, rng, TandemParameters()
            ),
            seed,
        )
        for tier in (self.prefills, self.decodes):
            for index, node in enumerate(tier):
                node.model = (QUIET, FLOODED)[index % 2]
        self.seen: defaultdict[str, Seen] = defaultdict(Seen)
        self._lines_apart = lines_apart
        self._views = [self._by_model(router) for router in self.routers]

    def _by_model(self, router: SimRouter) -> dict[str, SimRouter]:
        """Returns the router as requests for each model see it."""
        num_nodes = _NODES if self._lines_apart else 2 * _NODES
        gates = ModelGates(
            limits=_GATE,
            num_nodes=lambda model: num_nodes,
            clock=router.registry.clock,
            rng=random.Random(self._rng.random()),
        )
        return {
            model: replace(router, gate=gates.of(model if self._lines_apart else ""))
            for model in (QUIET, FLOODED)
        }

    def _arrive(self, request: SimRequest) -> None:
        self.routers = [self._rng.choice(self._views)[request.info.model]]
        super()._arrive(request)

    def _tell(self, address: NodeAddress, report: NodeReport) -> None:
        for views in self._views:
            views[QUIET].registry.take_report(address, report)

    def _refuse(self, request: SimRequest) -> None:
        super()._refuse(request)
        self.seen[request.info.model].num_refused += self._counts(request)

    def _measure_first(self, job: Job) -> None:
        super()._measure_first(job)
        if self._counts(job.request):
            ttft_s = self.timeline.now - job.request.at_s
            self.seen[job.request.info.model].ttft_s.append(ttft_s)


def requests_of(model: str, load: float, seed: int) -> list[SimRequest]:
    """Returns requests for one model, which load its nodes so."""
    cost = PrefillCost()
    preset = PRESETS["chat-short"].scaled(1.0, 0.38, None)
    made = make_requests(preset, 5.0 * load * _NODES, _COUNT, seed)
    timed = at_load(made, load * _NODES, lambda r: cost.seconds(r.num_prompt, r.num_prompt))
    return [replace(r, info=replace(r.info, model=model, model_name=model)) for r in timed]


def run(load: float, *, lines_apart: bool, seed: int = 0) -> dict[str, Seen]:
    """Returns what both models' clients see, while one is asked for with `load`."""
    quiet, flood = requests_of(QUIET, _QUIET_LOAD, seed), requests_of(FLOODED, load, seed + 1)
    until = min(quiet[-1].at_s, flood[-1].at_s)
    arrivals: Sequence[SimRequest] = sorted(
        (r for r in (*quiet, *flood) if r.at_s <= until), key=lambda r: r.at_s
    )
    cluster = TwoModelCluster(seed, lines_apart=lines_apart)
    cluster.run(arrivals, _WARM_PART)
    return cluster.seen


def main() -> None:
    print("| load of the flooded model | line | quiet: SLO | refused | flooded: SLO | refused |")
    print("|---|---|---|---|---|---|")
    runs = []
    for load in LOADS:
        for apart in (False, True):
            seen = run(load, lines_apart=apart)
            quiet, flooded = seen[QUIET], seen[FLOODED]
            figures = (quiet.slo, quiet.refused, flooded.slo, flooded.refused)
            name = "one for each" if apart else "one for both"
            print(f"| {load:g} | {name} | " + " | ".join(f"{f:.3f}" for f in figures) + " |")
            runs.append(
                {
                    "load": load,
                    "lines": name,
                    "quiet_slo": quiet.slo,
                    "quiet_refused": quiet.refused,
                    "flooded_slo": flooded.slo,
                    "flooded_refused": flooded.refused,
                }
            )
    write_result("two_models", {"quiet_load": _QUIET_LOAD, "nodes_each": _NODES, "runs": runs})


if __name__ == "__main__":
    main()
