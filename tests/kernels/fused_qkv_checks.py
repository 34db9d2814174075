"""Checks of queries, keys and values from one kernel, for any column and any device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import kernel_oracle as oracle
import torch
from kernel_checks import ELEMENTWISE, Op
from torch import Tensor

_MAX_LEN = 64
_BEHIND = 3
"""Numbers of a page that belong to nobody, in lines."""


@dataclass(frozen=True, slots=True)
class QkvShape:
    """The sizes of a layer and of a step."""

    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 128
    inner: int = 128
    num_tokens: int = 150
    block_size: int = 16

    @property
    def parts(self) -> list[int]:
        return [self.num_q_heads, self.num_kv_heads, self.num_kv_heads]


class _Layer:
    """A layer's weights and the inputs of a step. Rows of x lie apart, pages have room behind them,
    slots are scattered, and one token is written nowhere."""

    def __init__(self, shape: QkvShape, dtype: torch.dtype, device: str, *, has_bias: bool) -> None:
        outputs, tokens = sum(shape.parts) * shape.head_dim, shape.num_tokens
        self.shape, self.dtype, self.device = shape, dtype, device
        x = torch.randn(tokens, 2 * shape.inner, device=device)
        self.x = x.to(dtype)[:, : shape.inner]
        weight = torch.randn(outputs, shape.inner, device=device) * shape.inner**-0.5
        self.weight = weight.to(dtype)
        self.bias = torch.randn(outputs, device=device).to(dtype) if has_bias else None
        self.positions = torch.randint(0, _MAX_LEN, (tokens,), device=device)
        self.num_blocks = -(-2 * tokens // shape.block_size)
        slots = torch.randperm(self.num_blocks * shape.block_size, device=device)[:tokens]
        slots[tokens // 2] = -1
        self.slots = slots
        self.angles = oracle.rope_angles(_MAX_LEN, shape.head_dim).to(device)

    def run(self, op: Op, positions: Tensor, *, keep_kv: bool) -> tuple[Tensor, Tensor]:
        """Returns the heads, and the cache, where nothing else is written."""
        cache = self.empty_cache()
        cos_sin = oracle.cos_sin_cache(self.angles)
        heads = op(
            self.x, self.weight, self.bias, positions, cos_sin, cache, self.slots, keep_kv
        )  # fmt: skip
        assert heads.dtype == self.dtype
        assert heads.shape == (len(self.x), sum(self.shape.parts), self.shape.head_dim)
        return heads, cache

    def empty_cache(self) -> Tensor:
        shape = self.shape
        sizes = (2, shape.num_kv_heads, shape.block_size, shape.head_dim)
        page = math.prod(sizes)
        pages = torch.full(
            (self.num_blocks, page + _BEHIND * shape.head_dim), math.nan,
            dtype=self.dtype, device=self.device,
        )  # fmt: skip
        return pages[:, :page].view(self.num_blocks, *sizes)

    def cached(self, cache: Tensor) -> Tensor:
        """Returns what is at each token's slot, [T, 2, Hkv, D], of the tokens that have one; all
        other places are untouched."""
        by_slot = cache.permute(0, 3, 1, 2, 4).flatten(0, 1)
        written = self.slots[self.slots >= 0]
        others = torch.ones(len(by_slot), dtype=torch.bool, device=self.device)
        others[written] = False
        assert by_slot[others].isnan().all()
        return by_slot[written]


def fused_qkv(
    op: Op,
    shape: QkvShape,
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    has_bias: bool = False,
    keep_kv: bool = False,
) -> None:
    """Checks heads and cache against float64."""
    layer = _Layer(shape, dtype, device, has_bias=has_bias)
    heads, cache = layer.run(op, layer.positions, keep_kv=keep_kv)
    exact = layer.x.double() @ layer.weight.double().t()
    if layer.bias is not None:
        exact += layer.bias.double()
    exact = exact.to(dtype).view(heads.shape)
    q, k, v = exact.split(shape.parts, dim=1)
    turned = layer.angles[layer.positions]
    keys_and_values = torch.stack((oracle.rotate(k, turned), v.double()), dim=1)
    kept = layer.slots >= 0
    queries = heads[:, : shape.num_q_heads]
    within = 2 * ELEMENTWISE[dtype]
    assert oracle.relative_error(queries, oracle.rotate(q, turned)) < within
    assert oracle.relative_error(layer.cached(cache), keys_and_values[kept]) < within
    if keep_kv:
        in_place = heads[kept, shape.num_q_heads :].unflatten(1, (2, shape.num_kv_heads))
        assert torch.equal(in_place, layer.cached(cache))


def keeping(op: Op) -> Op:
    """Returns a column that always keeps keys and values as one that may."""
    return lambda *given: op(*given[:-1])


def fused_qkv_as_two(
    op: Op,
    rope_and_cache: Op,
    shape: QkvShape,
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    has_bias: bool = False,
) -> None:
    """Checks bits against `rope_and_cache` of the same sums. At position 0 nothing turns, so that
    what `op` gives there is what it rotates."""
    layer = _Layer(shape, dtype, device, has_bias=has_bias)
    turned, cache = layer.run(op, layer.positions, keep_kv=True)
    heads, _ = layer.run(op, torch.zeros_like(layer.positions), keep_kv=True)
    expected = layer.empty_cache()
    cos_sin = oracle.cos_sin_cache(layer.angles)
    q, k, v = heads.split(shape.parts, dim=1)
    rope_and_cache(
        q, k, v, layer.positions, cos_sin, expected, layer.slots, None, None, 0.0, keep_k=True
    )
    kept = layer.slots >= 0
    assert torch.equal(turned[:, : shape.num_q_heads], q)
    assert torch.equal(turned[kept], heads[kept])
    assert torch.equal(layer.cached(cache), layer.cached(expected))
