"""Answers scrapers: in the text format, or in OpenMetrics, where they take it.

OpenMetrics alone carries exemplars: the trace of one request that fell into a bucket.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import ALLOWUTF8, CONTENT_TYPE_LATEST
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from starlette.requests import Request
from starlette.responses import Response

_OPENMETRICS = "application/openmetrics-text"
_TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def scrape_response(registry: CollectorRegistry, request: Request) -> Response:
    """Returns all metrics of `registry` in the best format that the scraper takes."""
    if not _takes_openmetrics(request.headers.get("accept", "")):
        return Response(generate_latest(registry), headers={"content-type": _TEXT_TYPE})
    # Every other escaping of the library makes an underscore of the colon in vllm:..., which is a
    # plain character of OpenMetrics.
    content = generate_openmetrics(registry, escaping=ALLOWUTF8)  # type: ignore[no-untyped-call]
    return Response(content, headers={"content-type": CONTENT_TYPE_LATEST})


def _takes_openmetrics(accept: str) -> bool:
    """Returns whether a scraper takes version 1.0.0, or any."""
    for part in accept.split(","):
        kind, *parameters = (word.strip() for word in part.split(";"))
        versions = [word[8:] for word in parameters if word.startswith("version=")]
        if kind == _OPENMETRICS and versions in ([], ["1.0.0"]):
            return True
    return False
