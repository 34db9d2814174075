"""The pages name files that exist, so that a reader who follows them gets there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
OF_TODAY = [page for page in PAGES if page.name != "CHANGELOG.md"]
FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != ".git"}
GENERATED = {"api.md", "configuration.md"}
MAX_LINES = 4000
_PATH = re.compile(r"`([a-z_.]+/[\w./-]+)`")
_MODULE = re.compile(r"`([\w./-]+\.py)`")
OF_OTHERS = {"encoding_dsv4.py"}
"""Modules of other projects, which pages name."""
_LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def named_files(page: Path) -> list[str]:
    """Returns paths in backticks that begin with a folder of the repository."""
    found = _PATH.findall(page.read_text(encoding="utf-8"))
    return [path for path in found if path.split("/")[0] in FOLDERS]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page: Path) -> None:
    missing = [path for path in named_files(page) if not (ROOT / path).exists()]
    assert not missing, missing


@pytest.fixture(scope="module")
def modules() -> set[str]:
    """Returns the paths of all modules, and their ends, by which pages name what stands beside."""
    folders = [ROOT / name for name in FOLDERS if name[0] != "."]
    paths = [path.relative_to(ROOT).parts for top in folders for path in top.rglob("*.py")]
    return {"/".join(parts[i:]) for parts in paths for i in range(len(parts))}


@pytest.mark.parametrize("page", OF_TODAY, ids=lambda page: page.name)
def test_named_modules_exist(page: Path, modules: set[str]) -> None:
    missing = set(_MODULE.findall(page.read_text(encoding="utf-8"))) - modules - OF_OTHERS
    assert not missing, missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = _LINK.findall(page.read_text(encoding="utf-8"))
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing, missing


def test_pages_by_hand_can_be_read_through() -> None:
    by_hand = [page for page in ROOT.glob("docs/*.md") if page.name not in GENERATED]
    lines = {page.name: len(page.read_text(encoding="utf-8").splitlines()) for page in by_hand}
    assert sum(lines.values()) <= MAX_LINES, lines


def test_the_architecture_names_many_files() -> None:
    """The pattern that finds them still does."""
    assert len(named_files(ROOT / "docs" / "architecture.md")) > 40


def test_each_question_is_answered_by_four_files_at_most() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.partition("## Where is")[2].partition("\n## ")[0]
    questions = [line for line in section.splitlines() if line.startswith("| **")]
    assert len(questions) == 12
    for question in questions:
        files = set(_PATH.findall(question))
        assert 1 <= len(files) <= 4, question


def test_the_architecture_names_what_its_files_have() -> None:
    """Names in brackets behind a file, or in front of it, stand there."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    behind = [
        (file, name)
        for file, names in re.findall(r"`([\w./]+\.py)` \(([^()]*)", page)
        for name in re.findall(r"`(\w+)`", names)
    ]
    before = [(file, name) for name, file in re.findall(r"`(\w+)` (?:of|in) `([\w./]+\.py)`", page)]
    assert len(behind) > 8 and len(before) > 4, "the patterns still find them"
    missing = [pair for pair in behind + before if not is_in_file(*pair)]
    assert not missing, missing


def is_in_file(file: str, name: str) -> bool:
    """Returns whether a name is in the file, whose path may begin with any folder."""
    paths = [ROOT / file] if (ROOT / file).exists() else ROOT.glob(f"*/**/{file}")
    return any(re.search(rf"\b{name}\b", path.read_text(encoding="utf-8")) for path in paths)
