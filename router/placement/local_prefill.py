"""Decides when the decode node computes a prompt itself although there are prefill nodes.

short       a prompt so short that its KV would take longer to move than to compute; or a little
            longer one, while the prefill nodes are so busy that it would be done sooner
deflected   any prompt, while the prefill nodes are so busy that the decode node has computed it
            sooner in parts that leave running answers their objective: the room that its steps
            have is what it reports (`engine/sched/rows/step_slack.py`), none without an objective

Never on a decode node whose KV cache is filling up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from router.nodes.node import Node

_DISTURBANCE = 1.3
"""A prompt takes this much longer between decode steps."""
_MAX_KV_USAGE = 0.8
_LONGER = 4
_WORTH = 1.2
"""A prompt is deflected if it takes this much longer by way of the prefill nodes: what is moved for
less comes back the next moment."""


@dataclass(frozen=True, slots=True)
class LocalPrefillRule:
    """Applies to prompts up to `short_tokens`; with 0 only the decode node's own exact rule
    remains."""

    short_tokens: int = 0

    def local_s(self, decode: Node, num_prompt: int, alone_s: float, remote_s: float) -> float:
        """Returns the seconds to the first token if `decode` should compute the prompt; infinite if
        it should not. `alone_s` is to compute the prompt with nothing cached, `remote_s` to the
        first token by way of a prefill node."""
        if decode.kv_usage_with(num_prompt) > _MAX_KV_USAGE:
            return math.inf
        if self._is_short(num_prompt, alone_s, remote_s):
            return alone_s
        deflected_s = _deflected_s(decode, num_prompt)
        return deflected_s if _WORTH * deflected_s < remote_s else math.inf

    def _is_short(self, num_prompt: int, alone_s: float, remote_s: float) -> bool:
        if not self.short_tokens or num_prompt > _LONGER * self.short_tokens:
            return False
        return num_prompt <= self.short_tokens or _DISTURBANCE * alone_s < remote_s


def _deflected_s(decode: Node, num_prompt: int) -> float:
    """Returns the seconds until the steps of `decode` have had room for the prompts that it has and
    for this one. Those of batches come behind it."""
    room = decode.report.slack_tokens_per_s if decode.report is not None else 0.0
    before = max(0, decode.predicted_tokens - decode.work.idle_tokens)
    return (before + num_prompt) / room if room else math.inf
