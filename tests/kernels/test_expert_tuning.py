"""Tables of experts' tiles: those that are shipped can be read, and a shape without one takes the
nearest and says so."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import msgspec
import pytest
import torch

from bench.engine.experts import completed, ranges
from bench.engine.timing.expert_formats import POWERS, Mxfp4Weights
from tandem_kernels.experts import expert_plan
from tandem_kernels.experts.expert_plan import ExpertPlan
from tandem_kernels.experts.expert_tuning import (
    TABLES,
    ExpertShape,
    ExpertTable,
    ExpertTuning,
    Range,
    expert_tuning,
    nearest_shape,
    nearest_table,
)
from tandem_kernels.gemm.fp4_tiles import NUMBER_WORDS, SIDE, TILE_WORDS, untile_mxfp4

QWEN3_30B = ExpertShape(128, 768, 2048)
UNGATED = ExpertShape(128, 1856, 2688, "bf16_ungated")
SHIPPED = sorted(TABLES.glob("*/*.json"))
SMALL, LARGE = ExpertTuning(16, 32, 128, 4, 3), ExpertTuning(128, 128, 64, 8, 4, 8)
FP8 = ExpertTuning(64, 64, 128, 4, 4)


def write(folder: Path, gpu: str, shape: ExpertShape, tuning: ExpertTuning) -> None:
    table = ExpertTable(gate_up=(Range(None, tuning),), down=(Range(None, tuning),))
    (folder / gpu).mkdir(exist_ok=True)
    (folder / gpu / shape.file_name).write_bytes(table.to_json())


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_shipped_tables(path: Path) -> None:
    table = ExpertTable.from_json(path.read_bytes())
    assert table.to_json() == path.read_bytes(), "as the tuner writes it"
    for part in (*table.gate_up, *table.down):
        tuning = part.tuning
        in_registers = tuning.each_pair and path.stem.endswith("-fp8")
        assert (tuning.rows == 1) == in_registers, "one row is multiplied in registers"
        for size in (tuning.rows, tuning.cols, tuning.depth):
            assert size & (size - 1) == 0
            assert in_registers or size >= 8, "a tile that tl.dot takes"
        assert tuning.num_warps in (1, 2, 4, 8) and tuning.num_stages >= 1 and tuning.group >= 1
        assert tuning.splits >= 1


@pytest.mark.parametrize("path", [path for path in SHIPPED if "fp4" in path.name], ids=str)
def test_nothing_looks_for_rows_early_behind_pairs_in_four_bits(path: Path) -> None:
    """Their first GEMM lets the next kernel begin before it has waited for the experts, which other
    programs of a second GEMM read before they wait."""
    table = ExpertTable.from_json(path.read_bytes())
    for part in (*table.gate_up, *table.down):
        rows = 1e9 if part.up_to is None else part.up_to
        first, second = (table.choose(rows, gated=gated) for gated in (True, False))
        assert second.each_pair or not first.each_pair, rows


def test_what_a_format_alone_has_is_written_where_it_is_asked_for() -> None:
    pairs = ExpertTuning(8, 64, 64, 2, 3, splits=5, each_pair=True)
    table = ExpertTable(gate_up=(Range(0.1, pairs), Range(None, SMALL)), down=(Range(None, pairs),))
    data = table.to_json()
    assert ExpertTable.from_json(data) == table
    assert data.count(b'"each_pair":true') == 2 and b'"each_pair":false' not in data
    assert b"strips" not in data


@pytest.mark.parametrize("rows", [4 / 128, 0.5, 16, 64, 256])
def test_the_sweep_of_mxfp4_tries_what_its_kernels_take(rows: float) -> None:
    """Each once: whole tiles of weights, and the same number of rows in all of one expert's tiles.
    Pairs by themselves are tried where experts have less than a row on average."""
    tried = list(Mxfp4Weights.tunings(rows, gated=True))
    assert len(set(tried)) == len(tried) > 0
    for tuning in tried:
        assert tuning.cols % SIDE == 0 and tuning.depth % SIDE == 0
        assert tuning.num_warps < 4 or tuning.rows >= 16, "warps would share rows and outputs"
        assert tuning.extra_rows in (0, 16, 32) and tuning.extra_rows < tuning.rows
        assert tuning.extra_rows > 0 or not tuning.spares_extra, "there is nothing to spare"
        assert tuning.unroll in (1, 2, 3)
        if tuning.late:
            assert tuning.each_pair and tuning.num_warps < 4
            assert (tuning.rows, tuning.depth) == (8, SIDE), "a row of the operand for each group"
    assert any(tuning.unroll > 1 and not tuning.late for tuning in tried) == (rows > 0.2)
    assert any(tuning.each_pair for tuning in tried) == (rows < 0.3)
    assert any(tuning.late for tuning in tried) == (rows < 0.3)


def test_weights_of_the_sweep_of_mxfp4_are_like_those_of_models() -> None:
    """Zeros would be multiplied with less power, and so may be with a higher clock."""
    tiles = torch.randint(-(2**31), 2**31, (1, 1, TILE_WORDS), dtype=torch.int32)
    tiles[..., NUMBER_WORDS:] = POWERS
    weights = untile_mxfp4(tiles, SIDE, SIDE).abs()
    assert float(weights.mean()) > 0.01 and float(weights.max()) < 0.1


def test_a_measured_shape_has_its_own_table(caplog: pytest.LogCaptureFixture) -> None:
    nearest_table.cache_clear()
    assert {path.parent.name for path in SHIPPED} >= {"NVIDIA_H200"}
    rows = [
        expert_tuning(QWEN3_30B, pairs, "NVIDIA_H200", gated=gated).rows
        for pairs in (8, 8 * 128, 9 * 128, 64 * 128, 65 * 128)
        for gated in (True, False)
    ]
    assert rows == [16, 16, 16, 16, 32, 32, 64, 64, 128, 128]
    assert not caplog.records


def test_a_shape_without_a_table_takes_the_nearest_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, "NVIDIA_H200", ExpertShape(128, 384, 2048), SMALL)
    write(tmp_path, "NVIDIA_H200", ExpertShape(8, 14336, 4096), LARGE)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert chosen(tmp_path, QWEN3_30B) == SMALL
            assert chosen(tmp_path, ExpertShape(16, 8192, 4096)) == LARGE
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "E128-N768-K2048-bf16 on NVIDIA_H200" in messages[0]
    assert "NVIDIA_H200/E128-N384-K2048-bf16.json" in messages[0] and "--tune" in messages[0]


def test_few_pairs_take_what_was_measured_for_as_many(tmp_path: Path) -> None:
    """A token of 32 experts has as many programs as one of 128: each of its pairs is alone."""
    table = ExpertTable(
        gate_up=(Range(4 / 128, SMALL), Range(None, LARGE)), down=(Range(None, FP8),)
    )
    (tmp_path / "NVIDIA_H200").mkdir()
    (tmp_path / "NVIDIA_H200" / QWEN3_30B.file_name).write_bytes(table.to_json())
    few_experts = msgspec.structs.replace(QWEN3_30B, num_experts=32)
    assert chosen(tmp_path, few_experts, num_pairs=4) == SMALL
    assert chosen(tmp_path, few_experts, num_pairs=8) == LARGE
    many_experts = msgspec.structs.replace(QWEN3_30B, num_experts=512)
    assert chosen(tmp_path, many_experts, num_pairs=8) == LARGE
    assert chosen(tmp_path, many_experts, num_pairs=512) == LARGE, "a row each"


def test_few_pairs_have_a_row_each_whatever_table_they_take(tmp_path: Path) -> None:
    table = ExpertTable(gate_up=(Range(1.0, SMALL), Range(None, LARGE)), down=(Range(None, FP8),))
    (tmp_path / "NVIDIA_H200").mkdir()
    (tmp_path / "NVIDIA_H200" / QWEN3_30B.file_name).write_bytes(table.to_json())
    many_experts = msgspec.structs.replace(QWEN3_30B, num_experts=512)
    for num_pairs in (128, 129, 511, 512):
        assert chosen(tmp_path, many_experts, num_pairs=num_pairs) == SMALL
    assert chosen(tmp_path, many_experts, num_pairs=513) == LARGE


def chosen(
    tables: Path, shape: ExpertShape, gpu: str = "NVIDIA_H200", num_pairs: int = 64
) -> ExpertTuning:
    return expert_tuning(shape, num_pairs, gpu, gated=True, tables=tables)


def test_the_format_counts_before_the_gpu_and_the_gpu_before_the_sizes(tmp_path: Path) -> None:
    fp8 = msgspec.structs.replace(QWEN3_30B, weights="fp8")
    other = ExpertShape(8, 14336, 4096)
    write(tmp_path, "NVIDIA_H200", QWEN3_30B, SMALL)
    write(tmp_path, "NVIDIA_L40S", other, LARGE)
    write(tmp_path, "NVIDIA_A100", msgspec.structs.replace(other, weights="fp8"), FP8)
    assert chosen(tmp_path, QWEN3_30B, "NVIDIA_L40S") == LARGE
    assert chosen(tmp_path, QWEN3_30B, "NVIDIA_B200") == SMALL, "a GPU without tables"
    assert chosen(tmp_path, fp8) == FP8
    mxfp4 = msgspec.structs.replace(QWEN3_30B, weights="mxfp4")
    assert chosen(tmp_path, mxfp4) == SMALL, "a format without tables"


def plain(units: int, dtype: torch.dtype) -> ExpertShape:
    w13, w2 = (torch.empty(128, *size, dtype=dtype, device="meta") for size in _sizes(units))
    return ExpertShape.of_plain(w13, w2)


def _sizes(units: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return (units, 2048), (2048, 768)


def test_formats_of_plain_weights() -> None:
    halves = torch.bfloat16, torch.float16
    assert {plain(2 * 768, dtype) for dtype in halves} == {QWEN3_30B}
    assert {plain(768, dtype).weights for dtype in halves} == {"bf16_ungated"}
    exact = plain(2 * 768, torch.float32)
    small, large = (expert_tuning(exact, n, "NVIDIA_H200", gated=True) for n in (8, 1 << 16))
    assert small == large, "no table is asked"


@pytest.mark.parametrize(
    "ends", [[8, 4, None], [8, 8, None], [4, 8], [None, 8], []], ids=lambda ends: str(ends)
)
def test_ranges_must_rise_and_end_open(ends: list[float | None]) -> None:
    parts = [{"up_to": end, **msgspec.structs.asdict(SMALL)} for end in ends]
    with pytest.raises(msgspec.ValidationError, match="up_to must rise"):
        ExpertTable.from_json(msgspec.json.encode({"gate_up": parts, "down": parts}))


def test_a_misspelt_field_is_refused() -> None:
    part = {"up_to": None, **msgspec.structs.asdict(SMALL), "num_warp": 8}
    with pytest.raises(msgspec.ValidationError, match="num_warp"):
        ExpertTable.from_json(msgspec.json.encode({"gate_up": [part], "down": [part]}))


def test_the_tuner_takes_the_fastest_and_puts_borders_between() -> None:
    times = {
        1: [(5.0, LARGE), (3.0, SMALL)],
        4: [(4.0, SMALL), (9.0, LARGE)],
        64: [(30.0, LARGE), (31.0, SMALL)],
    }
    assert ranges(times, rows_per_token=0.5) == (Range(8.0, SMALL), Range(None, LARGE))


def test_a_sweep_of_some_sizes_keeps_what_the_table_says_about_others() -> None:
    parts = (Range(16.0, FP8), Range(None, LARGE))
    table = ExpertTable(gate_up=parts, down=(Range(None, FP8),))
    sizes = (1, 2, 4, 16, 64, 256, 2048, 8192)
    kept = {size: table.choose(size / 32, gated=True) for size in sizes}
    times = completed({2048: [(7.0, SMALL)]}, kept)
    found = [(Range(22.627, FP8)), Range(128.0, SMALL), Range(None, LARGE)]
    assert list(ranges(times, 1 / 32)) == found


def test_parts_of_the_inner_dimension_are_written_where_there_are_several() -> None:
    parts = msgspec.structs.replace(SMALL, splits=4)
    table = ExpertTable(gate_up=(Range(1.0, parts), Range(None, SMALL)), down=(Range(None, SMALL),))
    written = table.to_json()
    assert written.count(b"splits") == 1
    assert ExpertTable.from_json(written) == table


def test_a_launch_is_told_of_registers_only_where_they_are_few() -> None:
    usual = ExpertTuning(rows=64, cols=128, depth=64, num_warps=4, num_stages=3)
    assert usual.options == {"num_warps": 4, "num_stages": 3}
    few = msgspec.structs.replace(usual, registers=168)
    assert few.options == {**usual.options, "maxnreg": 168}
    part = Range(None, few)
    table = ExpertTable((part,), (part,))
    assert ExpertTable.from_json(table.to_json()) == table


def test_tiles_of_one_matrix_serve_no_two() -> None:
    """Tiles of Nemotron's experts, which have no gate, once served DeepSeek V3.2's at 80 rows of
    an expert: a program wanted 245,760 bytes of shared memory of 232,448."""
    measured = ExpertTable.from_json((TABLES / "NVIDIA_H200" / UNGATED.file_name).read_bytes())
    assert measured.gate_up[-1].tuning.cols == 256
    assert chosen(TABLES, UNGATED, num_pairs=1 << 20) == measured.gate_up[-1].tuning
    gated = msgspec.structs.replace(UNGATED, weights="bf16")
    assert chosen(TABLES, gated, num_pairs=1 << 20).cols < 256


@pytest.mark.parametrize(
    "path", [path for path in SHIPPED if re.search("bf16|-fp8", path.name)], ids=str
)
@pytest.mark.parametrize(("shared", "gpu"), [(227, "H200"), (163, "A100"), (99, "L40S")])
def test_tiles_fit_in_shared_memory(path: Path, shared: int, gpu: str) -> None:
    table = ExpertTable.from_json(path.read_bytes())
    first, itemsize = 1 if "ungated" in path.name else 2, 1 if "-fp8" in path.name else 2
    for kinds, parts in ((table.gate_up, first), (table.down, 1)):
        for tuning in (part.tuning for part in kinds):
            matrices = parts * (1 if parts == 2 else tuning.strips)
            fitting = tuning.within(shared * 1024, matrices, itemsize)
            stage = itemsize * tuning.depth * (tuning.rows + matrices * tuning.cols)
            assert stage * fitting.num_stages <= shared * 1024
            assert fitting.num_stages == tuning.num_stages or gpu != "H200"
            more = msgspec.structs.replace(fitting, num_stages=tuning.num_stages)
            assert more == tuning, "stages alone differ"


@pytest.mark.parametrize("weights", ["fp8", "mxfp4", "int4"])
def test_a_rank_counts_the_pairs_of_its_own_experts(
    weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its experts have as many rows as they would on one rank: of eight ranks each has an eighth of
    the experts, and of the pairs."""
    monkeypatch.setattr(expert_plan, "gpu_name", lambda device: "NVIDIA_H200")
    monkeypatch.setattr(expert_plan.ExpertRows, "of", lambda *given: None)
    whole, own = ExpertShape(128, 768, 2048, weights), ExpertShape(16, 768, 2048, weights)
    assert nearest_shape(own, "NVIDIA_H200", TABLES)[1] == whole
    for num_tokens in (1, 2, 8, 24, 64, 104, 304, 1000, 8192):
        experts = torch.empty((num_tokens, 8), dtype=torch.int32, device="meta")
        found = ExpertPlan.of(experts, own, ranks=8)
        alone = ExpertPlan.of(experts[: num_tokens // 8 or 1, : min(num_tokens, 8)], own)
        assert (found.gate_up, found.down) == (alone.gate_up, alone.down)
        expected = ExpertPlan.of(experts, whole)
        if num_tokens >= 16:
            assert (found.gate_up, found.down) == (expected.gate_up, expected.down)
