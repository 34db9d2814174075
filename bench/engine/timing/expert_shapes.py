"""Shapes of the experts of published models."""

from __future__ import annotations

from dataclasses import dataclass

from bench.engine.models.shapes import EXPERTS
from tandem_kernels.elementwise.gate_form import GateForm, has_gate


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Describes experts. `gate`: None: SiLU; bf16 weights alone know another."""

    num_experts: int
    top_k: int
    hidden: int
    width: int
    gate: GateForm | None = None

    @property
    def matrices(self) -> int:
        return 3 if has_gate(self.gate) else 2


def _shape(num_experts: int, top_k: int, hidden: int, width: int, gate: str = "") -> LayerShape:
    return LayerShape(num_experts, top_k, hidden, width, GateForm(gate) if gate else None)


SHAPES = {name: _shape(*sizes) for name, sizes in EXPERTS.items()}
