"""The locks of the images: complete, hashed, within pyproject.toml's ranges, on every platform."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

from release import ROOT, project
from release.lock import (
    FOLDER,
    PYTHONS,
    NoWheel,
    environment,
    platforms,
    ranges,
    resolve,
    tags,
    text_of,
    wanted,
    wheels,
)

LOCKS = tuple(PYTHONS)


@dataclass
class Entry:
    """One package of a lock. `wheels`: file names; `hashes`: hex digests."""

    version: Version
    marker: Marker | None
    wheels: list[str]
    hashes: list[str] = field(default_factory=list)

    def is_for(self, platform: tuple[tuple[int, int], str]) -> bool:
        return self.marker is None or self.marker.evaluate(environment(*platform))


@cache
def entries(lock: str) -> dict[str, Entry]:
    return parsed((FOLDER / f"{lock}.lock").read_text(encoding="utf-8"))


def parsed(text: str) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    names: list[str] = []
    for paragraph in text.split("\n\n")[1:]:
        *comments, requirement = re.sub(r" \\\n", " ", paragraph).strip().splitlines()
        pinned, *options = re.split(r"\s+--hash=", requirement)
        parsed = Requirement(pinned)
        (pin,) = parsed.specifier
        assert pin.operator == "==" and "*" not in pin.version, pinned
        name = canonicalize_name(parsed.name)
        names.append(name)
        files = [comment.removeprefix("# ") for comment in comments]
        found[name] = Entry(Version(pin.version), parsed.marker, files, options)
    assert len(names) == len(set(names)) > 3
    return found


@pytest.mark.parametrize("lock", LOCKS)
def test_every_entry_has_a_hash_for_each_of_its_wheels(lock: str) -> None:
    for name, entry in entries(lock).items():
        assert len(entry.hashes) == len(set(entry.hashes)) == len(entry.wheels) > 0, name
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", one) for one in entry.hashes), name
        for wheel in entry.wheels:
            assert parse_wheel_filename(wheel)[:2] == (name, entry.version)


@pytest.mark.parametrize("lock", LOCKS)
def test_every_platform_finds_a_wheel_of_what_it_needs(lock: str) -> None:
    for platform in platforms(lock):
        installable = tags(*platform)
        for name, entry in entries(lock).items():
            fits = any(parse_wheel_filename(wheel)[3] & installable for wheel in entry.wheels)
            assert fits or not entry.is_for(platform), (name, platform)


def test_what_arm64_lacks_is_flash_attention_3() -> None:
    """The Dockerfile and docs/releases.md say the same."""
    lacking = {
        lock: {
            name
            for name, entry in entries(lock).items()
            if not entry.is_for((PYTHONS[lock][-1], "aarch64"))
        }
        for lock in LOCKS
    }
    # einops and ninja are what the wheel of FlashAttention asks for.
    assert lacking == {
        "build": set(),
        "image-router": set(),
        "image-engine": {"fa3-fwd", "einops", "ninja"},
    }


@pytest.mark.parametrize("lock", LOCKS)
def test_versions_are_within_the_ranges_of_pyproject(lock: str) -> None:
    bounds = {canonicalize_name(r.name): r.specifier for r in map(Requirement, ranges())}
    checked = 0
    for name, entry in entries(lock).items():
        if name in bounds:
            assert entry.version in bounds[name], name
            checked += 1
    assert checked >= 1


def needs(name: str, extras: set[str], where: dict[str, str]) -> list[Requirement]:
    """Returns what the installed release of a package needs on a platform; what is not installed
    here is not asked. Torch's accelerator libraries depend on its build, and here is another."""
    try:
        found = map(Requirement, () if name == "torch" else requires(name) or ())
    except PackageNotFoundError:
        return []
    given = [where | {"extra": extra} for extra in extras or {""}]
    return [r for r in found if r.marker is None or any(map(r.marker.evaluate, given))]


