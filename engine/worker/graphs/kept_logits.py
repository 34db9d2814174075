"""Logits of steps that do more than draw: computed in a CUDA graph, and sampled behind it.

Ranks that share a vocabulary keep a part each; the sampler gathers those of the steps that need the
whole.
"""

from __future__ import annotations

import torch

from engine.config import EngineConfig
from engine.layers.vocabulary.vocab_part import VocabPart
from engine.models.base import CausalLM


class KeptLogits:
    """Computes logits, and keeps those of one recorded step."""

    _buffer: torch.Tensor
    """[most places, V] float32, or the columns of this rank's part."""

    def __init__(self, config: EngineConfig, model: CausalLM) -> None:
        self._model = model
        self._cut = model.vocab_cut
        self._num_columns = self._cut.width if self._cut is not None else config.model.vocab_size

    def allocate(self, num_places: int, device: torch.device) -> None:
        """Makes room for a step with this many places."""
        shape = num_places, self._num_columns
        self._buffer = torch.empty(shape, dtype=torch.float32, device=device)

    def write(self, hidden: torch.Tensor) -> None:
        """Computes the logits of [S, H] and keeps them. A graph may hold this."""
        found = self._model.compute_choices(hidden)
        written = found.padded if isinstance(found, VocabPart) else found
        self._buffer[: len(hidden)].copy_(written)

    def read(self, num_places: int) -> torch.Tensor | VocabPart:
        """Returns the first `num_places` rows of what was written last, [num_places, vocabulary]
        float32; the next `write` overwrites them."""
        logits = self._buffer[:num_places]
        return logits if self._cut is None else VocabPart(logits, self._cut)
