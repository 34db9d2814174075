"""Medusa heads as they are trained, in plain torch. Source: arXiv 2401.10774.

Head k guesses from the model's output at p the token at p + 2 + k; the model itself says p + 1.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from demo_model.lesson import Lesson

NUM_HEADS = 3


class MedusaTrainee(nn.Module):
    """Heads of one residual block each."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        embedding = model.get_output_embeddings().weight.detach()
        self._vocab_size, self._size = embedding.shape
        self.blocks = nn.ModuleList(nn.Linear(self._size, self._size) for _ in range(NUM_HEADS))
        for block in self.blocks:
            nn.init.zeros_(block.weight)
            nn.init.zeros_(block.bias)
        self.heads = nn.ParameterList(embedding.clone() for _ in range(NUM_HEADS))

    def loss(self, seen: Lesson) -> Tensor:
        """Returns the cross entropy with the model's distribution at the place of each head."""
        total = torch.zeros(())
        for ahead, (block, head) in enumerate(zip(self.blocks, self.heads, strict=True), 1):
            x = seen.streams[-1][:, :-ahead]
            found = F.linear(x + F.silu(block(x)), head).log_softmax(-1)
            total = total - (seen.probabilities[:, ahead:] * found).sum(-1).mean()
        return total

    def checkpoint(self) -> dict[str, Tensor]:
        """Returns the weights by vLLM's names."""
        found = {f"lm_heads.{k}.weight": head for k, head in enumerate(self.heads)}
        for k, block in enumerate(self.blocks):
            found[f"blocks.{k}.layers.0.weight"] = block.weight
            found[f"blocks.{k}.layers.0.bias"] = block.bias
        return found

    def config(self) -> dict[str, Any]:
        """Returns what config.json says."""
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": self._size,
            "vocab_size": self._vocab_size,
            "num_heads": NUM_HEADS,
            "num_hidden_layers": 1,
            "torch_dtype": "float32",
        }
