"""Holds what drafters of the demo model learn from: its own view of texts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Lesson:
    """Holds a batch of texts as the model sees them.

    Attributes:
        tokens: [B, T].
        streams: [B, T, H] each: in front of every layer, and behind the last norm.
        probabilities: [B, T, V], of the token behind each place.
    """

    tokens: Tensor
    streams: tuple[Tensor, ...]
    probabilities: Tensor


@torch.no_grad()
def lesson(model: PreTrainedModel, tokens: Tensor) -> Lesson:
    """Returns what the model makes of `tokens`, [B, T]."""
    out = model(tokens, output_hidden_states=True)
    return Lesson(tokens, out.hidden_states, out.logits.softmax(-1))
