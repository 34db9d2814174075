"""Tests that every benchmark can be started, and found by its question."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in sorted((ROOT / "bench").rglob("*.py"))
}
PARTS = sorted({name.split(".")[1] for name in FILES if name.count(".") > 1})


@pytest.mark.parametrize("part", PARTS)
def test_modules_import(part):
    """Imports a part in a process of its own: what it changes on import stays in there."""
    names = [name for name in FILES if name.startswith(f"bench.{part}.")]
    assert names
    code = f"import importlib\nfor name in {names}: importlib.import_module(name)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def commands() -> set[str]:
    """Returns the modules that are run by themselves."""
    return {name for name, path in FILES.items() if '__name__ == "__main__"' in path.read_text()}


def commands_of_the_map() -> list[str]:
    """Returns the modules that bench/README.md names, below the heading of their room."""
    found: list[str] = []
    room = ""
    for line in (ROOT / "bench" / "README.md").read_text().splitlines():
        if line.startswith("## "):
            named = re.search(r"`(bench\.\w+)`", line)
            room = f"{named[1]}." if named else ""
        words = re.findall(r"`(bench\.[\w.]+|\w+)`", line) if room else []
        words += [] if room else re.findall(r"`(bench\.[\w.]+)`", line)
        if not line.startswith("## "):
            found += [word if word.startswith("bench.") else room + word for word in words]
    return found


def test_the_map_has_every_command_once():
    assert sorted(commands_of_the_map()) == sorted(commands())
