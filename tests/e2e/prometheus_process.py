"""A real Prometheus on loopback scrapes what tests tell it, keeps exemplars, judges rules."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from host.termination import bound
from tests.processes import free_address

PROMETHEUS = shutil.which("prometheus", path=str(Path(sys.executable).parent)) or shutil.which(
    "prometheus"
)
needs_prometheus = pytest.mark.skipif(
    PROMETHEUS is None,
    reason="Prometheus is not installed (make prometheus-tools; Debian: prometheus)",
)
TIMEOUT_S = 60.0


@dataclass
class Prometheus:
    """Answers by its HTTP API."""

    url: str
    http: aiohttp.ClientSession

    async def get(self, path: str, **query: str) -> Any:
        """Returns `data` of an answer that must be a success."""
        async with self.http.get(f"{self.url}/api/v1/{path}", params=query) as response:
            answer = await response.json()
        assert answer["status"] == "success", (path, query, answer)
        return answer["data"]

    async def wait_ready(self) -> None:
        """Waits until it has read its storage, before which it answers nothing."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                with contextlib.suppress(aiohttp.ClientConnectionError):
                    async with self.http.get(f"{self.url}/-/ready") as response:
                        if response.status == 200:
                            return
                await asyncio.sleep(0.05)

    async def wait_up(self, count: int) -> list[dict[str, Any]]:
        """Returns the targets, as soon as so many have been scraped without an error."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                targets = (await self.get("targets", state="active"))["activeTargets"]
                if [target["health"] for target in targets] == ["up"] * count:
                    return list(targets)
                await asyncio.sleep(0.1)

    async def judged_rules(self) -> list[dict[str, Any]]:
        """Returns the rules, as soon as each was judged once."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                (group,) = (await self.get("rules"))["groups"]
                if all(rule["health"] != "unknown" for rule in group["rules"]):
                    return list(group["rules"])
                await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def run_prometheus(
    folder: Path, targets: Mapping[str, Mapping[str, str]], rules: list[dict[str, Any]]
) -> AsyncIterator[Prometheus]:
    """`targets` maps host:port, whose /metrics is scraped each second, to the labels of its series;
    `rules` are a group's."""
    assert PROMETHEUS is not None
    address = free_address()
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(folder / "rules.yaml")],
        "scrape_configs": [
            {
                "job_name": "tandem",
                "static_configs": [
                    {"targets": [target], "labels": dict(labels)}
                    for target, labels in targets.items()
                ],
            }
        ],
    }
    (folder / "rules.yaml").write_text(
        yaml.safe_dump({"groups": [{"name": "tandem", "rules": rules}]})
    )
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    log = (folder / "log").open("wb")
    process = await asyncio.create_subprocess_exec(
        *bound(
            [
                PROMETHEUS,
                f"--config.file={folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
                "--enable-feature=exemplar-storage",
            ]
        ),
        stdout=log,
        stderr=log,
    )
    try:
        async with aiohttp.ClientSession() as http:
            prometheus = Prometheus(f"http://{address}", http)
            await prometheus.wait_ready()
            yield prometheus
    finally:
        process.kill()
        await process.wait()
        log.close()
