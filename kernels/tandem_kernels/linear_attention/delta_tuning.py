"""How kernels of the gated delta rule are launched (`tunings/*/delta_*.json`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tandem_kernels.device import has_warpgroup_mma
from tandem_kernels.tunings.table import plain_table


@dataclass(frozen=True, slots=True)
class DeltaTuning:
    """How one kernel is launched.

    Attributes:
        values: Columns of a state in one program.
        fuses: Products are added without being rounded first. Of `a * b + c * d` the compiler
            chooses which one, differently in each kernel and loop.
    """

    values: int
    num_warps: int
    num_stages: int = 1
    fuses: bool = True


@dataclass(frozen=True, slots=True)
class PromptTuning:
    """How the kernels are launched that make of prompts what is walked through.

    Attributes:
        system_warps, system_registers: Of what solves the system of a chunk.
        factors_warps: Of what multiplies by the solution.
        parts_warps, channels_warps: Of parts of chunks, and what is made of them, where each
            channel decays by itself.
    """

    system_warps: int
    system_registers: int
    factors_warps: int
    parts_warps: int
    channels_warps: int

    @property
    def system(self) -> dict[str, int]:
        return {"num_warps": self.system_warps, "maxnreg": self.system_registers}


FIXED = DeltaTuning(values=32, num_warps=1, fuses=False)
"""That of tokens one by one where a row must have the same bits in any company."""

_TOKENS = plain_table("delta_tokens", DeltaTuning, ("num_reqs",))
_WALK = plain_table("delta_walk", DeltaTuning, ("itemsize", "block_key", "by_warpgroups"))
_PROMPTS = plain_table("delta_prompts", PromptTuning, ())


def decode_tuning(device: torch.device, num_reqs: int) -> DeltaTuning:
    """Returns that of tokens one by one."""
    return _TOKENS.choose(device, num_reqs)


def prompt_tuning(device: torch.device) -> PromptTuning:
    """Returns that of what comes before the walk through a prompt's chunks."""
    return _PROMPTS.choose(device)


def walk_tuning(device: torch.device, itemsize: int, block_key: int) -> DeltaTuning:
    """Returns that of the walk, for numbers of `itemsize` bytes and keys of `block_key`: what the
    chunks behind it read is loaded ahead, where they have room beside each other."""
    return _WALK.choose(device, itemsize, block_key, has_warpgroup_mma(device))
