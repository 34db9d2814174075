"""Makes the state of grammars for one rank of an engine."""

from __future__ import annotations

import os

import torch

from engine.config import EngineConfig
from engine.grammar.compiler import GrammarCompiler
from engine.sample.grammars import GrammarStates

_MAX_THREADS = 8


def create_grammars(config: EngineConfig, device: torch.device) -> GrammarStates:
    """Returns the state of grammars, with this rank's share of the host's cores."""
    ranks = config.parallel.num_ranks
    num_threads = max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)) // (2 * ranks)))
    model = config.model
    return GrammarStates(
        config.scheduler.max_num_seqs,
        model.vocab_size,
        device,
        GrammarCompiler(model, num_threads),
        num_threads,
        config.decode_query_len,
    )
