"""Weights in four-bit floats, and checks of linear layers with them, for any column of the dispatch
table and any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import kernel_oracle as oracle
import torch
from torch import Tensor

from tandem_kernels.gemm.fp4_tiles import (
    NVFP4_FACTOR,
    NVFP4_GROUP,
    NVFP4_TILE_WORDS,
    tile_mxfp4,
    tile_nvfp4,
    tiles_of,
)

Op = Callable[..., Any]
Form = Literal["mxfp4", "nvfp4"]
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}


def fp4_weight(
    form: Form, shape: tuple[int, ...], device: str = "cpu"
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Makes (tiles [..., N / 64, K / 64, words], the factor [...] of each matrix' sums or None, the
    same weight [..., N, K] in float64)."""
    if form == "mxfp4":
        blocks, exponents, wide = mxfp4_weight(shape, device)
        return mxfp4_tiles(blocks, exponents), None, wide
    packed, scales, factors, wide = nvfp4_weight(shape, device)
    tiles = torch.full(
        (*shape[:-2], *tiles_of(*shape[-2:], NVFP4_TILE_WORDS)),
        -1,
        dtype=torch.int32,
        device=device,
    )
    flat = (part.flatten(0, -3) if len(shape) > 2 else part[None] for part in (packed, scales))
    for numbers, of_groups, out in zip(*flat, tiles.view(-1, *tiles.shape[-3:]), strict=True):
        tile_nvfp4(numbers, of_groups, out)
    return tiles, factors * NVFP4_FACTOR, wide


