"""Without any extra, `tandem demo` runs: what else is installed here is hidden from it."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.cli.demo_talk import check_talk

ROOT = Path(__file__).resolve().parents[2]
HIDE = """\
import sys


class Hidden:
    names = frozenset({names})

    def find_spec(self, name, path=None, target=None):
        if name in self.names:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


sys.meta_path.insert(0, Hidden())
"""
DEMO_S = 240.0
"""A busy machine takes a minute."""


def plain_packages() -> set[str]:
    """Returns what a plain installation brings: tandem's dependencies, and theirs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    queue = [Requirement(line) for line in project["dependencies"]]
    seen: set[tuple[str, str]] = set()
    while queue:
        requirement = queue.pop()
        for extra in ("", *requirement.extras):
            key = (canonicalize_name(requirement.name), extra)
            if key in seen:
                continue
            seen.add(key)
            try:
                found = map(Requirement, requires(requirement.name) or ())
            except PackageNotFoundError:
                continue
            queue += [r for r in found if r.marker is None or r.marker.evaluate({"extra": extra})]
    return {name for name, _ in seen}


def hidden_modules() -> list[str]:
    """Returns modules that none of these packages has."""
    plain = plain_packages() | {"tandem"}
    return sorted(
        module
        for module, packages in packages_distributions().items()
        if not plain & {canonicalize_name(package) for package in packages}
    )


def test_the_demo_needs_no_extra(tmp_path: Path) -> None:
    hidden = hidden_modules()
    assert {"sqlalchemy", "asyncpg", "transformers"} <= set(hidden)
    assert not {"torch", "aiohttp", "yaml"} & set(hidden)
    (tmp_path / "sitecustomize.py").write_text(HIDE.format(names=hidden))
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "cli", "demo", "--device", "cpu"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEMO_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check_talk(done.stdout)
