"""The random numbers of sampling: a pure function of (seed, position, token id).

Nothing is stateful, so a token is the same on any rank and any node, after preemption and after
a resume, whatever else is in the batch. `tandem_kernels.sampler.gumbel` computes the same bits in
Triton.

Definition, all in unsigned 32-bit arithmetic that wraps:

    row key   a = fold(fold(fold(fold(0x9747B28C, seed_low), seed_high), position_low),
              position_high)
    hash      h = mix(fold(a, token id))
    fold(h, x) = rotl(h ^ (rotl(x * 0xCC9E2D51, 15) * 0x1B873593), 13) * 5 + 0xE6546B64
    mix(h)     = h ^ h>>16, * 0x85EBCA6B, ^ h>>13, * 0xC2B2AE35, ^ h>>16

(fold and mix are the round and the finaliser of MurmurHash3.) The uniform number is
u = (float32(h) + 0.5) / 2^32, at most 1 - 2^-24, and the noise is -log(-log1p(-u)): the large
values that decide a maximum come from small u, where float32 is fine-grained.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Words = npt.NDArray[np.uint32]


def hash_bits(seeds: Tensor, positions: Tensor, vocab_size: int, first_token: int = 0) -> Words:
    """Returns a hash of (seed [S] int64, position [S] int64, each of V token ids): [S, V]."""
    key = np.full(seeds.shape[0], 0x9747B28C, dtype=np.uint32)
    for numbers in (seeds, positions):
        wide = numbers.cpu().numpy().view(np.uint64)
        for word in (wide, wide >> np.uint64(32)):
            key = _fold(key, _scramble(word.astype(np.uint32)))
    token_ids = np.arange(first_token, first_token + vocab_size, dtype=np.uint32)
    return _mix(_fold(key[:, None], _scramble(token_ids)))


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int, first_token: int = 0) -> Tensor:
    """Returns standard Gumbel noise [S, V] float32 for V tokens of every row."""
    bits = hash_bits(seeds, positions, vocab_size, first_token).astype(np.float32)
    uniform = torch.from_numpy(bits).to(seeds.device).add_(0.5).mul_(2.0**-32)
    return uniform.clamp_(max=1.0 - 2.0**-24).neg_().log1p_().neg_().log_().neg_()


def _rotl(x: Words, bits: int) -> Words:
    return (x << np.uint32(bits)) | (x >> np.uint32(32 - bits))


def _scramble(x: Words) -> Words:
    return _rotl(x * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)


def _fold(h: Words, scrambled: Words) -> Words:
    return _rotl(h ^ scrambled, 13) * np.uint32(5) + np.uint32(0xE6546B64)


def _mix(h: Words) -> Words:
    h ^= h >> np.uint32(16)
    h *= np.uint32(0x85EBCA6B)
    h ^= h >> np.uint32(13)
    h *= np.uint32(0xC2B2AE35)
    h ^= h >> np.uint32(16)
    return h
