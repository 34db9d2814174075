"""Triton kernels of quantised experts in Triton's interpreter, as `interpreted_layers`."""

from __future__ import annotations

from typing import Any

import int4_checks as int4
import int8_checks
import pytest
import quantised_expert_checks as check
import routed_expert_checks as routed
import torch
from fp4_checks import Form
from interpreted_fixtures import (  # noqa: F401
    remembers,
    rounds_to_e4m3,
    rows_by_themselves,
    seeded,
)

from tandem_kernels import ops
from tandem_kernels.experts import expert_tuning, one_row_experts
from tandem_kernels.experts.expert_tuning import ExpertTuning
from tandem_kernels.experts.fp4 import experts as fp4_experts
from tandem_kernels.experts.fp4 import pair_shapes
from tandem_kernels.experts.fp4 import pairs as fp4_pairs
from tandem_kernels.experts.fp8 import pairs as fp8_pairs

pytestmark = pytest.mark.usefixtures("rounds_to_e4m3", "rows_by_themselves")


@pytest.mark.parametrize(
    ("sizes", "blocks", "clamped"),
    [
        ((3, 2, 8, 160, 144), True, False),
        ((9, 2, 4, 128, 256), False, True),
        ((140, 2, 3, 128, 128), True, False),
    ],
    ids=["by pair", "by expert", "sorted"],
)
def test_fp8_experts(sizes: check.Sizes, blocks: bool, clamped: bool) -> None:
    kernel = ops.fp8_experts.kernel
    check.fp8_experts(kernel, sizes, torch.float32, blocks=blocks, clamped=clamped)


@pytest.mark.parametrize(
    ("tuning", "sizes"),
    [
        (check.FP8_PAIRS[0], (2, 2, 3, 160, 144)),
        (check.FP8_PAIRS[1], (3, 2, 4, 144, 64)),
        (check.FP8_PAIRS[2], (3, 2, 3, 272, 96)),
    ],
    ids=["a masked step", "two steps", "three blocks"],
)
def test_fp8_pairs_by_themselves(tuning: ExpertTuning, sizes: check.Sizes) -> None:
    several = tuning.cols > 2
    check.fp8_pairs(tuning, sizes, torch.float32, blocks=tuning.cols != 4, clamped=several)


def test_rows_that_are_sorted_and_in_fp8() -> None:
    check.sorted_rows([0, 3, 128, 0, 130])
    check.sorted_rows([2, 0, 1], width=2200)


@pytest.mark.parametrize("tuning", check.FP8_DOWN[:2], ids=check.tile_name)
def test_tiles_of_the_second_gemm_in_fp8(tuning: ExpertTuning) -> None:
    check.fp8_down(tuning, torch.float32, "cpu", blocks=tuning.rows > 16)


@pytest.mark.parametrize(
    ("sizes", "quantises"),
    [((3, 2, 8, 160, 144), True), ((9, 2, 4, 128, 96), False), ((140, 2, 3, 64, 96), True)],
    ids=["by pair", "by expert", "sorted"],
)
def test_int8_experts(sizes: check.Sizes, quantises: bool) -> None:
    kernel = ops.int8_experts.kernel
    int8_checks.int8_experts(kernel, sizes, torch.float16, quantises=quantises)


@pytest.mark.parametrize(
    ("form", "sizes", "clamped"),
    [
        ("mxfp4", (3, 2, 8, 160, 96), False),
        ("mxfp4", (9, 2, 4, 64, 192), True),
        ("mxfp4", (140, 2, 3, 64, 64), False),
        ("nvfp4", (9, 2, 4, 80, 96), True),
    ],
    ids=["by pair", "by expert", "sorted", "NVFP4"],
)
def test_fp4_experts(form: Form, sizes: check.Sizes, clamped: bool) -> None:
    kernel = ops.fp4_experts.kernel
    check.fp4_experts(kernel, sizes, torch.float32, clamped=clamped, form=form)


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
def test_fp4_experts_in_halves(form: Form) -> None:
    check.fp4_experts(ops.fp4_experts.kernel, (9, 2, 4, 64, 64), torch.float16, form=form)


@pytest.mark.parametrize(
    ("sizes", "group_size"),
    [((3, 2, 8, 320, 96), 32), ((9, 2, 4, 256, 128), 64), ((140, 2, 3, 256, 128), 128)],
    ids=["by pair", "by expert", "sorted"],
)
def test_int4_experts(sizes: check.Sizes, group_size: int) -> None:
    int4.int4_experts(ops.int4_experts.kernel, sizes, group_size, torch.float16)


def test_tiles_of_many_rows() -> None:
    check.tiles_of_experts([0, 1, 128, 129, 0, 400])
    check.tiles_of_experts([129, 199], top_k=3)


def test_tilings_of_fp4_experts() -> None:
    nvfp4 = [check.FEW_ROWS[1], check.FEW_ROWS[3], check.MANY_ROWS[3]]
    check.fp4_tilings(nvfp4, (2, 2, 8, 160, 96), torch.float32, form="nvfp4")
    check.fp4_tilings(check.FEW_ROWS, (2, 2, 8, 160, 96), torch.float32)
    check.fp4_tilings(check.MANY_ROWS, (65, 2, 2, 32, 64), torch.float32)
    check.fp4_tilings(check.HALF_LAST, (65, 2, 2, 32, 160), torch.float32)


