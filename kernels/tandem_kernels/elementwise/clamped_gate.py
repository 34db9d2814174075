"""The gate of gpt-oss' experts, as a value that has no need of Triton."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """Describes `(up + 1) * gate * sigmoid(alpha * gate)`, where gate is at most `limit` and up
    within +-`limit` (OpenAI, gpt-oss, 2025)."""

    limit: float
    alpha: float
