"""Tokens that look alike go to as many experts as chance has it while a bench says so."""

from __future__ import annotations

import pytest
import torch

from bench.engine.models.planted import uniform_routing
from engine.layers.feed_forward.router import Router, RouterOptions
from engine.layers.norm import RMSNorm
from engine.layers.shard import Shard
from engine.parallel.place import ParallelPlace

TOKENS, EXPERTS, TOP_K = 512, 32, 4


@pytest.mark.parametrize(
    "options",
    [{}, {"has_logit_bias": True}, {"sigmoid": True, "has_bias": True}],
    ids=["plain", "biased logits", "biased choice"],
)
def test_alike_tokens_go_to_all_experts_evenly(options: dict[str, bool]) -> None:
    shard = Shard(ParallelPlace(range(1)), torch.float32, torch.device("cpu"))
    router = Router(16, EXPERTS, RouterOptions(top_k=TOP_K, **options), shard)
    for parameter in router.parameters():
        torch.nn.init.normal_(parameter)
    x, slots = torch.ones(TOKENS, 16), torch.arange(TOKENS)
    alone = router(x, slots)[1]
    with uniform_routing(TOKENS):
        chosen = router(x, slots)[1]
        again = router(x[:7], slots[:7])[1]
    assert len(alone.unique()) == TOP_K
    loads = torch.bincount(chosen.flatten().long(), minlength=EXPERTS)
    assert loads.sum() == TOKENS * TOP_K
    assert loads.min() > 32 and loads.max() < 96  # 64 expected, deviation 7.5.
    assert torch.equal(again, chosen[:7])
    assert torch.equal(router(x, slots)[1], alone)


def test_logits_that_experts_choose_by_are_replaced() -> None:
    """They are the same as those that a router chooses by itself, and normed rows stay."""
    shard = Shard(ParallelPlace(range(1)), torch.float32, torch.device("cpu"))
    router = Router(16, EXPERTS, RouterOptions(top_k=TOP_K, has_logit_bias=True), shard)
    norm = RMSNorm(16, 1e-5, shard)
    for parameter in (*router.parameters(), *norm.parameters()):
        torch.nn.init.normal_(parameter)
    x = torch.randn(2, 16)
    alone, normed = router.normed_logits(x, norm)
    with uniform_routing(TOKENS):
        found, same = router.normed_logits(x, norm)
        assert torch.equal(router._logits(same), found)
    assert torch.equal(same, normed) and not torch.equal(found, alone)
    assert torch.equal(router.normed_logits(x, norm)[0], alone)
