"""Tests what Helm does with the chart on a cluster: both engines, no processes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from tests.helm.helm_engine import CI_VALUES, HelmError, load_values
from tests.helm.releases.demand import Demand
from tests.helm.releases.helm_release import Release, SdkRelease
from tests.kubernetes_stand_in.autoscalers import AutoscalerController, KedaOperator
from tests.kubernetes_stand_in.cluster import Cluster
from tests.kubernetes_stand_in.object_store import ObjectStore

VALUES: dict[str, Any] = {"model": {"name": "example/model"}, "router": {"replicas": 2}}
BROKEN = {"router": {"tag": "broken"}, "engine": {"tag": "broken"}}
COMPONENTS = ("router", "prefill", "decode")
CERTIFICATES = ("router-tls", "prefill-tls", "decode-tls")


def changed(**values: Any) -> dict[str, Any]:
    """Returns `VALUES` with some more of each section."""
    result = copy.deepcopy(VALUES)
    for section, content in values.items():
        result[section] = {**result.get(section, {}), **content}
    return result


def secrets(cluster: Cluster) -> dict[str, dict[str, str]]:
    """Returns the secrets of the chart: Helm keeps releases in others."""
    found = [one for one in cluster.objects("Secret") if not one["type"].startswith("helm.sh/")]
    return {one["metadata"]["name"]: one["data"] for one in found}


def names(store: ObjectStore) -> set[tuple[str, str]]:
    return {(obj["kind"], obj["metadata"]["name"]) for obj in store.all()}


async def test_install_makes_every_component_ready(cluster: Cluster, release: Release) -> None:
    """Helm says so and waits here; elsewhere the cluster says it, which is quicker."""
    await release.install(VALUES, wait_s=60)
    await cluster.wait_ready(router=2, prefill=1, decode=1)
    for tier, ports in {"prefill": {"grpc"}, "decode": {"grpc", "http"}}.items():
        (slice_,) = (
            s
            for s in cluster.objects("EndpointSlice")
            if s["metadata"]["name"].endswith(f"{tier}-endpoints")
        )
        assert [e["conditions"]["ready"] for e in slice_["endpoints"]] == [True]
        assert {p["name"] for p in slice_["ports"]} == ports


async def test_scaling_one_tier_touches_no_pod_that_stays(
    cluster: Cluster, release: Release
) -> None:
    await release.install(VALUES)
    before = {name: cluster.uids(name) for name in COMPONENTS}
    await release.upgrade(changed(prefill={"replicas": 3}))
    await cluster.wait_ready(router=2, prefill=3, decode=1)
    assert cluster.uids("prefill") > before["prefill"]
    assert cluster.uids("decode") == before["decode"]
    prefills = cluster.uids("prefill")
    await release.upgrade(changed(prefill={"replicas": 2}, decode={"replicas": 3}))
    await cluster.wait_ready(router=2, prefill=2, decode=3)
    assert cluster.uids("prefill") < prefills
    assert cluster.uids("decode") > before["decode"]
    assert cluster.uids("router") == before["router"]


async def test_an_upgrade_that_changes_no_pod_restarts_none(
    cluster: Cluster, release: Release
) -> None:
    """Nor does it change what it has made: the token, the authority and its certificates. What an
    operator takes away is made again."""
    await release.install(changed(tls={"mode": "generated"}))
    before = {name: cluster.uids(name) for name in COMPONENTS}
    made = secrets(cluster)
    assert set(made) == {f"tandem-{name}" for name in ("ca", "cluster-token", *CERTIFICATES)}
    await release.upgrade(changed(tls={"mode": "generated"}))
    assert secrets(cluster) == made
    cluster.store.delete_object(cluster.get("Secret", "tandem-prefill-tls"))
    await release.upgrade(changed(tls={"mode": "generated"}, commonLabels={"team": "serving"}))
    assert {name: cluster.uids(name) for name in COMPONENTS} == before
    assert cluster.get("Deployment", "tandem-prefill")["metadata"]["labels"]["team"] == "serving"
    renewed = secrets(cluster)
    assert renewed.pop("tandem-prefill-tls")["ca.crt"] == made["tandem-ca"]["tls.crt"]
    assert renewed.items() < made.items()


async def test_a_made_secret_keeps_its_value_under_another_key(
    cluster: Cluster, release: Release
) -> None:
    def asked(key: str) -> dict[str, Any]:
        return changed(auth={"clusterToken": {"enabled": True, "secretKey": key}})

    await release.install(asked("one"))
    (token,) = secrets(cluster)["tandem-cluster-token"].values()
    await release.upgrade(asked("another"))
    assert secrets(cluster)["tandem-cluster-token"] == {"another": token}
    args = cluster.get("Deployment", "tandem-decode")["spec"]["template"]["spec"]["containers"][0]
    assert "--cluster-token-file=/etc/tandem/cluster-token/another" in args["args"]


async def test_a_change_of_one_tier_rolls_it_alone_and_rolls_back(
    cluster: Cluster, release: Release
) -> None:
    await release.install(changed(prefill={"replicas": 2}))
    before = {name: cluster.uids(name) for name in COMPONENTS}
    template = cluster.get("Deployment", "tandem-prefill")["spec"]["template"]
    await release.upgrade(changed(prefill={"replicas": 2, "settings": {"maxNumSeqs": 7}}))
    await cluster.wait_ready(router=2, prefill=2, decode=1)
    rolled = cluster.get("Deployment", "tandem-prefill")["spec"]["template"]
    assert "--max-num-seqs=7" in rolled["spec"]["containers"][0]["args"]
    assert not cluster.uids("prefill") & before["prefill"]
    await release.rollback(1)
    await cluster.wait_ready(router=2, prefill=2, decode=1)
    assert cluster.get("Deployment", "tandem-prefill")["spec"]["template"] == template
    assert cluster.uids("decode") == before["decode"]
    assert cluster.uids("router") == before["router"]
    assert await release.revisions() == ["superseded", "superseded", "deployed"]


async def test_rollout_on_a_cluster_without_a_free_gpu(release: Release, cluster: Cluster) -> None:
    """Old pods make room for new ones; nothing waits for a GPU that never comes."""
    full = {"replicas": 2, "parallelism": {"tensor": 2}}
    await release.install(changed(prefill=full, decode=full))
    await cluster.wait_ready(router=2, prefill=2, decode=2)
    before = cluster.uids("prefill") | cluster.uids("decode")
    new = {**full, "settings": {"maxNumSeqs": 7}}
    await release.upgrade(changed(prefill=new, decode=new))
    await cluster.wait_ready(router=2, prefill=2, decode=2)
    assert not before & (cluster.uids("prefill") | cluster.uids("decode"))


async def test_an_upgrade_leaves_the_replicas_to_the_autoscaler(
    cluster: Cluster, release: Release
) -> None:
    hpa = {"autoscaling": {"kind": "hpa", "minReplicas": 1, "maxReplicas": 4}}
    await release.install(changed(decode=hpa))
    cluster.scale("Deployment", "tandem-decode", 3)
    await cluster.wait_ready(router=2, prefill=1, decode=3)
    await release.upgrade(changed(decode=hpa, prefill={"settings": {"maxNumSeqs": 7}}))
    await cluster.wait_ready(router=2, prefill=1, decode=3)


@pytest.mark.parametrize("kind", ["hpa", "keda"])
async def test_turning_autoscaling_on_and_off_keeps_every_pod(
    cluster: Cluster, release: Release, kind: str
) -> None:
    """A number that is left out is one to Kubernetes, and the values may be of long ago. The
    autoscaler acts as soon as it is there, and changes nothing that the load does not ask for."""
    scaling = {"autoscaling": {"kind": kind, "minReplicas": 1, "maxReplicas": 6}}
    monitoring = {"prometheusUrl": "http://prometheus:9090"}
    tier = {"replicas": 2}
    await release.install(changed(prefill=tier, decode={"replicas": 3}))
    before = {name: cluster.uids(name) for name in COMPONENTS}
    on = changed(prefill=tier | scaling, decode={"replicas": 3} | scaling, monitoring=monitoring)
    await release.upgrade(on)
    assert {name: cluster.uids(name) for name in COMPONENTS} == before
    demand = Demand(prefill=2.0, decode=3.0)
    keda = KedaOperator(cluster.store, demand.query)
    autoscaler = AutoscalerController(cluster.store, demand.pod_metric, keda)
    autoscaler.sync(0.0)
    assert cluster.get("Deployment", "tandem-decode")["spec"]["replicas"] == 3
    demand.pods["decode"] = 6.0
    autoscaler.sync(15.0)
    await cluster.wait_ready(router=2, prefill=2, decode=4)
    before = {name: cluster.uids(name) for name in COMPONENTS}
    await release.upgrade(changed(prefill=tier, decode={"replicas": 3}))
    autoscaler.sync(30.0)
    await cluster.wait_rolled_out()
    assert {name: cluster.uids(name) for name in COMPONENTS} == before
    assert not cluster.objects("HorizontalPodAutoscaler")


async def test_hosts_of_a_tier_change_only_when_that_is_wanted(
    cluster: Cluster, release: Release
) -> None:
    """A Deployment would become a LeaderWorkerSet: all its pods go before the new ones serve."""
    storage = {"type": "pvc", "path": "m", "pvc": {"accessModes": ["ReadWriteMany"]}}
    model = {**VALUES["model"], "storage": storage}
    await release.install(changed(model=model))
    before = {name: cluster.uids(name) for name in COMPONENTS}
    parallelism = {"tensor": 2, "hosts": 2}
    with pytest.raises(HelmError, match="accept the outage with decode.parallelism.allowRepl"):
        await release.upgrade(changed(model=model, decode={"parallelism": parallelism}))
    assert {name: cluster.uids(name) for name in COMPONENTS} == before
    wanted = {"parallelism": {**parallelism, "allowReplacement": True}}
    await release.upgrade(changed(model=model, decode=wanted), wait_s=0)
    assert cluster.get("LeaderWorkerSet", "tandem-decode")["spec"]["replicas"] == 1
    with pytest.raises(HelmError, match="the tier is a LeaderWorkerSet now"):
        await release.upgrade(changed(model=model), wait_s=0)
    with pytest.raises(HelmError, match="disaggregatedSet.enabled: the tier is a Deployment now"):
        await release.upgrade(changed(model=model, disaggregatedSet={"enabled": True}))


async def test_an_upgrade_after_kubectl_scale(cluster: Cluster, release: Release) -> None:
    """Helm 3 sets what the values say; Helm 4 asks who is right, and takes an equal number."""
    await release.install(VALUES)
    cluster.scale("Deployment", "tandem-decode", 3)
    await cluster.wait_ready(router=2, prefill=1, decode=3)
    if isinstance(release, SdkRelease):
        with pytest.raises(HelmError, match=r'conflict with "kubectl": .spec.replicas'):
            await release.upgrade(changed(prefill={"replicas": 2}))
        await release.upgrade(changed(decode={"replicas": 3}))
        await cluster.wait_ready(router=2, prefill=1, decode=3)
    else:
        await release.upgrade(changed(prefill={"replicas": 2}))
        await cluster.wait_ready(router=2, prefill=2, decode=1)


async def test_a_version_that_never_gets_ready_leaves_the_old_one_serving(
    cluster: Cluster, release: Release
) -> None:
    tiers = {"tierDefaults": {"replicas": 2}}
    await release.install(changed(**tiers))
    before = {name: cluster.uids(name) for name in COMPONENTS}
    with pytest.raises(HelmError):
        await release.upgrade(changed(**tiers, image=BROKEN), wait_s=1)
    for tier in ("prefill", "decode"):
        await cluster.wait(lambda tier=tier: len(cluster.uids(tier) & before[tier]) == 1)
    assert cluster.uids("router") >= before["router"]
    await release.rollback(1)
    await cluster.wait_ready(router=2, prefill=2, decode=2)
    for tier in ("prefill", "decode"):
        assert len(cluster.uids(tier) & before[tier]) == 1


async def test_helm_test_and_uninstall_leave_nothing(cluster: Cluster, release: Release) -> None:
    before = names(cluster.store)
    await release.install(VALUES)
    await release.test()
    await release.uninstall()
    await cluster.wait(lambda: names(cluster.store) == before, timeout_s=10)


@pytest.mark.parametrize("path", CI_VALUES, ids=lambda path: path.name)
async def test_every_scenario_installs_and_uninstalls(
    cluster: Cluster, tmp_path: Path, path: Path
) -> None:
    """Only that is left what a user asked to keep."""
    release = SdkRelease(cluster, tmp_path)
    before = names(cluster.store)
    await release.install(load_values(path), wait_s=0)
    await release.uninstall()
    kept = {
        (obj["kind"], obj["metadata"]["name"])
        for obj in cluster.store.all()
        if obj["metadata"].get("annotations", {}).get("helm.sh/resource-policy") == "keep"
    }
    await cluster.wait(lambda: names(cluster.store) == before | kept, timeout_s=10)


async def test_a_refused_release_says_why(release: Release) -> None:
    with pytest.raises(HelmError, match="model"):
        await release.install({"model": {"name": ""}})


async def test_models_come_go_and_share_sessions_without_touching_each_others_pods(
    cluster: Cluster, release: Release
) -> None:
    await release.install(VALUES)
    before = {name: cluster.uids(name) for name in ("prefill", "decode")}
    canary = {"name": "canary", "model": {"name": "example/canary"}, "decode": {"replicas": 2}}
    other = {"name": "other", "model": {"name": "example/other"}, "prefill": {"enabled": False}}
    values = {**VALUES, "models": [canary, other]}
    await release.upgrade(values)
    ready = {"canary-prefill": 1, "canary-decode": 2, "other-decode": 1}
    await cluster.wait_ready(router=2, prefill=1, decode=1, **ready)
    assert {name: cluster.uids(name) for name in ("prefill", "decode")} == before
    for component, count in {"decode": 1, "canary-decode": 2, "other-decode": 1}.items():
        (slice_,) = (
            s
            for s in cluster.objects("EndpointSlice")
            if s["metadata"]["name"] == f"tandem-{component}-endpoints"
        )
        assert len(slice_["endpoints"]) == count, "no Service has another model's pods"
    everybody = {name: cluster.uids(name) for name in (*COMPONENTS, *ready)}
    split = {"example/model": {"example/model": 95, "canary": 5}}
    await release.upgrade({**values, "modelRules": {"splits": split}})
    assert '"canary" = 5' in cluster.get("ConfigMap", "tandem-model-rules")["data"]["rules.toml"]
    assert {name: cluster.uids(name) for name in (*COMPONENTS, *ready)} == everybody
    await release.upgrade({**values, "models": [canary]})
    await cluster.wait_ready(router=2, prefill=1, decode=1, **ready | {"other-decode": 0})
    for name in (*before, "canary-prefill", "canary-decode"):
        assert cluster.uids(name) == everybody[name]
