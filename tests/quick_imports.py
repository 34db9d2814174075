"""Keeps programs of tests from importing what takes seconds and serves nothing here.

jsonschema, which Ray imports, makes forty parsers of international addresses for formats that no
schema of ours or of Ray's has, wherever it finds the package that they come from.
"""

from __future__ import annotations

import sys
from pathlib import Path

_PACKAGE = "rfc3987_syntax"
HIDE = f"import sys\nsys.modules.setdefault({_PACKAGE!r}, None)\n"
"""Code that a program begins with."""


def hide_here() -> None:
    """Does so in this process."""
    sys.modules.setdefault(_PACKAGE, None)  # type: ignore[arg-type]


def hidden_by(folder: Path) -> str:
    """Returns a folder for `PYTHONPATH`, below `folder`, with which Python does so at its start."""
    folder = folder / "quick_imports"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(HIDE, encoding="utf-8")
    return str(folder)
