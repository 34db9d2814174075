"""Describes one small change that tests must notice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bug:
    """`old` is in `path` exactly once. `tests`: arguments for pytest. `hangs`: they may also wait
    for ever."""

    name: str
    what: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]
    hangs: bool = False


HAND_OVER = (
    "tests/engine/models/test_hybrid_node.py", "-k", "conversations_from_prefill and lfm2-",
)  # fmt: skip
"""The tests of a state that goes from a prefill to a decode node."""
ROWS_HAND_OVER = (
    "tests/engine/models/test_deepseek_v4.py", "-k", "other_sizes and True",
)  # fmt: skip
"""The test of windows, open and closed rows and a drafter's window that go to a decode node."""
