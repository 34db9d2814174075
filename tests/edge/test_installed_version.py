"""Every part tells the same version, and sources that nobody has installed can be run."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

from edge.installed_version import UNKNOWN_VERSION, installed_version
from tests.test_structure import modules

ROOT = Path(__file__).resolve().parents[2]


def test_the_version_is_the_one_that_is_installed() -> None:
    assert installed_version() == importlib.metadata.version("tandem")


def test_sources_that_are_not_installed_have_no_known_version() -> None:
    """Python looks at no installed packages here."""
    told = subprocess.run(
        [sys.executable, "-S", "-E", "-m", "cli", "--version"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout == f"tandem {UNKNOWN_VERSION}\n"


def test_nobody_else_looks_for_the_version() -> None:
    """A look-up of their own would end them where nothing is installed."""
    look_up = re.compile(r"\b(version|distribution|metadata)\(\s*[\"']tandem[\"']")
    looking = [name for name, path in modules().items() if look_up.search(path.read_text())]
    assert looking == ["edge.installed_version"]
