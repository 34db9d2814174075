"""The stand-in behaves like the API that Helm and pods were written for."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from tests.kubernetes_stand_in import rbac
from tests.kubernetes_stand_in.cluster import NAMESPACE, Cluster
from tests.kubernetes_stand_in.patches import strategic_merge
from tests.kubernetes_stand_in.resources import Object

CONFIG_MAPS = f"/api/v1/namespaces/{NAMESPACE}/configmaps"
DEPLOYMENTS = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments"
APPLY = "application/apply-patch+yaml"


class Client:
    """JSON in, (status, JSON) out."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session = session
        self.url = url

    async def ask(
        self, method: str, path: str, body: Any = None, content_type: str = "application/json",
        token: str = "",
    ) -> tuple[int, Any]:  # fmt: skip
        headers = {"Content-Type": content_type, "User-Agent": "tester/1"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        data = None if body is None else json.dumps(body)
        async with self.session.request(
            method, self.url + path, data=data, headers=headers
        ) as answer:
            return answer.status, await answer.json()

    async def apply(self, path: str, obj: Object, manager: str, **query: str) -> tuple[int, Any]:
        terms = "&".join(f"{k}={v}" for k, v in {"fieldManager": manager, **query}.items())
        return await self.ask("PATCH", f"{path}?{terms}", obj, APPLY)

    async def watch(self, path: str, **query: str) -> AsyncIterator[dict[str, Any]]:
        params = {"watch": "true", **query}
        async with self.session.get(self.url + path, params=params) as answer:
            async for line in answer.content:
                yield json.loads(line)


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession() as session:
        yield Client(session, cluster.api.url)


def config_map(name: str, **data: str) -> Object:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def deployment(name: str, image: str = "a:1", **spec: Any) -> Object:
    labels = {"app": name}
    containers = [{"name": "main", "image": image, "env": [{"name": "A", "value": "1"}]}]
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": containers}},
            **spec,
        },
    }


# Watching --------------------------------------------------------------------------------------


async def test_a_watch_misses_nothing_after_its_list(client: Client) -> None:
    _, listed = await client.ask("GET", CONFIG_MAPS)
    await client.ask("POST", CONFIG_MAPS, config_map("a", x="1"))
    await client.ask("PATCH", f"{CONFIG_MAPS}/a", {"data": {"x": "2"}}, _MERGE)
    await client.ask("DELETE", f"{CONFIG_MAPS}/a")
    seen = []
    version = listed["metadata"]["resourceVersion"]
    async for event in client.watch(CONFIG_MAPS, resourceVersion=version):
        seen.append((event["type"], event["object"]["data"]["x"]))
        if event["type"] == "DELETED":
            break
    assert seen == [("ADDED", "1"), ("MODIFIED", "2"), ("DELETED", "2")]


async def test_a_watch_sends_what_is_there_and_then_bookmarks(client: Client) -> None:
    await client.ask("POST", CONFIG_MAPS, config_map("a"))
    query = {"sendInitialEvents": "true", "allowWatchBookmarks": "true"}
    events = client.watch(CONFIG_MAPS, **query)
    first, end, later = [await anext(events) for _ in range(3)]
    assert (first["type"], first["object"]["metadata"]["name"]) == ("ADDED", "a")
    assert end["object"]["metadata"]["annotations"] == {"k8s.io/initial-events-end": "true"}
    assert later["type"] == "BOOKMARK"
    assert int(later["object"]["metadata"]["resourceVersion"]) > 0


async def test_a_watch_from_a_forgotten_version_must_list_again(
    client: Client, cluster: Cluster
) -> None:
    _, listed = await client.ask("GET", CONFIG_MAPS)
    await client.ask("POST", CONFIG_MAPS, config_map("a"))
    cluster.store.forget_history()
    version = listed["metadata"]["resourceVersion"]
    status, answer = await client.ask("GET", f"{CONFIG_MAPS}?watch=true&resourceVersion={version}")
    assert (status, answer["reason"]) == (410, "Expired")


async def test_a_selector_sees_objects_come_and_go(client: Client) -> None:
    await client.ask("POST", CONFIG_MAPS, config_map("a"))
    _, listed = await client.ask("GET", CONFIG_MAPS)
    for labels in ({"team": "x"}, {"team": "y"}):
        await client.ask("PATCH", f"{CONFIG_MAPS}/a", {"metadata": {"labels": labels}}, _MERGE)
    version = listed["metadata"]["resourceVersion"]
    events = client.watch(CONFIG_MAPS, resourceVersion=version, labelSelector="team in (x, z)")
    assert [(await anext(events))["type"] for _ in range(2)] == ["ADDED", "DELETED"]


# Writing ---------------------------------------------------------------------------------------

_MERGE = "application/merge-patch+json"


async def test_apply_removes_what_it_no_longer_names(client: Client) -> None:
    path = f"{DEPLOYMENTS}/d"
    wanted = deployment("d", replicas=2)
    wanted["spec"]["template"]["spec"]["containers"][0]["env"].append({"name": "B", "value": "2"})
    assert (await client.apply(path, wanted, "helm"))[0] == 201
    status, obj = await client.apply(path, deployment("d"), "helm")
    assert status == 200
    assert obj["spec"]["template"]["spec"]["containers"][0]["env"] == [{"name": "A", "value": "1"}]
    assert obj["spec"]["replicas"] == 1


