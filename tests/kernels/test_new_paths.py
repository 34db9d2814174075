"""New paths that launchers ask about are those that settings name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from engine.fast_paths import NewFastPath
from tandem_kernels import new_paths
from tandem_kernels.new_paths import take_new_paths, takes_new_path


def test_a_path_is_taken_until_others_are_named() -> None:
    assert not takes_new_path("late-route")
    take_new_paths(("late-route", "group-writes"))
    assert takes_new_path("late-route") and not takes_new_path("late-norm")
    take_new_paths(())
    assert not takes_new_path("late-route")


def test_launchers_ask_for_names_that_settings_have() -> None:
    folder = Path(new_paths.__file__).parent
    sources = [path.read_text() for path in folder.rglob("*.py")]
    asked = {name for text in sources for name in re.findall(r'takes_new_path\("(.*?)"\)', text)}
    assert asked == {"late-norm", "late-route", "wide-windows"}
    assert asked <= set(get_args(NewFastPath))
