"""A simulated cluster whose tiers grow and shrink, and what their GPUs cost.

1. starting   a pod was asked for: it costs, and serves nothing for `start_s`
2. serving    routers know it
3. leaving    it was taken away: routers send nothing more, it costs until its last answer
-  shrinking  takes starting pods first, then the youngest
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from planner.simulation.cluster import ClusterShape, MakePolicy, SimCluster
from planner.simulation.jobs import Job, SimRouter
from planner.simulation.nodes import SimDecodeNode, SimPrefillNode
from router.nodes.address import NodeRole
from router.scaling.scaling_signal import ScalingObjectives, ScalingSignal

SimNode = SimPrefillNode | SimDecodeNode


@dataclass(slots=True, eq=False)
class _Pod:
    asked_at: float
    node: SimNode | None = None
    is_wanted: bool = True


@dataclass(slots=True)
class _Tier:
    pods: list[_Pod] = field(default_factory=list)
    leaving: list[_Pod] = field(default_factory=list)
    gone_s: float = 0.0


class ElasticCluster(SimCluster):
    """Adds sizes to a cluster. Every router has a signal for `objectives`."""

    def __init__(
        self,
        shape: ClusterShape,
        make_policy: MakePolicy,
        seed: int,
        objectives: ScalingObjectives,
        start_s: float,
    ) -> None:
        super().__init__(shape, make_policy, seed)
        self._start_s = start_s
        self._born = {NodeRole.PREFILL: shape.num_prefill, NodeRole.DECODE: shape.num_decode}
        self._tiers = {
            NodeRole.PREFILL: _Tier([_Pod(0.0, node) for node in self.prefills]),
            NodeRole.DECODE: _Tier([_Pod(0.0, node) for node in self.decodes]),
        }
        self.signals = {
            id(router): self._make_signal(router, objectives) for router in self.routers
        }

    def _make_signal(self, router: SimRouter, objectives: ScalingObjectives) -> ScalingSignal:
        registry = router.registry
        signal = ScalingSignal(
            objectives=objectives,
            nodes=registry.nodes,
            state=registry.state,
            clock=registry.clock,
            num_routers=self.shape.num_routers,
        )
        router.gate.on_request = signal.arrived
        return signal

    # Sizes -------------------------------------------------------------------------------------

    def size(self, role: NodeRole) -> int:
        """Returns the pods that were asked for and not taken away."""
        return len(self._tiers[role].pods)

    def nodes_of(self, role: NodeRole) -> Sequence[SimNode]:
        """Returns the nodes that serve."""
        return self.prefills if role is NodeRole.PREFILL else self.decodes

    def resize(self, role: NodeRole, count: int) -> None:
        tier = self._tiers[role]
        while len(tier.pods) < count:
            pod = _Pod(self.timeline.now)
            tier.pods.append(pod)
            self.timeline.at(
                self.timeline.now + self._start_s, lambda pod=pod: self._started(role, pod)
            )
        while len(tier.pods) > count:
            starting = [pod for pod in tier.pods if pod.node is None]
            pod = (starting or tier.pods)[-1]
            tier.pods.remove(pod)
            pod.is_wanted = False
            self._take_away(tier, pod)

    def gpu_s(self, role: NodeRole) -> float:
        """Returns the seconds that pods of the tier have been held so far."""
        self._forget_gone(self._tiers[role])
        tier, now = self._tiers[role], self.timeline.now
        return tier.gone_s + sum(now - pod.asked_at for pod in (*tier.pods, *tier.leaving))

    def _started(self, role: NodeRole, pod: _Pod) -> None:
        if not pod.is_wanted:
            return
        index = self._born[role]
        self._born[role] += 1
        if role is NodeRole.PREFILL:
            prefill = self._make_prefill(index)
            self.prefills.append(prefill)
            self._prefill_at[prefill.address.target] = prefill
            pod.node = prefill
        else:
            decode = self._make_decode(index)
            self.decodes.append(decode)
            self._decode_at[decode.address.target] = decode
            pod.node = decode
        self._tell_members()
        self.reports.tell(pod.node.address, pod.node.report())

    def _take_away(self, tier: _Tier, pod: _Pod) -> None:
        node = pod.node
        if isinstance(node, SimPrefillNode):
            self.prefills.remove(node)
        elif isinstance(node, SimDecodeNode):
            self.decodes.remove(node)
        tier.leaving.append(pod)
        self._tell_members()
        self._forget_gone(tier)

    def _forget_gone(self, tier: _Tier) -> None:
        for pod in list(tier.leaving):
            if pod.node is None or _is_done(pod.node):
                tier.leaving.remove(pod)
                tier.gone_s += self.timeline.now - pod.asked_at

    def _tell_members(self) -> None:
        for router in self.routers:
            router.registry.set_members(self._addresses())

    # What the signals receive ------------------------------------------------------------------

    def _first_token(self, node: SimPrefillNode, job: Job) -> None:
        super()._first_token(node, job)
        self.signals[id(job.router)].observe(job.request.info, self._outcome(node, job))

    def _end(self, node: SimDecodeNode, job: Job) -> None:
        num, took_s = job.request.num_output, self.timeline.now - job.first_at
        running = node.engine.num_running + 1
        self.signals[id(job.router)].finished(num, took_s, running)
        super()._end(node, job)


def _is_done(node: SimNode) -> bool:
    if isinstance(node, SimDecodeNode):
        return not node.num_running and not node.pending
    return node.engine.is_idle
