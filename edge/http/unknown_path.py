"""Answers requests for what is not served: names the path, what was meant, and what there is. A
path with a slash at its end leads to the one without. Of what is served, heads may be asked for.
What operators ask is served and not named: who mistypes a path of the API need not learn of it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import BaseRoute, Route

from edge.http.errors import HttpError, MethodNotAllowed, NotFound, NoWebSockets, PathMoved

_MAX_SHOWN = 100
_BEGINNINGS = {"/status": "the cluster", "/metrics": "counters", "/docs": "the API"}
"""People who open a service without a path look for one of these."""
_HIDDEN = {"HEAD", "OPTIONS"}


def serve(app: Starlette, routes: Sequence[BaseRoute], *, is_named: bool = True) -> None:
    """Adds routes to an application. `is_named`: where a path is not found, they are what there is.
    The framework's own redirects name a scheme and a host, which proxies in front of us have
    changed. Who may GET may HEAD, as load balancers do; the framework does so for some routes
    alone."""
    for route in routes:
        if isinstance(route, Route) and route.methods and "GET" in route.methods:
            route.methods.add("HEAD")
    app.router.redirect_slashes = False
    app.router.routes.extend(routes)
    app.state.served = [*getattr(app.state, "served", ()), *routes]
    if is_named:
        app.state.named = [*getattr(app.state, "named", ()), *routes]


def serve_elsewhere(app: Starlette, routes: Sequence[BaseRoute], *, where: str) -> None:
    """Says of routes that another port serves them. `where` tells which."""
    app.state.elsewhere = (where, routes)


def unknown_path(request: Request) -> HttpError:
    """Returns the error for a request that no route takes."""
    method, path = request.method, request.url.path
    routes = [route for route in request.app.state.served if isinstance(route, Route)]
    shown = path[:_MAX_SHOWN]
    others = _methods(route for route in routes if route.path_regex.match(path))
    if others:
        allowed = ", ".join(sorted(others))
        if method == "GET" and request.headers.get("upgrade", "").lower() == "websocket":
            return NoWebSockets(f"{shown} has no WebSockets; it takes {allowed} over HTTP")
        return MethodNotAllowed(f"{shown} takes {allowed}, not {method}", allowed=allowed)
    is_slashed = request.scope["raw_path"].endswith(b"/")
    if is_slashed and any(route.path_regex.match(path[:-1]) for route in routes):
        return path_without_slash(request)
    where, away = getattr(request.app.state, "elsewhere", ("", ()))
    if any(isinstance(route, Route) and route.path_regex.match(path) for route in away):
        return NotFound(f"{method} {shown} is not served on this port, but {where}")
    routes = [route for route in request.app.state.named if isinstance(route, Route)]
    named = {
        path: _methods(route for route in routes if route.path_format == path)
        for path in {route.path_format for route in routes}
    }
    listed = ", ".join(f"{'|'.join(sorted(how))} {one}" for one, how in sorted(named.items()))
    meant = _meant(shown, named)
    hint = f"did you mean {meant}? " if meant else ""
    if path == "/":
        begun = {one: what for one, what in _BEGINNINGS.items() if _serves(request, one)}
        hint = f"see {', '.join(f'{one} ({what})' for one, what in begun.items())}; "
    return NotFound(f"there is no {method} {shown} here; {hint}served: {listed}")


def _serves(request: Request, path: str) -> bool:
    return any(isinstance(one, Route) and one.path == path for one in request.app.state.served)


def path_without_slash(request: Request) -> PathMoved:
    """Returns what leads to the path without its last slash."""
    shown = request.url.path[:_MAX_SHOWN]
    location = _without_slash(request.scope["raw_path"], request.scope["query_string"])
    return PathMoved(f"{shown} has a slash too many at its end", location=location)


def _without_slash(path: bytes, query: bytes) -> str:
    """Returns the way to a path without the slash at its end, as a relative reference."""
    way = b"../" + path[:-1].rpartition(b"/")[2] + (b"?" + query if query else b"")
    return way.decode("latin-1")


def _methods(routes: Iterable[Route]) -> set[str]:
    return {method for route in routes for method in route.methods or ()} - _HIDDEN


def _meant(path: str, served: Iterable[str]) -> str:
    """Returns the served path that is most like this one, such as one without its /v1."""
    ends = [one for one in served if one.endswith(path) and path.count("/") and path != "/"]
    return next(iter([*ends, *difflib.get_close_matches(path, served, 1, 0.75)]), "")
