"""Kernels of linear layers, norms, experts and adapters in Triton's interpreter.

Nothing here is collected without TRITON_INTERPRET set.

The interpreter computes bfloat16 wrongly and takes milliseconds a program: small shapes,
float32 and float16.
"""

from __future__ import annotations

from typing import Any

import few_row_checks
import fp4_checks
import fp8_linear_checks
import fused_qkv_checks
import int4_checks as int4
import int8_checks
import kernel_checks as check
import lora_checks
import pytest
import torch
from fp4_checks import Form
from fused_qkv_checks import QkvShape
from interpreted_fixtures import (  # noqa: F401
    dtypes,
    remembers,
    rounds_to_e4m3,
    rows_by_themselves,
    seeded,
)
from triton.runtime import interpreter

from tandem_kernels import ops
from tandem_kernels.elementwise.gate_form import GateForm
from tandem_kernels.gemm import few_row_gemm, few_row_qkv, fp4_gemm, int4_gemm, small_m_qkv
from tandem_kernels.gemm.few_row_gemm import FewRowTuning
from tandem_kernels.gemm.fp4_tuning import Fp4Tuning
from tandem_kernels.gemm.fp8_gemm import fp8_small_m
from tandem_kernels.gemm.fp8_tuning import Fp8Tuning
from tandem_kernels.gemm.int4_tuning import Int4Tuning
from tandem_kernels.gemm.small_m_gemm import SmallMTuning
from tandem_kernels.lora import lora_gemm
from tandem_kernels.lora.lora_gemm_tuning import LoraGemmTuning


@dtypes
def test_norms_and_activation(dtype: torch.dtype) -> None:
    check.embedding(ops.embedding.kernel, 7, 1100, dtype)
    check.rms_norm(ops.rms_norm.kernel, 3, 80, dtype)
    check.fused_add_rms_norm(ops.fused_add_rms_norm.kernel, 3, 96, dtype)
    for readers, top_k in ((0, None), (1, None), (3, 2), (2, 0)):
        options = {"readers": readers, "top_k": top_k}
        check.add_normed(ops.add_normed.kernel, 3, 96, dtype, **options)
    check.silu_and_mul(ops.silu_and_mul.kernel, 3, 1100, dtype)
    check.gelu_tanh_and_mul(ops.gelu_tanh_and_mul.kernel, 3, 1100, dtype)
    check.bounded_gate_and_mul(ops.bounded_gate_and_mul.kernel, 3, 1100, dtype)
    check.relu_squared(ops.relu_squared.kernel, 3, 1100, dtype)


def test_products_of_few_rows() -> None:
    columns = ops.small_m_gemm.kernel, ops.small_m_gate_up.kernel
    for inner in (768, 33 * 256):
        check.small_m_gemm(*columns, (3, 128, inner), torch.float16)


