"""Tells the load of a service with its answer, to gateways that balance by it (ORCA, the Open
Request Cost Aggregation).

A request that says `endpoint-load-metrics-format: TEXT` (or `JSON`) gets the header
`endpoint-load-metrics`, with the metrics that vLLM reports: the share of KV blocks in use, and the
number of requests that wait.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from edge.http import headers as names

_DIGITS = 6


class Load(Protocol):
    """Holds what a service reports of itself in its answers."""

    @property
    def kv_usage(self) -> float: ...
    @property
    def num_waiting(self) -> int: ...


def load_headers(form: str, load: Load) -> dict[str, str]:
    """Returns the header for the format that a request asks for; none for an unknown one."""
    metrics = {
        "kv_cache_usage_perc": round(load.kv_usage, _DIGITS),
        "num_requests_waiting": load.num_waiting,
    }
    match form.upper():
        case "TEXT":
            listed = ", ".join(f"named_metrics.{name}={value}" for name, value in metrics.items())
            return {names.LOAD: f"TEXT {listed}"}
        case "JSON":
            told = msgspec.json.encode({"named_metrics": metrics}).decode()
            return {names.LOAD: f"JSON {told}"}
        case _:
            return {}
