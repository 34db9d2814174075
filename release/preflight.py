"""Finds what keeps a commit from being released."""

from __future__ import annotations

import re

from release import ROOT, project
from release.tools import Command, run


def problems(*, must_be_tagged: bool) -> list[str]:
    """Returns one sentence for each, none if the commit may be released."""
    version = project()["version"]
    found = [
        f"{place} says {said or 'no version'}, pyproject.toml says {version}"
        for place, said in versions().items()
        if said != version
    ]
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    if not re.search(rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", changes, re.MULTILINE):
        found.append(f"CHANGELOG.md has no heading `## {version} (YYYY-MM-DD)`")
    if status := _git("status", "--porcelain"):
        found.append(f"the tree has changes that are not committed: {status.splitlines()[0]} ...")
    if must_be_tagged and f"v{version}" not in _git("tag", "--points-at", "HEAD").split():
        found.append(f"the commit is not tagged: git tag --sign v{version}")
    return found


def versions() -> dict[str, str]:
    """Returns what each place says that names the version besides pyproject.toml."""
    chart = (ROOT / "helm" / "Chart.yaml").read_text(encoding="utf-8")
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    return {
        "version in helm/Chart.yaml": _first(r"^version: (\S+)$", chart),
        "appVersion in helm/Chart.yaml": _first(r"^appVersion: (\S+)$", chart),
        "ARG VERSION in the Dockerfile": _first(r"^ARG VERSION=(\S+)$", dockerfile),
        "the newest heading in CHANGELOG.md": _first(
            r"^## (\S+) \(", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
        ),
    }


def head() -> str:
    return _git("rev-parse", "HEAD")


def commit_time() -> int:
    """Returns the seconds since 1970 that everything is dated with that this commit makes."""
    return int(_git("show", "--no-patch", "--format=%ct", "HEAD"))


def _first(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    return found[1] if found else ""


def _git(*arguments: str) -> str:
    return run(Command("git", ("git", *arguments))).strip()
