"""The metrics of a decode node about requests, besides the state of its engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from decode_node.answer.choice import Choice
from decode_node.disagg.prefill_events import FAILURE_CODES, PASSED_OVER
from decode_node.disagg.proxy import DisaggProxy
from decode_node.observe.request_facts import facts_of
from decode_node.observe.request_spans import spans_of
from decode_node.observe.timeline import RequestRecord
from decode_node.observe.token_gaps import GapCollector
from edge.http.event_loop.loop_lateness import LoopLateness
from edge.logs.request_log import note_facts
from edge.tracing.tracer import Tracer
from engine.config import EngineConfig
from engine.node.metrics.engine_metrics import (
    ITL_BUCKETS,
    LABELS,
    LATENCY_BUCKETS,
    TOKEN_BUCKETS,
    TTFT_BUCKETS,
    counters_from_zero,
    metric_labels,
)

Exemplar = dict[str, str] | None

_BYTES_PER_S_BUCKETS = (
    5e7, 1e8, 2.5e8, 5e8, 1e9, 2e9, 3e9, 5e9, 7.5e9, 1e10, 1.5e10, 2e10, 3e10, 5e10, 7.5e10, 1e11,
    2e11,
)  # fmt: skip
_FINISHED = "stop", "length", "abort", "error"
_DECISIONS = _DECODE_ONLY, _PREFILL_ONLY, _PREFILL_DECODE = (
    "decode-only",
    "prefill-only",
    "prefill-decode",
)
_MEASURES = (
    # (name, meaning, buckets)
    ("vllm:time_to_first_token_seconds", "Received until first token.", TTFT_BUCKETS),
    ("vllm:request_time_per_output_token_seconds", "Mean after the first.", ITL_BUCKETS),
    ("vllm:e2e_request_latency_seconds", "Received until last token.", LATENCY_BUCKETS),
    ("vllm:request_queue_time_seconds", "Until the prompt was begun.", LATENCY_BUCKETS),
    ("vllm:request_prefill_time_seconds", "Begun until first token.", LATENCY_BUCKETS),
    ("vllm:request_decode_time_seconds", "First until last token.", LATENCY_BUCKETS),
    ("vllm:request_inference_time_seconds", "Prompt begun until last token.", LATENCY_BUCKETS),
    ("vllm:request_prompt_tokens", "Tokens of the prompt.", TOKEN_BUCKETS),
    ("vllm:request_generation_tokens", "Tokens of the answer.", TOKEN_BUCKETS),
    ("vllm:request_params_max_tokens", "Tokens allowed.", TOKEN_BUCKETS),
    ("vllm:request_max_num_generation_tokens", "Of its longest answer.", TOKEN_BUCKETS),
    ("vllm:request_prefill_kv_computed_tokens", "Of the prompt, not cached.", TOKEN_BUCKETS),
    ("vllm:request_params_n", "Answers asked for.", TOKEN_BUCKETS),
    ("tandem_kv_transfer_seconds", "First until last byte of KV.", TTFT_BUCKETS),
    (
        "tandem_kv_transfer_bytes_per_second",
        "Of a prompt's KV, in that time.",
        _BYTES_PER_S_BUCKETS,
    ),
    ("tandem_kv_ready_after_first_token_seconds", "KV complete after token one.", TTFT_BUCKETS),
    ("tandem_kv_inject_seconds", "Last byte of KV received until in its block.", TTFT_BUCKETS),
    ("tandem_join_seconds", "KV and token one here until token two.", TTFT_BUCKETS),
    ("tandem_second_token_seconds", "Token one until token two.", TTFT_BUCKETS),
)


class DecodeMetrics:
    """Owns the node's registry. Call `observe` once for each HTTP request, at its end; its trace
    goes to `tracer`, and what its log line tells to `note_facts`."""

    def __init__(self, config: EngineConfig, tracer: Tracer | None = None) -> None:
        self.registry = CollectorRegistry()
        self._tracer = tracer or Tracer()
        self._model_name = config.model.served_model_name
        labels = metric_labels(config)
        self._histograms = {
            name: Histogram(name, text, LABELS, buckets=buckets, registry=self.registry).labels(
                *labels
            )
            for name, text, buckets in _MEASURES
        }
        self._labels = labels
        self._gaps = GapCollector(labels)
        self.registry.register(self._gaps)
        self.lateness = LoopLateness()
        self.registry.register(self.lateness)
        self._success = self._counters(
            "vllm:request_success", "Requests by how they ended.", "finished_reason", _FINISHED
        )
        self._decisions = self._counters(
            "tandem_disagg_decision", "Where prompts were computed.", "decision_type", _DECISIONS
        )
        self._failures = self._counters(
            "tandem_prefill_attempt_failures",
            "Attempts that failed, by reason.",
            "reason",
            FAILURE_CODES,
        )
        self._passed_over = self._counters(
            "tandem_prefill_nodes_passed_over",
            "Prefill nodes that were not asked for a prompt, by reason.",
            "reason",
            PASSED_OVER,
        )
        self._fallbacks = self._counter(
            "tandem_local_prefill_fallbacks", "Prompts computed here after a failed attempt."
        )
        self._attempts = self._counter("tandem_prefill_attempts", "Prompts given to prefill nodes.")
        self._retries = self._counter("tandem_prefill_retries", "Of these, after a failed attempt.")
        self._kv_bytes = self._counter("tandem_kv_received_bytes", "KV taken.")
        self._ignored_fields = self._counter(
            "tandem_ignored_fields", "Fields of requests of no known name."
        )

    def watch_proxy(self, proxy: DisaggProxy) -> None:
        """Adds gauges of what is open now."""
        for name, text, read in (
            ("tandem_open_requests", "Requests being served.", lambda: proxy.open.count),
            ("tandem_remote_prefills", "Calls to prefill nodes.", lambda: proxy.num_remote),
            ("tandem_credit_waiters", "Requests waiting for room.", lambda: proxy.num_queued),
            ("tandem_credit_blocks_free", "KV blocks not claimed.", lambda: proxy.num_free_blocks),
        ):
            gauge = Gauge(name, text, LABELS, registry=self.registry)
            gauge.labels(*self._labels).set_function(read)

    def fields_ignored(self, count: int) -> None:
        """Counts fields of a request that are not known and were ignored."""
        self._ignored_fields.inc(count)

    def observe(self, choices: Sequence[Choice]) -> None:
        self._histograms["vllm:request_params_n"].observe(
            len(choices) / max(1, sum(choice.is_first_of_prompt for choice in choices))
        )
        note_facts(**facts_of(self._model_name, [choice.record for choice in choices]))
        longest = max(choice.record.num_output_tokens for choice in choices)
        self._histograms["vllm:request_max_num_generation_tokens"].observe(longest)
        seen: set[int] = set()
        for choice in choices:
            if choice.replay is None:
                exemplar = choice.request.trace.exemplar() if choice.request.trace else None
                self._observe_record(choice.record, exemplar)
                if id(choice.record.prefill) not in seen:
                    seen.add(id(choice.record.prefill))
                    self._observe_prefill(choice.record, exemplar)
                if self._tracer.wants(choice.request.trace):
                    spans = spans_of(choice.record, choice.request, self._model_name)
                    self._tracer.write(choice.request.trace, spans)

    def _observe_record(self, record: RequestRecord, exemplar: Exemplar) -> None:
        reason = record.finish_reason or "abort"
        self._success.labels(*self._labels, reason).inc()
        self._observe_tokens(record)
        self._observe_times(record, exemplar)

    def _observe_prefill(self, record: RequestRecord, exemplar: Exemplar) -> None:
        """Counts once what the choices of a prompt share; `record` is the first one's."""
        prefill = record.prefill
        self._decisions.labels(*self._labels, _decision(record)).inc()
        self._attempts.inc(prefill.attempts)
        self._retries.inc(max(0, prefill.attempts - 1))
        if prefill.attempts and prefill.path == "local":
            self._fallbacks.inc()
        for code in prefill.failures:
            counters = self._passed_over if code in PASSED_OVER else self._failures
            counters.labels(*self._labels, code).inc()
        self._observe_kv(record, exemplar)

    def _observe_tokens(self, record: RequestRecord) -> None:
        histograms = self._histograms
        histograms["vllm:request_prompt_tokens"].observe(record.num_prompt_tokens)
        histograms["vllm:request_generation_tokens"].observe(record.num_output_tokens)
        histograms["vllm:request_params_max_tokens"].observe(record.max_tokens)
        computed = record.num_prompt_tokens - record.prefill.cached_tokens
        histograms["vllm:request_prefill_kv_computed_tokens"].observe(max(0, computed))

    def _observe_times(self, record: RequestRecord, exemplar: Exemplar) -> None:
        if not record.first_token_at:
            return
        histograms = self._histograms
        decode_s = record.last_token_at - record.first_token_at
        first_token_s = record.first_token_at - record.received_at
        for name, value in (
            ("vllm:time_to_first_token_seconds", first_token_s),
            ("vllm:e2e_request_latency_seconds", record.last_token_at - record.received_at),
            ("vllm:request_queue_time_seconds", record.queue_s),
            ("vllm:request_prefill_time_seconds", record.prefill_s),
            ("vllm:request_decode_time_seconds", decode_s),
            ("vllm:request_inference_time_seconds", record.prefill_s + decode_s),
        ):
            histograms[name].observe(value, exemplar)
        if record.num_output_tokens > 1:
            histograms["vllm:request_time_per_output_token_seconds"].observe(
                decode_s / (record.num_output_tokens - 1), exemplar
            )
        if record.second_token_at:
            histograms["tandem_second_token_seconds"].observe(
                record.second_token_at - record.first_token_at, exemplar
            )
        self._gaps.observe(record.gaps, exemplar)

    def _observe_kv(self, record: RequestRecord, exemplar: Exemplar) -> None:
        kv = record.prefill.kv
        if kv is None or not kv.num_bytes:
            return
        self._kv_bytes.inc(kv.num_bytes)
        histograms = self._histograms
        seconds = kv.last_byte_at - kv.first_byte_at
        histograms["tandem_kv_transfer_seconds"].observe(seconds, exemplar)
        if seconds > 0:
            histograms["tandem_kv_transfer_bytes_per_second"].observe(kv.num_bytes / seconds)
        if record.first_token_at:
            histograms["tandem_kv_ready_after_first_token_seconds"].observe(
                max(0.0, kv.last_byte_at - record.first_token_at), exemplar
            )
        histograms["tandem_kv_inject_seconds"].observe(max(0.0, kv.last_byte_at - kv.received_at))
        if record.second_token_at:
            histograms["tandem_join_seconds"].observe(
                max(0.0, record.second_token_at - record.joined_at)
            )

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, LABELS, registry=self.registry).labels(*self._labels)

    def _counters(self, name: str, text: str, label: str, values: Iterable[str]) -> Counter:
        return counters_from_zero(self.registry, self._labels, name, text, label, values)


def _decision(record: RequestRecord) -> str:
    prefill = record.prefill
    if prefill.attempts == 0:
        return _DECODE_ONLY
    is_complete = record.finish_reason in ("stop", "length") and not record.second_token_at
    is_whole = prefill.path == "remote" and prefill.kv is None and is_complete
    return _PREFILL_ONLY if is_whole else _PREFILL_DECODE
