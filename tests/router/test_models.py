"""Several models behind one router: none answers for another, starves another or vanishes unsaid,
and an answer stays with the weights that began it."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from edge.http.bodies.body_room import FREE_BYTES
from router.admission.admission_gate import AdmissionGate, GateLimits
from router.admission.class_line import Waiting
from router.admission.model_gates import ModelGates
from router.errors import Overloaded, RateLimited
from router.models.open_request_limit import OpenRequestLimit
from router.models.per_model import PerModel
from router.nodes.address import NodeRole
from router.nodes.health import EjectionPolicy
from router.placement.prefill_outcome import PrefillOutcome
from router.placement.tandem_policy import TandemParameters, TandemPolicy
from router.request.tenants import Tenant
from tests.router.cluster import Cluster, RunningRouter, eventually
from tests.router.factories import Fleet, ManualClock, request
from tests.router.fakes import (
    FakeDecodeNode,
    FakePrefillNode,
    answer_json,
    never_answer,
)
from tests.router.token_server import TokenHandler, Writer, expected, texts

PREFILL = NodeRole.PREFILL
CANARY = '[aliases]\n"gpt-4o" = "m"\n[splits.m]\nv1 = 50\nv2 = 50\n'
BODY: dict[str, Any] = {
    "model": "m", "prompt": "hello", "seed": 7, "max_tokens": 12, "stream": True,
}  # fmt: skip


async def node_of(
    cluster: Cluster, model: str, handler: Any = None, name: str = ""
) -> FakeDecodeNode:
    node = await cluster.decode(name or model, handler)
    await node.status.change(model_name=model, fingerprint=f"weights of {model}")
    return node


async def prefill_of(cluster: Cluster, model: str) -> FakePrefillNode:
    node = await cluster.prefill(f"p-{model}")
    await node.status.change(model_name=model, fingerprint=f"weights of {model}")
    return node


def rules_in(folder: Path, text: str) -> Path:
    path = folder / "rules.toml"
    path.write_text(text)
    return path


async def session_of(router: RunningRouter, version: str) -> str:
    """Returns a session that gets `version`."""
    for i in range(100):
        async with router.post({**BODY, "max_tokens": 1}, x_session_id=f"s{i}") as response:
            await response.read()
            if response.headers.get("x-tandem-model-version") == version:
                return f"s{i}"
    raise AssertionError(f"no session of 100 gets {version}")


# Names -------------------------------------------------------------------------------------------


async def test_aliases_and_splits_reach_nodes_that_know_nothing_of_them(
    cluster: Cluster, tmp_path: Path
) -> None:
    nodes = {name: await node_of(cluster, name) for name in ("v1", "v2", "other")}
    rules = rules_in(tmp_path, CANARY)
    router = await cluster.router(*nodes.values(), model_rules_file=rules)
    got = Counter[str]()
    for i in range(40):
        name = ("m", "gpt-4o")[i % 2]
        async with router.post({**BODY, "model": name}, x_session_id=f"s{i // 2}") as response:
            assert response.status == 200
            version = response.headers["x-tandem-model-version"]
        got[version] += 1
        headers, body = nodes[version].requests[-1]
        assert headers["x-tandem-model"] == version
        assert json.loads(body)["model"] == name, "the node answers with what the client asked"
    assert min(got["v1"], got["v2"]) >= 8
    assert all(count % 2 == 0 for count in got.values()), "one version by either name"
    await router.text({**BODY, "model": "v2"})
    assert "x-tandem-model" not in nodes["v2"].requests[-1][0]
    assert not nodes["other"].requests


async def test_all_names_are_listed_with_what_is_behind_them(
    cluster: Cluster, tmp_path: Path
) -> None:
    nodes = [await node_of(cluster, name) for name in ("v1", "v2")]
    rules = rules_in(tmp_path, CANARY)
    router = await cluster.router(*nodes, model_rules_file=rules)
    async with router.client.get(router.url + "/v1/models") as response:
        listed = await response.json()
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("gpt-4o", "v2", False)
    cards = {card["id"]: card for card in listed["data"]}
    assert list(cards) == ["gpt-4o", "m", "v1", "v2"]
    assert cards["m"]["versions"] == {"v1": 0.5, "v2": 0.5}
    assert (cards["gpt-4o"]["root"], cards["gpt-4o"]["display_name"]) == ("m", "gpt-4o")
    for path in ("/model_info", "/get_model_info"):
        async with router.client.get(router.url + path) as response:
            assert (await response.json())["served_model_name"] == "gpt-4o"
    async with router.client.get(router.url + "/v1/models/gpt-9") as response:
        assert response.status == 404
        assert "'gpt-4o', 'm', 'v1', 'v2'" in (await response.json())["error"]["message"]


async def test_with_several_models_a_request_must_name_one(cluster: Cluster) -> None:
    nodes = [await node_of(cluster, name) for name in ("one", "two")]
    router = await cluster.router(*nodes)
    async with router.post({"prompt": "x"}) as response:
        assert response.status == 400
        error = (await response.json())["error"]
    assert error["param"] == "model"
    assert "'one', 'two'" in error["message"]
    assert not nodes[0].requests + nodes[1].requests


# Placement ---------------------------------------------------------------------------------------


async def test_a_decode_node_is_offered_prefill_nodes_of_its_own_weights(cluster: Cluster) -> None:
    decodes = {name: await node_of(cluster, name) for name in ("one", "two")}
    prefills = {name: await prefill_of(cluster, name) for name in ("one", "two")}
    router = await cluster.router(*decodes.values(), *prefills.values())
    for name in ("one", "two") * 3:
        await router.text({"model": name, "prompt": "hello " * 2000})
    for name, node in decodes.items():
        assert len(node.requests) == 3
        offered = {headers["x-prefiller-host-port"] for headers, _ in node.requests}
        assert offered == {prefills[name].target}


def test_models_of_equal_weights_keep_to_the_prefill_nodes_of_their_name() -> None:
    fleet = Fleet()
    for name in ("one", "two", "three"):
        fleet.add(name, model_name=name, fingerprint="same")
    for name in ("one", "two"):
        fleet.add(f"p-{name}", PREFILL, model_name=name, fingerprint="same")
    policy = TandemPolicy(fleet.registry, random.Random(1))
    for name in ("one", "two"):
        assert policy.place(request(model=name)).prefills == (fleet.node(f"p-{name}"),)
    assert len(policy.place(request(model="three")).prefills) == 2


def two_models() -> tuple[Fleet, TandemPolicy]:
    fleet = Fleet()
    for name in ("one", "two"):
        fleet.add(name, model_name=name, fingerprint=name)
        for i in range(2):
            fleet.add(f"{name}-{i}", PREFILL, model_name=name, fingerprint=name)
    parameters = TandemParameters(max_index_entries=400)
    return fleet, TandemPolicy(fleet.registry, random.Random(1), parameters)


def test_a_models_prompts_teach_nothing_about_another() -> None:
    _, policy = two_models()
    before = policy.place(request(model="two", num_prompt_tokens=4000)).ttft_s
    for _ in range(50):
        turn = request(model="one", num_prompt_tokens=4000)
        placement = policy.place(turn)
        done = PrefillOutcome(
            node=placement.prefills[0].address.target,
            compute_s=40.0,
            num_cached_tokens=0,
            num_prompt_tokens=4000,
        )
        policy.observe(turn, placement, done)
    assert policy.place(request(model="one", num_prompt_tokens=4000)).ttft_s > 30
    assert policy.place(request(model="two", num_prompt_tokens=4000)).ttft_s == before


def test_a_flood_of_prompts_evicts_no_block_of_another_model_from_the_index() -> None:
    fleet, policy = two_models()
    kept = request(
        model="two", num_prompt_tokens=50_000, prefix_blocks=tuple(range(50)), tokens_per_block=1e3
    )
    home = policy.place(kept).prefills[0]
    for i in range(1, 100):
        blocks = tuple(range(1000 * i, 1000 * i + 50))
        policy.place(request(model="one", prefix_blocks=blocks, tokens_per_block=1e3))
    again = policy.place(kept)
    assert (again.prefills[0], again.num_new_tokens) == (home, 1)
    known = [policy.knowledge(fleet.node(f"{name}-0")).index for name in ("one", "two")]
    assert sum(index.num_entries for index in known) <= 400


def test_a_model_that_fails_leaves_the_ejections_of_others_alone() -> None:
    fleet = Fleet(ejection=EjectionPolicy(failures=1, max_fraction=0.5))
    bad = [fleet.add(f"one-{i}", model_name="one") for i in range(4)]
    good = [fleet.add(f"two-{i}", model_name="two") for i in range(2)]
    assert [fleet.registry.record_failure(node) for node in bad] == [True, True, False, False]
    assert fleet.registry.record_failure(good[0]), "one of two may be left out, whatever others do"


# One model away, others not ----------------------------------------------------------------------


async def test_a_model_without_nodes_is_a_503_and_others_are_unaffected(cluster: Cluster) -> None:
    stays, goes = await node_of(cluster, "stays"), await node_of(cluster, "goes")
    router = await cluster.router(stays, goes)
    await goes.status.change(draining=True)
    await router.wait_usable(decode=1, prefill=0)
    async with router.post({"model": "goes", "prompt": "x"}) as response:
        assert response.status == 503
        assert int(response.headers["retry-after"]) >= 1
        error = (await response.json())["error"]
    assert error["code"] == "no_node_available"
    assert "'goes'" in error["message"]
    await router.text({"model": "stays", "prompt": "x"})
    assert router.metric("tandem_router_model_ready_nodes", model="stays") == 1
    registry = router.services.metrics.registry
    gone = registry.get_sample_value("tandem_router_model_ready_nodes", {"model": "goes"})
    assert gone == 0, "told, not left out"
    assert router.metric(
        "tandem_router_model_requests_total", model="goes", version="goes", status="503"
    )
    assert not router.metric(
        "tandem_router_model_requests_total", model="stays", version="stays", status="503"
    )


async def test_a_flood_on_one_model_keeps_nobody_from_another(cluster: Cluster) -> None:
    """The nodes of one model answer nothing; its slots, its line and its part of the open requests
    are full, and whoever asks for the other model does not notice."""
    stuck = await node_of(cluster, "stuck", never_answer())
    works = await node_of(cluster, "works")
    router = await cluster.router(
        stuck, works, max_prefills_per_node=2, max_waiting_requests=4, max_open_requests=16
    )
    flood = [asyncio.create_task(router.text({"model": "stuck", "prompt": "x"})) for _ in range(6)]
    await eventually(lambda: router.metric("tandem_router_waiting_requests", model="stuck") == 4)
    async with router.post({"model": "stuck", "prompt": "x"}) as response:
        assert response.status == 503
    for _ in range(10):
        await router.text({"model": "works", "prompt": "x"})
    assert router.metric("tandem_router_waiting_requests", model="works") == 0
    assert router.metric("tandem_router_refusals_total", model="works", reason="line_full") == 0
    for task in flood:
        task.cancel()
    await asyncio.wait(flood)


def test_room_is_kept_for_models_that_are_asked_less() -> None:
    room = OpenRequestLimit(limit=16, models=lambda: {"a", "b"}, retry_after_s=lambda: 1)
    held = [room.admit("a") for _ in range(12)]
    for one in held:
        one.__enter__()
    with pytest.raises(Overloaded), room.admit("a"):
        pass
    for _ in range(4):
        held.append(room.admit("b"))
        held[-1].__enter__()
    with pytest.raises(Overloaded), room.admit("b"):
        pass
    for one in held:
        one.__exit__(None, None, None)
    alone = OpenRequestLimit(limit=1, models=lambda: {"a"}, retry_after_s=lambda: 1)
    with alone.admit("a"), pytest.raises(Overloaded), alone.admit("a"):
        pass


def test_long_bodies_that_wait_have_a_bounded_room() -> None:
    room = OpenRequestLimit(
        limit=99, models=lambda: {"a", "b"}, retry_after_s=lambda: 1, max_waiting_bytes=1 << 20
    )
    size = (256 << 10) + FREE_BYTES
    with ExitStack() as held:
        leave, *_ = [held.enter_context(room.waiting("a", size)) for _ in range(3)]
        with pytest.raises(Overloaded), room.waiting("a", size):
            pass
        held.enter_context(room.waiting("a", FREE_BYTES))
        held.enter_context(room.waiting("b", 9 << 20))
        assert room.num_waiting_bytes == 3 * (256 << 10) + (9 << 20) - FREE_BYTES
        with pytest.raises(Overloaded), room.waiting("b", size):
            pass
        leave()
        leave()
        assert room.num_waiting_bytes == 2 * (256 << 10) + (9 << 20) - FREE_BYTES
    assert room.num_waiting_bytes == 0


def test_lines_are_apart_and_a_tenants_rates_are_not() -> None:
    clock = ManualClock()
    gates = ModelGates(
        limits=GateLimits(slots_per_node=1, max_waiting=1),
        num_nodes=lambda model: {"small": 1, "large": 3}[model],
        clock=clock,
        rng=random.Random(1),
    )
    small, large = gates.of("small"), gates.of("large")
    assert (small.num_slots(), large.num_slots()) == (1, 3)

    def offer(gate: AdmissionGate, model: str) -> Waiting | None:
        return gate.offer(request(model=model), lambda: None, lambda error: None)

    assert offer(small, "small") is None
    assert offer(small, "small") is not None
    with pytest.raises(Overloaded):
        offer(small, "small")
    assert offer(large, "large") is None
    tenant = Tenant(name="t", requests_per_s=0.1)
    large.check_rates(request(model="large", tenant=tenant))
    with pytest.raises(RateLimited):
        small.check_rates(request(model="small", tenant=tenant))


def test_names_that_clients_make_up_do_not_open_a_gate_again() -> None:
    """One that has requests stays, and so does one that is asked for now and again."""
    gates = ModelGates(
        limits=GateLimits(slots_per_node=1),
        num_nodes=lambda model: 1,
        clock=ManualClock(),
        rng=random.Random(1),
    )
    used, known = gates.of("used"), gates.of("known")
    assert used.offer(request(model="used"), lambda: None, lambda error: None) is None
    for number in range(3000):
        gates.of(f"made up {number}")
        assert number % 500 or gates.of("known") is known
    assert gates.of("used") is used and used.num_started == 1
    used.free()
    for number in range(3000):
        gates.of(f"made up {number}")
    assert gates.known("used") is gates.known("known") is None


def test_requests_without_a_model_keep_their_gate_beside_very_many_that_are_used() -> None:
    places = PerModel[list[str]](lambda model: [model], is_used=lambda one: True)
    first = places.of("")
    for number in range(3000):
        places.of(f"m{number}")
    assert places.of("") is first


async def test_retries_of_one_model_are_not_paid_by_another(cluster: Cluster) -> None:
    busy = [
        await node_of(cluster, "busy", answer_json(503, {"error": {}}), f"b{i}") for i in range(2)
    ]
    fine = await node_of(cluster, "fine")
    router = await cluster.router(*busy, fine, retry_budget=0.0, retry_burst=1)
    budgets = router.services.forwarder.attempts.budgets
    for _ in range(4):
        async with router.post({"model": "busy", "prompt": "x"}) as response:
            assert response.status == 503
    await router.text({"model": "fine", "prompt": "x"})
    assert (budgets.of("busy").left, budgets.of("fine").left) == (0, 1)


# Answers stay with their weights -----------------------------------------------------------------


async def test_an_answer_resumes_on_a_node_of_its_version_alone(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Two nodes of each version, whose weights tell other tokens. When one dies in the middle of
    an answer, the rest comes from its twin."""
    nodes, handlers = [], {}
    for version in ("v1", "v2"):
        handler = handlers[version] = TokenHandler(weights=version)
        for i in range(2):
            nodes.append(await node_of(cluster, version, handler, f"{version}-{i}"))
    router = await cluster.router(*nodes, model_rules_file=rules_in(tmp_path, CANARY))
    for version, handler in handlers.items():
        session = await session_of(router, version)
        hit: list[Writer] = []

        async def die_once(writer: Writer, hit: list[Writer] = hit) -> None:
            if writer.num_tokens == 5 and not hit:
                hit.append(writer)
                writer.abort()

        handler.fault = die_once
        answer = await router.text(BODY, x_session_id=session)
        assert hit
        assert texts(answer) == [expected({**BODY, "prompt": [version, "hello"]})]
        assert handler.resumed_from == [5]
    assert router.metric("tandem_router_migrations_total", reason="lost") == 2


