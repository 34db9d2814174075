"""Answers for files and batches on a router that keeps none. Needs no package of the stores."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edge.http.errors import NotFound


def no_batch_routes() -> list[Route]:
    """Returns the routes."""
    ends = "", "/{rest:path}"
    paths = [f"/v1/{kept}{end}" for kept in ("files", "batches") for end in ends]
    return [Route(path, _refuse, methods=["GET", "POST", "DELETE"]) for path in paths]


async def _refuse(_request: Request) -> Response:
    raise NotFound(
        "this router keeps no files and no batches; it does when started with --batch-store",
        code="no_batch_store",
    )
