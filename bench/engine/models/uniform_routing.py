"""Routes the tokens of a bench to uniformly random experts, whatever its random weights would do.

Random weights may send most tokens to a few experts, and which ones depends on how they were drawn;
a peer measured with uniform routing (vLLM's VLLM_MOE_ROUTING_SIMULATION_STRATEGY=uniform_random)
reads more experts than that. Logits are computed as ever, so that they take their time, and then
replaced: those of the k-th token of a step in a layer are the k-th row of numbers that were drawn
once. Biases that a router adds are zero meanwhile: random ones prefer some experts, by which a
prompt of 2048 tokens of gpt-oss-120b had 1.3 times the tiles. It is for a worker in this process,
as `UniprocExecutor` has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from engine.layers.norm import RMSNorm
from engine.layers.router import Router


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
