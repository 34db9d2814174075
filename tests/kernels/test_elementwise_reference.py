"""Plain-torch norms, activation and rotary embedding against float64."""

from __future__ import annotations

import few_row_checks
import fp8_linear_checks
import fused_qkv_checks
import kernel_checks as check
import pytest
import torch
from fused_qkv_checks import QkvShape

from tandem_kernels import ops
from tandem_kernels.attention.value_form import ValueForm
from tandem_kernels.gemm import few_row_shapes, fused_qkv_shapes

dtypes = pytest.mark.parametrize("dtype", list(check.ELEMENTWISE), ids=str)
shapes = pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 80), (17, 333)])


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(7)


def test_a_token_that_no_table_has_is_told() -> None:
    with pytest.raises(IndexError):
        ops.embedding(torch.tensor([3, 60]), torch.zeros(60, 8))


@dtypes
@shapes
def test_embedding(dtype: torch.dtype, rows: int, width: int) -> None:
    check.embedding(ops.embedding, rows, width, dtype)


@dtypes
@shapes
def test_rms_norm(dtype: torch.dtype, rows: int, width: int) -> None:
    check.rms_norm(ops.rms_norm, rows, width, dtype)


@dtypes
@shapes
def test_fused_add_rms_norm(dtype: torch.dtype, rows: int, width: int) -> None:
    check.fused_add_rms_norm(ops.fused_add_rms_norm, rows, width, dtype)


@dtypes
@pytest.mark.parametrize(("readers", "top_k"), [(0, None), (1, None), (3, 2), (2, 0)])
def test_norms_around_the_stream(dtype: torch.dtype, readers: int, top_k: int | None) -> None:
    check.add_normed(ops.add_normed, 3, 80, dtype, readers=readers, top_k=top_k)


@dtypes
def test_products_of_few_rows(dtype: torch.dtype) -> None:
    columns = ops.small_m_gemm, ops.small_m_gate_up
    check.small_m_gemm(*columns, (3, 128, 256), dtype)


@dtypes
def test_few_rows_of_any_size(dtype: torch.dtype) -> None:
    check.few_row_gemm(ops.few_row_gemm, (3, 37, 272), dtype)
    check.head_gemm(ops.head_gemm, (3, 4, 40, 24), dtype)


@dtypes
@pytest.mark.parametrize("norm", [False, True])
def test_front_of_attention_in_one_launch(dtype: torch.dtype, norm: bool) -> None:
    few_row_checks.few_row_qkv(ops.few_row_qkv, 3, 144, (4, 2, 64), dtype, bias=norm, norm=norm)


def test_shapes_of_the_front_of_attention() -> None:
    """Rows of some kinds are left to kernels apart."""
    takes = few_row_shapes.takes_heads

    def given(num_rows: int, num_outputs: int, head_dim: int = 64) -> list[torch.Tensor]:
        sizes = (num_rows, 96), (num_outputs, 96), (3, 2, 8, 16, head_dim)
        return [torch.zeros(size, dtype=torch.bfloat16) for size in sizes]

    assert takes(*given(2, 5120)) and takes(*given(4, 2560))
    assert not takes(*given(3, 5120)) and not takes(*given(5, 2560))
    assert not takes(*given(1, 2560, head_dim=40)), "half a head is no multiple of 8"
    x, weight, kv_cache = given(1, 2560)
    assert not takes(x, weight, kv_cache.half())
    assert not takes(torch.zeros(97).bfloat16()[1:].view(1, 96), weight, kv_cache)


@dtypes
def test_fused_gate_up_of_many_rows(dtype: torch.dtype) -> None:
    check.fused_gate_up(ops.fused_gate_up, (40, 128, 64), dtype)


@dtypes
@pytest.mark.parametrize("has_bias", [False, True])
def test_fused_qkv_of_many_rows(dtype: torch.dtype, has_bias: bool) -> None:
    shape = QkvShape(num_q_heads=6, head_dim=24, inner=40, num_tokens=7)
    options = {"has_bias": has_bias, "keep_kv": has_bias}
    fused_qkv_checks.fused_qkv(ops.fused_qkv, shape, dtype, **options)
    op = fused_qkv_checks.keeping(ops.small_m_qkv)
    fused_qkv_checks.fused_qkv(op, shape, dtype, has_bias=has_bias, keep_kv=True)
    columns = ops.fused_qkv, ops.rope_and_cache
    fused_qkv_checks.fused_qkv_as_two(*columns, shape, dtype, has_bias=has_bias)


