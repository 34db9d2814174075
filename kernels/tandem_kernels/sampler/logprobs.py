"""Log-probabilities of a few tokens without a [S, V] softmax."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _weigh(
    tokens: tl.tensor, vocab_size: tl.tensor, threshold: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """Returns the logarithm of the sum of a row's exponentials, and how many logits are above
    `threshold`: a running maximum and sum a lane, joined at the end."""
    lane = tl.arange(0, BLOCK)
    peak = tl.full([BLOCK], -3.0e38, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    larger = tl.zeros([BLOCK], tl.int32)
    for offset in range(0, vocab_size, BLOCK):
        inside = offset + lane < vocab_size
        x = tl.load(tokens + offset + lane, mask=inside, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(peak, x)
        total = total * tl.exp(peak - higher) + tl.exp(x - higher)
        peak = higher
        larger += (x > threshold).to(tl.int32)
    highest = tl.max(peak)
    return highest + tl.log(tl.sum(total * tl.exp(peak - highest))), tl.sum(larger)


@triton.jit(do_not_specialize=["num_ids"])
def logprobs_kernel(
    logits: tl.tensor,
    ids: tl.tensor,
    logprobs: tl.tensor,
    ranks: tl.tensor,
    logits_stride: tl.tensor,
    vocab_size: tl.tensor,
    num_ids: tl.tensor,
    BLOCK: tl.constexpr,
    IDS: tl.constexpr,
) -> None:
    """Computes one row in each program."""
    row = tl.program_id(0).to(tl.int64)
    tokens = logits + row * logits_stride
    chosen = tl.load(tokens + tl.load(ids + row * num_ids)).to(tl.float32)
    log_sum, likelier = _weigh(tokens, vocab_size, chosen, BLOCK)
    entry = tl.arange(0, IDS)
    asked = tl.load(ids + row * num_ids + entry, mask=entry < num_ids, other=0)
    value = tl.load(tokens + asked, mask=entry < num_ids, other=0.0).to(tl.float32)
    tl.store(logprobs + row * num_ids + entry, value - log_sum, mask=entry < num_ids)
    tl.store(ranks + row, likelier.to(tl.int64) + 1)


def topk_logprobs(logits: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.sampling.topk_logprobs`."""
    num_rows, vocab_size = logits.shape
    chosen = token_ids.unsqueeze(1)
    ids = torch.cat((chosen, logits.topk(k, dim=-1).indices), dim=1) if k > 0 else chosen
    ids = ids.contiguous()
    logprobs = torch.empty(ids.shape, dtype=torch.float32, device=logits.device)
    ranks = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows > 0:
        logprobs_kernel[(num_rows,)](
            logits,
            ids,
            logprobs,
            ranks,
            logits.stride(0),
            vocab_size,
            1 + k,
            BLOCK=min(BLOCK, triton.next_power_of_2(vocab_size)),
            IDS=triton.next_power_of_2(1 + k),
            num_warps=8,
        )
    return ids, logprobs, ranks