async def test_an_answer_whose_version_is_lost_ends_with_an_error_not_on_other_weights(
    cluster: Cluster, tmp_path: Path
) -> None:
    async def die(writer: Writer) -> None:
        if writer.num_tokens == 5:
            writer.abort()

    stable, canary = TokenHandler(weights="v1"), TokenHandler(weights="v2")
    nodes = [await node_of(cluster, "v1", stable), await node_of(cluster, "v2", canary)]
    rules = rules_in(tmp_path, CANARY)
    router = await cluster.router(*nodes, model_rules_file=rules, resume_timeout_s=0.5)
    session = await session_of(router, "v2")
    num_before = len(nodes[0].requests)
    canary.fault = die
    async with router.post(BODY, x_session_id=session) as response:
        answer = await response.text()
    assert "[DONE]" not in answer
    assert "node_lost" in answer
    begun = "".join(
        choice["text"]
        for event in answer.split("\n\n")
        if event.startswith("data: ")
        for choice in json.loads(event[6:]).get("choices", ())
    )
    assert expected({**BODY, "prompt": ["v2", "hello"]}).startswith(begun)
    assert len(nodes[0].requests) == num_before, "nothing of it was asked of other weights"


async def test_weights_change_while_the_router_runs(cluster: Cluster, tmp_path: Path) -> None:
    nodes = [await node_of(cluster, name) for name in ("v1", "v2")]
    rules = rules_in(tmp_path, "[splits.m]\nv1 = 100\n")
    router = await cluster.router(*nodes, model_rules_file=rules)
    await router.text({"model": "m", "prompt": "x"})
    assert (len(nodes[0].requests), len(nodes[1].requests)) == (1, 0)
    rules.write_text("[splits.m]\nv1 = 'all'\n")
    assert router.services.models.rules.reload() is False
    assert router.metric("tandem_router_model_rules_broken") == 1
    await router.text({"model": "m", "prompt": "x"})
    rules.write_text("[splits.m]\nv2 = 100\n")
    await eventually(
        lambda: router.metric("tandem_router_model_weight", model="m", version="v2") == 1
    )
    await router.text({"model": "m", "prompt": "x"})
    assert (len(nodes[0].requests), len(nodes[1].requests)) == (2, 1)
    assert router.metric("tandem_router_model_rules_broken") == 0
    assert router.metric("tandem_router_time_to_first_byte_seconds_count", model="m", version="v2")
