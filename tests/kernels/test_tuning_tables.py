"""Tables of tunings: what they choose, how they are read, and which one a GPU takes."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem_kernels.attention.attention_thresholds import masked_tokens, whole_prompts
from tandem_kernels.attention.block_sparse_attention import block_sparse_tuning
from tandem_kernels.attention.decode_tuning import decode_tuning
from tandem_kernels.attention.latent_attention import latent_tuning
from tandem_kernels.attention.latent_decode import latent_decode_tuning
from tandem_kernels.attention.prefill_tuning import prefill_tuning
from tandem_kernels.attention.sparse_latent_attention import sparse_tuning
from tandem_kernels.attention.window_rows_attention import window_rows_tuning
from tandem_kernels.device import GpuFacts, as_on
from tandem_kernels.experts.fp4.few_rows.shapes import expert_warp_tuning
from tandem_kernels.experts.fp4.one_row.shapes import one_row_tuning
from tandem_kernels.gemm.few_row_gemm import few_row_tuning
from tandem_kernels.gemm.few_row_warp_shapes import few_row_warp_tuning
from tandem_kernels.gemm.fp4_tuning import fp4_tuning
from tandem_kernels.gemm.fp8_few_rows import few_fp8_tuning
from tandem_kernels.gemm.fp8_paths import fp8_path
from tandem_kernels.gemm.fp8_tuning import fp8_tuning
from tandem_kernels.gemm.fused_tuning import fused_tuning
from tandem_kernels.gemm.gemm_thresholds import gemm_thresholds
from tandem_kernels.gemm.int4_tuning import int4_tuning
from tandem_kernels.gemm.int8_gemm import int8_tuning
from tandem_kernels.gemm.small_m_gemm import small_m_tuning
from tandem_kernels.linear_attention.delta_tuning import (
    decode_tuning as delta_rule_tuning,
)
from tandem_kernels.linear_attention.delta_tuning import prompt_tuning, walk_tuning
from tandem_kernels.linear_attention.mamba_tuning import chunk_tuning, token_tuning
from tandem_kernels.lora.lora_gemm_tuning import lora_gemm_tuning
from tandem_kernels.tunings.table import (
    GENERAL,
    TABLES,
    TableError,
    TuningTable,
    asked_choices,
    plain_table,
)

CPU = torch.device("cpu")
CHOICES = json.loads(Path(__file__).with_name("tuning_choices.json").read_text())
"""Holds what was chosen for the arguments of three shapes of each row of a table, by kind."""


def _decode(units: int, head_dim: int, dtype: str) -> Any:
    return decode_tuning(CPU, units, head_dim, getattr(torch, dtype))


def _prefill(*given: Any) -> Any:
    *sizes, dtype, block_size, window, by_warpgroups = given
    kind = getattr(torch, dtype)
    return prefill_tuning(CPU, *sizes, kind, block_size, window, by_warpgroups=by_warpgroups)


def _sparse(heads: int, itemsize: int, is_ahead: bool) -> Any:
    return sparse_tuning(CPU, heads, itemsize, is_ahead=is_ahead)


def _window_rows(tokens: int, heads: int, dtype: str, fixed_order: bool) -> Any:
    queries = torch.empty(tokens, heads, 8, dtype=getattr(torch, dtype), device="meta")
    return window_rows_tuning(queries, fixed_order)


def _four_bits(of: Callable[..., Any], rows: int, outputs: int, inner: int, gated: bool) -> Any:
    return of(CPU, rows, outputs, inner, gated=gated)


def _fp8(rows: int, outputs: int, inner: int, gated: bool, blocks: bool) -> Any:
    return fp8_tuning(CPU, rows, outputs, inner, gated=gated, blocks=blocks)


def _fp8_path(rows: int, blocks: bool, is_whole: bool) -> str:
    weight = torch.empty(128, 128 if is_whole else 64, device="meta")
    return fp8_path(rows, weight, torch.empty((1, 1) if blocks else (1,), device="meta"))


def _delta_walk(itemsize: int, block_key: int, by_warpgroups: bool) -> Any:
    with as_on(GpuFacts("NVIDIA_X", (9 if by_warpgroups else 8, 0), 132)):
        return walk_tuning(CPU, itemsize, block_key)


def _latent_decode(
    num_rows: int, itemsize: int, num_decodes: int, turns: bool, is_ahead: bool = False
) -> Any:
    return latent_decode_tuning(
        CPU, num_rows, itemsize, num_decodes, turns=turns, is_ahead=is_ahead
    )


KINDS: dict[str, Callable[..., Any]] = {
    "lora_gemm": partial(lora_gemm_tuning, CPU),
    "whole_prompts": partial(whole_prompts, CPU),
    "masked_contexts": partial(masked_tokens, CPU),
    "fp8_paths": _fp8_path,
    "thresholds": partial(gemm_thresholds, CPU),
    "decode": _decode,
    "prefill": _prefill,
    "latent": partial(latent_tuning, CPU),
    "latent_decode": _latent_decode,
    "sparse": _sparse,
    "window_rows": _window_rows,
    "block_sparse": partial(block_sparse_tuning, CPU),
    "small_m": partial(small_m_tuning, CPU),
    "few_row": partial(few_row_tuning, CPU),
    "few_row_warps": partial(few_row_warp_tuning, CPU),
    "few_fp8": partial(few_fp8_tuning, CPU),
    "fp8": _fp8,
    "int8": partial(int8_tuning, CPU),
    "int4": partial(_four_bits, int4_tuning),
    "fp4": partial(_four_bits, fp4_tuning),
    "delta_tokens": partial(delta_rule_tuning, CPU),
    "delta_walk": _delta_walk,
    "delta_prompts": partial(prompt_tuning, CPU),
    "mamba_tokens": partial(token_tuning, CPU),
    "mamba_prompts": partial(chunk_tuning, CPU),
    "fused": partial(fused_tuning, CPU),
    "fp4_one_row": partial(one_row_tuning, CPU),
    "fp4_few_rows": partial(expert_warp_tuning, CPU),
}


def test_every_row_of_every_table_chooses_what_was_measured() -> None:
    with asked_choices() as asked:
        for kind, choose in KINDS.items():
            for arguments, expected in CHOICES[kind]:
                found = choose(*arguments)
                found = asdict(found) if is_dataclass(found) else found
                assert found == expected, (kind, arguments)
    assert CHOICES.keys() == KINDS.keys()
    taken = {(choice.table, choice.number) for choice in asked}
    for path in (TABLES / GENERAL).glob("*.json"):
        count = len(json.loads(path.read_text())["rows"])
        table = f"{GENERAL}/{path.stem}"
        assert {number for name, number in taken if name == table} == set(range(1, count + 1)), path


@dataclass(frozen=True)
class Tiles:
    cols: int


ROWS = [
    {"up_to": {"rows": 4}, "equal": {"gated": True}, "take": {"cols": 1}, "note": "one"},
    {"at_least": {"rows": 3}, "multiple_of": {"rows": 2}, "take": {"cols": 2}},
    {"take": {"cols": 3}},
]


def write(folder: Path, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "tiles.json").write_text(json.dumps({"rows": rows}))


def table_in(tables: Path) -> TuningTable[Tiles, Tiles]:
    return plain_table("tiles", Tiles, ("rows", "gated"), tables)


def test_the_first_row_whose_conditions_hold_is_taken_and_named(tmp_path: Path) -> None:
    write(tmp_path / GENERAL, ROWS)
    table, shapes = table_in(tmp_path), [(4, True), (4, False), (5, True), (6, True), (2, False)]
    with asked_choices() as asked:
        assert [table.choose(CPU, *shape).cols for shape in shapes] == [1, 2, 3, 2, 3]
    assert [str(choice) for choice in asked[:3]] == [
        f"{GENERAL}/tiles row 1: rows <= 4, gated = true",
        f"{GENERAL}/tiles row 2: rows >= 3, rows a multiple of 2",
        f"{GENERAL}/tiles row 3: all others",
    ]
    assert asked[0].row.note == "one"
    assert table.choose(CPU, 4, True) is asked[0].tuning, "it is found once"


def test_a_gpu_takes_the_table_of_its_name_then_of_its_family_then_the_general_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The last is said in the log, once."""
    for cols, folder in enumerate((GENERAL, "sm_89", "NVIDIA_L4")):
        write(tmp_path / folder, [{"take": {"cols": cols}}])
    table = table_in(tmp_path)
    gpus = {"NVIDIA_L4": (8, 9), "NVIDIA_L40S": (8, 9), "NVIDIA_A100": (8, 0), "NVIDIA_H": (9, 0)}
    found = []
    with caplog.at_level(logging.WARNING, logger="tandem_kernels.tunings.table"):
        for name, capability in [*gpus.items(), *gpus.items()]:
            with as_on(GpuFacts(name, capability, 100)):
                found.append(table.choose(torch.device("cuda"), 1, False).cols)
    assert found == [2, 1, 0, 0] * 2
    (record,) = caplog.records
    assert "NVIDIA_A100 or sm_80: GEMMs and attention take those of sm_90" in record.getMessage()


