"""A stand-in for kube-apiserver: the HTTP API over an `ObjectStore`, as Helm and clients in pods
use it.

    GET    discovery, OpenAPI, objects, lists, watches (also with bookmarks and initial events)
    POST   create, evictions        PUT     update, scale, status
    PATCH  apply, strategic, merge and JSON patches, scale, status        DELETE  one or many

Requests without a token come from the outside (Helm) and may do everything. A pod's token is its
service account's: it may do what the Roles of its namespace say (`rbac`).

Life: `ApiServer(store)` → `start` (listens on loopback; with TLS besides, when given) → `close`.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from typing import Any

import yaml
from aiohttp import web

from tests.kubernetes_stand_in import discovery, rbac, scale
from tests.kubernetes_stand_in.api_errors import (
    ApiError,
    BadRequest,
    MethodNotAllowed,
    NotFound,
    TooManyRequests,
    UnsupportedMediaType,
)
from tests.kubernetes_stand_in.disruption import may_evict
from tests.kubernetes_stand_in.object_store import Event, ObjectStore
from tests.kubernetes_stand_in.protobuf_body import decode_protobuf
from tests.kubernetes_stand_in.resources import (
    Object,
    Resource,
    Target,
    find_resource,
    matches_labels,
    parse_selector,
)
from tests.kubernetes_stand_in.writes import Writer

_BOOKMARK_S = 1.0
_PATCH_TYPES = {
    "application/apply-patch+yaml": "apply",
    "application/strategic-merge-patch+json": "strategic",
    "application/merge-patch+json": "merge",
    "application/json-patch+json": "json",
}
_STARTS = (r"/namespaces/{namespace}/{plural:(?!status$)[^/]+}", "/{plural}")
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch"}


class ApiServer:
    """`requests` is a log of (user, verb, kind, name) of everything that was asked."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.requests: list[tuple[str, str, str, str]] = []
        self._writer = Writer(store)
        self._watches: set[asyncio.Task[object]] = set()
        self._runner = web.AppRunner(self._app(), access_log=None, shutdown_timeout=1)
        self.url = ""
        self.tls_port = 0

    async def start(self, tls: ssl.SSLContext | None = None) -> None:
        await self._runner.setup()
        self.url = f"http://127.0.0.1:{await self._listen(None)}"
        if tls is not None:
            self.tls_port = await self._listen(tls)

    async def close(self) -> None:
        for watch in self._watches:
            watch.cancel()
        await self._runner.cleanup()

    async def _listen(self, tls: ssl.SSLContext | None) -> int:
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        return int(self._runner.addresses[-1][1])

    def _app(self) -> web.Application:
        app = web.Application(middlewares=[_errors_as_status], client_max_size=32 << 20)
        app.add_routes(discovery.routes())
        for prefix in ("/api/{version}", "/apis/{group}/{version}"):
            for start in _STARTS:
                for rest in ("", "/{name}", "/{name}/{subresource}"):
                    app.router.add_route("*", prefix + start + rest, self._handle)
        return app

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        target = _target(request)
        verb = _verb(request, target)
        user = rbac.authenticate(self.store, request.headers.get("Authorization", ""))
        self.requests.append((user.name, verb, target.resource.kind, target.name))
        rbac.authorize(self.store, user, verb, target)
        match verb:
            case "get":
                return web.json_response(self._get(target))
            case "list":
                return web.json_response(self._list(target, request))
            case "watch":
                return await self._watch(target, request)
            case "delete" | "deletecollection":
                return web.json_response(self._delete(target, request, await _body(request)))
        return await self._write(target, verb, request)

    # Reading -----------------------------------------------------------------------------------

    def _get(self, target: Target) -> Object:
        obj = self.store.get(target.resource, target.namespace, target.name)
        return scale.read(obj) if target.subresource == "scale" else obj

    def _list(self, target: Target, request: web.Request) -> Object:
        items = self.store.objects(target.resource, target.namespace)
        return {
            "kind": f"{target.resource.kind}List",
            "apiVersion": target.resource.api_version,
            "metadata": {"resourceVersion": str(self.store.version)},
            "items": [item for item in items if _is_chosen(item, request)],
        }

    async def _watch(self, target: Target, request: web.Request) -> web.StreamResponse:
        since = request.query.get("resourceVersion", "")
        sends_initial = request.query.get("sendInitialEvents") == "true" or since in ("", "0")
        queue = self.store.subscribe(None if sends_initial else int(since))
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        task = asyncio.current_task()
        assert task is not None
        self._watches.add(task)
        try:
            await response.prepare(request)
            if sends_initial:
                await self._send_initial(response, target, request)
            limit_s = float(request.query.get("timeoutSeconds", 3600))
            async with asyncio.timeout(limit_s):
                async for line in self._lines(queue, target, request):
                    await response.write(line)
        except (TimeoutError, ConnectionError):
            pass
        finally:
            self._watches.discard(task)
            self.store.unsubscribe(queue)
        return response

    async def _send_initial(
        self, response: web.StreamResponse, target: Target, request: web.Request
    ) -> None:
        """Sends what is there, and with `sendInitialEvents` a bookmark that says that this
        was all.
        """
        for obj in self.store.objects(target.resource, target.namespace):
            if _is_chosen(obj, request):
                await response.write(_line("ADDED", obj))
        if request.query.get("sendInitialEvents") == "true":
            ended = {"k8s.io/initial-events-end": "true"}
            await response.write(self._bookmark(target.resource, ended))

    async def _lines(
        self, queue: asyncio.Queue[Event], target: Target, request: web.Request
    ) -> AsyncIterator[bytes]:
        wants_bookmarks = request.query.get("allowWatchBookmarks") in ("true", "1")
        while True:
            try:
                async with asyncio.timeout(_BOOKMARK_S):
                    event = await queue.get()
            except TimeoutError:
                if wants_bookmarks:
                    yield self._bookmark(target.resource, {})
                continue
            if event.resource == target.resource and (type_ := _seen_as(event, target, request)):
                yield _line(type_, event.object)

    def _bookmark(self, resource: Resource, annotations: dict[str, str]) -> bytes:
        meta = {"resourceVersion": str(self.store.version), "annotations": annotations}
        return _line(
            "BOOKMARK",
            {"kind": resource.kind, "apiVersion": resource.api_version, "metadata": meta},
        )

    # Writing -----------------------------------------------------------------------------------

    async def _write(self, target: Target, verb: str, request: web.Request) -> web.Response:
        body = await _body(request)
        if target.subresource == "eviction":
            return web.json_response(self._evict(target), status=201)
        manager = request.query.get("fieldManager") or _client_name(request)
        is_dry = "dryRun" in request.query
        if verb == "create":
            return web.json_response(
                self._writer.create(target, body, manager, dry_run=is_dry), status=201
            )
        if verb == "update":
            return web.json_response(self._writer.replace(target, body, manager, dry_run=is_dry))
        patch_type = _PATCH_TYPES.get(request.content_type)
        if patch_type is None:
            raise UnsupportedMediaType(f"cannot patch with {request.content_type}")
        if patch_type == "apply":
            force = request.query.get("force") == "true"
            obj, is_new = self._writer.apply(target, body, manager, force=force, dry_run=is_dry)
            return web.json_response(obj, status=201 if is_new else 200)
        return web.json_response(
            self._writer.patch(target, patch_type, body, manager, dry_run=is_dry)
        )

    def _evict(self, target: Target) -> Object:
        pod = self.store.get(target.resource, target.namespace, target.name)
        if not may_evict(self.store, pod):
            raise TooManyRequests("Cannot evict pod as it would violate the disruption budget.")
        self.store.delete(target.resource, target.namespace, target.name)
        return {"kind": "Status", "apiVersion": "v1", "status": "Success"}

    def _delete(self, target: Target, request: web.Request, options: Any) -> Object:
        options = options if isinstance(options, dict) else {}
        policy = request.query.get("propagationPolicy") or options.get("propagationPolicy")
        if policy not in (None, "Background"):
            raise BadRequest(f"propagation policy {policy} is not supported here")
        grace = request.query.get("gracePeriodSeconds", options.get("gracePeriodSeconds"))
        grace_s = None if grace is None else int(grace)
        if target.name:
            if "dryRun" in request.query:
                return self.store.get(target.resource, target.namespace, target.name)
            return self.store.delete(target.resource, target.namespace, target.name, grace_s)
        for obj in self.store.objects(target.resource, target.namespace):
            if _is_chosen(obj, request):
                self.store.delete_object(obj, grace_s)
        return {"kind": "Status", "apiVersion": "v1", "status": "Success"}