@pytest.mark.parametrize(
    ("shape", "tuning"),
    [((1, 3, 1040), None), ((3, 10, 272), FewRowTuning(4, 128, 4)), ((6, 40, 272), None)],
)
def test_few_rows_of_any_size(
    shape: tuple[int, int, int], tuning: FewRowTuning | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tuning is not None:
        monkeypatch.setattr(few_row_gemm, "few_row_tuning", lambda *sizes: tuning)
    check.few_row_gemm(ops.few_row_gemm.kernel, shape, torch.float16)


@pytest.mark.parametrize("shape", [(1, 3, 96, 48), (3, 2, 40, 512)])
def test_few_rows_of_each_head(shape: tuple[int, ...]) -> None:
    check.head_gemm(ops.head_gemm.kernel, shape, torch.float16)


@pytest.mark.parametrize(
    ("rows", "inner", "heads", "tuning", "parts"),
    [
        (1, 720, (4, 1, 64), FewRowTuning(8, 256, 4), {}),
        (2, 720, (4, 2, 64), None, {"bias": False}),
        (2, 144, (1, 1, 128), FewRowTuning(16, 128, 4), {"norm": False}),
        (3, 272, (2, 1, 80), FewRowTuning(16, 512, 4), {}),
    ],
    ids=["one row", "padding", "normed", "uneven"],
)
def test_front_of_attention_in_one_launch(
    rows: int,
    inner: int,
    heads: tuple[int, int, int],
    tuning: FewRowTuning | None,
    parts: dict[str, bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if tuning is not None:
        monkeypatch.setattr(few_row_qkv, "few_row_tuning", lambda *sizes: tuning)
    few_row_checks.few_row_qkv(ops.few_row_qkv.kernel, rows, inner, heads, torch.float16, **parts)


@pytest.mark.parametrize(
    ("shape", "tuning"),
    [
        (QkvShape(num_tokens=1, inner=256), None),
        (QkvShape(num_tokens=33, inner=768), SmallMTuning(64, 128, 4, 1, splits=3)),
        (QkvShape(num_tokens=5, inner=512, head_dim=64), SmallMTuning(32, 128, 4, 1, splits=2)),
    ],
    ids=["one row", "parts", "small heads"],
)
def test_heads_of_a_decode_step_in_one_launch(
    shape: QkvShape, tuning: SmallMTuning | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tuning is not None:
        monkeypatch.setattr(small_m_qkv, "small_m_tuning", lambda *sizes: tuning)
    op = fused_qkv_checks.keeping(ops.small_m_qkv.kernel)
    for has_bias in (False, True):
        options = {"has_bias": has_bias, "keep_kv": True}
        fused_qkv_checks.fused_qkv(op, shape, torch.float16, **options)


def test_fused_gate_up_of_many_rows() -> None:
    check.fused_gate_up(ops.fused_gate_up.kernel, (150, 256, 128), torch.float16)


@pytest.mark.parametrize(
    ("shape", "has_bias", "keep_kv"),
    [
        (QkvShape(), False, True),
        (QkvShape(num_tokens=128, block_size=128, inner=192), True, False),
        (QkvShape(num_kv_heads=4, head_dim=64, num_tokens=3), True, True),
        (QkvShape(num_q_heads=8, num_kv_heads=4, head_dim=64, block_size=128), False, False),
    ],
    ids=str,
)
def test_fused_qkv_of_many_rows(shape: QkvShape, has_bias: bool, keep_kv: bool) -> None:
    op = ops.fused_qkv.kernel
    options = {"has_bias": has_bias, "keep_kv": keep_kv}
    fused_qkv_checks.fused_qkv(op, shape, torch.float16, **options)
    rope = ops.rope_and_cache.kernel
    fused_qkv_checks.fused_qkv_as_two(op, rope, shape, torch.float16, has_bias=has_bias)


@pytest.mark.parametrize(
    ("shape", "group_size"),
    [((3, 48, 2048), 128), ((20, 40, 320), 64), ((2, 72, 608), 32)],
    ids=["split", "swapped", "uneven"],
)
def test_products_with_4_bit_weights(shape: tuple[int, int, int], group_size: int) -> None:
    int4.int4_dequantise(ops.int4_dequantise.kernel, shape[1:], group_size, torch.float16)
    columns = ops.int4_gemm.kernel, ops.int4_gate_up.kernel
    int4.int4_gemm(*columns, shape, group_size, torch.float16)


@pytest.mark.parametrize(
    ("group_size", "pieces", "late"), [(128, 2, False), (64, 4, True), (32, 2, True)]
)
def test_blocks_of_4_bit_weights_in_several_turns(
    group_size: int, pieces: int, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuning = Int4Tuning(16, 64, 2, True, 4, 3, late=late, pieces=pieces)
    monkeypatch.setattr(int4_gemm, "int4_tuning", lambda *sizes, gated: tuning)
    columns = ops.int4_gemm.kernel, ops.int4_gate_up.kernel
    int4.int4_gemm(*columns, (3, 40, 384), group_size, torch.float16)


@pytest.mark.usefixtures("rows_by_themselves")
def test_products_with_4_bit_weights_that_do_not_depend_on_the_batch() -> None:
    int4.int4_in_fixed_order(ops.int4_gemm.kernel, (70, 96, 256), torch.float16)


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize(
    ("shape", "tuning"),
    [
        ((3, 128, 544), None),
        ((20, 128, 160), Fp4Tuning(16, 128, 128, 1, num_warps=4, num_stages=3)),
    ],
    ids=["split", "uneven"],
)
def test_products_with_four_bit_floats(
    form: Form,
    shape: tuple[int, int, int],
    tuning: Fp4Tuning | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if tuning is not None:
        monkeypatch.setattr(fp4_gemm, "fp4_tuning", lambda *sizes, gated: tuning)
    fp4_checks.fp4_dequantise(ops.fp4_dequantise.kernel, form, shape[1:], torch.float16)
    columns = ops.fp4_gemm.kernel, ops.fp4_gate_up.kernel
    fp4_checks.fp4_gemm(*columns, form, shape, torch.float16)


@pytest.mark.usefixtures("rows_by_themselves")
def test_products_with_four_bit_floats_that_do_not_depend_on_the_batch() -> None:
    kernel = ops.fp4_gemm.kernel
    fp4_checks.fp4_in_fixed_order(kernel, "nvfp4", (70, 64, 192), torch.float16)


@dtypes
@pytest.mark.usefixtures("rows_by_themselves")
def test_products_that_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    check.invariant_gemm(ops.invariant_gemm.kernel, (70, 150, 100), dtype)


@pytest.mark.parametrize("name", check.ROUTERS)
def test_routers(name: str) -> None:
    check.route_tokens(ops.route_tokens.kernel, name, 24)


def test_sums_of_experts_that_are_normed() -> None:
    check.pairs_add_rms_norm(ops.pairs_add_rms_norm.kernel, (5, 3, 200), torch.float32)


def test_routers_of_ranks_with_some_experts() -> None:
    check.route_to_own_experts(ops.route_tokens.kernel)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((2, 2, 8, 32, 32), torch.float32),
        ((9, 2, 4, 40, 24), torch.float32),
        ((140, 2, 3, 16, 32), torch.float16),
    ],
    ids=["by pair", "by expert", "sorted"],
)
def test_experts(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    for gate in check.GATES.values() if shape[0] == 2 else (None, check.GATES["clamped"]):
        check.fused_experts(ops.fused_experts.kernel, shape, dtype, gate=gate)
    if shape[0] == 2:
        for gate in (None, GateForm("relu_squared")):
            check.experts_beside(
                ops.experts_beside.kernel, (*shape[:4], 40, 72), torch.float32, gate=gate
            )
            check.experts_beside(
                ops.experts_beside.kernel, (1, *shape[1:4], 48, 80), torch.float16, gate=gate
            )


@pytest.mark.usefixtures("rounds_to_e4m3")
@pytest.mark.parametrize("group", [0, 128])
def test_rows_of_fp8(group: int) -> None:
    fp8_linear_checks.quantised_rows(ops.quantise_fp8.kernel, 5, 384, group, torch.float32)
    columns = ops.rms_norm_fp8.kernel, ops.silu_and_mul_fp8.kernel
    fp8_linear_checks.fp8_norm_and_activation(columns, 256, torch.float32, "cpu")
    fp8_linear_checks.unscaled_products((ops.scale_product.kernel, *columns), 200, torch.float32)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(("rows", "splits", "swap"), [(3, 1, False), (3, 3, False), (20, 2, True)])
def test_fp8_products_of_few_rows(rows: int, splits: int, swap: bool, blocks: bool) -> None:

    def small(*given: Any, gated: bool = False) -> torch.Tensor:
        *operands, out_dtype = given
        x, _, weight, *_ = operands
        out = torch.empty(len(x), len(weight) // (2 if gated else 1), dtype=out_dtype)
        tuning = Fp8Tuning(64, 128, splits, swap, num_warps=4, num_stages=3)
        return fp8_small_m(*operands, out, tuning, gated=gated)

    def gated(x: Any, x_scales: Any, weight: Any, w_scales: Any, out_dtype: Any) -> torch.Tensor:
        return small(x, x_scales, weight, w_scales, None, out_dtype, gated=True)

    fp8_linear_checks.fp8_gemm((small, gated), (rows, 256, 768), blocks=blocks)


def test_few_rows_of_fp8_in_registers() -> None:
    columns = ops.fp8_gemm.kernel, ops.fp8_gate_up.kernel
    fp8_linear_checks.fp8_gemm(columns, (3, 256, 2176), blocks=True)


@pytest.mark.parametrize("rows", [1, 20])
def test_fp8_products_of_groups(rows: int) -> None:
    columns = ops.fp8_group_gemm.kernel, ops.fp8_dequantise.kernel
    fp8_linear_checks.fp8_groups(*columns, (rows, 128, 512))


def test_rows_of_int8() -> None:
    columns = ops.quantise_int8.kernel, ops.rms_norm_int8.kernel, ops.silu_and_mul_int8.kernel
    int8_checks.int8_rows(columns, 5, 200, torch.float32)


@pytest.mark.parametrize(
    "shape", [(3, 256, 512), (20, 256, 512), (70, 272, 144)], ids=["few", "swapped", "tiles"]
)
def test_int8_products(shape: tuple[int, int, int]) -> None:
    columns = ops.int8_gemm.kernel, ops.int8_gate_up.kernel
    int8_checks.int8_gemm(columns, shape, torch.float16)


@pytest.mark.parametrize(
    ("shape", "groups"), [((3, 64, 256), 1), ((20, 40, 96), 3), ((2, 36, 80), 1)]
)
def test_products_with_8_bit_weights(shape: tuple[int, int, int], groups: int) -> None:
    columns = (
        ops.int8_weight_gemm.kernel,
        ops.int8_weight_gate_up.kernel,
        ops.int8_dequantise.kernel,
    )
    int8_checks.int8_weights(columns, shape, groups, torch.float16)


def test_adapters() -> None:
    lora_checks.slots_of_tokens(ops.lora_slots_of_tokens.kernel)
    columns = ops.lora_shrink.kernel, ops.lora_expand.kernel
    for num_tokens, inner, counts, rank in (
        (5, 1040, (72, 16, 16), 8),
        (70, 96, (48, 48), 16),
        (3, 64, (40,), 32),
    ):
        lora_checks.shrink_and_expand(*columns, num_tokens, inner, counts, rank, torch.float32)


def test_adapters_in_the_launch_of_their_layer() -> None:
    kernels = ops.lora_gemm.kernel, ops.lora_gate_up.kernel
    for num_tokens, inner, counts, rank, num_slots in (
        (5, 512, (64, 32, 32), 8, 3),
        (16, 512, (32, 32), 16, 9),
        (1, 1024, (32,), 64, 5),
        (18, 256, (32,), 16, 4),
    ):
        lora_checks.one_launch(*kernels, num_tokens, inner, counts, rank, num_slots, torch.float32)


@pytest.mark.parametrize(
    "tuning",
    [
        LoraGemmTuning(cols=64, depth=128, num_stages=3, shrink_programs=32, ahead=8),
        LoraGemmTuning(depth=512, num_stages=4, shrink_programs=2, ahead=1),
        LoraGemmTuning(depth=256, num_stages=3, shrink_programs=8, splits=2, ahead=2),
    ],
    ids=str,
)
def test_adapters_in_one_launch_with_the_tiles_of_large_layers(
    tuning: LoraGemmTuning, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora_gemm, "lora_gemm_tuning", lambda *_args, **_options: tuning)
    kernels = ops.lora_gemm.kernel, ops.lora_gate_up.kernel
    lora_checks.one_launch(*kernels, 5, 1024, (64, 64), 8, 3, torch.float32)


def test_adapters_in_one_launch_when_the_last_program_begins_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One program at a time, in the other order: none may wait for one that has not begun."""
    builder = interpreter.interpreter_builder
    begin = builder.set_grid_idx
    monkeypatch.setattr(
        builder, "set_grid_idx", lambda x, y, z: begin(builder.grid_dim[0] - 1 - x, y, z)
    )
    kernels = ops.lora_gemm.kernel, ops.lora_gate_up.kernel
    lora_checks.one_launch(*kernels, 5, 512, (32, 32), 8, 3, torch.float32)


def test_adapters_of_few_tokens() -> None:
    few = ops.lora_shrink.kernel, ops.lora_expand_few.kernel, ops.lora_expand_gated.kernel
    for num_tokens, inner, counts, rank, num_slots in (
        (5, 1040, (72, 16, 16), 8, 3),
        (18, 96, (48, 48), 16, 9),
        (3, 2100, (40,), 32, 5),
        (2, 96, (80, 80), 256, 2),
    ):
        lora_checks.few_tokens(
            *few, num_tokens, inner, counts, rank, torch.float32, "cpu", num_slots, most_pieces=4
        )
