"""An operator's header sends a request to one node, and no other takes its place."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from edge.http.errors import NotFound
from router.errors import NoNodeAvailable
from router.nodes.address import NodeRole
from router.placement.policy import PrefillChoice
from router.placement.tandem_policy import TandemPolicy
from tests.router.cluster import Cluster
from tests.router.factories import Fleet, request
from tests.router.test_keys import tenant
from tests.router.token_server import TokenHandler

PREFILL, DECODE = NodeRole.PREFILL, NodeRole.DECODE
BODY = {"model": "demo", "prompt": "hello", "seed": 7, "max_tokens": 3, "stream": True}
HEADER = "x-gateway-destination-endpoint"


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet()
    for name, role in (("d0", DECODE), ("d1", DECODE), ("p0", PREFILL), ("p1", PREFILL)):
        fleet.add(name, role, node_id=name, fingerprint="f")
    return fleet


def test_the_named_node_gets_it_whatever_the_others_do(fleet: Fleet) -> None:
    policy = TandemPolicy(fleet.registry, random.Random(1))
    sticky = request(session_key=b"s", num_prompt_tokens=50, model="demo")
    for name in ("d0", "d1", "d1:80"):
        asked = request(endpoint=name, session_key=b"s", num_prompt_tokens=50, model="demo")
        assert policy.place(asked).decode is fleet.node(name[:2])
    for name in ("p0", "p1"):
        placement = policy.place(request(endpoint=name, session_key=b"s", model="demo"))
        assert placement.prefills == (fleet.node(name),)
        assert placement.choice is PrefillChoice.FORCED
    assert policy.place(sticky).choice is not PrefillChoice.FORCED


def test_a_drained_node_is_tested_and_one_that_cannot_answer_is_not(fleet: Fleet) -> None:
    policy = TandemPolicy(fleet.registry, random.Random(1))
    for name, role in (("d0", DECODE), ("p0", PREFILL)):
        said = {"node_id": name, "fingerprint": "f", "sequence": 2}
        fleet.add(name, role, draining=True, drained=True, **said)
        placement = policy.place(request(endpoint=name, model="demo"))
        assert fleet.node(name) in (placement.decode, *placement.prefills)
    asked = request(endpoint="d0", model="demo")
    with pytest.raises(NoNodeAvailable, match="has failed the request"):
        policy.place(asked, [fleet.node("d0")])
    with pytest.raises(NoNodeAvailable, match="does not serve 'other'"):
        policy.place(request(endpoint="d0", model="other"))
    with pytest.raises(NotFound, match="no node is known as 'd7'"):
        policy.place(request(endpoint="d7", model="demo"))
    fleet.add("p0", PREFILL, node_id="p0", fingerprint="g", sequence=3)
    with pytest.raises(NoNodeAvailable, match="No decode node can use KV of"):
        policy.place(request(endpoint="p0", model="demo"))
    fleet.add("d1", node_id="d1", draining=True, sequence=2)
    with pytest.raises(NoNodeAvailable, match="is draining"):
        policy.place(request(endpoint="d1", model="demo"))


async def test_only_an_operator_s_key_names_nodes(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(tenant("acme", "a") + tenant("staff", "b", more="operator = true"))
    one, two = [await cluster.decode(name, handler=TokenHandler()) for name in ("d1", "d2")]
    router = await cluster.router(one, two, api_key_file=path)
    for _ in range(5):
        forced = {"authorization": "Bearer b", HEADER.replace("-", "_"): two.target}
        await router.text(BODY, **forced)
    assert (len(one.requests), len(two.requests)) == (0, 5)
    assert HEADER not in two.requests[0][0]
    forced = {"authorization": "Bearer a", HEADER.replace("-", "_"): two.target}
    async with router.post(BODY, **forced) as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"]) == (403, "permission_denied")
    assert len(two.requests) == 5
    gone = {"authorization": "Bearer b", HEADER.replace("-", "_"): "nowhere:1"}
    async with router.post(BODY, **gone) as response:
        assert response.status == 404