@web.middleware
async def _errors_as_status(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        response: web.StreamResponse = await handler(request)
    except ApiError as error:
        return web.json_response(error.status(), status=error.code)
    return response


def _target(request: web.Request) -> Target:
    info = request.match_info
    group, version = info.get("group", ""), info["version"]
    plural, namespace = info["plural"], info.get("namespace", "")
    resource = find_resource(f"{group}/{version}" if group else version, plural)
    if resource is None or (resource.namespaced and not namespace and info.get("name")):
        raise NotFound(plural, info.get("name", ""))
    subresource = info.get("subresource", "")
    if subresource and subresource not in resource.subresources:
        raise NotFound(f"{plural}/{subresource}", info["name"])
    return Target(resource, namespace, info.get("name", ""), subresource)


def _verb(request: web.Request, target: Target) -> str:
    if request.method == "GET":
        if target.name:
            return "get"
        return "watch" if request.query.get("watch") in ("true", "1") else "list"
    if request.method == "DELETE":
        return "delete" if target.name else "deletecollection"
    verb = _VERBS.get(request.method, "")
    fits = bool(target.name) if verb != "create" else bool(not target.name or target.subresource)
    if not verb or not fits:
        raise MethodNotAllowed(f"{request.method} {request.path}")
    return verb


async def _body(request: web.Request) -> Any:
    """Reads the body; YAML includes JSON. A protobuf that is not an object (options of a delete) is
    left out.
    """
    raw = await request.read()
    if not raw:
        return None
    if "protobuf" in request.content_type:
        return decode_protobuf(raw)
    if "json" in request.content_type:
        return json.loads(raw)
    return yaml.load(raw, yaml.CSafeLoader)


def _client_name(request: web.Request) -> str:
    """Returns the client's name: `Helm/3.6.2` is the manager `Helm`."""
    return request.headers.get("User-Agent", "unknown").partition("/")[0]


def _is_chosen(obj: Object, request: web.Request) -> bool:
    labels = request.query.get("labelSelector", "")
    if labels and not matches_labels(obj, parse_selector(labels)):
        return False
    fields = request.query.get("fieldSelector", "")
    return all(_has_field(obj, term) for term in fields.split(",") if term)


def _has_field(obj: Object, term: str) -> bool:
    path, _, wanted = term.replace("==", "=").partition("=")
    differs = path.endswith("!")
    value: Any = obj
    for part in path.rstrip("!").split("."):
        value = value.get(part, "") if isinstance(value, dict) else ""
    return bool((value == wanted) != differs)


def _seen_as(event: Event, target: Target, request: web.Request) -> str | None:
    """Returns what a watch with selectors calls the event; None if it does not see it."""
    if target.namespace not in ("", event.object["metadata"].get("namespace")):
        return None
    was = event.before is not None and _is_chosen(event.before, request)
    if event.type == "DELETED":
        return "DELETED" if was else None
    is_ = _is_chosen(event.object, request)
    if was and not is_:
        return "DELETED"
    if is_:
        return "MODIFIED" if was else "ADDED"
    return None


def _line(type_: str, obj: Object) -> bytes:
    return json.dumps({"type": type_, "object": obj}).encode() + b"\n"
