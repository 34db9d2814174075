"""Adapters behind the router: requests reach nodes that have them, and operators load them on all
nodes or on none."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest

from edge import adapter_call
from edge.adapter_call import LOAD_LIMIT_S
from router.errors import NoNodeAvailable
from router.models.known_models import KnownModels
from router.models.models_catalog import with_all_adapters
from router.models.rules_file import RulesFile
from router.nodes.adapter_set import NO_ADAPTERS, AdapterId, AdapterSet, adapter_set
from router.nodes.address import NodeRole
from router.placement.tandem_policy import TandemParameters, TandemPolicy
from tandem_pb import node_pb2
from tests.router.cluster import Cluster, RunningRouter, eventually
from tests.router.factories import Fleet, request
from tests.router.fakes import FakeDecodeNode, FakePrefillNode

BODY = {"model": "poet", "prompt": "hello", "max_tokens": 2}
POET, OTHER = "a" * 64, "b" * 64


async def ask(router: RunningRouter, **changes: Any) -> tuple[int, dict[str, Any]]:
    async with router.post({**BODY, **changes}) as response:
        text = await response.text()
        return response.status, json.loads(text) if response.status >= 400 else {}


async def call(router: RunningRouter, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    async with router.client.post(router.url + path, json=body) as response:
        return response.status, await response.json()


async def until_known(router: RunningRouter, *names: str) -> None:
    models = router.services.models
    await eventually(lambda: set(models.table.adapters) == set(names))


async def test_a_load_outlasts_one_of_another_router_before_it(cluster: Cluster) -> None:
    """A node loads one adapter at a time, each within the limit."""
    node = await cluster.decode()
    router = await cluster.router(node)
    await router.wait_usable(decode=1, prefill=0)
    status, _ = await call(
        router, "/v1/load_lora_adapter", {"lora_name": "poet", "lora_path": "poet"}
    )
    assert status == 200
    assert node.status.load_limits_s[0] > 2 * LOAD_LIMIT_S


async def test_a_router_asks_for_changes_of_adapters_alone(cluster: Cluster) -> None:
    node = await cluster.decode()
    router = await cluster.router(node)
    await router.wait_usable(decode=1, prefill=0)
    for name in ("poet", "bard"):
        body = {"lora_name": name, "lora_path": name}
        assert await call(router, "/v1/load_lora_adapter", body) == (200, ANY)
    [known] = router.services.registry.all_nodes()
    await eventually(lambda: known.adapters.by_name.keys() == {"poet", "bard"})
    assert [one.takes_adapter_changes for one in node.status.watched] == [True]


def _stands_for(router: RunningRouter, digest: str) -> bool:
    """Returns whether the router leads "poet" to this adapter."""
    found, _ = router.services.models.table.adapters.get("poet", ("", ""))
    return found == digest


async def test_the_last_call_counts_though_clocks_of_routers_differ(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions are times: a router that is late makes one that is newer than what it has learnt."""
    node = await cluster.decode()
    routers = [await cluster.router(node) for _ in range(3)]
    now_ns = time.time_ns()
    for index, (router, path) in enumerate(zip(routers, ("v1", "v2", "v3"), strict=True)):
        await router.wait_usable(decode=1, prefill=0)
        clock = SimpleNamespace(time_ns=lambda ahead=600 * (1 - index): now_ns + ahead * 10**9)
        monkeypatch.setattr(adapter_call, "time", clock)
        body = {"lora_name": "poet", "lora_path": path, "load_inplace": True}
        assert await call(router, "/v1/load_lora_adapter", body) == (200, ANY)
        for one in routers:
            await eventually(partial(_stands_for, one, path))
    versions = [one.services.registry.adapters.calls("demo")["poet"].version for one in routers]
    assert versions == [now_ns // 10**6 + 600_002] * 3


async def test_requests_reach_nodes_that_have_the_adapter(cluster: Cluster) -> None:
    has, lacks = await cluster.decode("has"), await cluster.decode("lacks")
    p_has, p_lacks = await cluster.prefill("p-has"), await cluster.prefill("p-lacks")
    router = await cluster.router(has, lacks, p_has, p_lacks)
    for node in (has, p_has):
        await node.status.serve_adapters({"poet": POET})
    await until_known(router, "poet")
    await eventually(
        lambda: any(n.adapters for n in router.services.registry.nodes(NodeRole.PREFILL))
    )
    for _ in range(6):
        assert (await ask(router))[0] == 200
    assert (len(has.requests), len(lacks.requests)) == (6, 0)
    for headers, _ in has.requests:
        assert headers["x-tandem-adapter"] == POET
        assert headers["x-prefiller-host-port"] == p_has.target
        assert "x-tandem-model" not in headers
    status, answer = await ask(router, model="painter")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert "'poet'" in answer["error"]["message"]
    await has.status.serve_adapters({})
    await until_known(router)
    assert (await ask(router))[0] == 404


async def test_loads_of_one_node_wait_for_their_turn_here(cluster: Cluster) -> None:
    """A node reads one adapter at a time: what it is given two minutes for begins then."""
    decode = await cluster.decode()
    router = await cluster.router(decode)
    [node] = router.services.registry.all_nodes()
    asker = router.services.adapters.adapters.asker
    decode.status.may_act.clear()
    names = [f"adapter-{number}" for number in range(3)]
    wishes = [node_pb2.LoadAdapterRequest(name=name, path=POET, version=5) for name in names]
    async with asyncio.TaskGroup() as tasks:
        loads = [tasks.create_task(asker.ask(node, wish)) for wish in wishes]
        await eventually(lambda: decode.status.num_calls >= 1)
        await asker.ask(node, node_pb2.UnloadAdapterRequest(name="none", version=6))
        assert decode.status.num_calls == 1
        decode.status.may_act.set()
    assert [load.result().said for load in loads] == ["loaded"] * 3
    assert [one for one in decode.status.adapter_calls if one.startswith("load")] == [
        f"load {name}" for name in names
    ]


async def test_a_name_means_the_same_weights_on_both_tiers(cluster: Cluster) -> None:
    decode, prefill = await cluster.decode(), await cluster.prefill()
    router = await cluster.router(decode, prefill)
    await prefill.status.serve_adapters({"poet": OTHER})
    await decode.status.serve_adapters({"poet": POET})
    await until_known(router, "poet")
    assert (await ask(router))[0] == 200
    assert "x-prefiller-host-port" not in decode.requests[0][0]


async def test_operators_load_on_prefill_nodes_first_and_unload_on_them_last(
    cluster: Cluster,
) -> None:
    decode, prefill = await cluster.decode(), await cluster.prefill()
    order: list[str] = []
    for node, tier in ((decode, "decode"), (prefill, "prefill")):
        node.status.adapter_calls = _Noted(order, tier)
    router = await cluster.router(decode, prefill)
    body = {"lora_name": "poet", "lora_path": POET}
    status, answer = await call(router, "/v1/load_lora_adapter", body)
    assert (status, set(answer["nodes"].values())) == (200, {"loaded"})
    await until_known(router, "poet")
    assert (await ask(router))[0] == 200
    status, answer = await call(router, "/v1/unload_lora_adapter", {"lora_name": "poet"})
    assert (status, set(answer["nodes"].values())) == (200, {"unloaded"})
    assert (await ask(router))[0] == 404
    assert order == ["prefill load poet", "decode load poet", "decode unload poet",
                     "prefill unload poet"]  # fmt: skip
    status, answer = await call(router, "/v1/unload_lora_adapter", {"lora_name": "poet"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


async def test_an_adapter_is_on_all_nodes_or_on_none(cluster: Cluster) -> None:
    nodes: list[FakeDecodeNode | FakePrefillNode] = [
        await cluster.decode("d"), await cluster.decode("e"), await cluster.prefill("p"),
    ]  # fmt: skip
    router = await cluster.router(*nodes)
    nodes[1].status.adapter_fault = "has rank 64"
    body = {"lora_name": "poet", "lora_path": POET}
    status, answer = await call(router, "/v1/load_lora_adapter", body)
    assert status == 400
    assert "has rank 64" in answer["error"]["message"]
    assert all(not node.status.load.adapters for node in nodes)
    status, answer = await call(router, "/v1/load_lora_adapter", {"lora_name": "poet"})
    assert (status, "lora_path" in answer["error"]["message"]) == (400, True)


async def test_a_node_that_does_not_answer_is_no_fault_of_the_call(cluster: Cluster) -> None:
    decode = await cluster.decode()
    router = await cluster.router(decode)
    await decode.stop()
    for what in ("load", "unload"):
        body = {"lora_name": "poet"} | ({"lora_path": POET} if what == "load" else {})
        status, answer = await call(router, f"/v1/{what}_lora_adapter", body)
        assert (status, answer["error"]["code"]) == (503, "nodes_away"), what


async def test_a_lie_about_the_newest_call_ends_no_calls(cluster: Cluster) -> None:
    """The next version would fit into no message."""
    liar, honest = await cluster.decode("d"), await cluster.decode("e")
    lie = node_pb2.AdapterCall(name="poet", path=POET, version=(1 << 64) - 1)
    liar.status.load.adapter_calls.append(lie)
    router = await cluster.router(liar, honest)
    body = {"lora_name": "poet", "lora_path": POET}
    status, answer = await call(router, "/v1/load_lora_adapter", body)
    assert (status, set(answer["nodes"].values())) == (200, {"loaded"})


async def test_keys_of_clients_change_no_adapters(cluster: Cluster) -> None:
    node = await cluster.decode()
    router = await cluster.router(node, api_keys="secret")
    headers = {"authorization": "Bearer secret"}
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        url = router.url + path
        async with router.client.post(url, json={"lora_name": "x"}, headers=headers) as response:
            assert response.status == 403
    assert node.status.adapter_calls == []


def test_why_no_node_can_be_used_is_said_without_a_look_at_all_adapters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nodes have thousands, and every request that waits asks again and again."""
    fleet, looks = Fleet(), list[AdapterSet]()
    known = adapter_set(AdapterId(f"lora-{i}", f"{i:064}") for i in range(100))
    for i in range(20):
        fleet.add(f"d{i}", adapters=known, draining=True)
    policy = TandemPolicy(fleet.registry, random.Random(1), TandemParameters())

    def look(adapters: AdapterSet) -> Iterator[AdapterId]:
        looks.append(adapters)
        return frozenset.__iter__(adapters)

    monkeypatch.setattr(AdapterSet, "__iter__", look)
    for name, count in (("lora-7", "20 known"), ("another", "none known"), ("lora-8", "20 known")):
        with pytest.raises(NoNodeAvailable, match=count):
            policy.place(request(model=name))
    assert len(looks) <= 1


def test_names_of_nodes_that_have_loaded_some_are_found_without_a_look_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While a tier loads its adapters, each node has others, and each report changes them."""
    fleet = Fleet()
    known = [AdapterId(f"lora-{i}", f"{i:064}") for i in range(100)]
    for i in range(50):
        fleet.add(f"d{i}", adapters=NO_ADAPTERS.with_changes(known[: i + 50]))
    fleet.add("other", adapters=NO_ADAPTERS.with_changes([AdapterId("lora-7", "f" * 64)]))
    models = KnownModels(registry=fleet.registry, rules=RulesFile(None))
    monkeypatch.setattr(AdapterSet, "__iter__", lambda adapters: pytest.fail("it is looked at"))
    assert models.table.adapters["lora-7"] == (known[7].digest, "demo")
    assert len(models.table.adapters) == 99


def test_few_nodes_are_asked_for_models_while_a_tier_loads_adapters() -> None:
    """Nearly each has others then, and a list of a thousand is long. The first that answers of a
    group does."""
    fleet = Fleet()
    known = [AdapterId(f"lora-{i}", f"{i:064}") for i in range(100)]
    for i in range(40):
        fleet.add(f"d{i}", adapters=adapter_set(known[: i + 50]))
    fleet.add("own", adapters=adapter_set([known[0], AdapterId("lora-1", "f" * 64)]))
    fleet.add("plain", model_name="other")
    groups = with_all_adapters(fleet.registry.nodes(NodeRole.DECODE))
    asked = [[node.address.target for node in group] for group in groups]
    assert [(names[0], len(names)) for names in asked] == [
        ("d39:80", 40), ("own:80", 1), ("plain:80", 1)
    ]  # fmt: skip


def test_an_adapter_keeps_to_few_nodes_until_they_are_full() -> None:
    fleet = Fleet()
    poet = AdapterId("poet", POET)
    full = {"num_total_blocks": 100, "block_size": 16}
    for i in range(8):
        free = {"num_free_blocks": 100, "adapters": adapter_set({poet})}
        fleet.add(f"d{i}", **full, **free, fingerprint="f")
    policy = TandemPolicy(fleet.registry, random.Random(1), TandemParameters())
    info = request(model="demo", adapter="poet", adapter_digest=POET)
    homes = Counter(policy.place(info).decode for _ in range(50))
    assert len(homes) == 2
    for node in homes:
        assert node.report is not None
        used = {"num_free_blocks": 5, "adapters": adapter_set({poet}), "sequence": 2}
        fleet.registry.apply_report(node.address, replace(node.report, **used))
    next_homes = {policy.place(info).decode for _ in range(50)}
    assert len(next_homes) == 2 and not next_homes & set(homes)


class _Noted(list[str]):
    """Notes calls of a tier in the order of all tiers."""

    def __init__(self, order: list[str], tier: str) -> None:
        super().__init__()
        self._order, self._tier = order, tier

    def append(self, call: str) -> None:
        self._order.append(f"{self._tier} {call}")
