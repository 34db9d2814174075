"""The trace of one request, as the decode node sees it.

    request  ├── queue ──┤── prefill ──┤
             ├─────── token 1 ─────────┤──────── token 2 ────────┤
                            ├── stream ──┤ inject ├──── join ────┤

`stream`: first to last byte of KV from the network. `inject`: until the last byte is in its block.
`join`: from KV and token one being here until our engine has answered with token two.
"""

from __future__ import annotations

from collections.abc import Iterator

from decode_node.observe.timeline import RequestRecord
from edge.tracing.file import Span


def spans_of(record: RequestRecord) -> list[Span]:
    """Returns the spans, the request's first. Parts that never happened are left out."""
    end = max(record.last_token_at, record.first_token_at, record.received_at)
    attributes: dict[str, str | int] = {
        "prompt_tokens": record.num_prompt_tokens,
        "output_tokens": record.num_output_tokens,
        "cached_tokens": record.prefill.cached_tokens,
        "path": record.prefill.path,
        "attempts": record.prefill.attempts,
        "finish_reason": record.finish_reason or "abort",
    }
    if record.prefill.prefill_node:
        attributes["prefill_node"] = record.prefill.prefill_node
    if record.prefill.failures:
        attributes["failures"] = ",".join(record.prefill.failures)
    return [Span("request", record.received_at, end, attributes), *_parts(record)]


def _parts(record: RequestRecord) -> Iterator[Span]:
    if not record.first_token_at:
        return
    begun = record.received_at + record.queue_s
    yield Span("queue", record.received_at, begun)
    yield Span("prefill", begun, begun + record.prefill_s)
    yield Span("token 1", record.received_at, record.first_token_at)
    kv = record.prefill.kv
    if kv is not None and kv.num_bytes:
        size = {"bytes": kv.num_bytes, "streams": kv.num_streams}
        yield Span("stream", kv.first_byte_at, kv.received_at, size)
        yield Span("inject", kv.received_at, kv.last_byte_at)
    if record.second_token_at:
        if record.joined_at:
            yield Span("join", record.joined_at, record.second_token_at)
        yield Span("token 2", record.first_token_at, record.second_token_at)
