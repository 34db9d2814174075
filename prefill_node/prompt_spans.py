"""The trace of one prompt, as the prefill node sees it.

    request  ├── queue ──┤──── prefill ────┤──── kv held ────┤
                            ├ save layer 0 ┤
                               ├ save layer 1 ┤ ...

A layer is saved from when it was computed until all of its KV had left the blocks.
"""

from __future__ import annotations

from edge.tracing.file import Span
from kv_transfer.metadata import TransferStats


def spans_of(
    received_at: float, queue_s: float, token_at: float, released_at: float, kv: TransferStats
) -> list[Span]:
    """Returns the spans, the request's first. All times but `queue_s` are CLOCK_MONOTONIC
    seconds."""
    begun = received_at + queue_s
    return [
        Span("request", received_at, released_at, {"bytes": kv.num_bytes}),
        Span("queue", received_at, begun),
        Span("prefill", begun, token_at),
        *(
            Span(f"save layer {layer}", ready, saved)
            for layer, (ready, saved) in enumerate(kv.layers)
            if ready and saved
        ),
        *([Span("kv held", token_at, released_at)] if released_at > token_at else []),
    ]
