"""Plants drafts of which a given share is right, whatever random weights would answer.

A model with random weights has no drafter, and what it answers depends on how many rows a step has.
So the token of each place is a function of the place: all is computed and drawn as ever, so that it
takes its time, and then replaced. The drafter knows that function, and is wrong by chance; nothing
of it waits for the device. It is for a worker in this process, as `UniprocExecutor` has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from engine.config import EngineConfig, SpeculativeConfig
from engine.layers.vocab_part import VocabPart
from engine.sample.sampler import Sampler
from tandem_kernels.batch.batch_tables import RowTables

_STRIDE = 7919
"""A prime, by which tokens of places beside each other are apart."""


class PlantedDrafts:
    """Proposes what `planted_tokens` gives. `share`: of the drafts that are right."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.share = 0.0

    def propose(self, idx_mapping: Tensor, rows: RowTables) -> Tensor:
        ahead = torch.arange(rows.max_drafts, device=idx_mapping.device)
        places = rows.total_len[idx_mapping.long()].long().unsqueeze(1) + ahead
        right = _tokens_of(places, self._vocab_size)
        is_wrong = torch.rand(right.shape, device=right.device) >= self.share
        return (right + is_wrong) % self._vocab_size


@contextmanager
def planted_tokens(vocab_size: int) -> Iterator[None]:
    """Replaces what all samplers draw meanwhile by what `PlantedDrafts` knows."""
    draw = Sampler.draw

    def planted(
        self: Sampler,
        logits: Tensor | VocabPart,
        idx_mapping: Tensor,
        seq_lens: Tensor,
        has_filters: bool = True,
    ) -> Tensor:
        draw(self, logits, idx_mapping, seq_lens, has_filters)
        return _tokens_of(seq_lens.long(), vocab_size)

    Sampler.draw = planted  # type: ignore[method-assign]
    try:
        yield
    finally:
        Sampler.draw = draw  # type: ignore[method-assign]


def with_drafts(
    config: EngineConfig, num_drafts: int, lookup: tuple[int, int] = (3, 3)
) -> EngineConfig:
    """Returns an engine that drafts as many tokens as pay, up to `num_drafts`, by what follows the
    last ones where they stood before: `lookup` of them, at least and at most."""
    speculative = SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=num_drafts,
        prompt_lookup_min=lookup[0],
        prompt_lookup_max=lookup[1],
        adaptive=True,
    )
    return replace(config, speculative=speculative, decode_query_len=num_drafts + 1)


def _tokens_of(places: Tensor, vocab_size: int) -> Tensor:
    return places * _STRIDE % vocab_size
