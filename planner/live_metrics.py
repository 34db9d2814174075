"""Takes speeds from a running cluster: what its nodes' /metrics tell under load.

A prefill node tells how many prompt tokens it computes in a second; a decode node how long its
clients wait between tokens, how many sequences run, and how much KV fits. That is one point of each
curve: a step is taken to be no shorter with fewer sequences, and to grow in proportion with more. A
plan from it is careful; `tandem bench` measures the curves.
"""

from __future__ import annotations

import http.client
import re
import urllib.request
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from prometheus_client.parser import text_string_to_metric_families

from engine.speed.profile import DecodePoint, PrefillPoint, SpeedProfile
from planner.errors import MetricsError

_V = "tandem_prefill_tokens_per_second"
_T = "vllm:inter_token_latency_seconds"
_RUNNING = "vllm:num_requests_running"
_USAGE = "vllm:kv_cache_usage_perc"
_CONFIG = "vllm:cache_config_info"
_TIMEOUT_S = 10
_PROMPT_TOKENS = 2048
_NUMBER = re.compile(r"[0-9]+")

Samples = Mapping[str, list[tuple[Mapping[str, str], float]]]


def live_profile(urls: Sequence[str]) -> SpeedProfile:
    """Returns what the nodes at `urls` show. Raises `MetricsError`."""
    return profile_of([(url, _fetch(url)) for url in urls])


def profile_of(scrapes: Sequence[tuple[str, str]]) -> SpeedProfile:
    """Returns the profile that (name, exposition text) of some nodes amount to. Raises
    `MetricsError`."""
    speeds: list[float] = []
    decode: list[DecodePoint] = []
    room: list[int] = []
    models: set[str] = set()
    for name, text in scrapes:
        samples = _samples(name, text)
        speeds += [value for _, value in samples[_V] if value > 0]
        count, total = _sum(samples, f"{_T}_count"), _sum(samples, f"{_T}_sum")
        running = _sum(samples, _RUNNING)
        sizes = [_tokens(labels) for labels, _ in samples[_CONFIG]]
        room += sizes
        if count and running >= 1:
            held = _sum(samples, _USAGE) * sum(sizes) / running
            decode.append(DecodePoint(round(running), max(1.0, held), total / count))
        models |= {
            labels["model_name"] for labels, _ in samples[_RUNNING] if "model_name" in labels
        }
    if not speeds:
        raise MetricsError(
            f"no node tells {_V} above 0: give the /metrics of a prefill node that has computed "
            "prompts (--metrics once for each node)"
        )
    if not decode:
        raise MetricsError(
            f"no node tells {_T} with {_RUNNING} of 1 or more: give the /metrics of a decode node "
            "while it answers requests"
        )
    slowest = max(decode, key=lambda point: point.sequences)
    return SpeedProfile(
        name="live metrics",
        model=", ".join(sorted(models)) or "unknown",
        date=datetime.now(UTC).date().isoformat(),
        note="one point of each curve, from /metrics",
        kv_tokens=min((tokens for tokens in room if tokens), default=1 << 20),
        prefill=(PrefillPoint(1, _PROMPT_TOKENS, _PROMPT_TOKENS / max(speeds)),),
        decode=(slowest,),
    )


def _fetch(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise MetricsError(f"--metrics {url}: it must begin with http:// or https://")
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            return str(answer.read().decode("utf-8"))
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise MetricsError(f"--metrics {url}: {reason}") from None


def _samples(name: str, text: str) -> Samples:
    found: defaultdict[str, list[tuple[Mapping[str, str], float]]] = defaultdict(list)
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found[sample.name].append((sample.labels, sample.value))
    except ValueError as error:
        raise MetricsError(f"--metrics {name}: these are no Prometheus metrics: {error}") from None
    return found


def _sum(samples: Samples, name: str) -> float:
    return sum(value for _, value in samples[name])


def _tokens(labels: Mapping[str, str]) -> int:
    """Returns the tokens that the KV cache has room for; 0 when the labels do not tell."""
    sizes = [labels.get(key, "") for key in ("num_gpu_blocks", "block_size")]
    if not all(_NUMBER.fullmatch(size) for size in sizes):
        return 0
    return int(sizes[0]) * int(sizes[1])
