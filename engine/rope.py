"""How an architecture tells positions apart: how queries and keys rotate, and queries grow.
Torch-free; `engine.layers.rotary` computes with it."""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True, tag="llama3"):
    """Llama 3's frequency-dependent scaling (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


class LinearRope(msgspec.Struct, frozen=True, kw_only=True, tag="linear"):
    """Turns every pair `factor` times slower (`rope_type: linear`)."""

    factor: float


class YarnRope(msgspec.Struct, frozen=True, kw_only=True, tag="yarn"):
    """Turns slow pairs slower and leaves fast ones (`rope_type: yarn`). Source: Peng et al., YaRN
    (arXiv 2309.00071).

    Attributes:
        factor: How much slower a slow pair turns.
        beta_fast, beta_slow: A pair that turns more often than the first within the original
            context stays, one that turns less often than the second is slowed down in full.
        truncate: The border pairs are rounded to whole numbers.
        attention_factor: Multiplies cosines and sines.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int
    truncate: bool
    attention_factor: float


class LongRope(msgspec.Struct, frozen=True, kw_only=True, tag="longrope"):
    """Scaling by a factor for each pair (`rope_type: longrope`, or `su`).

    Attributes:
        factors: [dim / 2], which each pair turns slower.
        attention_factor: Multiplies cosines and sines.
    """

    factors: tuple[float, ...]
    attention_factor: float


class ProportionalRope(msgspec.Struct, frozen=True, kw_only=True, tag="proportional"):
    """Turns the first `pairs` pairs of a head alone, by frequencies of the whole head, `factor`
    times slower (`rope_type: proportional`)."""

    pairs: int
    factor: float


AnyRopeScaling: TypeAlias = RopeScaling | LinearRope | YarnRope | LongRope | ProportionalRope


class Rotary(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding of one kind of layers.

    Attributes:
        theta: The base of the frequencies.
        dim: The first this many elements of a head turn, the others stay.
        interleaved: Pair i is elements 2i and 2i + 1 in the checkpoint, not i and i + dim / 2.
    """

    theta: float
    dim: int
    scaling: AnyRopeScaling | None = None
    interleaved: bool = False

    def head_order(self, head_dim: int) -> tuple[int, ...] | None:
        """Returns which element of a checkpoint's head becomes element i of ours, or None when they
        are in our order.

        Our kernels turn element i with i + head_dim / 2. Queries and keys whose elements are
        reordered alike have the same scores, so any other pairing is made ours when weights are
        loaded. Elements that stay are pairs that turn by nothing.
        """
        if self.dim == 0 or (self.dim == head_dim and not self.interleaved):
            return None
        turning = range(self.dim)
        first = turning[::2] if self.interleaved else turning[: self.dim // 2]
        second = turning[1::2] if self.interleaved else turning[self.dim // 2 :]
        staying = range(self.dim, head_dim)
        middle = len(staying) // 2
        return (*first, *staying[:middle], *second, *staying[middle:])


class QueryScale(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """Makes scores grow with the position p: a query counts `1 + beta * log(1 + p // length)` times
    (`llama_4_scaling_beta`), or `(1 + (p + 1) / length) ** power` times (Beam). Nodes compare its
    repr, which a new field must not change.

    Attributes:
        beta, power: How fast they grow; 0: in the other way.
        length: Tokens of the context that the model was first made for.
    """

    beta: float = 0.0
    length: int
    power: float = 0.0


UNROTATED = Rotary(theta=1.0, dim=0)
"""Leaves heads as they are."""
