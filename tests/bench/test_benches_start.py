"""Tests that every benchmark can be started: its imports hold after a module has moved."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "bench").glob("*/*.py")
)


@pytest.mark.parametrize("part", ["engine", "kv", "router", "serving", "demo_model", "quality"])
def test_modules_import(part):
    """Imports a part in a process of its own: what it changes on import stays in there."""
    names = [name for name in MODULES if name.startswith(f"bench.{part}.")]
    assert names
    code = f"import importlib\nfor name in {names}: importlib.import_module(name)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
