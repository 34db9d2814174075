"""Docstrings open with a sentence: somebody does or is something.

"Of the last step, by row" or "What is needed of a tokenizer" can only be understood with the name
below; "Returns ..." or "The part of ..." can be read alone.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CLEAN = (
    "bench",
    "cli",
    "decode_node",
    "role_node",
    "edge",
    "engine",
    "host",
    "kernels",
    "kv_transfer",
    "planner",
    "prefill_node",
    "release",
    "router",
    "tests/bench",
    "tests/browser",
    "tests/cli",
    "tests/clients",
    "tests/decode_node",
    "tests/role_node",
    "tests/e2e",
    "tests/edge",
    "tests/engine",
    "tests/fuzz",
    "tests/helm",
    "tests/kernels",
    "tests/kubernetes_stand_in",
    "tests/kv_transfer",
    "tests/planner",
    "tests/prefill_node",
    "tests/release",
    "tests/router",
    "tests/security",
    "tests/test_one_envelope.py",
)
"""Files and folders whose docstrings are sentences. Add to it; take nothing away."""

FRAGMENT = re.compile(
    r"(Of|What|Where|Who|Whose|From|For|With|By|Between|Until|Before|After)\s"
    r"|None[\s:;,.]"
    r"|`[^`]+`(\s\S+)?:\s"
    r"|Raises\s\S+\.$"
    r"|[(/\d]"
)


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yields (line, text) of every docstring, those below assignments among them."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text


@pytest.mark.parametrize("place", CLEAN)
def test_docstrings_open_with_a_sentence(place: str) -> None:
    path = ROOT / place
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    assert files
    wrong = [
        f"{file.relative_to(ROOT)}:{line}: {' '.join(text.split())[:60]}"
        for file in files
        for line, text in docstrings(file)
        if FRAGMENT.match(text.strip())
    ]
    assert not wrong, "open with a subject and a verb:\n" + "\n".join(wrong)
