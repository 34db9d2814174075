"""The objects are those that were reviewed."""

from __future__ import annotations

import difflib

import pytest

from tests.helm.golden import FOLDER, NAMES, text_of


@pytest.mark.parametrize("name", NAMES)
def test_the_chart_renders_what_was_reviewed(name: str) -> None:
    old = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    changes = list(difflib.unified_diff(old, text_of(name).splitlines(), "reviewed", "now", n=2))
    cure = "if this is what you want: python -m tests.helm.golden"
    assert not changes, "\n".join([*changes, cure])
