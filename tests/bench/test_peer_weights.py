"""Weights as a peer draws them, and again as we do."""

from __future__ import annotations

import torch

from bench.engine.models.peer_weights import peer_weights
from engine.layers.norm import RMSNorm
from engine.layers.shard import Shard
from engine.models.dummy_weights import fill_dummy
from engine.parallel.place import ParallelPlace


def drawn() -> torch.Tensor:
    norm = RMSNorm(512, 1e-5, Shard(ParallelPlace(range(1)), torch.float32, torch.device("cpu")))
    fill_dummy(list(norm.checkpoint_weights("model.norm")), lambda fraction: None)
    return norm.weight.detach().clone()


def test_meanwhile_all_weights_are_within_the_peers_limits() -> None:
    before = drawn()
    with peer_weights():
        peers = drawn()
    assert peers.abs().max() <= 1e-3 and peers.std() > 5e-4
    assert torch.equal(drawn(), before) and before.mean() > 0.9