def nvfp4_weight(
    shape: tuple[int, ...], device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Makes (numbers [..., N, K / 2] by two, scales [..., N, K / 16] e4m3, factors [...] float32,
    the same weight [..., N, K] in float64), as the format defines it: all numbers, and scales of
    0.002 to 448, some of them 0."""
    *outer, num_outputs, num_inputs = shape
    size = (*outer, num_outputs, num_inputs // 2)
    packed = torch.randint(0, 256, size, dtype=torch.uint8, device=device)
    size = (*outer, num_outputs, num_inputs // NVFP4_GROUP)
    bits = torch.randint(40, 88, size, dtype=torch.uint8, device=device)
    rare = torch.randint(0, 127, size, dtype=torch.uint8, device=device)
    bits = torch.where(torch.rand(size, device=device) < 0.02, rare, bits)
    bits[..., 0] *= torch.rand(size[:-1], device=device) < 0.95
    scales = bits.view(torch.float8_e4m3fn)
    factors = torch.rand(outer, device=device) / 128 + 1 / 256
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    wide = _number(codes).unflatten(-1, (-1, NVFP4_GROUP)) * scales.double()[..., None]
    return packed, scales, factors, wide.flatten(-2) * factors.double()[..., None, None]


def _number(code: Tensor) -> Tensor:
    """Returns what codes of e2m1 mean, in float64."""
    exponent, fraction = (code % 8).double() // 2, (code % 2).double()
    normal = torch.exp2(exponent - 1) * (1 + fraction / 2)
    return torch.where(exponent > 0, normal, fraction / 2) * torch.where(code > 7, -1.0, 1.0)


def mxfp4_weight(shape: tuple[int, ...], device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Makes (blocks [..., N, K / 32, 16], exponents [..., N, K / 32], the same weight [..., N, K]
    in float64), as the format defines it: all numbers, and scales that differ by 2 ** 8."""
    *outer, num_outputs, num_inputs = shape
    size = (*outer, num_outputs, num_inputs // 32)
    blocks = torch.randint(0, 256, (*size, 16), dtype=torch.uint8, device=device)
    exponents = torch.randint(116, 125, size, dtype=torch.uint8, device=device)
    wide = torch.zeros(*outer, num_outputs, num_inputs, dtype=torch.float64, device=device)
    for place in range(32):
        value = _number(blocks[..., place // 2] >> 4 * (place % 2) & 15)
        wide[..., place::32] = value * torch.exp2(exponents.double() - 127)
    return blocks, exponents, wide


def mxfp4_tiles(blocks: Tensor, exponents: Tensor) -> Tensor:
    """Makes tiles [..., N / 64, K / 64, 544] of weights. What they do not fill starts as ones."""
    num_outputs, num_groups = exponents.shape[-2:]
    shape = tiles_of(num_outputs, 32 * num_groups)
    flat = blocks.reshape(-1, *blocks.shape[-3:]), exponents.reshape(-1, *exponents.shape[-2:])
    out = torch.full((len(flat[0]), *shape), -1, dtype=torch.int32, device=blocks.device)
    for index in range(len(out)):
        tile_mxfp4(flat[0][index], flat[1][index], out[index])
    return out.view(*exponents.shape[:-2], *shape)


def fp4_dequantise(
    op: Op, form: Form, shape: tuple[int, int], dtype: torch.dtype, device: str = "cpu"
) -> None:
    """Every weight has the bits that the format's definition gives it, rounded once."""
    tiles, factor, wide = fp4_weight(form, shape, device)
    factors = None if factor is None else factor.expand(shape[0]).contiguous()
    found = op(tiles, factors, shape[1], dtype)
    assert found.dtype == dtype
    limits = torch.finfo(dtype)
    # The factor rounds a product in float32 first.
    allowed = wide.abs().clamp(min=limits.tiny) * (limits.eps / 2 * 1.001)
    if dtype == torch.float32:
        allowed *= 2
    assert bool(((found.double() - wide).abs() <= allowed).all())


def fp4_gemm(
    linear: Op,
    gated: Op,
    form: Form,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: str = "cpu",
) -> None:
    """Checks both GEMMs, with factors of their own for both halves of the outputs. `shape` is
    (rows, outputs, inner). Rows of x lie apart, and beside them there is what must not count."""
    rows, outputs, inner = shape
    halves = [fp4_weight(form, (outputs // 2, inner), device) for _ in range(2)]
    tiles, weights = (torch.cat([half[i] for half in halves]) for i in (0, 2))  # type: ignore[misc]
    factors = None
    if form == "nvfp4":
        factors = torch.cat([half[1].expand(outputs // 2) for half in halves])  # type: ignore[union-attr]
    spread = weights.square().mean().sqrt() * inner**0.5
    wide = torch.full((rows, 2 * inner), torch.nan, dtype=dtype, device=device)
    wide[:, :inner] = torch.randn(rows, inner, device=device) / spread
    x = wide[:, :inner]
    bias = torch.randn(outputs, device=device).to(dtype)
    exact = x.double() @ weights.t()
    gate, up = exact.to(dtype).double().chunk(2, -1)
    for fixed_order in (False, True):
        plain = linear(x, tiles, factors, None, fixed_order)
        biased = linear(x, tiles, factors, bias, fixed_order)
        assert plain.dtype == dtype
        assert oracle.relative_error(plain, exact) < TOLERANCE[dtype]
        assert oracle.relative_error(biased, exact + bias) < TOLERANCE[dtype]
        activated = gated(x, tiles, factors, fixed_order)
        assert oracle.relative_error(activated, gate * gate.sigmoid() * up) < 2 * TOLERANCE[dtype]


def fp4_in_fixed_order(
    op: Op, form: Form, shape: tuple[int, int, int], dtype: torch.dtype, device: str = "cpu"
) -> None:
    """A row has the same bits in any company."""
    rows, outputs, inner = shape
    tiles, factor, _ = fp4_weight(form, (outputs, inner), device)
    factors = None if factor is None else factor.expand(outputs).contiguous()
    x = torch.randn(rows, inner, device=device).to(dtype)
    found = op(x, tiles, factors, None, True)
    for start, end in ((0, 1), (rows // 2, rows // 2 + 3), (1, rows)):
        assert torch.equal(op(x[start:end], tiles, factors, None, True), found[start:end])


def fp4_gemm_again(op: Op, form: Form, shape: tuple[int, int, int], device: str) -> None:
    """The same call gives the same bits each time, whichever part of a sum comes last."""
    rows, outputs, inner = shape
    tiles, factor, _ = fp4_weight(form, (outputs, inner), device)
    factors = None if factor is None else factor.expand(outputs).contiguous()
    x = torch.randn(rows, inner, device=device).to(torch.bfloat16)
    first = op(x, tiles, factors)
    assert all(torch.equal(op(x, tiles, factors), first) for _ in range(50))
