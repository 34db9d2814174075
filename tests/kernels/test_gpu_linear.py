"""Linear layers, norms and activations on a CUDA device, against float64."""

from __future__ import annotations

import few_row_checks
import fp8_linear_checks
import fused_qkv_checks
import int4_checks as int4
import kernel_checks as check
import pytest
import torch
from fused_qkv_checks import QkvShape
from gpu_fixtures import HALVES, halves, poisoned_and_fresh  # noqa: F401

from tandem_kernels import ops

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16


@halves
@pytest.mark.parametrize("rows", [1, 7, 256, 2049])
@pytest.mark.parametrize("width", [64, 896, 1000, 4096, 8192])
def test_norms_and_activation(dtype: torch.dtype, rows: int, width: int) -> None:
    check.embedding(ops.embedding, rows, width, dtype, "cuda")
    check.rms_norm(ops.rms_norm, rows, width, dtype, "cuda")
    check.fused_add_rms_norm(ops.fused_add_rms_norm, rows, width, dtype, "cuda")
    for readers, top_k in ((0, None), (1, None), (3, 8), (2, 0)):
        options = {"readers": readers, "top_k": top_k, "device": "cuda"}
        check.add_normed(ops.add_normed, rows, width, dtype, **options)
    check.silu_and_mul(ops.silu_and_mul, rows, width, dtype, "cuda")
    check.gelu_tanh_and_mul(ops.gelu_tanh_and_mul, rows, width, dtype, "cuda")
    check.bounded_gate_and_mul(ops.bounded_gate_and_mul, rows, width, dtype, "cuda")
    check.relu_squared(ops.relu_squared, rows, width, dtype, "cuda")


@halves
@pytest.mark.parametrize("rows", [1, 5, 16, 33, 64])
@pytest.mark.parametrize(
    "shape", [(6144, 4096), (128, 256), (4096, 14336), (4608, 3584), (2560, 8192), (8192, 2048)]
)
def test_products_of_few_rows(dtype: torch.dtype, rows: int, shape: tuple[int, int]) -> None:
    columns = ops.small_m_gemm, ops.small_m_gate_up
    check.small_m_gemm(*columns, (rows, *shape), dtype, "cuda")


@halves
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 9, 16])
@pytest.mark.parametrize("shape", [(5120, 2880), (2880, 4096), (128, 2880), (37, 272)])
def test_few_rows_of_any_size(dtype: torch.dtype, rows: int, shape: tuple[int, int]) -> None:
    check.few_row_gemm(ops.few_row_gemm, (rows, *shape), dtype, "cuda")


@halves
@pytest.mark.parametrize("rows", [1, 3, 4])
@pytest.mark.parametrize("shape", [(16, 512, 128), (16, 128, 512), (5, 40, 96)])
def test_few_rows_of_each_head(dtype: torch.dtype, rows: int, shape: tuple[int, ...]) -> None:
    check.head_gemm(ops.head_gemm, (rows, *shape), dtype, "cuda")


@halves
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize(
    ("heads", "inner"),
    [((64, 8, 64), 2880), ((8, 1, 64), 2880), ((32, 8, 128), 4096), ((3, 1, 80), 272)],
)
def test_front_of_attention_in_one_launch(
    dtype: torch.dtype, rows: int, heads: tuple[int, int, int], inner: int
) -> None:
    given = ops.few_row_qkv, rows, inner, heads, dtype, "cuda"
    if rows <= 4:  # Of more, no kernel computes the norm, too.
        few_row_checks.few_row_qkv(*given)
    few_row_checks.few_row_qkv(*given, norm=False)
    few_row_checks.few_row_qkv(*given, bias=False, norm=False)


@halves
@pytest.mark.parametrize("rows", [1, 16, 17, 64])
@pytest.mark.parametrize(
    ("heads", "inner"), [((16, 2, 128), 8192), ((32, 8, 128), 4096), ((8, 4, 64), 2560)]
)
def test_heads_of_a_decode_step_in_one_launch(
    dtype: torch.dtype, rows: int, heads: tuple[int, int, int], inner: int
) -> None:
    op, shape = fused_qkv_checks.keeping(ops.small_m_qkv), QkvShape(*heads, inner, rows, 64)
    for has_bias in (False, True):
        fused_qkv_checks.fused_qkv(op, shape, dtype, "cuda", has_bias=has_bias, keep_kv=True)


