"""Replaces what random weights would do by what a bench needs, in a worker in this process, as
`UniprocExecutor` has it. All is computed as ever, so that it takes its time, and then replaced.

`uniform_routing`: tokens go to uniformly random experts. Random weights may send most to a few, and
which ones depends on how they were drawn; a peer measured with uniform routing (vLLM's
VLLM_MOE_ROUTING_SIMULATION_STRATEGY=uniform_random) reads more experts than that. Logits of the
k-th token of a step in a layer are the k-th row of numbers that were drawn once. Biases that a
router adds are zero meanwhile: random ones prefer some experts, by which a prompt of 2048 tokens of
gpt-oss-120b had 1.3 times the tiles.

`PlantedDrafts`: a given share of drafts is right. A model with random weights has no drafter, and
what it answers depends on how many rows a step has. So the token of each place is a function of the
place, which the drafter knows; it is wrong by chance, and nothing of it waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from engine.config import EngineConfig, SpeculativeConfig
from engine.layers.feed_forward.router import Router
from engine.layers.norm import RMSNorm
from engine.layers.vocabulary.vocab_part import VocabPart
from engine.sample.sampler import Sampler
from tandem_kernels.batch.batch_tables import RowTables

_STRIDE = 7919
"""A prime, by which tokens of places beside each other are apart."""


@contextmanager
def uniform_routing(max_tokens: int) -> Iterator[None]:
    """Replaces the logits of all routers that compute meanwhile. `max_tokens`: of a step."""
    logits_of, normed_logits_of = Router._logits, Router.normed_logits
    drawn: WeakKeyDictionary[Router, Tensor] = WeakKeyDictionary()
    biases: list[tuple[Tensor, Tensor]] = []

    @torch.inference_mode()
    def replaced(self: Router, computed: Tensor) -> Tensor:
        if self not in drawn:
            for bias in (self.bias, self.logit_bias):
                if bias is not None:
                    biases.append((bias, bias.clone()))
                    bias.zero_()
            torch.manual_seed(len(drawn))
            drawn[self] = torch.rand(max_tokens, computed.shape[1], device=computed.device)
        return drawn[self][: len(computed)]

    def logits(self: Router, x: Tensor) -> Tensor:
        return replaced(self, logits_of(self, x))

    def normed_logits(self: Router, x: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        computed, normed = normed_logits_of(self, x, norm)
        return replaced(self, computed), normed

    Router._logits = logits  # type: ignore[method-assign]
    Router.normed_logits = normed_logits  # type: ignore[method-assign]
    try:
        yield
    finally:
        Router._logits = logits_of  # type: ignore[method-assign]
        Router.normed_logits = normed_logits_of  # type: ignore[method-assign]
        with torch.inference_mode():
            for bias, before in biases:
                bias.copy_(before)


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
