"""Experts with quantised weights, in plain torch, against float64."""

from __future__ import annotations

import pytest
import quantised_expert_checks as check
import routed_expert_checks as routed
import torch
from fp4_checks import Form, fp4_weight, mxfp4_weight

from tandem_kernels import ops
from tandem_kernels.gemm.fp4_tiles import (
    NVFP4_FACTOR,
    NVFP4_TILE_WORDS,
    tile_mxfp4,
    tile_nvfp4,
    tiles_of,
    untile_fp4,
    untile_mxfp4,
)
from tandem_kernels.reference.mxfp4 import dequantise_mxfp4


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(5)


@pytest.mark.parametrize("clamped", [False, True], ids=["silu", "clamped"])
@pytest.mark.parametrize("blocks", [False, True], ids=["channel", "block"])
def test_fp8_experts(blocks: bool, clamped: bool) -> None:
    sizes = (13, 3, 8, 160, 144)
    check.fp8_experts(ops.fp8_experts, sizes, torch.float32, blocks=blocks, clamped=clamped)
    check.fp8_experts(ops.fp8_experts, sizes, torch.bfloat16, blocks=blocks, clamped=clamped)


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("shape", [(64, 64), (130, 96), (2880, 32)])
def test_tiles_hold_the_weights(form: Form, shape: tuple[int, int]) -> None:
    tiles, factor, wide = fp4_weight(form, shape)
    if factor is not None:
        wide /= factor / NVFP4_FACTOR
        factor = torch.tensor(NVFP4_FACTOR)
    assert torch.equal(untile_fp4(tiles, *shape, factor).double(), wide)
    whole = untile_fp4(tiles, tiles.shape[0] * 64, tiles.shape[1] * 64, factor)
    whole[: shape[0], : shape[1]] = 0
    assert not whole.any(), "what is padded"


def test_exponents_at_the_ends_of_the_tiles_range() -> None:
    blocks, _, _ = mxfp4_weight((64, 64))
    tiles = torch.empty(tiles_of(64, 64), dtype=torch.int32)
    for exponent in (0, 1, 127, 128):
        tile_mxfp4(blocks, torch.full((64, 2), exponent, dtype=torch.uint8), tiles)
        expected = dequantise_mxfp4(blocks, torch.full((64, 2), exponent), torch.float32)
        assert torch.equal(untile_mxfp4(tiles, 64, 64), expected)
    with pytest.raises(ValueError, match="129, above 128"):
        tile_mxfp4(blocks, torch.full((64, 2), 129, dtype=torch.uint8), tiles)


def test_every_scale_of_e4m3_is_kept() -> None:
    packed = torch.full((128, 8), 0x2E, dtype=torch.uint8)
    scales = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None]
    tiles = torch.empty(tiles_of(127, 16, NVFP4_TILE_WORDS), dtype=torch.int32)
    tile_nvfp4(packed[:127], scales, tiles)
    found = untile_fp4(tiles, 127, 16, torch.tensor(NVFP4_FACTOR))
    assert torch.equal(found, torch.tensor([-4.0, 1.0]).repeat(8) * scales.float())
    for bits in (127, 129, 255):
        with pytest.raises(ValueError, match="below 0, or no number"):
            scale = torch.tensor([[bits]], dtype=torch.uint8).view(torch.float8_e4m3fn)
            tile_nvfp4(packed[:1], scale, tiles)


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("clamped", [False, True], ids=["silu", "clamped"])
def test_fp4_experts(clamped: bool, form: Form) -> None:
    sizes = (13, 3, 8, 160, 96)
    check.fp4_experts(ops.fp4_experts, sizes, torch.float32, clamped=clamped, form=form)
    check.fp4_experts(ops.fp4_experts, sizes, torch.bfloat16, clamped=clamped, form=form)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_router_normalises_its_rows(dtype: torch.dtype) -> None:
    routed.normed_router(ops.normed_router, (3, 9, 96), dtype)
    routed.normed_router(
        ops.normed_router, (1, 128, 64), dtype, has_bias=False, norm_dtype=torch.float32
    )


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("renormalise", [True, False])
def test_fp4_experts_that_choose_themselves(renormalise: bool, form: Form) -> None:
    apart = ops.route_tokens, ops.fp4_experts
    sizes = 4, 3, 12, 96, 64
    routed.routed_experts(
        ops.fp4_routed_experts, apart, sizes, torch.bfloat16,
        renormalise=renormalise, scaling=2.5, form=form,
    )  # fmt: skip
