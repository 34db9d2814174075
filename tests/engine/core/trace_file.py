"""Reads the file of a profile as Perfetto does."""

from __future__ import annotations

import gzip
import json
import re

ANNOTATION = re.compile(r"step (\d+): (\d+) rows, (\d+) tokens")


def steps_of(path: str) -> list[tuple[int, int, int]]:
    """Returns (number, rows, tokens) of the steps in a trace, in order of time."""
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    operators = {event["name"] for event in events if event.get("cat") == "cpu_op"}
    assert any("mm" in name for name in operators)
    marked = sorted(
        (event["ts"], tuple(map(int, match.groups())))
        for event in events
        if event.get("cat") == "user_annotation" and (match := ANNOTATION.fullmatch(event["name"]))
    )
    return [step for _, step in marked]
