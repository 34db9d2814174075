"""The trace of one request, as the decode node sees it.

    chat MODEL  ├── queue ──┤── prefill ──┤
                ├─────── token 1 ─────────┤──────── token 2 ────────┤
                               ├── stream ──┤ inject ├──── join ────┤
                   ├── tandem.v1.Prefill/Prefill, a call of a prefill node ──┤

`stream`: first to last byte of KV from the network. `inject`: until the last byte is in its block.
`join`: from KV and token one being here until our engine has answered with token two.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from decode_node.observe.timeline import RequestRecord
from edge.tracing.span import AttributeValue, Span
from engine.frontend.input_processor import GenerationRequest

_ABORTED = "abort"
_FAILED = "error"


def spans_of(record: RequestRecord, request: GenerationRequest, model: str) -> list[Span]:
    """Returns the spans, the request's first. Parts that never happened are left out. Attributes
    have OpenTelemetry's names for generative AI, and vLLM's where those have none."""
    is_unfinished = not record.finish_reason
    end = max(record.last_token_at, record.first_token_at, record.received_at)
    if is_unfinished:
        end = max(end, time.monotonic())
    attributes = {
        **_asked(record, request, model),
        **_answered(record, model),
        **_latencies(record),
        **_prefill(record),
    }
    error = "the engine ended the request" if record.finish_reason == _FAILED else ""
    if error:
        attributes["error.type"] = _FAILED
    name = f"{record.operation} {model}"
    spans = [Span(name, record.received_at, end, attributes, error), *_parts(record)]
    return [*spans, *request.calls.spans(end)]


def _asked(
    record: RequestRecord, request: GenerationRequest, model: str
) -> dict[str, AttributeValue]:
    sampling = request.spec.sampling
    return {
        "gen_ai.operation.name": record.operation,
        "gen_ai.provider.name": "tandem",
        "gen_ai.request.model": model,
        "gen_ai.request.max_tokens": record.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
    }


def _answered(record: RequestRecord, model: str) -> dict[str, AttributeValue]:
    prompt, output = record.num_prompt_tokens, record.num_output_tokens
    return {
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": (record.finish_reason or _ABORTED,),
        "gen_ai.usage.input_tokens": prompt,
        "gen_ai.usage.output_tokens": output,
        "gen_ai.usage.cache_read.input_tokens": record.prefill.cached_tokens,
        "gen_ai.usage.prompt_tokens": prompt,
        "gen_ai.usage.completion_tokens": output,
    }


def _latencies(record: RequestRecord) -> dict[str, AttributeValue]:
    """Returns vLLM's latencies, in seconds; none before the first token."""
    if not record.first_token_at:
        return {}
    return {
        "gen_ai.latency.time_in_queue": record.queue_s,
        "gen_ai.latency.time_in_model_prefill": record.prefill_s,
        "gen_ai.latency.time_to_first_token": record.first_token_at - record.received_at,
        "gen_ai.latency.time_in_model_decode": record.last_token_at - record.first_token_at,
        "gen_ai.latency.e2e": record.last_token_at - record.received_at,
    }


def _prefill(record: RequestRecord) -> dict[str, AttributeValue]:
    prefill = record.prefill
    found: dict[str, AttributeValue] = {
        "tandem.prefill.path": prefill.path,
        "tandem.prefill.attempts": prefill.attempts,
    }
    if prefill.prefill_node:
        found["tandem.prefill.node"] = prefill.prefill_node
    if prefill.failures:
        found["tandem.prefill.failures"] = tuple(prefill.failures)
    return found


def _parts(record: RequestRecord) -> Iterator[Span]:
    if not record.first_token_at:
        return
    begun = record.received_at + record.queue_s
    yield Span("queue", record.received_at, begun)
    yield Span("prefill", begun, begun + record.prefill_s)
    yield Span("token 1", record.received_at, record.first_token_at)
    kv = record.prefill.kv
    if kv is not None and kv.num_bytes:
        size = {"tandem.kv.bytes": kv.num_bytes, "tandem.kv.streams": kv.num_streams}
        yield Span("stream", kv.first_byte_at, kv.received_at, size)
        yield Span("inject", kv.received_at, kv.last_byte_at)
    if record.second_token_at:
        if record.joined_at:
            yield Span("join", record.joined_at, record.second_token_at)
        yield Span("token 2", record.first_token_at, record.second_token_at)
