"""The activation of gated blocks where it is not SiLU, as a value that has no need of Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GateKind = Literal[
    "silu", "clamped", "gelu_tanh", "limited", "relu_squared", "capped", "situ"
]  # fmt: skip
_KINDS: tuple[GateKind, ...] = (
    "silu", "clamped", "gelu_tanh", "limited", "relu_squared", "capped", "situ",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class GateForm:
    """Describes what is made of a gate and of what it lets through.

    clamped     (up + 1) * gate * sigmoid(alpha * gate), gate at most `limit`, up within
                +-`limit` (OpenAI, gpt-oss, 2025)
    gelu_tanh   gelu(gate) * up, by its tanh formula (Gemma)
    limited     silu(gate) * up, silu(gate) at most `limit`, up within +-`limit` (StepFun,
                Step-3.5-Flash, 2026)
    capped      silu(gate) * up, gate at most `limit`, up within +-`limit` (DeepSeek-V4, 2026)
    relu_squared  relu(up) ** 2: there is no gate (NVIDIA, Nemotron-H, 2025)
    situ        soft(gate, alpha) * sigmoid(gate) * soft(up, limit), where soft(x, most) is
                most * tanh(x / most) (Moonshot, Kimi K3, arXiv 2607.24653)
    """

    kind: GateKind
    limit: float = 0.0
    alpha: float = 0.0


def gate_arguments(gate: GateForm | None) -> tuple[float, float]:
    """Returns (limit, alpha) for a kernel; None: SiLU."""
    return (0.0, 0.0) if gate is None else (gate.limit, gate.alpha)


def gate_code(gate: GateForm | None) -> int:
    """Returns the number by which kernels know a kind; None: SiLU."""
    return 0 if gate is None else _KINDS.index(gate.kind)


def has_gate(gate: GateForm | None) -> bool:
    """Returns whether there is a gate at all; None: SiLU."""
    return gate is None or gate.kind != "relu_squared"


def is_silu(gate: GateForm | None) -> bool:
    """Returns whether a gate is SiLU's, whose gate and output may be bounded; None: SiLU."""
    return gate is None or gate.kind in ("silu", "limited", "capped")
