"""Reads the order in which a client wants a list."""

from __future__ import annotations

from starlette.requests import Request

from edge.http.errors import BadRequest

_ORDERS = {"asc": True, "desc": False}


def is_ascending(request: Request) -> bool:
    """Returns whether the oldest come first. Raises `BadRequest`."""
    order = request.query_params.get("order", "desc")
    if order not in _ORDERS:
        raise BadRequest("order must be asc or desc", param="order")
    return _ORDERS[order]
