"""Says what a line of the log tells of an answer: times, tokens, nodes; never content."""

from __future__ import annotations

from collections.abc import Sequence

from decode_node.observe.timeline import RequestRecord
from edge.logs.formatters import Field


def facts_of(model: str, records: Sequence[RequestRecord]) -> dict[str, Field]:
    """Returns the facts of a request with these choices. Times and the nodes are the first one's,
    in seconds since the request was received."""
    first = records[0]
    found: dict[str, Field] = {
        "model": model,
        "prompt_tokens": first.num_prompt_tokens,
        "cached_tokens": first.prefill.cached_tokens,
        "output_tokens": sum(record.num_output_tokens for record in records),
        "finish_reason": ",".join(record.finish_reason or "abort" for record in records),
        "prefill": first.prefill.prefill_node or first.prefill.path,
        "attempts": first.prefill.attempts,
    }
    if first.first_token_at:
        found["queue_s"] = round(first.queue_s, 6)
        found["first_token_s"] = round(first.first_token_at - first.received_at, 6)
    return found
