"""The trace of one prompt, as the prefill node sees it.

    tandem.v1.Prefill/Prefill  ├── queue ──┤──── prefill ────┤──── kv held ────┤
                                              ├ save layer 0 ┤
                                                 ├ save layer 1 ┤ ...

A layer is saved from when it was computed until all of its KV had left the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from edge.logs.formatters import Field
from edge.tracing.rpc import PREFILL_CALL, PREFILL_RPC
from edge.tracing.span import AttributeValue, Span
from kv_transfer.metadata import TransferStats

_FINE = "done", "cancelled", "given_up"
"""Ends of a call that are no failures of this node."""
_MISTAKES = "invalid_argument", "cannot_follow"
"""Ends that the request itself is to blame for; their messages may quote it."""


@dataclass(slots=True, kw_only=True)
class PromptRecord:
    """Is filled while a prompt is served. `outcome` says how its call ends, as far as is known; the
    other times are CLOCK_MONOTONIC seconds, 0.0 for not yet."""

    received_at: float
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    outcome: str = "cancelled"
    failure: str = ""
    queue_s: float = 0.0
    token_at: float = 0.0
    released_at: float = 0.0
    kv: TransferStats = field(default_factory=TransferStats)

    def failed(self, outcome: str, message: str) -> None:
        """Notes a failure. What a request did wrong is for its client's eyes alone."""
        self.outcome = outcome
        self.failure = "" if outcome in _MISTAKES else message

    def facts(self) -> dict[str, Field]:
        """Returns what a line of the log tells of a call that has ended; times in seconds."""
        found: dict[str, Field] = {
            "outcome": self.outcome,
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": self.num_cached_tokens,
            "duration_s": round(self.released_at - self.received_at, 6),
        }
        if self.token_at:
            found["queue_s"] = round(self.queue_s, 6)
            found["first_token_s"] = round(self.token_at - self.received_at, 6)
            found["kv_bytes"] = self.kv.num_bytes
        if self.failure:
            found["error"] = self.failure
        return found


def spans_of(record: PromptRecord, model: str) -> list[Span]:
    """Returns the spans of a call that has ended, the request's first. Parts that never happened
    are left out."""
    attributes: dict[str, AttributeValue] = {
        **PREFILL_RPC,
        "gen_ai.provider.name": "tandem",
        "gen_ai.request.model": model,
        "gen_ai.usage.input_tokens": record.num_prompt_tokens,
        "gen_ai.usage.prompt_tokens": record.num_prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.num_cached_tokens,
        "tandem.kv.bytes": record.kv.num_bytes,
        "tandem.prefill.outcome": record.outcome,
    }
    error = ""
    if record.outcome not in _FINE:
        attributes["error.type"] = record.outcome
        error = record.failure or record.outcome
    return [
        Span(PREFILL_CALL, record.received_at, record.released_at, attributes, error),
        *_parts(record),
    ]


def _parts(record: PromptRecord) -> list[Span]:
    token_at, released_at = record.token_at, record.released_at
    if not token_at:
        return []
    begun = record.received_at + record.queue_s
    return [
        Span("queue", record.received_at, begun),
        Span("prefill", begun, token_at),
        *(
            Span(f"save layer {layer}", ready, saved)
            for layer, (ready, saved) in enumerate(record.kv.layers)
            if ready and saved
        ),
        *([Span("kv held", token_at, released_at)] if released_at > token_at else []),
    ]
