"""Pins the Dockerfile's base by digest: `make release-bases [TAG=3.12.15-slim-bookworm]`.

A tag moves when Debian or Python mend something. This asks the registry for the tag's digest now,
checks that it is an index of every architecture that we build for, and writes it down.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence

from release import ARCHITECTURES, ROOT
from release.tools import Command, Runner, ToolFailed, ToolMissing, run

_LINE = re.compile(
    r"^ARG PYTHON_BASE=(?P<name>[^:]+):(?P<tag>[^@]+)@(?P<digest>\S+)$", re.MULTILINE
)
_OF_MACHINE = {"x86_64": "amd64", "aarch64": "arm64"}


def pinned(text: str) -> tuple[str, str, str]:
    """Returns (name, tag, digest) of a Dockerfile's base. Raises `ValueError`."""
    found = _LINE.search(text)
    if not found:
        raise ValueError("Dockerfile: no line ARG PYTHON_BASE=NAME:TAG@DIGEST")
    return found["name"], found["tag"], found["digest"]


def inspect(reference: str) -> Command:
    words = (
        "docker",
        "buildx",
        "imagetools",
        "inspect",
        reference,
        "--format",
        "{{json .Manifest}}",
    )
    return Command("docker buildx", words)


def digest_of(reference: str, run: Runner) -> str:
    """Returns the digest of an image's index. Raises `ToolFailed` if it lacks an architecture."""
    manifest = json.loads(run(inspect(reference)))
    parts = [part.get("platform", {}) for part in manifest.get("manifests", ())]
    there = {part["architecture"] for part in parts if part.get("os") == "linux"}
    lacking = {_OF_MACHINE[machine] for machine in ARCHITECTURES} - there
    if lacking:
        raise ToolFailed(f"{reference} is no index with {', '.join(sorted(lacking))}")
    return str(manifest["digest"])


def main(argv: Sequence[str] | None = None, runner: Runner = run) -> int:
    parser = argparse.ArgumentParser(prog="python -m release.bases")
    parser.add_argument("--tag", help="another tag than the Dockerfile's")
    arguments = parser.parse_args(argv)
    path = ROOT / "Dockerfile"
    text = path.read_text(encoding="utf-8")
    name, tag, old = pinned(text)
    tag = arguments.tag or tag
    try:
        digest = digest_of(f"{name}:{tag}", runner)
    except (ToolMissing, ToolFailed) as error:
        print(f"release.bases: {error}", file=sys.stderr)
        return 1
    path.write_text(_LINE.sub(f"ARG PYTHON_BASE={name}:{tag}@{digest}", text), encoding="utf-8")
    print(f"{name}:{tag}: {digest}" + (" (unchanged)" if digest == old else f", was {old}"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
