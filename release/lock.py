"""Writes `requirements/*.lock`: each dependency of the images, one version, the hash of each wheel.

    requirements/NAME.in   what is wanted; ranges that it does not give are pyproject.toml's
    uv pip compile         chooses versions for all platforms at once (a pylock)
    requirements/NAME.lock what pip installs with --require-hashes: wheels of `PLATFORMS` alone

    python -m release.lock [--upgrade] [NAME ...]

Without `--upgrade` versions stay that still fit. Names of wheels stand above their hashes, so that
a reader, and `tests/release`, see which platforms each of them serves. Locks name no registry.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

from release import ARCHITECTURES, ROOT, project, pyproject

FOLDER = ROOT / "requirements"

GLIBC = (2, 36)
"""The C library of Debian bookworm, which the images are based on."""

PYTHONS: Mapping[str, tuple[tuple[int, int], ...]] = {
    "image-engine": ((3, 12),),
    "image-router": ((3, 11), (3, 12)),
    "build": ((3, 11), (3, 12)),
}
"""The versions of Python that a lock serves. Images have the last one; tests that install a lock
run under the first as well."""


class NoWheel(Exception):
    """A package has no wheel for a platform that needs it."""


def platforms(lock: str) -> Iterator[tuple[tuple[int, int], str]]:
    """Yields (version of Python, architecture) of each platform that a lock serves."""
    yield from itertools.product(PYTHONS[lock], ARCHITECTURES)


@cache
def tags(python: tuple[int, int], architecture: str) -> frozenset[Tag]:
    """Returns the tags of wheels that this platform can install."""
    names = [f"manylinux_2_{minor}_{architecture}" for minor in range(GLIBC[1], 4, -1)]
    names += [f"manylinux{old}_{architecture}" for old in ("2014", "2010", "1")]
    interpreter = f"cp{python[0]}{python[1]}"
    return frozenset(
        (*cpython_tags(python, platforms=names), *compatible_tags(python, interpreter, names))
    )


def environment(python: tuple[int, int], architecture: str) -> dict[str, str]:
    """Returns what markers are judged by on this platform."""
    version = ".".join(map(str, python))
    return {
        "implementation_name": "cpython",
        "os_name": "posix",
        "platform_machine": architecture,
        "platform_python_implementation": "CPython",
        "platform_system": "Linux",
        "python_full_version": f"{version}.9",
        "python_version": version,
        "sys_platform": "linux",
        "extra": "",
    }


def ranges() -> list[str]:
    """Returns every requirement of pyproject.toml that images may need, and its build system's."""
    build: list[str] = pyproject()["build-system"]["requires"]
    extras = project()["optional-dependencies"]
    wanted_extras = (*extras["ray"], *extras["fa3"], *extras["otlp"], *extras["video"])
    return [*project()["dependencies"], *wanted_extras, *build]


def wanted(lock: str) -> list[Requirement]:
    """Returns what a lock is made from: its `.in` file, with pyproject.toml's lists for tandem."""
    lines = (FOLDER / f"{lock}.in").read_text(encoding="utf-8").splitlines()
    found: list[Requirement] = []
    for requirement in map(Requirement, (li for li in lines if li and not li.startswith("#"))):
        if requirement.name != project()["name"]:
            found.append(requirement)
            continue
        found += map(Requirement, project()["dependencies"])
        for extra in sorted(requirement.extras):
            found += map(Requirement, project()["optional-dependencies"][extra])
    return found


