"""Says from and up to how many tokens each way to attend is the fastest on a device
(`tunings/*/whole_prompts.json`, `masked_contexts.json`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tandem_kernels.tunings.table import plain_table


@dataclass(frozen=True, slots=True)
class WholePrompts:
    """Holds the fewest tokens of an uncached prompt that a library attends; shorter ones take less
    time together with the rest of the batch.

    Attributes:
        flash_tokens, cudnn_tokens: Of FlashAttention 3, and of cuDNN.
    """

    flash_tokens: int
    cudnn_tokens: int


@dataclass(frozen=True, slots=True)
class _MaskedContexts:
    tokens: int


_WHOLE_PROMPTS = plain_table("whole_prompts", WholePrompts, ())
_MASKED_CONTEXTS = plain_table("masked_contexts", _MaskedContexts, ("num_heads",))


def whole_prompts(device: torch.device) -> WholePrompts:
    """Returns what was measured for a device."""
    return _WHOLE_PROMPTS.choose(device)


def masked_tokens(device: torch.device, num_heads: int) -> int:
    """Returns the most tokens of a context that is expanded and masked, of latents of which each
    query chooses some, for a rank with this many heads."""
    return _MASKED_CONTEXTS.choose(device, num_heads).tokens
