"""A release works under the controllers of others: autoscalers, groups of hosts, certificates.

No processes run, and an hour of an autoscaler takes a moment.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.helm.helm_engine import CHART, load_values
from tests.helm.releases.demand import Demand
from tests.helm.releases.helm_release import SdkRelease
from tests.helm.scenarios import overlay
from tests.kubernetes_stand_in.autoscalers import AutoscalerController, KedaOperator
from tests.kubernetes_stand_in.cert_manager import Authority, CertManager, expiry, leaf
from tests.kubernetes_stand_in.cluster import NAMESPACE, Cluster
from tests.kubernetes_stand_in.hpa import SYNC_PERIOD_S
from tests.kubernetes_stand_in.resources import Object

SCALING: dict[str, Any] = {
    "kind": "keda", "minReplicas": 1, "maxReplicas": 5, "scaleDownWindowSeconds": 600,
}  # fmt: skip
SCALED: dict[str, Any] = {
    "model": {"name": "org/model"},
    "decode": {"replicas": 2, "autoscaling": SCALING},
    "monitoring": {"prometheusUrl": "http://prometheus:9090"},
}


def scenario(name: str) -> dict[str, Any]:
    return load_values(CHART / "ci" / f"{name}-values.yaml")


@pytest.fixture
async def roomy() -> AsyncIterator[Cluster]:
    async with Cluster.hollow(gpus=64) as cluster:
        yield cluster


class Hours:
    """Lets time pass for an autoscaler. `pods`: of the decode tier, whenever it changed."""

    def __init__(self, cluster: Cluster, demand: Demand) -> None:
        self._cluster = cluster
        keda = KedaOperator(cluster.store, demand.query)
        self._scaler = AutoscalerController(cluster.store, demand.pod_metric, keda)
        self._now_s = 0.0

    async def run(self, minutes: float) -> list[tuple[float, int]]:
        """Returns (minute, pods) of each change."""
        until_s = self._now_s + 60.0 * minutes
        changes: list[tuple[float, int]] = []
        begun_s, count = self._now_s, self._wanted()
        while self._now_s < until_s:
            self._scaler.sync(self._now_s)
            if self._wanted() != count:
                count = self._wanted()
                changes.append(((self._now_s - begun_s) / 60.0, count))
                await self._cluster.wait_ready(decode=count)
            self._now_s += SYNC_PERIOD_S
        return changes

    def _wanted(self) -> int:
        return int(self._cluster.get("Deployment", "tandem-decode")["spec"]["replicas"])


async def test_keda_follows_the_load_a_pod_at_a_time(cluster: Cluster, tmp_path: Path) -> None:
    """It goes up with each minute, and down only when ten minutes have been quiet."""
    await SdkRelease(cluster, tmp_path).install(SCALED)
    demand = Demand(decode=2.0, prefill=1.0)
    hours = Hours(cluster, demand)
    assert await hours.run(30) == []
    demand.pods["decode"] = 9.0
    assert await hours.run(10) == [(0.0, 3), (1.0, 4), (2.0, 5)]
    demand.pods["decode"] = 0.2
    down = await hours.run(40)
    assert [count for _, count in down] == [4, 3, 2, 1]
    assert down[0][0] >= 9.5
    gaps = [b - a for (a, _), (b, _) in itertools.pairwise(down)]
    assert gaps and min(gaps) >= 5.0


async def test_a_scaler_that_is_blind_takes_no_pod_of_a_loaded_tier(
    cluster: Cluster, tmp_path: Path
) -> None:
    await SdkRelease(cluster, tmp_path).install(SCALED)
    demand = Demand(decode=4.0, prefill=1.0)
    hours = Hours(cluster, demand)
    assert (await hours.run(10))[-1][1] == 4
    demand.pods["decode"] = None
    assert await hours.run(120) == [], "scrapes are lost, and nobody knows of any load"
    demand.pods["decode"] = 4.0
    assert await hours.run(10) == []


async def test_a_scaler_that_is_blind_from_the_start_gives_what_the_tier_was_sized_for(
    cluster: Cluster, tmp_path: Path
) -> None:
    await SdkRelease(cluster, tmp_path).install(SCALED)
    demand = Demand(decode=0.1, prefill=1.0)
    hours = Hours(cluster, demand)
    assert (await hours.run(60))[-1][1] == 1
    demand.pods["decode"] = None
    assert [count for _, count in await hours.run(10)] == [2], "the values' replicas"


# Nodes that span hosts ----------------------------------------------------------------------------


def group(pod: Object) -> str:
    return str(pod["metadata"]["labels"]["leaderworkerset.sigs.k8s.io/group-index"])


def groups(cluster: Cluster, component: str) -> dict[str, set[str]]:
    """Maps each group to the uids of its pods."""
    found: dict[str, set[str]] = {}
    for pod in cluster.pods(component):
        found.setdefault(group(pod), set()).add(pod["metadata"]["uid"])
    return found


async def test_a_lost_worker_takes_its_node_along_and_no_other(
    roomy: Cluster, tmp_path: Path
) -> None:
    await SdkRelease(roomy, tmp_path).install(scenario("multi-host"))
    await roomy.wait_ready(decode=4)
    (slice_,) = [
        one
        for one in roomy.objects("EndpointSlice")
        if one["metadata"]["name"] == "tandem-decode-endpoints"
    ]
    leaders = {pod["metadata"]["name"] for pod in roomy.pods("decode") if is_leader(pod)}
    assert {one["targetRef"]["name"] for one in slice_["endpoints"]} == leaders
    assert len(leaders) == 2, "who holds ranks alone answers nobody"
    before = groups(roomy, "decode")
    lost = next(pod for pod in roomy.pods("decode") if not is_leader(pod) and group(pod) == "0")
    roomy.lose_pod(lost)
    await roomy.wait(lambda: not before["0"] & groups(roomy, "decode").get("0", set()))
    await roomy.wait_ready(decode=4)
    assert groups(roomy, "decode")["1"] == before["1"]


def is_leader(pod: Object) -> bool:
    return bool(pod["metadata"]["labels"]["leaderworkerset.sigs.k8s.io/worker-index"] == "0")


async def test_workers_are_told_their_leader_by_a_name_that_resolves(
    roomy: Cluster, tmp_path: Path
) -> None:
    await SdkRelease(roomy, tmp_path).install(scenario("multi-host"))
    await roomy.wait_ready(decode=4)
    for pod in roomy.pods("decode"):
        env = {e["name"]: e.get("value") for e in pod["spec"]["containers"][0]["env"]}
        host, service, namespace = str(env["LWS_LEADER_ADDRESS"]).split(".")
        leader = roomy.get("Pod", host)
        assert namespace == NAMESPACE and group(leader) == group(pod) and is_leader(leader)
        spec = roomy.get("Service", service)["spec"]
        assert spec["publishNotReadyAddresses"] and spec["clusterIP"] == "None"
        assert spec["selector"].items() <= leader["metadata"]["labels"].items()


async def test_groups_roll_one_at_a_time_as_wholes(roomy: Cluster, tmp_path: Path) -> None:
    release = SdkRelease(roomy, tmp_path)
    values = scenario("multi-host")
    await release.install(values)
    await roomy.wait_ready(decode=4)
    before, fewest = groups(roomy, "decode"), [2]

    def look() -> None:
        whole = [pods for pods in groups(roomy, "decode").values() if len(pods) == 2]
        fewest[0] = min(fewest[0], len(whole))

    with roomy.store.observed_by(look):
        await release.upgrade(overlay(values, {"decode": {"settings": {"maxNumSeqs": 7}}}))
        await roomy.wait(lambda: not _uids(before) & _uids(groups(roomy, "decode")))
        await roomy.wait_ready(decode=4)
    assert fewest == [1], "one group of two serves at every moment"


def _uids(groups_: dict[str, set[str]]) -> set[str]:
    return {uid for pods in groups_.values() for uid in pods}


async def test_an_autoscaler_adds_whole_groups(roomy: Cluster, tmp_path: Path) -> None:
    await SdkRelease(roomy, tmp_path).install(scenario("multi-host"))
    await roomy.wait_ready(decode=4)
    demand = Demand(decode=3.0, prefill=1.0)
    keda = KedaOperator(roomy.store, demand.query)
    AutoscalerController(roomy.store, demand.pod_metric, keda).sync(0.0)
    await roomy.wait_ready(decode=6)
    assert {len(pods) for pods in groups(roomy, "decode").values()} == {2}


# Certificates -------------------------------------------------------------------------------------


async def test_certificates_are_issued_and_renewed_without_a_restart(
    cluster: Cluster, tmp_path: Path
) -> None:
    await SdkRelease(cluster, tmp_path).install(scenario("tls-certmanager"))
    await cluster.wait_ready(decode=1)
    certificates = cluster.objects("Certificate")
    (issuer,) = {one["spec"]["issuerRef"]["name"] for one in certificates}
    own = {"namespace": NAMESPACE}
    cluster.store.create(
        {"kind": "Issuer", "metadata": {"name": issuer, **own}, "spec": {"ca": {"secretName": "a"}}}
    )
    authority = Authority.new()
    cluster.store.create(
        {"kind": "Secret", "metadata": {"name": "a", **own}, "data": authority.secret_data()}
    )
    before = {name: cluster.uids(name) for name in ("router", "prefill", "decode")}
    manager, begun = CertManager(cluster.store), datetime.now(UTC)
    manager.sync(begun)
    mounted = {
        volume["secret"]["secretName"]
        for name in before
        for pod in cluster.pods(name)
        for volume in pod["spec"]["volumes"]
        if volume["name"] == "tls"
    }
    assert mounted == {one["spec"]["secretName"] for one in certificates}
    first = {name: leaf(cluster.get("Secret", name)) for name in mounted}
    for certificate in first.values():
        certificate.verify_directly_issued_by(authority.certificate)
    soonest = min(expiry(cluster.get("Secret", name)) for name in mounted)
    manager.sync(soonest - timedelta(hours=241))
    assert {name: leaf(cluster.get("Secret", name)) for name in mounted} == first
    manager.sync(soonest - timedelta(hours=239))
    renewed = {name: leaf(cluster.get("Secret", name)) for name in mounted}
    assert all(renewed[name] != first[name] for name in mounted)
    assert all(one.not_valid_after_utc > soonest for one in renewed.values())
    assert {name: cluster.uids(name) for name in before} == before