@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize(("dtype", "rows"), [(BF16, 1), (BF16, 2049), (torch.float16, 33)])
def test_rows_of_fp8(dtype: torch.dtype, rows: int, group: int) -> None:
    columns = ops.rms_norm_fp8, ops.silu_and_mul_fp8
    for width in (896, 4096, 14336):
        fp8_linear_checks.quantised_rows(ops.quantise_fp8, rows, width, group, dtype, "cuda")
        fp8_linear_checks.fp8_norm_and_activation(columns, width, dtype, "cuda")
        fp8_linear_checks.unscaled_products((ops.scale_product, *columns), width, dtype, "cuda")


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 33, 65, 2049])
@pytest.mark.parametrize("shape", [(256, 384), (4096, 14336), (1536, 2304)])
def test_fp8_products(rows: int, shape: tuple[int, int], blocks: bool) -> None:
    """Rows that are no multiple of anything, and inner dimensions of 3 and of 18 blocks."""
    fp8_linear_checks.fp8_product(ops.fp8_product, (rows, *shape), "cuda")
    columns = ops.fp8_gemm, ops.fp8_gate_up
    fp8_linear_checks.fp8_gemm(columns, (rows, *shape), blocks=blocks, device="cuda")
    if blocks and rows <= 64:
        of_groups = ops.fp8_group_gemm, ops.fp8_dequantise
        fp8_linear_checks.fp8_groups(*of_groups, (rows, *shape), device="cuda")


@halves
@pytest.mark.parametrize("rows", [1, 63, 1024, 3001])
@pytest.mark.parametrize("shape", [(128, 256), (14336, 4096), (9472, 3584), (4864, 896)])
def test_fused_gate_up_of_many_rows(dtype: torch.dtype, rows: int, shape: tuple[int, int]) -> None:
    check.fused_gate_up(ops.fused_gate_up, (rows, *shape), dtype, "cuda")


@halves
@pytest.mark.parametrize("rows", [1, 127, 1024, 3001])
@pytest.mark.parametrize(
    ("heads", "inner", "has_bias", "block_size"),
    [
        ((32, 8, 128), 4096, False, 16),
        ((28, 4, 128), 3584, True, 128),
        ((64, 8, 64), 2880, True, 16),
        ((8, 4, 64), 256, False, 32),
    ],
)
def test_fused_qkv_of_many_rows(
    dtype: torch.dtype,
    rows: int,
    heads: tuple[int, int, int],
    inner: int,
    has_bias: bool,
    block_size: int,
) -> None:
    shape = QkvShape(*heads, inner, rows, block_size)
    for keep_kv in (False, True):
        options = {"has_bias": has_bias, "keep_kv": keep_kv}
        fused_qkv_checks.fused_qkv(ops.fused_qkv, shape, dtype, "cuda", **options)
    columns = ops.fused_qkv, ops.rope_and_cache
    fused_qkv_checks.fused_qkv_as_two(*columns, shape, dtype, "cuda", has_bias=has_bias)


@pytest.mark.parametrize(
    ("shape", "group_size", "dtype"),
    [
        ((6144, 4096), 128, torch.bfloat16),
        ((4096, 14336), 128, torch.bfloat16),
        ((200, 1408), 64, torch.bfloat16),
        ((4608, 3584), 32, torch.float16),
    ],
)
def test_4_bit_weights(shape: tuple[int, int], group_size: int, dtype: torch.dtype) -> None:
    int4.int4_dequantise(ops.int4_dequantise, shape, group_size, dtype, "cuda")
    for rows in (1, 5, 16, 17, 64, 200):
        columns = ops.int4_gemm, ops.int4_gate_up
        int4.int4_gemm(*columns, (rows, *shape), group_size, dtype, "cuda")


@pytest.mark.parametrize("rows", [65, 96, 128, 129, 256])
@pytest.mark.parametrize(
    ("shape", "group_size", "dtype"),
    [
        ((4096, 2048), 128, torch.bfloat16),
        ((6144, 2048), 128, torch.float16),
        ((9216, 2048), 128, torch.bfloat16),
        ((9240, 1408), 64, torch.bfloat16),
        ((9216, 1120), 32, torch.float16),
    ],
)
def test_4_bit_weights_of_many_rows(
    shape: tuple[int, int], group_size: int, dtype: torch.dtype, rows: int
) -> None:
    """One shape or more for each tile, with whole blocks and without."""
    columns = ops.int4_gemm, ops.int4_gate_up
    int4.int4_gemm(*columns, (rows, *shape), group_size, dtype, "cuda")


@halves
def test_4_bit_weights_in_one_order(dtype: torch.dtype) -> None:
    int4.int4_in_fixed_order(ops.int4_gemm, (300, 4096, 4096), dtype, "cuda")
    for shape in ((1, 4096, 14336), (33, 6144, 4096), (128, 6144, 4096), (256, 18432, 2048)):
        int4.int4_gemm_again(ops.int4_gemm, shape, "cuda")


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(3, 128, 64), (70, 150, 100), (300, 4096, 4096)])
def test_products_that_do_not_depend_on_the_batch(
    dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    check.invariant_gemm(ops.invariant_gemm, shape, dtype, "cuda")
