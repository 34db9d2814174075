"""A small streaming client for the OpenAI API, for the terminal."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from edge.http import headers as names


class ApiError(Exception):
    """The server refused, with its status and its own words, or does not answer as the API has
    it."""


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
                raise ApiError(f"{response.status}: {error_message(await response.text())}")
            async for line in _lines(response):
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


def error_message(body: str) -> str:
    """Returns what an error of the API says; the body itself, if that is none."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:500]


def unreachable(error: Exception) -> str:
    """Returns what is wrong with a server that could not be asked, and what to do where none
    answers."""
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno or 0
        # asyncio puts an address where the kernel's words would be; resolvers' errors are below 0.
        why = os.strerror(number) if number > 0 else error.os_error.strerror or error.os_error
        return f"nothing answers there ({why}); `tandem up` starts a cluster, --url names another"
    return str(error) or "no answer in time"


def without_v1(url: str) -> str:
    """Returns the address of a server, which `tandem up` and clients of the API write with /v1.
    Raises `ValueError`."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise ValueError(f"{url!r} is no address of a server: write it as http://host:port")
    return url.rstrip("/").removesuffix("/v1")


async def first_model(session: aiohttp.ClientSession, url: str) -> str:
    """Name of the model that `url` serves. Raises `ApiError`."""
    async with session.get(f"{url}/v1/models") as response:
        text = await response.text()
        if response.status != 200:
            raise ApiError(f"{response.status}: {error_message(text)}")
    try:
        return str(json.loads(text)["data"][0]["id"])
    except (ValueError, KeyError, TypeError, IndexError):
        raise ApiError("no list of models comes from there; name one with --model") from None


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yields the lines of an answer. Raises `ApiError` when it breaks off."""
    try:
        async for line in response.content:
            yield line
    except aiohttp.ClientError as error:
        raise ApiError(f"the answer broke off: {error}") from None
