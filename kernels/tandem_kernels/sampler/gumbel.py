"""The random numbers of sampling in Triton, bit for bit those of `reference.gumbel`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rotl(x: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    return (x << BITS) | (x >> (32 - BITS))


@triton.jit
def _fold(h: tl.tensor, x: tl.tensor) -> tl.tensor:
    """Does one round of MurmurHash3 on uint32."""
    scrambled = _rotl(x * tl.full([], 0xCC9E2D51, tl.uint32), 15)
    h ^= scrambled * tl.full([], 0x1B873593, tl.uint32)
    return _rotl(h, 13) * tl.full([], 5, tl.uint32) + tl.full([], 0xE6546B64, tl.uint32)


@triton.jit
def row_key(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """Returns the uint32 key of a row from int64 `seed` and `position`."""
    key = _fold(tl.full([], 0x9747B28C, tl.uint32), seed.to(tl.uint32))
    key = _fold(key, (seed >> 32).to(tl.uint32))
    key = _fold(key, position.to(tl.uint32))
    return _fold(key, (position >> 32).to(tl.uint32))


@triton.jit
def hash_bits(key: tl.tensor, token_ids: tl.tensor) -> tl.tensor:
    """Returns a uint32 hash of a row's key and each token id."""
    h = _fold(key, token_ids.to(tl.uint32))
    h ^= h >> 16
    h *= tl.full([], 0x85EBCA6B, tl.uint32)
    h ^= h >> 13
    h *= tl.full([], 0xC2B2AE35, tl.uint32)
    return h ^ (h >> 16)


@triton.jit
def uniform(key: tl.tensor, token_ids: tl.tensor) -> tl.tensor:
    """Returns a float32 in (0, 1)."""
    number = (hash_bits(key, token_ids).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    return tl.minimum(number, 0.99999994)


@triton.jit
def small_exponential(u: tl.tensor) -> tl.tensor:
    """Returns -log1p(-u) for u < 1/16, where 1 - u would lose the digits that decide a maximum."""
    series = u * (0.2 + u * (0.16666667 + u * 0.14285715))
    series = u * (0.5 + u * (0.33333334 + u * (0.25 + series)))
    return u + u * series


@triton.jit
def exponential(u: tl.tensor) -> tl.tensor:
    """Returns -log1p(-u); its negative logarithm is Gumbel noise."""
    return tl.where(u < 0.0625, small_exponential(u), -tl.log(1.0 - u))