@pytest.mark.parametrize("lock", LOCKS)
def test_what_is_wanted_and_what_that_needs_is_there(lock: str) -> None:
    locked = entries(lock)
    for platform in platforms(lock):
        where = environment(*platform)
        queue = [r for r in wanted(lock) if r.marker is None or r.marker.evaluate(where)]
        for requirement in queue:
            assert locked[canonicalize_name(requirement.name)].version in requirement.specifier
        seen: set[str] = set()
        while queue:
            requirement = queue.pop()
            name = canonicalize_name(requirement.name)
            assert name in locked and locked[name].is_for(platform), (name, platform)
            if name not in seen:
                seen.add(name)
                queue += needs(name, requirement.extras, where)
        assert len(seen) >= len(wanted(lock)) - (platform[1] != "x86_64")


def test_locks_name_no_registry() -> None:
    for path in sorted(FOLDER.iterdir()):
        assert not re.search(r"https?:|index-url|find-links", path.read_text("utf-8")), path.name


def test_a_package_without_a_wheel_is_told_by_name() -> None:
    package = {
        "name": "odd",
        "version": "1",
        "wheels": [
            {
                "url": "file:///odd-1-cp312-cp312-manylinux_2_28_x86_64.whl",
                "hashes": {"sha256": "0" * 64},
            }
        ],
    }
    with pytest.raises(NoWheel, match=r"odd 1 has no wheel for Python 3\.12 on aarch64"):
        wheels(package, "image-engine")
    marker, served = wheels({**package, "marker": "platform_machine == 'x86_64'"}, "image-engine")
    assert marker == "platform_machine == 'x86_64'" and len(served) == 1
    assert wheels({**package, "marker": "sys_platform == 'win32'"}, "image-engine") == ("", {})


@pytest.fixture(scope="module")
def index() -> None:
    """Skips where no package index answers uv: locks can be read without one, but not compared."""
    done = subprocess.run(
        [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-config", "-"],
        input="packaging\n",
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"no package index answers: {' '.join(done.stderr.split())[:200]}")


def skip_if_lost(said: str) -> None:
    """Skips if uv said that the index, which did answer, does so no more."""
    if re.search("Failed to (fetch|download)|[Rr]equest failed|error sending request", said):
        pytest.skip(f"the package index stopped to answer: {' '.join(said.split())[:200]}")


@pytest.mark.usefixtures("index")
@pytest.mark.parametrize("lock", LOCKS)
def test_locks_are_what_their_sources_make_now(
    lock: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Asks the index. Versions are kept that still fit, and the index may have got more wheels of
    them: only a change of ranges, or a wheel that is not what was locked, shows here. `make lock`
    mends the first."""
    try:
        found = resolve(lock, upgrade=False)
    except subprocess.CalledProcessError:
        said = capfd.readouterr().err
        skip_if_lost(said)
        pytest.fail(said)
    now = parsed(text_of(lock, found))
    assert now.keys() == entries(lock).keys()
    for name, entry in entries(lock).items():
        assert (now[name].version, str(now[name].marker)) == (entry.version, str(entry.marker))
        assert set(entry.hashes) <= set(now[name].hashes), name


@pytest.mark.usefixtures("index")
def test_the_routers_lock_installs_by_hash_and_runs_it(tmp_path: Path) -> None:
    """In an environment of its own, which has nothing else: the router's image without its base."""
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    install = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-config"]
    lock = FOLDER / "image-router.lock"
    done = subprocess.run(
        [*install, "--python", python, "--require-hashes", "--only-binary=:all:", "-r", lock],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        skip_if_lost(done.stderr)
        pytest.fail(done.stderr)
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]\nimport router.main; print('torch' in sys.modules)"
    )
    installed = tmp_path / f"tandem-{project()['version']}.dist-info"
    installed.mkdir()
    metadata = f"Metadata-Version: 2.4\nName: tandem\nVersion: {project()['version']}\n"
    (installed / "METADATA").write_text(metadata, encoding="utf-8")
    paths = [*map(str, (tmp_path, ROOT, ROOT / "proto", ROOT / "kernels"))]
    done = subprocess.run(
        [python, "-I", "-c", code, *paths], capture_output=True, text=True, check=False
    )
    assert done.stdout == "False\n", done.stderr
