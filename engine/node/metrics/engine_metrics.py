"""Shows the engine's state as Prometheus metrics, under vLLM's names where it has one.

Read from `SchedulerStats` at the moment of a scrape; nothing is counted twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from engine.config import EngineConfig
from engine.contracts.messages import EngineReady
from engine.contracts.outputs import (
    DURATION_BUCKETS,
    STEP_TOKEN_BUCKETS,
    DraftStats,
    Durations,
    GrammarStats,
    ImageStats,
    SchedulerStats,
    TokensPerStep,
)
from engine.frontend.calls.adapter_calls import AdapterCalls
from engine.node.metrics.adapter_metrics import adapter_metrics
from engine.node.metrics.device_peaks import DevicePeaks, peaks_of
from engine.node.metrics.expert_metrics import expert_metrics
from engine.node.metrics.group_metrics import group_metrics
from engine.node.metrics.inspection_metrics import histogram_of, residency_metrics, work_metrics
from engine.node.metrics.kv_transfer_metrics import kv_transfer_metrics
from engine.node.metrics.tier_metrics import tier_metrics

LABELS = ("model_name", "engine")


def _bounds(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split()))


TTFT_BUCKETS = _bounds(
    "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
)
ITL_BUCKETS = _bounds(
    "0.001 0.002 0.003 0.004 0.005 0.006 0.008 0.01 0.0125 0.015 0.02 0.025 0.03 0.04 0.05 0.075 "
    "0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80"
)
"""vLLM's begin at 10 ms, where a decode step of ours takes 3 to 17."""
LATENCY_BUCKETS = _bounds(
    "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
)
TOKEN_BUCKETS = tuple(float(1 << i) for i in range(18))


class MeasuredEngine(Protocol):
    """The part of `AsyncLLM` that is needed here."""

    @property
    def config(self) -> EngineConfig: ...
    @property
    def stats(self) -> SchedulerStats: ...
    @property
    def ready(self) -> EngineReady: ...
    @property
    def is_dead(self) -> bool: ...
    @property
    def adapters(self) -> AdapterCalls: ...


