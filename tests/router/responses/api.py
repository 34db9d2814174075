"""Asks a router for responses and conversations, and looks into what it keeps."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

from router.responses.kept_responses import KeptResponses
from tests.router.cluster import RunningRouter

Json = dict[str, Any]


class Api:
    """Asks one router, as a client with one key."""

    def __init__(self, router: RunningRouter, key: str = "") -> None:
        self.router = router
        self._headers = {"authorization": f"Bearer {key}"} if key else {}

    async def __call__(
        self, method: str, path: str, body: Json | None = None, status: int = 200, **query: str
    ) -> Json:
        url = f"{self.router.url}/v1/{path}"
        given: Json = {} if body is None else {"json": body}
        async with self.router.client.request(
            method, url, headers=self._headers, params=query, **given
        ) as response:
            assert response.status == status, await response.text()
            found: Json = await response.json()
            return found

    async def create(self, text: Any = "hi", status: int = 200, **fields: Any) -> Json:
        body = {"model": "demo", "input": text, **fields}
        return await self("POST", "responses", body, status)

    async def create_stream(self, text: str) -> str:
        """Begins a response in the background, streamed; leaves when its first words are here.
        Returns its id."""
        body = {"model": "demo", "input": text, "background": True, "stream": True}
        async with self.router.client.post(f"{self.router.url}/v1/responses", json=body) as answer:
            found = b""
            while b"output_text.delta" not in found:
                found += await answer.content.readuntil(b"\n\n")
        return str(events_of(found.decode())[0]["response"]["id"])

    async def events(self, path: str, body: Json | None = None, **query: str) -> list[Json]:
        method = "GET" if body is None else "POST"
        url = f"{self.router.url}/v1/{path}"
        given: Json = {} if body is None else {"json": body}
        async with self.router.client.request(method, url, params=query, **given) as response:
            assert response.status == 200, await response.text()
            return events_of(await response.text())


def events_of(text: str) -> list[Json]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]


def said(response: Json) -> str:
    return str(response["output"][-1]["content"][0]["text"])


def rows(store: Path) -> int:
    """Returns how many rows hold content."""
    with sqlite3.connect(store) as database:
        tables = ("responses", "conversations", "items", "events")
        counts = [database.execute(f"SELECT count(*) FROM tandem_{t}").fetchone() for t in tables]
    return sum(count for (count,) in counts)


def kept_of(router: RunningRouter) -> KeptResponses:
    found: KeptResponses = router.server.config.app.state.kept.endpoint.kept  # type: ignore[union-attr]
    return found
