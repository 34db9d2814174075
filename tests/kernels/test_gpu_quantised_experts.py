"""Experts with quantised weights on a GPU, against float64."""

from __future__ import annotations

import int4_checks as int4
import msgspec
import pytest
import quantised_expert_checks as check
import routed_expert_checks as routed
import torch
from fp4_checks import Form

from tandem_kernels import ops
from tandem_kernels.elementwise.gate_form import GateForm
from tandem_kernels.experts.expert_tuning import ExpertTuning
from tandem_kernels.experts.fp4.few_rows.shapes import ExpertWarpTuning

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(6)


@pytest.mark.parametrize(
    ("sizes", "blocks"),
    [
        ((1, 8, 128, 2048, 768), True),
        ((33, 6, 60, 256, 208), False),
        ((300, 8, 128, 1024, 384), True),
        ((700, 2, 8, 512, 384), False),
        ((700, 2, 8, 512, 640), True),
        ((1100, 2, 8, 512, 640), True),
        ((1100, 2, 8, 768, 384), False),
    ],
    ids=[
        "by pair",
        "by expert",
        "sorted",
        "large tiles",
        "large tiles and blocks",
        "warps that copy and blocks",
        "warps that copy",
    ],
)
def test_fp8_experts(sizes: check.Sizes, blocks: bool) -> None:
    check.fp8_experts(ops.fp8_experts, sizes, torch.bfloat16, "cuda", blocks=blocks)


@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize("tuning", check.FP8_DOWN, ids=check.tile_name)
def test_tiles_of_the_second_gemm_in_fp8(tuning: ExpertTuning, blocks: bool) -> None:
    check.fp8_down(tuning, torch.bfloat16, "cuda", blocks=blocks)


def test_rows_that_are_sorted_and_in_fp8() -> None:
    check.sorted_rows([0, 1, 128, 129, 0, 500], "cuda")


@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize("tuning", check.FP8_PAIRS, ids=check.pair_name)
def test_fp8_pairs_by_themselves(tuning: ExpertTuning, blocks: bool) -> None:
    check.fp8_pairs(tuning, (5, 4, 16, 1152, 384), torch.bfloat16, "cuda", blocks=blocks)
    check.fp8_pairs(tuning, (2, 8, 32, 7168, 256), torch.float16, "cuda", blocks=blocks)


def test_fp8_experts_with_biases() -> None:
    sizes = 33, 4, 32, 512, 384
    check.fp8_experts(ops.fp8_experts, sizes, torch.float16, "cuda", clamped=True)


@pytest.mark.parametrize(
    ("sizes", "clamped"),
    [
        ((1, 4, 32, 2880, 2880), True),
        ((33, 4, 32, 960, 704), False),
        ((300, 4, 32, 512, 704), True),
        ((700, 2, 8, 160, 96), True),
    ],
    ids=["by pair", "by expert", "sorted", "large tiles"],
)
@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
def test_fp4_experts(sizes: check.Sizes, clamped: bool, form: Form) -> None:
    check.fp4_experts(ops.fp4_experts, sizes, torch.bfloat16, "cuda", clamped=clamped, form=form)


@pytest.mark.parametrize(
    ("sizes", "gate"),
    [
        ((700, 2, 8, 1024, 768), GateForm("capped", limit=0.5)),
        ((460, 2, 8, 512, 512), None),
        ((270, 2, 8, 512, 512), GateForm("limited", limit=0.5)),
    ],
    ids=["two tiles of an expert", "one or two", "one"],
)
def test_fp4_experts_of_many_rows(sizes: check.Sizes, gate: GateForm | None) -> None:
    check.fp4_experts_ahead(ops.fp4_experts, sizes, gate, "cuda")
    check.tiles_of_experts([0, 1, 128, 129, 0, 500], "cuda")


def test_nvfp4_experts_of_128() -> None:
    for rows in (1, 16, 64):
        sizes = rows, 8, 128, 2048, 768
        check.fp4_experts(ops.fp4_experts, sizes, torch.bfloat16, "cuda", form="nvfp4")


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
def test_tilings_of_fp4_experts(form: Form) -> None:
    for tunings, sizes in (
        (check.FEW_ROWS, (17, 4, 32, 992, 320)),
        (check.MANY_ROWS, (100, 4, 8, 992, 320)),
        (check.HALF_LAST, (100, 4, 8, 992, 320)),
    ):
        check.fp4_tilings(tunings, sizes, torch.bfloat16, "cuda", form=form)


