"""Makes the sampler of one rank of an engine."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from engine.batch.row_states import RowStates
from engine.config import EngineConfig
from engine.grammar.compiler import GrammarCompiler
from engine.models.vocabularies.files import tokenizer_folder
from engine.sample.grammars import GrammarStates
from engine.sample.sampler import Sampler

_MAX_THREADS = 8


def create_sampler(
    config: EngineConfig, states: RowStates, device: torch.device, *, splits_vocabulary: bool
) -> Sampler:
    """Returns the sampler of the rows of `states`. `splits_vocabulary`: ranks have parts of the
    logits."""
    return Sampler(
        states.max_num_reqs,
        config.model.vocab_size,
        device,
        config.device.deterministic,
        token_ids=states.token_ids.tensor,
        grammars=create_grammars(config, device),
        splits_vocabulary=splits_vocabulary,
    )


def create_grammars(config: EngineConfig, device: torch.device) -> GrammarStates:
    """Returns the state of grammars, with this rank's share of the host's cores."""
    ranks = config.parallel.num_ranks
    num_threads = max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)) // (2 * ranks)))
    model = config.model
    return GrammarStates(
        config.scheduler.max_num_seqs,
        model.vocab_size,
        device,
        GrammarCompiler(model, num_threads, tokenizer_folder(Path(model.path))),
        num_threads,
        config.decode_query_len,
    )
