"""Docstrings open with a sentence, and words are the field's.

"Of the last step, by row" or "What is needed of a tokenizer" can only be understood with the name
below; "Returns ..." or "The part of ..." can be read alone.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.statements import statements

ROOT = Path(__file__).resolve().parent.parent
CLEAN = (
    "bench",
    "cli",
    "decode_node",
    "demo_model",
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
    "tests/drafts",
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
    for node in statements(ast.parse(path.read_text(encoding="utf-8"))):
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


TENSORS = ("engine/layers", "engine/models", "engine/worker")
SHAPE = re.compile(r"\[[^\[\]]+\]|\bshapes?\b")


@pytest.mark.parametrize("place", TENSORS)
def test_tensors_have_shapes(place: str) -> None:
    """A method without a docstring does what its base class says."""
    missing = []
    for file in sorted((ROOT / place).rglob("*.py")):
        for node in statements(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            text = ast.get_docstring(node)
            signature = f"{ast.unparse(node.args)} {node.returns and ast.unparse(node.returns)}"
            if text and re.search(r"\bTensor\b", signature) and not SHAPE.search(text):
                missing.append(f"{file.relative_to(ROOT)}:{node.lineno}: {node.name}")
    assert not missing, "say [rows, width] and the dtype:\n" + "\n".join(missing)


GLOSSARY = {
    r"(no|some|any|every)body": "a process is no person: nothing, another request, all ranks",
    r"(over)?hear(s|d|ing)?": "receives, learns of, is called with, records",
    r"(is|are|was|were|be|been|being) told": "gets, is called with, is notified of, is asked to",
    r"unless told otherwise": "by default",
    r"obey(s|ed|ing)?": "follows, handles",
    r"farewells?": "end of stream",
    r"last words": "final messages",
    r"wish(es|ed)?": "request, preference, wanted",
    r"so (many|much)(?! that)": "a name (`num_tokens`), this many, a number",
    r"foretells?": "predicts",
    r"frightens?": "dominates",
    r"who(so)?m?ever": "the caller, a client, the process that",
    r"lets? go( of)?|letting go": "releases, closes, forgets",
    r"(for )?so (long|often)(?! (as|that|in ))": "a name (`limit_s`), this long, that often",
    r"told": "sent, reported, called with, named",
    r"for(gives?|gave|given) .{0,20}silence": "extends the deadline",
}
"""Words that docstrings, comments and pages do without, each with the field's."""

PRODUCT = (
    "bench", "cli", "decode_node", "demo_model", "edge", "engine", "host", "kernels", "kv_transfer",
    "planner", "prefill_node", "release", "role_node", "router",
)  # fmt: skip


def prose_of(path: Path) -> Iterator[str]:
    """Yields the lines of a page, or those of a module's docstrings and comments."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield from text.splitlines()
        return
    for _, docstring in docstrings(path):
        yield from docstring.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def test_words_are_the_fields() -> None:
    forbidden = re.compile(rf"\b({'|'.join(f'(?:{word})' for word in GLOSSARY)})\b", re.IGNORECASE)
    modules = [path for folder in PRODUCT for path in sorted((ROOT / folder).rglob("*.py"))]
    pages = [*sorted((ROOT / "docs").glob("*.md")), *ROOT.glob("*.md"), ROOT / "bench/README.md"]
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()[:100]}"
        for path in modules + pages
        if path.name != "CHANGELOG.md" and "_pb2" not in path.name
        # What stands nowhere in a file stands in none of its docstrings and comments.
        if forbidden.search(path.read_text(encoding="utf-8"))
        for line in prose_of(path)
        if forbidden.search(line)
    ]
    assert not found, "say it with the words of GLOSSARY:\n" + "\n".join(found)


NAMES = re.compile(
    r"(^|_)((no|some|any|every)body|who(so)?ever|obeys?|hears?|heard|wish(es)?|farewell|fore(tell|told)"
    r"|untold|told_back|is_told|doubt(ful)?|let_go)(_|$)"
)
"""Matches names of a private language; methods called `told` are found by themselves."""


def test_names_are_the_fields() -> None:
    modules = [path for folder in PRODUCT for path in sorted((ROOT / folder).rglob("*.py"))]
    found = []
    for path in modules:
        if "_pb2" in path.name:
            continue
        text = path.read_text(encoding="utf-8")
        words = set(re.findall(r"\w+", text))
        if "told" not in words and not any(map(NAMES.search, words)):
            continue
        before = ""
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            name = token.string if token.type == tokenize.NAME else ""
            if NAMES.search(name) or (name == "told" and before in (".", "def")):
                found.append(f"{path.relative_to(ROOT)}:{token.start[0]}: {name}")
            before = token.string
    assert not found, "name it as the field does (see GLOSSARY):\n" + "\n".join(found)
