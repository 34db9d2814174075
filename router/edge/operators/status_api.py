"""Serves the status page.

GET  /status               the page for people; `?format=json`: a snapshot for programs
GET  /status/events        what changes, each second (`router.observe.status.status_feed`)
GET  /status/{file}        what the page is made of
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from edge.http.errors import BadRequest, NotFound
from router.observe.status.page_files import PAGE, PageFile, page_files
from router.observe.status.status_feed import StatusFeed

_NOT_MODIFIED = 304


def status_routes(feed: StatusFeed) -> list[BaseRoute]:
    files = page_files()

    async def status(request: Request) -> Response:
        wanted = request.query_params.get("format", "html")
        if wanted == "json":
            headers = {"cache-control": "no-store"}
            return Response(await feed.document(), media_type="application/json", headers=headers)
        if wanted != "html":
            raise BadRequest("format must be html or json", param="format")
        return _answer(request, files[PAGE])

    async def file(request: Request) -> Response:
        name = request.path_params["file"]
        if name not in files or name == PAGE:
            raise NotFound(f"the status page has no such file; it has: {', '.join(sorted(files))}")
        return _answer(request, files[name])

    return [
        Route("/status", status),
        Route("/status/events", feed, methods=["GET"]),
        Route("/status/{file}", file),
    ]


def _answer(request: Request, file: PageFile) -> Response:
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=_NOT_MODIFIED, headers=dict(file.headers))
    return Response(file.content, headers=dict(file.headers))
