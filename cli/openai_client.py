"""A small streaming client for the OpenAI API, for the terminal."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from edge.http import headers as names


class ApiError(Exception):
    """The server refused: its status and its own words."""


class ChatStream:
    """One streamed chat completion. Iterate over it for text; afterwards `usage` and
    `timeline` (tandem's account of where the time went) are set when the server sent them."""

    def __init__(self, session: aiohttp.ClientSession, url: str, session_id: str) -> None:
        self._session = session
        self._url = f"{url}/v1/chat/completions"
        self._headers = {names.SESSION: session_id, names.TIMELINE: "1"}
        self.usage: dict[str, Any] = {}
        self.timeline: dict[str, Any] = {}

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[str]:
        request = {**body, "stream": True, "stream_options": {"include_usage": True}}
        async with self._session.post(self._url, json=request, headers=self._headers) as response:
            if response.status != 200:
                raise ApiError(f"{response.status}: {_error_message(await response.text())}")
            async for line in response.content:
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise ApiError(event["error"]["message"])
                    self._note_extras(event)
                    for choice in event["choices"]:
                        if text := choice["delta"].get("content"):
                            yield text

    def _note_extras(self, event: dict[str, Any]) -> None:
        self.usage = event.get("usage") or self.usage
        self.timeline = event.get("timeline") or self.timeline


def _error_message(body: str) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:500]


async def first_model(session: aiohttp.ClientSession, url: str) -> str:
    """Name of the model that `url` serves."""
    async with session.get(f"{url}/v1/models") as response:
        if response.status != 200:
            raise ApiError(f"{response.status}: {_error_message(await response.text())}")
        models = (await response.json())["data"]
    return str(models[0]["id"])