@pytest.mark.parametrize("tuning", check.EACH_PAIR, ids=check.pair_name)
@pytest.mark.parametrize("sizes", [(1, 4, 32, 2880, 2880), (7, 4, 32, 992, 320)])
@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
def test_fp4_pairs_by_themselves(form: Form, tuning: ExpertTuning, sizes: check.Sizes) -> None:
    check.fp4_pairs(tuning, sizes, torch.bfloat16, "cuda", clamped=True, form=form)


@pytest.mark.parametrize("runs", [1, 6])
@pytest.mark.parametrize("sizes", [(8, 4, 32, 2880, 2880), (7, 4, 32, 992, 320)])
@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
def test_fp4_experts_by_even_runs(form: Form, sizes: check.Sizes, runs: int) -> None:
    for tuning in check.EVEN_RUNS:
        own = msgspec.structs.replace(tuning, runs=runs)
        check.fp4_even_runs(own, sizes, torch.bfloat16, "cuda", form=form)


@pytest.mark.parametrize(
    "sizes",
    [
        (8, 4, 32, 2880, 2880), (7, 4, 32, 960, 320), (8, 4, 6, 320, 704), (8, 1, 2, 256, 192),
        (3, 4, 128, 128, 64),
    ],
    ids=["as gpt-oss", "some warps have less", "shared experts", "one of two", "one tile"],
)  # fmt: skip
@pytest.mark.parametrize("tuning", [(1, 2, 2, 128), (1, 3, 1, 112), (2, 2, 2, 128)])
def test_fp4_experts_of_few_rows_by_warps(
    sizes: check.Sizes, tuning: tuple[int, int, int, int]
) -> None:
    check.fp4_few_rows(ExpertWarpTuning(*tuning, least_pairs=1), sizes)


@pytest.mark.parametrize(
    "sizes",
    [(1, 128, 2880), (2, 128, 2880), (4, 60, 2048), (3, 9, 8192), (5, 32, 2880), (8, 128, 4096)],
)
@pytest.mark.parametrize("norm_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_router_normalises_its_rows(sizes: tuple[int, int, int], norm_dtype: torch.dtype) -> None:
    kind = torch.bfloat16
    routed.normed_router(ops.normed_router, sizes, kind, "cuda", norm_dtype=norm_dtype)


@pytest.mark.parametrize(
    "sizes",
    [
        (1, 4, 128, 2880, 2880), (1, 2, 60, 320, 704), (2, 4, 128, 2880, 2880),
        (4, 4, 128, 960, 704), (2, 3, 60, 320, 320),
    ],
    ids=["one row", "a small one", "two rows", "four rows", "other sizes"],
)  # fmt: skip
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
def test_fp4_experts_that_choose_themselves(
    sizes: check.Sizes, renormalise: bool, form: Form
) -> None:
    """Again and again the same bits, whichever program is last."""
    apart = ops.route_tokens, ops.fp4_experts
    for _ in range(3):
        routed.routed_experts(
            ops.fp4_routed_experts, apart, sizes, torch.bfloat16, "cuda",
            renormalise=renormalise, scaling=1.5, form=form,
        )  # fmt: skip


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
def test_fp4_experts_in_fp16(form: Form) -> None:
    check.fp4_experts(ops.fp4_experts, (33, 4, 8, 256, 192), torch.float16, "cuda", form=form)


@pytest.mark.parametrize(
    ("sizes", "group_size", "dtype"),
    [
        ((1, 8, 128, 2048, 768), 128, torch.bfloat16),
        ((33, 8, 128, 2048, 768), 128, torch.bfloat16),
        ((300, 2, 8, 1024, 1792), 64, torch.bfloat16),
        ((16, 8, 48, 7168, 256), 32, torch.float16),
    ],
)
def test_int4_experts(
    sizes: tuple[int, int, int, int, int], group_size: int, dtype: torch.dtype
) -> None:
    int4.int4_experts(ops.int4_experts, sizes, group_size, dtype, "cuda")