class EngineCollector(Collector):
    """Collects one engine's metrics, with labels `model_name` and `engine` (always 0: one a
    process)."""

    def __init__(self, engine: MeasuredEngine) -> None:
        self._engine = engine
        self._labels = metric_labels(engine.config)
        self._peaks = DevicePeaks()
        if engine.config.inspection.enable_mfu_metrics:
            self._peaks = peaks_of(engine.config, engine.ready.device_name)

    def collect(self) -> Iterable[Metric]:
        stats = self._engine.stats
        yield from self._gauges(stats)
        yield from self._counters(stats)
        yield from self._by_source(stats)
        yield self._by_reason(stats)
        yield self._step_tokens(stats.step_tokens)
        yield from self._grammar(stats.grammar)
        if self._engine.config.decode_query_len > 1:
            yield from self._drafts(stats.drafts)
        if stats.images is not None:
            yield from self._images(stats.images)
        yield from residency_metrics(stats.residency, LABELS, self._labels)
        yield from work_metrics(stats.work, self._peaks, LABELS, self._labels)
        known = self._engine.adapters.known
        lora = self._engine.config.lora
        yield from adapter_metrics(lora, stats.lora, known, LABELS, self._labels)
        yield from expert_metrics(stats.experts, LABELS, self._labels)
        yield from group_metrics(stats.groups, LABELS, self._labels)
        yield from kv_transfer_metrics(stats.kv_transfer, LABELS, self._labels)
        yield from tier_metrics(self._engine.config, stats, LABELS, self._labels)
        yield self._cache_config()
        yield from self._role()

    def _gauges(self, stats: SchedulerStats) -> Iterable[Metric]:
        ready = self._engine.ready
        total = stats.num_total_blocks or ready.num_blocks
        free = stats.num_free_blocks if stats.num_total_blocks else total
        for name, text, value in (
            ("vllm:num_requests_running", "Requests in the running batch.", stats.num_running),
            ("vllm:num_requests_waiting", "Requests that wait to run.", stats.num_waiting),
            ("vllm:kv_cache_usage_perc", "KV blocks in use, 0 to 1.", 1 - free / max(total, 1)),
            (
                "tandem_requests_waiting_for_remote_kvs",
                "Requests whose KV comes from elsewhere, until they run.",
                stats.num_waiting_for_remote_kvs,
            ),
            ("tandem_waiting_tokens", "Prompt tokens not yet computed.", stats.num_waiting_tokens),
            ("tandem_kv_blocks_free", "KV blocks that are not in use.", free),
            ("tandem_kv_blocks", "KV blocks.", total),
            ("tandem_rows_free", "Rows of the workers' tables that are free.", stats.num_free_rows),
            (
                "tandem_delayed_frees",
                "Ended requests whose blocks a transfer still holds.",
                stats.num_delayed_frees,
            ),
            (
                "tandem_prefill_tokens_per_second",
                "Prompt tokens computed a second, lately.",
                stats.prefill_tokens_per_s,
            ),
            ("tandem_engine_up", "1 while the engine lives.", float(not self._engine.is_dead)),
        ):
            yield self._gauge(name, text, value)

    def _counters(self, stats: SchedulerStats) -> Iterable[Metric]:
        prompt = stats.prompt_tokens_computed + stats.prompt_tokens_cached
        for name, text, value in (
            ("vllm:prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_cache_queries),
            ("vllm:prefix_cache_hits", "Prompt tokens found cached.", stats.prefix_cache_hits),
            (
                "vllm:external_prefix_cache_hits",
                "Prompt tokens whose KV came from a prefill node.",
                stats.prompt_tokens_transferred,
            ),
            (
                "vllm:external_prefix_cache_queries",
                "Prompt tokens that were not cached here.",
                stats.prompt_tokens_computed + stats.prompt_tokens_transferred,
            ),
            ("vllm:num_preemptions", "Requests put back to make room.", stats.num_preemptions),
            (
                "vllm:prompt_tokens",
                "Prompt tokens of all requests.",
                prompt + stats.prompt_tokens_transferred,
            ),
            ("vllm:prompt_tokens_cached", "Prompt tokens cached.", stats.prompt_tokens_cached),
            ("vllm:generation_tokens", "Tokens generated.", stats.generation_tokens),
            ("tandem_engine_steps", "Steps of the engine.", stats.num_steps),
            (
                "tandem_worker_host_seconds",
                "Time that the host of the first worker took to start steps.",
                stats.worker_host_s,
            ),
            (
                "tandem_kernel_compiles",
                "Kernels that workers compiled after the start, while requests waited.",
                stats.num_kernel_compiles,
            ),
            (
                "tandem_dropped_messages",
                "Messages on the engine's own sockets that no process of it can have sent.",
                stats.num_dropped_messages,
            ),
        ):
            counter = CounterMetricFamily(name, text, labels=LABELS)
            counter.add_metric(self._labels, value)
            yield counter

    def _by_source(self, stats: SchedulerStats) -> Iterable[Metric]:
        tokens = CounterMetricFamily(
            "vllm:prompt_tokens_by_source",
            "Where the KV of prompt tokens came from.",
            labels=(*LABELS, "source"),
        )
        for source, value in (
            ("local_compute", stats.prompt_tokens_computed),
            ("local_cache_hit", stats.prompt_tokens_cached - stats.prompt_tokens_loaded),
            ("host_memory", stats.prompt_tokens_loaded),
            ("peer_cache_hit", stats.prompt_tokens_pulled),
            ("external_kv_transfer", stats.prompt_tokens_transferred),
        ):
            tokens.add_metric((*self._labels, source), value)
        yield tokens

    def _by_reason(self, stats: SchedulerStats) -> Metric:
        waiting = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Requests that wait for room (capacity), or for KV that is on its way (deferred).",
            labels=(*LABELS, "reason"),
        )
        waiting.add_metric((*self._labels, "capacity"), stats.num_waiting)
        waiting.add_metric((*self._labels, "deferred"), stats.num_waiting_for_remote_kvs)
        return waiting

    def _step_tokens(self, tokens: TokensPerStep) -> Metric:
        name, text = "vllm:iteration_tokens_total", "Tokens that a step computed."
        return histogram_of(name, text, tokens, STEP_TOKEN_BUCKETS, LABELS, self._labels)

    def _drafts(self, stats: DraftStats) -> Iterable[Metric]:
        """Only of an engine that drafts, as vLLM has them."""
        for name, text, value in (
            ("num_drafts", "Times that a request had drafts in a step.", stats.num_drafts),
            ("num_draft_tokens", "Tokens drafted.", stats.num_draft_tokens),
            ("num_accepted_tokens", "Drafts that were right.", stats.num_accepted_tokens),
        ):
            counter = CounterMetricFamily(f"vllm:spec_decode_{name}", text, labels=LABELS)
            counter.add_metric(self._labels, value)
            yield counter
        by_place = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafts that were right, by their place in a step.",
            labels=(*LABELS, "position"),
        )
        for place in range(self._engine.config.decode_query_len - 1):
            accepted = stats.num_accepted_per_pos[place : place + 1] or [0]
            by_place.add_metric((*self._labels, str(place)), accepted[0])
        yield by_place

    def _images(self, stats: ImageStats) -> Iterable[Metric]:
        """Only of an engine that encodes images; the first two as vLLM has them."""
        for name, text, value in (
            ("vllm:mm_cache_queries", "Times that a request came to an image.", stats.num_queries),
            ("vllm:mm_cache_hits", "Of these, those that were encoded already.", stats.num_hits),
            ("tandem_image_tokens", "Tokens of images encoded.", stats.num_encoded_tokens),
        ):
            counter = CounterMetricFamily(name, text, labels=LABELS)
            counter.add_metric(self._labels, value)
            yield counter

    def _grammar(self, stats: GrammarStats) -> Iterable[Metric]:
        for name, text, durations in (
            (
                "tandem_grammar_compile_seconds",
                "Time to compile a grammar, beside the steps.",
                stats.compiling,
            ),
            (
                "tandem_grammar_wait_seconds",
                "Time that a step waited for a grammar that was not compiled yet.",
                stats.waiting,
            ),
            (
                "tandem_grammar_mask_seconds",
                "Time to fill the masks of a step, beside its forward pass.",
                stats.filling,
            ),
        ):
            yield self._histogram(name, text, durations)
        for name, text, value in (
            ("tandem_grammar_masks", "Masks filled: one for each token.", stats.num_masks),
            (
                "tandem_grammar_failures",
                "Requests that ended because their grammar could not be followed.",
                stats.num_failed,
            ),
        ):
            counter = CounterMetricFamily(name, text, labels=LABELS)
            counter.add_metric(self._labels, value)
            yield counter

    def _histogram(self, name: str, text: str, durations: Durations) -> Metric:
        return histogram_of(name, text, durations, DURATION_BUCKETS, LABELS, self._labels)

    def _cache_config(self) -> Metric:
        blocks = str(self._engine.ready.num_blocks)
        block_size = str(self._engine.config.cache.block_size)
        info = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Size of the KV cache.",
            labels=(*LABELS, "block_size", "num_gpu_blocks"),
        )
        info.add_metric((*self._labels, block_size, blocks), 1)
        return info

    def _role(self) -> Iterable[Metric]:
        """Yields what a node is, by which queries find one that changes its role."""
        transfer = self._engine.config.kv_transfer
        if transfer is not None:
            role = "prefill" if transfer.kv_role == "kv_producer" else "decode"
            info = GaugeMetricFamily(
                "tandem_node_role", "What the node is now.", labels=(*LABELS, "role")
            )
            info.add_metric((*self._labels, role), 1)
            yield info

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(name, text, labels=LABELS)
        gauge.add_metric(self._labels, value)
        return gauge


def counters_from_zero(
    registry: CollectorRegistry,
    labels: tuple[str, str],
    name: str,
    text: str,
    label: str,
    values: Iterable[str],
) -> Counter:
    """Returns a counter with one label besides `LABELS`, which is there for each of `values` from
    the beginning: an alert sees no increase in a series that its first event makes."""
    counter = Counter(name, text, (*LABELS, label), registry=registry)
    for value in values:
        counter.labels(*labels, value)
    return counter


def metric_labels(config: EngineConfig) -> tuple[str, str]:
    """Returns the values of `LABELS`."""
    return (config.model.served_model_name, "0")
