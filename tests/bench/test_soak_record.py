"""The record of a soak: it goes on where it was, and its slopes are those of what remains."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.serving.soak_record import Look, Record, plot, slopes, told


def looks(**growth_mib_s: float) -> list[Look]:
    """Makes looks of an hour, every minute."""
    return [
        Look(at, i, {name: 100 + by * at for name, by in growth_mib_s.items()}, {})
        for i, at in enumerate(60.0 * minute for minute in range(61))
    ]


def test_slopes_are_per_hour_and_forget_the_warm_up() -> None:
    run = looks(flat=0.0, grows=0.01)
    for look in run[:10]:
        look.private_mib["flat"] = 7.0
    run[-1].private_mib["late"] = 50.0
    assert slopes(run) == {"flat": 0.0, "grows": pytest.approx(36.0)}
    assert slopes([]) == {}


def test_a_record_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "record"
    record = Record.read(path)
    record.num_done, record.texts = 9, {"3": "three"}
    record.runs.append(looks(core=0.5))
    record.save(path)
    again = Record.read(path)
    assert again == record
    assert told(again)["hours"] == 1.0


def test_the_plot_has_a_line_for_each_process() -> None:
    drawn = plot(looks(core=0.1, router=0.2))
    assert drawn.count("<polyline") == 2 and drawn.endswith("</svg>\n")
