"""Tests how an engine takes its place in a cluster: order of ranks, and what is said when there is
none.

Ray itself is replaced here by what it answers; `test_ray_executor` has a real one.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from edge.installed_version import UNKNOWN_VERSION
from engine.config import ParallelConfig
from engine.contracts.errors import EngineDeadError
from engine.executor.ray import ray_cluster
from engine.executor.ray.ray_cluster import RayCluster
from engine.executor.ray.ray_host import HostFacts
from host.sockets.secure_socket import LinkKey

OWN = HostFacts(address="10.0.0.11", node_id="b", sharing="kernel 1", version="1")


class FakeGroup:
    """A placement group whose resources never come."""

    def __init__(self) -> None:
        self.bundles: list[dict[str, float]] = []
        self.is_removed = False

    def __call__(self, bundles: list[dict[str, float]], **_: Any) -> FakeGroup:
        self.bundles = bundles
        return self

    def wait(self, timeout_s: float) -> bool:
        return False


def cluster_of(num_ranks: int, device: Any = "cuda", timeout_s: float = 0.01) -> RayCluster:
    parallel = ParallelConfig(tensor_parallel_size=num_ranks, ray_timeout_s=timeout_s)
    cluster = RayCluster(parallel, device, "test")
    cluster._own = OWN
    return cluster


def test_this_host_comes_first_and_ranks_of_a_host_are_neighbours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hosts = {0: "b", 1: "c", 2: "b", 3: "a", 4: "c", 5: "a"}
    monkeypatch.setattr(
        ray_cluster, "placement_group_table", lambda group: {"bundles_to_node_id": hosts}
    )
    assert cluster_of(6)._ranks_to_bundles() == [0, 2, 3, 5, 1, 4]


def test_missing_hosts_are_waited_for_and_then_named(monkeypatch: pytest.MonkeyPatch) -> None:
    group, reports = FakeGroup(), []
    nodes = [
        {"NodeManagerAddress": "10.0.0.11", "Resources": {"GPU": 8.0}, "Alive": True},
        {"NodeManagerAddress": "10.0.0.12", "Resources": {"GPU": 4.0}, "Alive": True},
        {"NodeManagerAddress": "10.0.0.13", "Resources": {"GPU": 8.0}, "Alive": False},
    ]
    monkeypatch.setattr(ray_cluster, "placement_group", group)
    monkeypatch.setattr(
        ray_cluster, "remove_placement_group", lambda one: setattr(one, "is_removed", True)
    )
    monkeypatch.setattr(ray_cluster.ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray_cluster.ray, "cluster_resources", lambda: {"GPU": 12.0})
    monkeypatch.setattr(ray_cluster.ray, "available_resources", lambda: {"GPU": 11.0})
    with pytest.raises(
        EngineDeadError,
        match=r"16 workers need one GPU each, the first of them on 10\.0\.0\.11, .* has 12, 11 of "
        r"them free: 10\.0\.0\.11 with 8, 10\.0\.0\.12 with 4; start Ray on the other hosts",
    ):
        cluster_of(16).reserve(LinkKey.create(), lambda *report: reports.append(report))
    assert group.is_removed
    assert group.bundles == [{"GPU": 1.0, "node:10.0.0.11": 0.001}] + [{"GPU": 1.0}] * 15
    assert reports[0] == ("waiting for hosts", 0.75)


def test_another_version_of_tandem_is_refused() -> None:
    other = HostFacts(address="10.0.0.12", node_id="c", sharing="kernel 2", version="2")
    with pytest.raises(EngineDeadError, match=r"10\.0\.0\.12 has tandem 2 and this host has 1;"):
        cluster_of(2)._check_versions([OWN, other])


def test_hosts_with_sources_of_no_known_version_are_refused() -> None:
    cluster = cluster_of(2)
    cluster._own = msgspec.structs.replace(OWN, version=UNKNOWN_VERSION)
    other = msgspec.structs.replace(cluster._own, address="10.0.0.12", node_id="c")
    cluster._check_versions([cluster._own])
    with pytest.raises(EngineDeadError, match=r"whether host 10\.0\.0\.12 has the same tandem"):
        cluster._check_versions([cluster._own, other])


@pytest.mark.parametrize(
    ("node_id", "sharing", "is_near"),
    [("b", "kernel 1", True), ("c", "kernel 1", False), ("b", "another container", False)],
)
def test_memory_is_shared_only_where_it_can_be(node_id: str, sharing: str, is_near: bool) -> None:
    facts = HostFacts(address="10.0.0.12", node_id=node_id, sharing=sharing, version="1")
    link = cluster_of(2)._link(facts, LinkKey.create())
    if is_near:
        assert link is None
    else:
        assert link is not None
        assert (link.core_address, link.host_address) == ("10.0.0.11", "10.0.0.12")
