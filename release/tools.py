"""Other people's programs that a release calls: found, or named with what to do."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from release import ROOT

HELP = {
    "docker buildx": "Docker with its buildx plugin and a builder of the driver docker-container",
    "cosign": "Sigstore's cosign",
    "helm": "Helm, or run `make helm-tools`",
    "helm push": "Helm 3.8 or newer, which pushes charts to registries",
    "git": "git",
}
"""Says what to install, by tool."""
_PROBES = {"docker buildx": ("buildx", "version"), "helm push": ("push", "--help")}
"""Arguments that fail where a program lacks what is needed of it."""


class ToolMissing(Exception):
    """A tool is not installed. The message names it and says what to install."""


class ToolFailed(Exception):
    """A tool ended with an error, which stands on stderr."""


@dataclass(frozen=True)
class Command:
    """A command of a tool. `words` begin with the program; `tool` is what must be there."""

    tool: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return shlex.join(self.words)


def path_of(tool: str) -> str | None:
    """Returns where a program is; None where it, or the command named behind it, is missing."""
    program = tool.partition(" ")[0]
    found = shutil.which(program) or shutil.which(program, path=str(Path(sys.executable).parent))
    if found and tool in _PROBES:
        probe = subprocess.run([found, *_PROBES[tool]], capture_output=True, check=False)
        found = found if probe.returncode == 0 else None
    return found


def missing(tools: Sequence[str]) -> dict[str, str]:
    """Returns the tools that are not installed, with what to install."""
    return {tool: HELP.get(tool, tool) for tool in tools if path_of(tool) is None}


def run(command: Command, environment: Mapping[str, str] | None = None) -> str:
    """Runs a command in the repository and returns its standard output; raises `ToolMissing`,
    `ToolFailed`."""
    program = path_of(command.tool)
    if program is None:
        raise ToolMissing(f"{command.tool} is missing: install {HELP.get(command.tool, 'it')}")
    done = subprocess.run(
        [program, *command.words[1:]],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ToolFailed(f"{command} ended with {done.returncode}")
    return done.stdout


Runner = Callable[[Command], str]
"""Runs a command, or only shows it."""
