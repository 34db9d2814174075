"""Answers scrapers: in the text format, or in OpenMetrics, where they take it.

OpenMetrics alone carries exemplars: the trace of one request that fell into a bucket.

Text is made in the event loop, where nothing changes the figures meanwhile, but in slices, between
which the loop serves streams: a scrape of a large router takes a second. Scrapers that come at once
share an answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.openmetrics.exposition import ALLOWUTF8, CONTENT_TYPE_LATEST
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from starlette.requests import Request
from starlette.responses import Response

from edge.http.event_loop.shared_work import SharedWork

_OPENMETRICS = "application/openmetrics-text"
_TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_END = b"# EOF\n"
_SLICE_S = 0.003

Render = Callable[["_Families"], bytes]


@dataclass(frozen=True, slots=True)
class _Families:
    """Gives the library's renderers one family."""

    family: Metric

    def collect(self) -> Iterator[Metric]:
        yield self.family


class Exposition:
    """Tells all metrics of `registry`. A collector may yield a long family in parts: families of
    one name, one after the other."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._text = SharedWork(lambda: _in_slices(registry, generate_latest))
        self._openmetrics = SharedWork(lambda: _in_slices(registry, _openmetrics))

    async def response(self, request: Request) -> Response:
        """Returns the metrics in the best format that the scraper takes."""
        if not _takes_openmetrics(request.headers.get("accept", "")):
            return Response(await self._text.get(), headers={"content-type": _TEXT_TYPE})
        content = await self._openmetrics.get() + _END
        return Response(content, headers={"content-type": CONTENT_TYPE_LATEST})


async def _in_slices(registry: CollectorRegistry, render: Render) -> bytes:
    parts, last = [], ""
    began = time.perf_counter()
    for family in registry.collect():
        text = render(_Families(family))
        parts.append(_without_header(text) if family.name == last else text)
        last = family.name
        if time.perf_counter() - began > _SLICE_S:
            await asyncio.sleep(0)
            began = time.perf_counter()
    return b"".join(parts)


def _without_header(text: bytes) -> bytes:
    """Leaves the lines of HELP, TYPE and UNIT, which a family has once."""
    while text.startswith(b"#"):
        text = text.partition(b"\n")[2]
    return text


def _openmetrics(families: _Families) -> bytes:
    # Every other escaping of the library makes an underscore of the colon in vllm:..., which is a
    # plain character of OpenMetrics.
    text: bytes = generate_openmetrics(families, escaping=ALLOWUTF8)  # type: ignore[no-untyped-call]
    return text.removesuffix(_END)


def _takes_openmetrics(accept: str) -> bool:
    """Returns whether a scraper takes version 1.0.0, or any."""
    for part in accept.split(","):
        kind, *parameters = (word.strip() for word in part.split(";"))
        versions = [word[8:] for word in parameters if word.startswith("version=")]
        if kind == _OPENMETRICS and versions in ([], ["1.0.0"]):
            return True
    return False
