"""Decides when the decode node computes a prompt itself although there are prefill nodes.

A prompt so short that its KV would take longer to move than to compute; or a little longer one,
while the prefill nodes are so busy that it would be done sooner. Never on a decode node whose KV
cache is filling up: computing prompts makes everybody's tokens wait.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.nodes.node import Node

_DISTURBANCE = 1.3
"""A prompt takes so much longer between decode steps."""
_MAX_KV_USAGE = 0.8
_LONGER = 4


@dataclass(frozen=True, slots=True)
class LocalPrefillRule:
    """Applies to prompts up to `short_tokens`; with 0 only the decode node's own exact rule
    remains."""

    short_tokens: int = 0

    def applies(self, decode: Node, num_prompt: int, alone_s: float, remote_s: float) -> bool:
        """Returns whether it does. `alone_s` is to compute the prompt with nothing cached,
        `remote_s` to the first token by way of a prefill node."""
        if not self.short_tokens or decode.kv_usage_with(num_prompt) > _MAX_KV_USAGE:
            return False
        if num_prompt <= self.short_tokens:
            return True
        return num_prompt <= _LONGER * self.short_tokens and _DISTURBANCE * alone_s < remote_s