def resolve(lock: str, *, upgrade: bool) -> list[dict[str, Any]]:
    """Returns the packages of uv's pylock. Raises `CalledProcessError`; uv says why on stderr."""
    python = ".".join(map(str, PYTHONS[lock][0]))
    with tempfile.TemporaryDirectory() as folder:
        inputs, bounds, output = (Path(folder, name) for name in ("in", "bounds", "pylock.toml"))
        inputs.write_text("\n".join(map(str, wanted(lock))), encoding="utf-8")
        # Extras are for those who want them; a constraint has none.
        plain = [f"{r.name}{r.specifier}" for r in map(Requirement, ranges())]
        plain += [] if upgrade else pins(FOLDER / f"{lock}.lock")
        bounds.write_text("\n".join(plain), encoding="utf-8")
        command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal"]
        command += ["--no-config", "--python-version", python, "--format", "pylock.toml"]
        command += ["--constraints", str(bounds), "--output-file", str(output), str(inputs)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        packages: list[dict[str, Any]] = tomllib.loads(output.read_text("utf-8"))["packages"]
        return packages


def pins(path: Path) -> list[str]:
    """Returns `name==version` of each entry of a lock; nothing where there is none."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [line.split()[0] for line in text.splitlines() if line[:1].isalnum()]


def wheels(package: Mapping[str, Any], lock: str) -> tuple[str, dict[str, str]]:
    """Returns the marker of a package ("" for none) and its wheels, file name to SHA-256; no wheels
    if no platform needs it. Raises `NoWheel`."""
    marker = Marker(package["marker"]) if "marker" in package else None
    by_name = {_file_name(w): str(w["hashes"]["sha256"]) for w in package.get("wheels", ())}
    served: dict[str, str] = {}
    needed = [p for p in platforms(lock) if marker is None or marker.evaluate(environment(*p))]
    for platform in needed:
        fitting = {name for name in by_name if parse_wheel_filename(name)[3] & tags(*platform)}
        if not fitting:
            raise NoWheel(
                f"{package['name']} {package['version']} has no wheel for Python"
                f" {'.'.join(map(str, platform[0]))} on {platform[1]}: bound its version in"
                f" requirements/{lock}.in, or leave it out there by a marker in pyproject.toml"
            )
        served |= {name: by_name[name] for name in fitting}
    if len(needed) == len(list(platforms(lock))):
        return "", served
    machines = sorted({machine for _, machine in needed})
    whole = len(needed) == len(PYTHONS[lock]) * len(machines)
    return (
        f"platform_machine == '{machines[0]}'" if whole else str(marker)
    ) if needed else "", served


def _file_name(wheel: Mapping[str, Any]) -> str:
    return str(wheel.get("name") or unquote(urlsplit(wheel["url"]).path).rpartition("/")[2])


def text_of(lock: str, packages: Iterable[Mapping[str, Any]]) -> str:
    """Returns the lock of resolved packages. Raises `NoWheel`."""
    pythons = " and ".join(".".join(map(str, python)) for python in PYTHONS[lock])
    lines = [
        f"# Made by `make lock` from requirements/{lock}.in and pyproject.toml; do not edit.",
        f"# Wheels for Python {pythons} on Linux, {' and '.join(ARCHITECTURES)}.",
    ]
    for package in sorted(packages, key=lambda package: canonicalize_name(package["name"])):
        marker, found = wheels(package, lock)
        if not found:
            continue
        lines += ["", *(f"# {name}" for name in sorted(found))]
        condition = f" ; {marker}" if marker else ""
        lines.append(f"{package['name']}=={package['version']}{condition} \\")
        lines.append(
            " \\\n".join(f"    --hash=sha256:{digest}" for digest in sorted(found.values()))
        )
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m release.lock", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--upgrade", action="store_true", help="the newest versions that fit")
    parser.add_argument("locks", nargs="*", metavar="NAME", help=f"of {', '.join(PYTHONS)}")
    arguments = parser.parse_args(argv)
    for lock in arguments.locks or PYTHONS:
        if lock not in PYTHONS:
            parser.error(f"no lock {lock!r}; there are {', '.join(PYTHONS)}")
        try:
            text = text_of(lock, resolve(lock, upgrade=arguments.upgrade))
        except (NoWheel, subprocess.CalledProcessError) as error:
            print(f"{lock}: {error}", file=sys.stderr)
            return 1
        (FOLDER / f"{lock}.lock").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