@pytest.mark.parametrize("tuning", check.EACH_PAIR, ids=check.pair_name)
def test_fp4_pairs_by_themselves(tuning: ExpertTuning) -> None:
    clamped = tuning.splits > 1
    check.fp4_pairs(tuning, (3, 2, 4, 160, 64), torch.float32, clamped=clamped)


@pytest.mark.parametrize("tuning", check.EACH_PAIR[1:3], ids=check.pair_name)
def test_nvfp4_pairs_by_themselves(tuning: ExpertTuning) -> None:
    check.fp4_pairs(tuning, (3, 2, 4, 176, 64), torch.float32, form="nvfp4")


@pytest.mark.parametrize("tuning", check.EVEN_RUNS[2:], ids=lambda tuning: f"runs={tuning.runs}")
def test_fp4_experts_by_even_runs(tuning: ExpertTuning) -> None:
    form: Form = "nvfp4" if tuning.runs == 5 else "mxfp4"
    check.fp4_even_runs(tuning, (5, 2, 4, 160, 192), torch.float32, form=form)


def test_a_table_may_ask_for_pairs_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each GEMM follows its own range; with more tiles than there are counters neither does."""
    sizes = 3, 2, 4, 64, 64
    pairs, usual = check.EACH_PAIR[0], check.FEW_ROWS[2]
    launched = []
    monkeypatch.setattr(
        fp4_experts, "fp4_pair_gemm",
        lambda *args, **options: launched.append(args[1].shape[1])
        or fp4_pairs.fp4_pair_gemm(*args, **options),
    )  # fmt: skip
    for chosen, parts in (((pairs, usual), [2]), ((usual, pairs), [1])):
        monkeypatch.setattr(
            expert_tuning, "expert_tuning",
            lambda *args, gated, chosen=chosen: chosen[0] if gated else chosen[1],
        )  # fmt: skip
        launched.clear()
        check.fp4_experts(ops.fp4_experts.kernel, sizes, torch.float32, clamped=True)
        assert launched == parts
    assert not pair_shapes.takes_each_pair(pairs, 1 << 14, 65)


@pytest.mark.parametrize(
    ("sizes", "dtype", "options"),
    [
        ((1, 128, 96), torch.float16, {}),
        ((4, 24, 320), torch.float16, {"has_bias": False}),
        ((3, 5, 64), torch.float16, {"norm_dtype": torch.float32}),
        ((2, 9, 2048), torch.float32, {}),
        ((7, 9, 96), torch.float16, {}),
    ],
)
def test_a_router_normalises_its_rows(
    sizes: tuple[int, int, int], dtype: torch.dtype, options: dict[str, Any]
) -> None:
    routed.normed_router(ops.normed_router.kernel, sizes, dtype, **options)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((1, 4, 32, 160, 96), {"scaling": 2.5}),
        ((2, 3, 40, 96, 64), {"renormalise": False}),
        ((4, 4, 72, 64, 64), {}),
        ((2, 3, 40, 96, 64), {"form": "nvfp4"}),
    ],
    ids=["one row", "two rows", "four rows", "NVFP4"],
)
def test_experts_that_choose_themselves(sizes: check.Sizes, options: dict[str, Any]) -> None:
    apart = ops.route_tokens.kernel, ops.fp4_experts.kernel
    kernel = ops.fp4_routed_experts.kernel
    routed.routed_experts(kernel, apart, sizes, torch.float16, **options)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_one_token_reads_the_experts_of_its_rank_alone(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pairs of other ranks cost neither a weight nor a product, however few programs there are."""
    kept, read = one_row_experts._outputs, []

    def spy(x: Any, weight: Any, first: Any, *rest: Any) -> Any:
        read.append(int(first.handle.data[0]))
        return kept(x, weight, first, *rest)

    monkeypatch.setattr(one_row_experts, "_outputs", spy)
    sizes = (1, 32), (4, 96, 32), (4, 32, 48)
    x, w13, w2 = (torch.randn(size).half() for size in sizes)
    chosen = torch.tensor([[-1, 2, -1, 3]], dtype=torch.int32)
    given = x, w13, w2, torch.rand(1, 4), chosen
    found = ops.fused_experts.kernel(*given, ranks=ranks)
    assert set(read) == {2 * 96, 3 * 96, 2 * 32, 3 * 32}
    assert torch.equal(found, ops.fused_experts.kernel(*given))
    assert 0 in read, "on one rank nothing looks for pairs"


def test_ranks_launch_programs_for_their_part_of_the_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []

    class Recorded:
        def __getitem__(self, grid: tuple[int]) -> Any:
            launched.append(grid[0])
            return lambda *given, **constants: None

    monkeypatch.setattr(fp8_pairs, "fp8_pair_gemm_kernel", Recorded())
    monkeypatch.setattr(one_row_experts, "one_row_expert_kernel", Recorded())
    x, chosen = torch.randn(1, 128).half(), torch.zeros((1, 8), dtype=torch.int32)
    weight, scales, _ = check.fp8_weight((2, 1, 128, 128), blocks=True)
    for ranks in (1, 3, 8):
        out, tuning = torch.empty(8, 128), check.FP8_PAIRS[1]
        given = x, (weight, scales), chosen.float(), chosen, out, tuning
        fp8_pairs.fp8_pair_gemm(*given, ranks=ranks)
        w13, w2 = torch.empty(2, 256, 128).half(), torch.empty(2, 128, 128).half()
        one_row_experts.one_row_experts(x, w13, w2, chosen.float(), chosen, None, ranks=ranks)
    assert launched == [8 * 32, 8 * 64, 8 * 32, 3 * 32, 3 * 64, 3 * 32, 32, 64, 32]
