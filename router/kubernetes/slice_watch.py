"""Follows the EndpointSlices of one service for as long as the router runs.

    1. list      everything, and the version it is of
    2. watch     changes since; a bookmark only moves the version
    3. ended     by the API, as it does every few minutes: watch again from the last version
    4. expired   (410) the version is too old: list again
    -  failed    a pause, twice as long each time and with jitter, then again from 3 or 1

What was last known stays known through all of it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from router.kubernetes.api_client import (
    ApiUnavailable,
    EndpointSliceApi,
    VersionExpired,
    WatchEvent,
)
from router.kubernetes.endpoint_slices import Endpoints, EndpointSlices

logger = logging.getLogger(__name__)

_WATCH_S = 240
_MIN_PAUSE_S = 0.2
_MAX_PAUSE_S = 10.0


class SliceWatch:
    """Calls `on_endpoints` with what is known after every change, and `on_failure` when the API
    does not answer as it should."""

    def __init__(
        self,
        api: EndpointSliceApi,
        service: str,
        on_endpoints: Callable[[Endpoints], None],
        on_failure: Callable[[], None],
        rng: random.Random,
        *,
        min_pause_s: float = _MIN_PAUSE_S,
    ) -> None:
        self._api = api
        self._service = service
        self._on_endpoints = on_endpoints
        self._on_failure = on_failure
        self._rng = rng
        self._min_pause_s = min_pause_s
        self._slices = EndpointSlices()
        self._version = ""

    async def run(self) -> None:
        """Runs until cancelled."""
        pause_s = self._min_pause_s
        while True:
            before = self._version
            try:
                await self._follow()
                pause_s = self._min_pause_s
            except VersionExpired:
                self._version = ""
            except ApiUnavailable as error:
                self._on_failure()
                logger.warning("endpoints of %s: %s; what is known stays", self._service, error)
            if self._version != before and self._version:
                pause_s = self._min_pause_s
            await asyncio.sleep(pause_s * self._rng.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    async def _follow(self) -> None:
        """Runs until the API ends the watch."""
        if not self._version:
            await self._list()
        seconds = round(_WATCH_S * self._rng.uniform(0.8, 1.2))
        async for event in self._api.watch(self._version, seconds):
            self._take(event)

    async def _list(self) -> None:
        found = await self._api.list()
        self._version = found.metadata.resource_version
        if not found.items:
            self._on_failure()
            logger.warning("service %s has no EndpointSlices; what is known stays", self._service)
            # Until the watch tells of a slice: those of before will never be named again.
            self._slices.replace([])
            return
        self._slices.replace(found.items)
        self._on_endpoints(self._slices.endpoints())

    def _take(self, event: WatchEvent) -> None:
        self._version = event.object.metadata.resource_version or self._version
        if event.type == "BOOKMARK":
            return
        if event.type == "DELETED":
            self._slices.delete(event.object)
        else:
            self._slices.put(event.object)
        self._on_endpoints(self._slices.endpoints())
