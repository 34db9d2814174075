"""Says what the API knows about itself: version, groups, kinds.

The OpenAPI documents are empty: Helm then validates nothing on its side, and `tests/helm` does it
against the schemas of several Kubernetes versions.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from tests.kubernetes_stand_in.api_errors import NotFound
from tests.kubernetes_stand_in.resources import RESOURCES, api_versions

KUBERNETES_VERSION = "v1.37.0"
_VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
_OPENAPI_V2_TYPE = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf"


def routes() -> list[web.RouteDef]:
    return [
        web.get("/version", _version),
        web.get("/openapi/v2", _openapi_v2),
        web.get("/openapi/v3", _openapi_v3),
        web.get("/api", _core),
        web.get("/apis", _groups),
        web.get("/api/{version}", _kinds),
        web.get("/apis/{group}/{version}", _kinds),
    ]


async def _version(_request: web.Request) -> web.Response:
    major, minor = KUBERNETES_VERSION.removeprefix("v").split(".")[:2]
    return web.json_response({"major": major, "minor": minor, "gitVersion": KUBERNETES_VERSION})


async def _openapi_v2(_request: web.Request) -> web.Response:
    return web.Response(body=b"", headers={"Content-Type": _OPENAPI_V2_TYPE})


async def _openapi_v3(_request: web.Request) -> web.Response:
    return web.json_response({"paths": {}})


async def _core(_request: web.Request) -> web.Response:
    return web.json_response({"kind": "APIVersions", "versions": ["v1"]})


async def _groups(_request: web.Request) -> web.Response:
    groups: dict[str, dict[str, Any]] = {}
    for api_version in api_versions():
        name, _, version = api_version.rpartition("/")
        if name:
            entry = {"groupVersion": api_version, "version": version}
            first = {"name": name, "versions": [], "preferredVersion": entry}
            groups.setdefault(name, first)["versions"].append(entry)
    found = list(groups.values())
    return web.json_response({"kind": "APIGroupList", "apiVersion": "v1", "groups": found})


async def _kinds(request: web.Request) -> web.Response:
    group = request.match_info.get("group")
    version = request.match_info["version"]
    api_version = f"{group}/{version}" if group else version
    if api_version not in api_versions():
        raise NotFound("group version", api_version)
    return web.json_response(
        {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": api_version,
            "resources": [
                entry
                for r in RESOURCES
                if r.api_version == api_version
                for entry in (
                    _kind(r.plural, r.kind, r.namespaced),
                    *(_kind(f"{r.plural}/{s}", r.kind, r.namespaced) for s in r.subresources),
                )
            ],
        }
    )


def _kind(name: str, kind: str, namespaced: bool) -> dict[str, Any]:
    return {
        "name": name,
        "singularName": "" if "/" in name else kind.lower(),
        "namespaced": namespaced,
        "kind": "Scale" if name.endswith("/scale") else kind,
        "verbs": ["get", "patch", "update"] if "/" in name else _VERBS,
    }
