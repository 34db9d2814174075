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
from tests.kubernetes_stand_in.cluster import NAMESPACE, Cluster

NAME = "tandem"
TIMEOUT_S = 60

Values = Mapping[str, Any]


class Release(Protocol):
    """Every method raises `HelmError` with what Helm said. Install, upgrade and rollback return
    when all is rolled out, as the cluster says. With `wait_s` it is Helm that waits, which asks
    every two seconds, and fails after that time; with 0 nobody waits."""

    async def install(
        self, values: Values, *, wait_s: int | None = None, chart: Path = CHART
    ) -> None: ...
    async def upgrade(self, values: Values, *, wait_s: int | None = None) -> None: ...
    async def rollback(self, revision: int) -> None: ...
    async def test(self) -> None: ...
    async def revisions(self) -> list[str]:
        """Status of each revision, oldest first."""
        ...

    async def uninstall(self) -> None: ...


class CliRelease:
    """Helm 3.6, the command line."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster = cluster
        self._helm = HelmCli()
        self._folder = folder
        self._kubeconfig = folder / "kubeconfig"
        self._kubeconfig.write_text(cluster.kubeconfig)
        self._kubeconfig.chmod(0o600)

    async def install(
        self, values: Values, *, wait_s: int | None = None, chart: Path = CHART
    ) -> None:
        await self._roll("install", values, wait_s, chart)

    async def upgrade(self, values: Values, *, wait_s: int | None = None) -> None:
        await self._roll("upgrade", values, wait_s)

    async def rollback(self, revision: int) -> None:
        await self._run("rollback", NAME, str(revision))
        await self._cluster.wait_rolled_out()

    async def test(self) -> None:
        await self._run("test", NAME, "--timeout", f"{TIMEOUT_S}s")

    async def revisions(self) -> list[str]:
        text = await self._run("history", NAME, "--output", "json")
        return [entry["status"] for entry in json.loads(text)]

    async def uninstall(self) -> None:
        await self._run("uninstall", NAME)

    async def _roll(
        self, command: str, values: Values, wait_s: int | None, chart: Path = CHART
    ) -> None:
        path = self._folder / "values.json"
        path.write_text(json.dumps(values))
        wait = ["--wait", "--timeout", f"{wait_s}s"] if wait_s else []
        await self._run(command, NAME, chart, "--values", path, *wait)
        if wait_s is None:
            await self._cluster.wait_rolled_out()

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
        self._cluster = cluster
        self._helm = HelmSdk.shared()
        self._kubeconfig = cluster.kubeconfig

    async def install(
        self, values: Values, *, wait_s: int | None = None, chart: Path = CHART
    ) -> None:
        await self._roll("install", values, wait_s, chart)

    async def upgrade(self, values: Values, *, wait_s: int | None = None) -> None:
        await self._roll("upgrade", values, wait_s)

    async def rollback(self, revision: int) -> None:
        await self._run("rollback", NAME, version=revision)
        await self._cluster.wait_rolled_out()

    async def test(self) -> None:
        await self._run("test", NAME, timeout=TIMEOUT_S)

    async def revisions(self) -> list[str]:
        return [entry["status"] for entry in await self._run("history", NAME)]

    async def uninstall(self) -> None:
        await self._run("uninstall", NAME)

    async def _roll(
        self, method: str, values: Values, wait_s: int | None, chart: Path = CHART
    ) -> None:
        wait = {"wait": "watcher", "timeout": wait_s} if wait_s else {}
        await self._run(method, str(chart), NAME, dict(values), **wait)
        if wait_s is None:
            await self._cluster.wait_rolled_out()

    async def _run(self, method: str, *arguments: Any, **options: Any) -> Any:
        return await asyncio.to_thread(
            self._helm.release, method, self._kubeconfig, NAMESPACE, arguments, **options
        )


RELEASES: dict[str, Callable[[Cluster, Path], Release]] = {
    HelmCli.name: CliRelease,
    HelmSdk.name: SdkRelease,
}