def test_programs_with_little_shared_memory_have_tables_of_their_own() -> None:
    """An L40S has no room for some tiles of an H200; `compile_kernels` sees that these fit."""
    with as_on(GpuFacts("NVIDIA_L40S", (8, 9), 142, 99 * 1024)), asked_choices() as asked:
        latent_tuning(CPU, 2)
        latent_decode_tuning(CPU, 128, 2, 1, turns=False)
        prefill_tuning(CPU, 8192, 1 << 20, 8192, 128, torch.bfloat16, 128)
        decode_tuning(CPU, 8, 128, torch.bfloat16)
        small_m_tuning(CPU, False, 16, 8192, 8192)
    assert [choice.table for choice in asked] == [
        "shared_99k/latent_attention",
        "shared_99k/latent_decode",
        "shared_99k/prefill_attention",
        f"{GENERAL}/decode_attention",
        "shared_99k/small_m",
    ]
    assert all(choice.tuning.rows <= 16 for choice in asked[:2]) and asked[2].tuning.tile == 64


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "the last row, and no other, must be without conditions"),
        (ROWS[:2], "the last row, and no other, must be without conditions"),
        ([ROWS[2], ROWS[2]], "the last row, and no other, must be without conditions"),
        ([{"up_to": {"row": 4}, "take": {"cols": 1}}, ROWS[2]], "row 1: unknown facts row"),
        ([{"take": {"cols": 1, "rows": 2}}], "row 1: unknown fields rows; there are cols"),
        ([{"take": {"cols": "1"}}], "row 1: Expected `int`, got `str` - at `$.cols`"),
        ([{"take": {}}], "row 1: Object missing required field `cols`"),
        ([{"took": {}}], "Object contains unknown field `took`"),
    ],
)
def test_what_is_wrong_in_a_table_is_said_with_its_file_and_row(
    tmp_path: Path, rows: list[dict[str, Any]], message: str
) -> None:
    write(tmp_path / GENERAL, rows)
    with pytest.raises(TableError) as caught:
        table_in(tmp_path).choose(CPU, 1, False)
    assert message in str(caught.value) and str(tmp_path / GENERAL) in str(caught.value)
