"""The metrics of a prefill node about prompts, besides the state of its engine."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Gauge, Histogram

from edge.http.event_loop.loop_lateness import LoopLateness
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
from kv_transfer.layer_times import LayerTime

_OUTCOMES = (
    "done", "cancelled", "given_up", "kv_transfer", "cannot_follow", "ended", "engine_dead",
    "unavailable", "failed_precondition", "invalid_argument", "resource_exhausted", "not_found",
)  # fmt: skip


class PrefillMetrics:
    """Owns the node's registry."""

    def __init__(self, config: EngineConfig) -> None:
        self.registry = CollectorRegistry()
        self.lateness = LoopLateness()
        self.registry.register(self.lateness)
        self._labels = metric_labels(config)
        self._ended = counters_from_zero(
            self.registry,
            self._labels,
            "tandem_prefill_requests",
            "Prompts by how they ended.",
            "outcome",
            _OUTCOMES,
        )
        self.open = Gauge(
            "tandem_open_prefills", "Calls being served.", LABELS, registry=self.registry
        ).labels(*self._labels)
        self._ttft = self._histogram(
            "vllm:time_to_first_token_seconds", "Received until token.", TTFT_BUCKETS
        )
        self._queue = self._histogram(
            "vllm:request_queue_time_seconds", "Received until begun.", LATENCY_BUCKETS
        )
        self._prefill = self._histogram(
            "vllm:request_prefill_time_seconds", "Begun until token.", LATENCY_BUCKETS
        )
        self._prompt_tokens = self._histogram(
            "vllm:request_prompt_tokens", "Tokens of the prompt.", TOKEN_BUCKETS
        )
        self._kv_held = self._histogram(
            "tandem_kv_held_seconds", "Token until all KV was taken.", TTFT_BUCKETS
        )

        self._layer_save = self._histogram(
            "tandem_kv_layer_save_seconds", "A layer computed until out of its blocks.", ITL_BUCKETS
        )

    def ended(self, outcome: str) -> None:
        """Counts a call that has ended: `done`; `cancelled` by the caller, or `given_up` by who
        pulled its KV; or the code of a failure."""
        self._ended.labels(*self._labels, outcome).inc()

    def first_token(
        self,
        num_prompt_tokens: int,
        queue_s: float,
        prefill_s: float,
        exemplar: dict[str, str] | None = None,
    ) -> None:
        self._prompt_tokens.observe(num_prompt_tokens)
        self._queue.observe(queue_s, exemplar)
        self._prefill.observe(prefill_s, exemplar)
        self._ttft.observe(queue_s + prefill_s, exemplar)

    def kv_taken(self, held_s: float, layers: Sequence[LayerTime]) -> None:
        self._kv_held.observe(held_s)
        for ready, saved in layers:
            if ready and saved:
                self._layer_save.observe(max(0.0, saved - ready))

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(name, text, LABELS, buckets=buckets, registry=self.registry)
        return histogram.labels(*self._labels)
