"""How kernels of state-space layers are launched (`tunings/*/mamba_*.json`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tandem_kernels.linear_attention.delta_tuning import DeltaTuning
from tandem_kernels.tunings.table import plain_table


@dataclass(frozen=True, slots=True)
class ChunkTuning:
    """How prompts are cut. Operands that are computed are always the second one: those go through
    shared memory, where the fault of `tandem_kernels.warpgroup_waits` cannot be.

    Attributes:
        chunk: Tokens of a chunk; one program computes y of half of them.
        heads: Heads of one program at most, which share B and C.
        piece_warps: Of programs that compute what a chunk adds.
        num_warps: Of programs that compute y.
        num_stages: Heads of one of those that are under way at once.
    """

    chunk: int
    heads: int
    piece_warps: int
    num_warps: int
    num_stages: int


_TOKENS = plain_table("mamba_tokens", DeltaTuning, ("num_reqs",))
_PROMPTS = plain_table("mamba_prompts", ChunkTuning, ())


def token_tuning(device: torch.device, num_reqs: int) -> DeltaTuning:
    """Returns that of tokens one by one."""
    return _TOKENS.choose(device, num_reqs)


def chunk_tuning(device: torch.device) -> ChunkTuning:
    """Returns that of prompts."""
    return _PROMPTS.choose(device)
