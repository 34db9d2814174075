"""Kernels and tiles of single launches, as the tables of an H200 have them."""

from __future__ import annotations

import pytest
import torch

from engine.explain.launches import Launch
from engine.explain.reasons import OF_STATES
from engine.explain.tiles import describe
from tandem_kernels.batch.state_metadata import StateMetadata
from tandem_kernels.device import KNOWN_GPUS, as_on
from tandem_kernels.tunings.table import asked_choices

H200 = KNOWN_GPUS["h200"]


def _meta(*size: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("name", "arguments", "kernel", "table"),
    [
        ("fp8_gemm", (4096, 4096, (32, 32)), "fp8_few_row_kernel", "fp8_registers row 7"),
        ("fp8_gate_up", (8192, 4096, (8192,)), "fp8_small_m_kernel", "fp8_few row 6: gated = true"),
        ("int8_gate_up", (8192, 4096, (8192,)), "fp8_small_m_kernel", "fp8_few row 6"),
        ("int4_gemm", (4096, 1024, (1,)), "int4_gemm_kernel", "int4 row 1: num_rows <= 8"),
        ("fp4_gate_up", (128, 64, ()), "fp4_gemm_kernel", "fp4 row 1: num_rows <= 8, gated = true"),
    ],
)
def test_gemms_of_few_bits_say_their_row(
    name: str, arguments: tuple[int, int, tuple[int, ...]], kernel: str, table: str
) -> None:
    """A step of four rows."""
    outputs, columns, scales = arguments
    rows, weight = _meta(4, 4096, dtype=torch.bfloat16), _meta(outputs, columns)
    given: tuple[torch.Tensor, ...] = (rows, weight, _meta(*scales))
    if "8" in name:
        given = (rows, _meta(4), weight, _meta(*scales))
    with as_on(H200), asked_choices() as asked:
        found, tile = describe(Launch(name, "gemm", "", given))
    assert found == kernel and "warps" in tile
    assert str(asked[-1]).startswith(f"sm_90/{table}")


@pytest.mark.parametrize(
    ("name", "decodes", "tiles", "tables"),
    [
        ("gated_delta_rule", 4, "values 32, warps 1", {"delta_tokens row 1: num_reqs <= 31"}),
        ("mamba_scan", 64, "values 64, warps 4", {"mamba_tokens row 2: all others"}),
        ("mamba_scan", 0, "chunk 128, heads 4, warps 4, stages 1", {"mamba_prompts"}),
        (
            "gated_delta_rule",
            0,
            "system_warps 4, system_registers 128, walk values 32, warps 4, stages 3",
            {
                "delta_prompts",
                "delta_walk row 1: block_key <= 128, itemsize = 2, by_warpgroups = true",
            },
        ),
    ],
)
def test_operations_on_states_say_their_rows(
    name: str, decodes: int, tiles: str, tables: set[str]
) -> None:
    """Decodes alone, or prompts alone."""
    requests = torch.empty(max(decodes, 2), dtype=torch.int32)
    metadata = StateMetadata(requests, requests, requests, num_decodes=decodes)
    before = [_meta(4, 64, 128, 128, dtype=torch.bfloat16)] * OF_STATES[name]
    with as_on(H200), asked_choices() as asked:
        found, tile = describe(Launch(name, "states", "", (*before, metadata)))
    assert tile == tiles and found
    assert set(map(str, asked)) == {f"sm_90/{table}" for table in tables}


@pytest.mark.parametrize(("name", "cols"), [("fused_gate_up", 128), ("fused_qkv", 256)])
def test_gemms_that_do_more_say_their_row(name: str, cols: int) -> None:
    rows = _meta(4096, 4096, dtype=torch.bfloat16)
    with as_on(H200), asked_choices() as asked:
        found, tile = describe(Launch(name, "gemm", "", (rows,)))
    assert found == f"{name}_kernel" and f"rows 128, cols {cols}" in tile
    assert str(asked[-1]).startswith("sm_90/fused_gemm row")


@pytest.mark.parametrize(("rows", "by_warps"), [(6, False), (7, True), (8, True), (9, False)])
def test_gate_and_up_of_few_mxfp4_rows_are_by_warps(rows: int, by_warps: bool) -> None:
    """Experts of gpt-oss-20b: of fewer pairs tiles are shared out, of more a program has a tile."""
    x, experts = _meta(rows, 2880, dtype=torch.bfloat16), _meta(rows, 4, dtype=torch.int32)
    w13, w2 = _meta(32, 2, 45, 45, 544), _meta(32, 45, 45, 544)
    given = x, w13, w2, 2880, _meta(rows, 4, dtype=torch.float32), experts
    with as_on(H200):
        kernels, tiles = describe(Launch("fp4_experts", "experts", "", given))
    assert ("fp4_few_row_gate_up_kernel" in kernels) == by_warps
    gate_up, down = tiles.split("; ")[:2]
    assert ("even runs" in gate_up) == (rows < 7) and ("even runs" in down) == (rows < 9)
    assert gate_up.startswith("gate·up ahead 2") == by_warps


@pytest.mark.parametrize(
    ("name", "rows", "kernel", "tiles"),
    [
        ("few_row_gemm", 4, "few_row_gemm_kernel", "few_rows row 5: num_outputs >= 4097"),
        ("few_row_gemm", 5, "few_row_warp_kernel", "few_row_warps"),
        ("few_row_gemm", 9, "few_row_gemm_kernel", "few_rows row 2: num_rows >= 5"),
        ("few_row_qkv", 4, "few_row_qkv_kernel", "few_rows row 5: num_outputs >= 4097"),
        ("few_row_qkv", 8, "few_row_warp_qkv_kernel", "few_row_warps"),
    ],
)
def test_few_rows_are_multiplied_in_registers_or_by_warps(
    name: str, rows: int, kernel: str, tiles: str
) -> None:
    given = _meta(rows, 2880, dtype=torch.bfloat16), _meta(5120, 2880, dtype=torch.bfloat16)
    with as_on(H200), asked_choices() as asked:
        found, tile = describe(Launch(name, "gemm", "", given))
    assert found == kernel and tile
    assert str(asked[-1]).startswith(f"sm_90/{tiles}")


def test_tiles_of_heads_are_those_of_any_inner_dimension() -> None:
    """As the launcher asks: of one row, the same layer without heads has other tiles."""
    given = _meta(1, 2880, dtype=torch.bfloat16), _meta(4096, 2880, dtype=torch.bfloat16)
    with as_on(H200):
        heads, plain = (
            describe(Launch(name, "gemm", "", given))[1] for name in ("few_row_qkv", "few_row_gemm")
        )
    assert heads.startswith("cols 4, depth 512") and plain.startswith("cols 4, depth 2048")