def test_shapes_of_fused_qkv() -> None:
    """Tiles are of one kind, queries, keys or values, and whole."""
    takes = fused_qkv_shapes.takes
    x = torch.zeros(3, 512).bfloat16()

    def weight(num_heads: int, head_dim: int, inner: int = 512) -> torch.Tensor:
        return torch.zeros(num_heads * head_dim, inner).bfloat16()

    def cache(num_kv_heads: int, head_dim: int, dtype: torch.dtype = x.dtype) -> torch.Tensor:
        return torch.zeros(1, 2, num_kv_heads, 16, head_dim).to(dtype)

    assert takes(x, weight(8, 128), cache(2, 128))
    assert takes(x, weight(16, 64), cache(4, 64))
    assert takes(x[:, 256:], weight(8, 128, 256), cache(2, 128))
    assert not takes(x[:0], weight(8, 128), cache(2, 128)), "no rows"
    assert not takes(x, weight(7, 128), cache(2, 128)), "three query heads"
    assert not takes(x, weight(6, 128), cache(1, 128)), "a tile of a key and a value"
    assert not takes(x, weight(12, 64), cache(2, 64)), "tiles of keys and values"
    assert not takes(x, weight(8, 256), cache(2, 256)), "halves of heads in two tiles"
    assert not takes(x, weight(16, 80), cache(4, 80)), "tiles of parts of heads"
    assert not takes(x, weight(8, 128), cache(2, 128, torch.float8_e4m3fn)), "numbers of 8 bits"
    assert not takes(x.float(), weight(8, 128).float(), cache(2, 128, torch.float32))
    assert not takes(x.half(), weight(8, 128), cache(2, 128))
    assert not takes(x[:, :320], weight(8, 128, 320)[:, :310], cache(2, 128))
    assert not takes(x[:, 1:], weight(8, 128)[:, 1:], cache(2, 128))


@dtypes
def test_products_that_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    check.invariant_gemm(ops.invariant_gemm, (40, 96, 80), dtype)


@dtypes
@shapes
def test_gated_activations(dtype: torch.dtype, rows: int, width: int) -> None:
    check.silu_and_mul(ops.silu_and_mul, rows, width, dtype)
    check.gelu_tanh_and_mul(ops.gelu_tanh_and_mul, rows, width, dtype)
    check.bounded_gate_and_mul(ops.bounded_gate_and_mul, rows, width, dtype)
    check.relu_squared(ops.relu_squared, rows, width, dtype)


@dtypes
@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("head_norm", [False, True])
def test_rope_and_cache(dtype: torch.dtype, head_dim: int, head_norm: bool) -> None:
    check.rope_and_cache(
        ops.rope_and_cache, dtype, head_dim=head_dim, head_norm=head_norm, keep_k=head_norm
    )


def test_a_step_may_overwrite_the_slots_of_the_one_before() -> None:
    """An engine writes those of each step into the same tensor."""
    cache, slots = torch.zeros(3, 2, 1, 4, 8), torch.tensor([1, -1])
    q, k, v = torch.zeros(2, 1, 8), torch.zeros(2, 1, 8), torch.ones(2, 1, 8)
    rest = torch.zeros(2, dtype=torch.int64), torch.zeros(1, 8), cache, slots
    for step in ([1, -1], [-1, 6], [9, 10]):
        slots.copy_(torch.tensor(step))
        ops.rope_and_cache(q, k, v, *rest)
    written = cache[:, 1, 0, :, 0].flatten().nonzero().flatten()
    assert written.tolist() == [1, 6, 9, 10]


@dtypes
def test_values_of_a_form(dtype: torch.dtype) -> None:
    for values in (ValueForm(normed=True), ValueForm(scale=0.7), ValueForm(normed=True, scale=2.0)):
        check.written_values(ops.rope_and_cache, values, dtype)


@pytest.mark.parametrize("group", [0, 128])
@dtypes
def test_rows_of_fp8(dtype: torch.dtype, group: int) -> None:
    fp8_linear_checks.quantised_rows(ops.quantise_fp8, 5, 384, group, dtype)
    columns = ops.rms_norm_fp8, ops.silu_and_mul_fp8
    fp8_linear_checks.fp8_norm_and_activation(columns, 256, dtype, "cpu")
    fp8_linear_checks.unscaled_products((ops.scale_product, *columns), 200, dtype)


@pytest.mark.parametrize("blocks", [False, True])
def test_fp8_products(blocks: bool) -> None:
    fp8_linear_checks.fp8_product(ops.fp8_product, (7, 48, 96), "cpu")
    fp8_linear_checks.fp8_gemm((ops.fp8_gemm, ops.fp8_gate_up), (7, 256, 384), blocks=blocks)
    fp8_linear_checks.fp8_groups(ops.fp8_group_gemm, ops.fp8_dequantise, (7, 128, 384))
