"""When a prefill node would have the first token of a prompt.

    ttft = queue + weight · service

queue     tokens that wait there (its report, and our own dispatches since), at its own pace; more
          when the report is old, because others have dispatched too
service   the prompt itself, without the tokens that are cached there. The weight is above 1: its
          time also delays everybody who comes after it, and what is cached for them is evicted
"""

from __future__ import annotations

from dataclasses import dataclass

from router.node import Node
from router.placement.service_time import ServiceTimeFit

_FRESH_S = 1.0
_DOUBT_PER_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class TtftEstimator:
    fit: ServiceTimeFit
    own_work_weight: float = 2.0

    def queue_s(self, node: Node, now: float) -> float:
        """Until `node` is through with what it has."""
        waiting = node.predicted_tokens * self.fit.s_per_token * self.pace(node)
        return waiting * doubt(now - node.reported_at)

    def service_s(self, node: Node, num_new: float, num_prompt: int) -> float:
        return self.fit.time.seconds(num_new, num_prompt) * self.pace(node)

    def ttft_s(self, node: Node, num_new: float, num_prompt: int, now: float) -> float:
        """What a client would see."""
        return self.queue_s(node, now) + self.service_s(node, num_new, num_prompt)

    def cost_s(self, node: Node, num_new: float, num_prompt: int, now: float) -> float:
        """What the choice between nodes goes by: `ttft_s` with the weight."""
        own = self.own_work_weight * self.service_s(node, num_new, num_prompt)
        return self.queue_s(node, now) + own

    def pace(self, node: Node) -> float:
        """Of `node` as measured; before any prompt was, by the speed that it reports."""
        measured = node.report.prefill_tokens_per_s if node.report else 0.0
        if node.pace.is_known or measured == 0.0:
            return node.pace.factor
        return 1 / (measured * self.fit.s_per_token)


def doubt(report_age_s: float) -> float:
    """What to multiply a queue by that was reported so long ago."""
    return 1 + _DOUBT_PER_S * max(0.0, report_age_s - _FRESH_S)
