"""Keeps programs of tests from importing what serves nothing here.

jsonschema, which Ray imports, makes forty parsers of international addresses for formats that no
schema of ours or of Ray's has, wherever it finds the package that they come from: that takes
seconds. transformers (5.24) computes states with the kernels of these two packages wherever they
are installed and there is a GPU, also those of a model on the CPU, where they fail.
"""

from __future__ import annotations

import sys
from pathlib import Path

_PACKAGES = ("rfc3987_syntax", "fla", "causal_conv1d")
HIDE = f"import sys\nfor name in {_PACKAGES!r}:\n    sys.modules.setdefault(name, None)\n"
"""Code that a program begins with."""


def hide_here() -> None:
    """Does so in this process."""
    for name in _PACKAGES:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]


def hidden_by(folder: Path) -> str:
    """Returns a folder for `PYTHONPATH`, below `folder`, with which Python does so at its start."""
    folder = folder / "quick_imports"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(HIDE, encoding="utf-8")
    return str(folder)
