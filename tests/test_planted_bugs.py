"""The bugs of `tests/planted_bugs.py` can still be planted, and name tests that exist."""

from __future__ import annotations

import pytest

from tests.bugs.bug import Bug
from tests.planted_bugs import BUGS, ROOT


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_finds_its_place_and_its_tests(bug: Bug) -> None:
    assert (ROOT / bug.path).read_text(encoding="utf-8").count(bug.old) == 1
    files = [name for name in bug.tests if name.startswith("tests/")]
    assert files
    assert all((ROOT / name).is_file() for name in files), files
