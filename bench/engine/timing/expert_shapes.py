"""Shapes of the experts of published models."""

from __future__ import annotations

from dataclasses import dataclass

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


SHAPES = {
    "deepseek-v2-lite": LayerShape(64, 6, 2048, 1408),
    "deepseek-v3": LayerShape(256, 8, 7168, 2048),
    "deepseek-v4-flash": LayerShape(256, 6, 4096, 2048),
    "gemma-4-26b-a4b": LayerShape(128, 8, 2816, 704),
    "glm-4.5-air": LayerShape(128, 8, 4096, 1408),
    "gpt-oss-20b": LayerShape(32, 4, 2880, 2880),
    "gpt-oss-120b": LayerShape(128, 4, 2880, 2880),
    "minimax-m2": LayerShape(256, 8, 3072, 1536),
    "mixtral-8x7b": LayerShape(8, 2, 4096, 14336),
    "nemotron-3-nano": LayerShape(128, 6, 2688, 1856, GateForm("relu_squared")),
    "qwen3-30b-a3b": LayerShape(128, 8, 2048, 768),
    "qwen3-235b-a22b": LayerShape(128, 8, 4096, 1536),
    "qwen3.5-35b-a3b": LayerShape(256, 8, 2048, 512),
}
"""Layers on one rank; `--ranks` divides their width."""
