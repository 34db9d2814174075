"""Answers for what a router without a store does not keep. Needs no package of the stores."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edge.http.errors import NotFound


def no_response_routes() -> list[Route]:
    """Returns the routes of responses and conversations."""
    one = "/v1/responses/{response_id}"
    return [
        _refusal(one, ["GET", "DELETE"], "response"),
        _refusal(one + "/cancel", ["POST"], "response"),
        _refusal(one + "/input_items", ["GET"], "response"),
        *_refusals_below("/v1/conversations", "response"),
    ]


def no_batch_routes() -> list[Route]:
    """Returns the routes of files and batches."""
    return [*_refusals_below("/v1/files", "batch"), *_refusals_below("/v1/batches", "batch")]


_KEPT = {"response": "no responses and no conversations", "batch": "no files and no batches"}


def _refusals_below(path: str, store: str) -> list[Route]:
    methods = ["GET", "POST", "DELETE"]
    return [_refusal(path + end, methods, store) for end in ("", "/{rest:path}")]


def _refusal(path: str, methods: list[str], store: str) -> Route:
    async def refuse(_request: Request) -> Response:
        raise NotFound(
            f"this router keeps {_KEPT[store]}; it does when started with --{store}-store",
            code=f"no_{store}_store",
        )

    return Route(path, refuse, methods=methods)