async def test_apply_conflicts_with_another_owner_unless_forced(client: Client) -> None:
    path = f"{DEPLOYMENTS}/d"
    await client.apply(path, deployment("d", replicas=2), "helm")
    await client.ask("PATCH", f"{path}/scale", {"spec": {"replicas": 5}}, _MERGE)
    status, answer = await client.apply(path, deployment("d", replicas=3), "helm")
    assert (status, answer["reason"]) == (409, "Conflict")
    assert ".spec.replicas" in answer["message"]
    assert (await client.apply(path, deployment("d"), "helm"))[1]["spec"]["replicas"] == 5
    status, obj = await client.apply(path, deployment("d", replicas=3), "helm", force="true")
    assert (status, obj["spec"]["replicas"]) == (200, 3)


def test_strategic_merge_joins_lists_by_their_keys() -> None:
    before = {"containers": [{"name": "a", "args": ["x"], "env": [{"name": "E", "value": "1"}]}]}
    patch = {
        "$setElementOrder/containers": [{"name": "b"}, {"name": "a"}],
        "containers": [
            {"name": "a", "args": ["y"], "env": [{"name": "E", "$patch": "delete"}]},
            {"name": "b", "image": "i"},
        ],
    }
    assert strategic_merge(before, patch) == {
        "containers": [{"name": "b", "image": "i"}, {"name": "a", "args": ["y"], "env": []}]
    }


async def test_only_the_spec_makes_a_new_generation(client: Client, cluster: Cluster) -> None:
    await client.ask("POST", DEPLOYMENTS, deployment("d"))
    await cluster.wait(lambda: cluster.get("Deployment", "d").get("status"))
    labels = {"metadata": {"labels": {"a": "b"}}, "status": {"replicas": 99}}
    _, obj = await client.ask("PATCH", f"{DEPLOYMENTS}/d", labels, _MERGE)
    assert obj["metadata"]["generation"] == 1
    assert obj["status"]["replicas"] != 99
    _, obj = await client.ask("PATCH", f"{DEPLOYMENTS}/d", {"spec": {"replicas": 0}}, _MERGE)
    assert obj["metadata"]["generation"] == 2


async def test_writes_that_the_real_api_refuses(client: Client) -> None:
    await client.ask("POST", DEPLOYMENTS, deployment("d"))
    stale = {"metadata": {"resourceVersion": "1"}, "spec": {"replicas": 3}}
    cases = {
        "exists already": ("POST", DEPLOYMENTS, deployment("d"), 409),
        "selector changed": (
            "PATCH", f"{DEPLOYMENTS}/d", {"spec": {"selector": {"matchLabels": {"b": "c"}}}}, 422,
        ),
        "stale version": ("PATCH", f"{DEPLOYMENTS}/d", stale, 409),
        "no such object": ("PATCH", f"{DEPLOYMENTS}/e", {}, 404),
        "no such namespace": (
            "POST", "/api/v1/namespaces/nowhere/configmaps", config_map("a"), 404,
        ),
        "no such kind": ("GET", "/apis/example.com/v1/things", None, 404),
    }  # fmt: skip
    for name, (method, path, body, wanted) in cases.items():
        status, _ = await client.ask(method, path, body, _MERGE)
        assert status == wanted, name


async def test_evictions_respect_the_budget(client: Client, cluster: Cluster) -> None:
    await client.ask("POST", DEPLOYMENTS, deployment("d", replicas=2))
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "b"},
        "spec": {"maxUnavailable": 0, "selector": {"matchLabels": {"app": "d"}}},
    }
    budgets = f"/apis/policy/v1/namespaces/{NAMESPACE}/poddisruptionbudgets"
    await client.ask("POST", budgets, budget)
    pods = await cluster.wait(lambda: len(cluster.objects("Pod")) == 2 and cluster.objects("Pod"))
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pods[0]['metadata']['name']}/eviction"
    assert (await client.ask("POST", path, {}))[0] == 429
    await client.ask("PATCH", f"{budgets}/b", {"spec": {"maxUnavailable": 1}}, _MERGE)
    await cluster.wait(lambda: cluster.get("Deployment", "d")["status"].get("readyReplicas") == 2)
    assert (await client.ask("POST", path, {}))[0] == 201


async def test_a_pods_token_allows_what_its_role_says(client: Client, cluster: Cluster) -> None:
    specs: dict[str, Any] = {
        "ServiceAccount": {},
        "Role": {"rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]},
        "RoleBinding": {
            "subjects": [{"kind": "ServiceAccount", "name": "s"}],
            "roleRef": {"kind": "Role", "name": "s"},
        },
    }
    for kind, spec in specs.items():
        meta = {"name": "s", "namespace": NAMESPACE}
        cluster.store.create({"kind": kind, "metadata": meta, **spec})
    token = rbac.token_of(NAMESPACE, "s")
    pods = f"/api/v1/namespaces/{NAMESPACE}/pods"
    assert (await client.ask("GET", pods, token=token))[0] == 200
    assert (await client.ask("GET", f"{pods}?watch=true", token=token))[0] == 403
    assert (await client.ask("GET", "/api/v1/namespaces/default/pods", token=token))[0] == 403
    assert (await client.ask("GET", pods, token="made up"))[0] == 401
