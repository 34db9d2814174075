"""Asks services, before any is started, whether they would start with their flags."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence

from cli.local_cluster.supervisor import ServiceFailed, ServiceSpec
from host.child_process import environment_with

_PROGRAM = re.compile(r"tandem \w+: ")


async def check_services(specs: Iterable[ServiceSpec]) -> None:
    """Asks one service of each kind, all at once: those of a kind differ in their places alone.
    Raises `ServiceFailed` with what the first says that would not start."""
    kinds = {spec.name.partition("-")[0]: spec for spec in specs}
    said = await asyncio.gather(*(refusal(spec.argv, spec.env) for spec in kinds.values()))
    for kind, refused in zip(kinds, said, strict=True):
        if refused:
            raise ServiceFailed(f"{kind}: {refused}")


async def refusal(argv: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    """Returns why a service does not start with these flags, as far as its `--check` tells; empty:
    it does."""
    process = await asyncio.create_subprocess_exec(
        *argv,
        "--check",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env=environment_with(env or {}),
    )
    _, said = await process.communicate()
    if not process.returncode:
        return ""
    return _PROGRAM.sub("", said.decode(errors="replace").strip(), count=1)
