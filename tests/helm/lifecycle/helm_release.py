"""One release on a stand-in cluster, through either Helm: what an operator does to it.

Helm runs outside of this event loop, because it talks to the API server that is inside.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from tests.helm.helm_engine import CHART, HelmCli, HelmSdk
from tests.helm.lifecycle.cluster import NAMESPACE, Cluster

NAME = "tandem"
TIMEOUT_S = 60

Values = Mapping[str, Any]


class Release(Protocol):
    """Every method raises `HelmError` with what Helm said. Install and upgrade return when all is
    ready, or fail after `wait_s`; with 0 they do not wait."""

    async def install(self, values: Values, *, wait_s: int = TIMEOUT_S) -> None: ...
    async def upgrade(self, values: Values, *, wait_s: int = TIMEOUT_S) -> None: ...
    async def rollback(self, revision: int) -> None: ...
    async def test(self) -> None: ...
    async def revisions(self) -> list[str]:
        """Status of each revision, oldest first."""
        ...

    async def uninstall(self) -> None: ...


class CliRelease:
    """Helm 3.6, the command line."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._helm = HelmCli()
        self._folder = folder
        self._kubeconfig = folder / "kubeconfig"
        self._kubeconfig.write_text(cluster.kubeconfig)
        self._kubeconfig.chmod(0o600)

    async def install(self, values: Values, *, wait_s: int = TIMEOUT_S) -> None:
        await self._run("install", NAME, CHART, *self._values(values), *_wait_flags(wait_s))

    async def upgrade(self, values: Values, *, wait_s: int = TIMEOUT_S) -> None:
        await self._run("upgrade", NAME, CHART, *self._values(values), *_wait_flags(wait_s))

    async def rollback(self, revision: int) -> None:
        await self._run("rollback", NAME, str(revision), *_wait_flags(TIMEOUT_S))

    async def test(self) -> None:
        await self._run("test", NAME, "--timeout", f"{TIMEOUT_S}s")

    async def revisions(self) -> list[str]:
        text = await self._run("history", NAME, "--output", "json")
        return [entry["status"] for entry in json.loads(text)]

    async def uninstall(self) -> None:
        await self._run("uninstall", NAME)

    def _values(self, values: Values) -> list[str | Path]:
        path = self._folder / "values.json"
        path.write_text(json.dumps(values))
        return ["--values", path]

    async def _run(self, *arguments: str | Path) -> str:
        return await asyncio.to_thread(
            self._helm.run,
            *arguments,
            "--namespace",
            NAMESPACE,
            kubeconfig=self._kubeconfig,
            timeout_s=TIMEOUT_S + 10,
        )


class SdkRelease:
    """Helm 4, the Go SDK; it applies on the server's side."""

    def __init__(self, cluster: Cluster, _folder: Path) -> None:
        self._helm = HelmSdk.shared()
        self._kubeconfig = cluster.kubeconfig

    async def install(self, values: Values, *, wait_s: int = TIMEOUT_S) -> None:
        await self._run("install", str(CHART), NAME, dict(values), **_wait_options(wait_s))

    async def upgrade(self, values: Values, *, wait_s: int = TIMEOUT_S) -> None:
        await self._run("upgrade", str(CHART), NAME, dict(values), **_wait_options(wait_s))

    async def rollback(self, revision: int) -> None:
        await self._run("rollback", NAME, version=revision, **_wait_options(TIMEOUT_S))

    async def test(self) -> None:
        await self._run("test", NAME, timeout=TIMEOUT_S)

    async def revisions(self) -> list[str]:
        return [entry["status"] for entry in await self._run("history", NAME)]

    async def uninstall(self) -> None:
        await self._run("uninstall", NAME)

    async def _run(self, method: str, *arguments: Any, **options: Any) -> Any:
        return await asyncio.to_thread(
            self._helm.release, method, self._kubeconfig, NAMESPACE, arguments, **options
        )


RELEASES: dict[str, Callable[[Cluster, Path], Release]] = {
    HelmCli.name: CliRelease,
    HelmSdk.name: SdkRelease,
}


def _wait_flags(wait_s: int) -> list[str]:
    return ["--wait", "--timeout", f"{wait_s}s"] if wait_s else []


def _wait_options(wait_s: int) -> dict[str, Any]:
    return {"wait": "watcher", "timeout": wait_s} if wait_s else {}
