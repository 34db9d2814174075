"""Staged writes against a plain array."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.batch.buffer_utils import (
    Carrier,
    HostBackedTensor,
    PinnedRing,
    StagedWriteTensor,
)

CPU = torch.device("cpu")
ROWS, COLUMNS = 5, 9


@st.composite
def disjoint_writes(draw: st.DrawFn) -> list[tuple[int, int, list[int]]]:
    """Pieces of different rows, or behind one another in the same row."""
    writes = []
    for row in draw(st.lists(st.integers(0, ROWS - 1), unique=True)):
        start = 0
        for _ in range(draw(st.integers(1, 3))):
            start = draw(st.integers(start, COLUMNS))
            values = draw(st.lists(st.integers(-9, 9), max_size=COLUMNS - start))
            writes.append((row, start, values))
            start += len(values)
    return draw(st.permutations(writes))


@given(rounds=st.lists(disjoint_writes(), max_size=4))
def test_staged_writes_equal_assignments(rounds: list[list[tuple[int, int, list[int]]]]) -> None:
    staged = StagedWriteTensor((ROWS, COLUMNS), np.int32, CPU)
    address = staged.tensor.data_ptr()
    model = np.zeros((ROWS, COLUMNS), np.int32)
    for writes in rounds:
        before = model.copy()
        for row, start, values in writes:
            staged.stage_write(row, start, values)
            model[row, start : start + len(values)] = values
        assert (staged.tensor.numpy() == before).all()
        Carrier([staged], CPU).carry_over()
        assert (staged.tensor.numpy() == model).all()
    assert staged.tensor.data_ptr() == address


def test_what_the_device_changed_survives() -> None:
    staged = StagedWriteTensor((ROWS,), np.int64, CPU)
    staged.stage_value(1, 10)
    staged.stage_value(3, 1 << 40)
    Carrier([staged], CPU).carry_over()
    staged.tensor[1] += 5
    staged.stage_value(4, 7)
    Carrier([staged], CPU).carry_over()
    assert staged.tensor.tolist() == [0, 15, 0, 1 << 40, 7]


@pytest.mark.parametrize(
    ("row", "start", "values"),
    [(-1, 0, [1]), (ROWS, 0, [1]), (0, -1, [1]), (0, COLUMNS, [1]), (0, 1, [0] * COLUMNS)],
)
def test_writes_outside_the_table_are_refused(row: int, start: int, values: list[int]) -> None:
    staged = StagedWriteTensor((ROWS, COLUMNS), np.int32, CPU)
    with pytest.raises(IndexError, match="outside a table of 5 rows and 9 columns"):
        staged.stage_write(row, start, values)
    Carrier([staged], CPU).carry_over()
    assert not staged.tensor.any()


def test_host_truth_is_seen_once_carried_over() -> None:
    table = HostBackedTensor((2, 3), np.float32, CPU)
    address = table.tensor.data_ptr()
    table.write((slice(None), 1), (0.5, -2.0))
    assert not table.tensor.any()
    Carrier([table], CPU).carry_over()
    assert table.tensor.tolist() == [[0.0, 0.5, 0.0], [0.0, -2.0, 0.0]]
    assert table.tensor.data_ptr() == address


def test_tensors_of_all_kinds_are_carried_over_together() -> None:
    counts = StagedWriteTensor((ROWS,), np.int64, CPU)
    tokens = StagedWriteTensor((ROWS, COLUMNS), np.int32, CPU)
    floats = HostBackedTensor((2, 3), np.float32, CPU)
    untouched = HostBackedTensor((ROWS,), np.int32, CPU)
    untouched.tensor[:] = 3
    counts.stage_value(2, 1 << 40)
    tokens.stage_write(0, 1, [4, 5, 6])
    tokens.stage_write(4, 0, [7])
    floats.write((1, 2), 0.25)
    Carrier([counts, tokens, untouched, floats], CPU).carry_over()
    assert counts.tensor.tolist() == [0, 0, 1 << 40, 0, 0]
    assert tokens.tensor[0].tolist() == [0, 4, 5, 6, 0, 0, 0, 0, 0]
    assert tokens.tensor[4].tolist() == [7] + [0] * 8
    assert floats.tensor.tolist() == [[0.0] * 3, [0.0, 0.0, 0.25]]
    assert untouched.tensor.tolist() == [3] * ROWS
    assert not any(tensor.has_changes for tensor in (counts, tokens, floats))


@given(rounds=st.lists(st.lists(st.lists(st.integers(-9, 9), max_size=5), max_size=3), max_size=9))
def test_a_ring_holds_what_was_written_last(rounds: list[list[list[int]]]) -> None:
    ring = PinnedRing(CPU, part_words=6, num_parts=2)
    before: list[tuple[torch.Tensor, list[int]]] = []
    for pieces in rounds:
        written = [number for piece in pieces for number in piece]
        arrays = [np.array(piece, np.int32) for piece in pieces]
        if not arrays:
            continue
        with ring.filled(arrays) as packed:
            assert packed[: len(written)].tolist() == written
        for earlier, expected in before[-1:]:
            assert earlier[: len(expected)].tolist() == expected, "a part that may be read still"
        before.append((packed, written))
