"""The rate of a path, from moments set by hand."""

from __future__ import annotations

import pytest

from kv_transfer.consumer.path_meter import PathMoment, rate_between
from kv_transfer.control.sizing import pull_bytes, pull_bytes_per_token
from kv_transfer.layout import KVLayout, attention_group

MIB = 1 << 20


@pytest.mark.parametrize(
    ("begun", "computed", "received", "expected"),
    [
        (None, None, None, (0.0, False)),
        ((0, 1.0), None, None, (0.0, False)),
        ((0, 1.0), None, (8 * MIB, 3.0), (4 * MIB, False)),
        ((0, 1.0), (6 * MIB, 2.5), (8 * MIB, 3.0), (4 * MIB, True)),
        ((0, 1.0), (8 * MIB, 2.5), (8 * MIB, 3.0), (4 * MIB, False)),
        ((0, 1.0), (8 * MIB - 9, 2.9), (8 * MIB, 3.0), (4 * MIB, False)),
        ((0, 1.0), (8 * MIB - 100, 2.0), (8 * MIB, 4.0), (50.0, True)),
        ((0, 1.0), None, (1000, 1.5), (0.0, False)),
        ((0, 1.0), (4 * MIB, 2.985), (8 * MIB, 3.0), (4 * MIB, False)),
        ((0, 1.0), (16 * MIB, 2.0), (18 * MIB, 2.5), (16 * MIB, True)),
        ((0, 1.0), (16 * MIB, 2.0), (18 * MIB, 3.0), (2 * MIB, True)),
        ((0, 3.0), (0, 1.0), (8 * MIB, 3.5), (16 * MIB, True)),
        ((0, 3.0), (0, 1.0), (8 * MIB, 3.01), (800 * MIB, False)),
    ],
    ids=[
        "none",
        "open",
        "hidden",
        "waited",
        "was there",
        "little",
        "little and long",
        "small",
        "too short to tell",
        "paused at the end",
        "too long for a pause",
        "opened late",
        "opened late and quick",
    ],
)
def test_what_a_transfer_says_of_its_path(
    begun: tuple[int, float] | None,
    computed: tuple[int, float] | None,
    received: tuple[int, float] | None,
    expected: tuple[float, bool],
) -> None:
    moments = [PathMoment(*one) if one else None for one in (begun, computed, received)]
    assert rate_between(*moments) == (pytest.approx(expected[0]), expected[1])


def test_bytes_of_a_prompt() -> None:
    full = attention_group(layers=range(4), heads=2, head_dim=8, dtype="bfloat16", block_size=16)
    near = attention_group(
        layers=(4, 5), heads=2, head_dim=8, dtype="bfloat16", block_size=16, window=33
    )
    layout = KVLayout(groups=(full, near), tp_size=2, model_hash="m")
    block = 16 * 2 * 2 * 8 * 2
    assert pull_bytes(layout, 0, 160) == (10 * 4 + 2 * 2) * block
    assert pull_bytes(layout, 144, 160) == (1 * 4 + 1 * 2) * block
    assert pull_bytes(layout, 160, 160) == 0
    assert pull_bytes_per_token(layout) == 4 * block / 16
