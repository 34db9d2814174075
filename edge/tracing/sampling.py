"""Decides which traces that begin here are sampled; those of callers are judged by their callers.

As OpenTelemetry's samplers `parentbased_always_on`, `_always_off` and `_traceidratio`: a share of
all trace ids, so that every service that judges one judges alike.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from edge.tracing.context import Sampler

logger = logging.getLogger(__name__)

_ID_SPACE = 1 << 64


def find_ratio(flag: float | None, environ: Mapping[str, str]) -> float:
    """Returns the share: the flag's, else what OTEL_TRACES_SAMPLER says, else all. Variables that
    say what we do not know are a warning and mean all, as OpenTelemetry has it."""
    if flag is not None:
        return flag
    kind = environ.get("OTEL_TRACES_SAMPLER", "").removeprefix("parentbased_")
    if kind in ("", "always_on"):
        return 1.0
    if kind == "always_off":
        return 0.0
    if kind != "traceidratio":
        logger.warning("OTEL_TRACES_SAMPLER=%s is not built: every trace is sampled", kind)
        return 1.0
    text = environ.get("OTEL_TRACES_SAMPLER_ARG", "1")
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= 1:
        logger.warning("OTEL_TRACES_SAMPLER_ARG=%s is no share: every trace is sampled", text)
        return 1.0
    return ratio


def ratio_sampler(ratio: float) -> Sampler:
    """Returns what samples that share of all traces."""
    bound = round(ratio * _ID_SPACE)
    return lambda trace_id: int(trace_id[16:], 16) < bound
