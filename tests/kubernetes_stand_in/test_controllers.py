"""Rollouts keep their promises at every moment, not only at the end."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kubernetes_stand_in.cluster import NAMESPACE, Cluster
from tests.kubernetes_stand_in.pod_state import is_ready, is_terminating
from tests.kubernetes_stand_in.resources import Object


def workload(kind: str, **spec: Any) -> Object:
    labels = {"app": "w"}
    return {
        "apiVersion": "apps/v1",
        "kind": kind,
        "metadata": {"name": "w", "namespace": NAMESPACE},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"containers": [{"name": "c", "image": "a:1"}]},
            },
            **spec,
        },
    }


def change_image(obj: Object) -> None:
    obj["spec"]["template"]["spec"]["containers"][0]["image"] = "a:2"


def is_rolled(cluster: Cluster, count: int) -> bool:
    pods = [pod for pod in cluster.objects("Pod") if not is_terminating(pod)]
    return len(pods) == count and all(
        is_ready(pod) and pod["spec"]["containers"][0]["image"] == "a:2" for pod in pods
    )


def pod_counts(cluster: Cluster) -> tuple[int, int]:
    """Pods and ready pods, without those that are terminating."""
    pods = [pod for pod in cluster.objects("Pod") if not is_terminating(pod)]
    return len(pods), sum(map(is_ready, pods))


@pytest.mark.parametrize(
    ("surge", "unavailable", "most", "fewest"), [(0, 1, 3, 2), (1, 0, 4, 3), ("50%", "50%", 5, 2)]
)
async def test_a_rolling_update_stays_within_its_bounds(
    cluster: Cluster, surge: Any, unavailable: Any, most: int, fewest: int
) -> None:
    rolling = {"maxSurge": surge, "maxUnavailable": unavailable}
    strategy = {"type": "RollingUpdate", "rollingUpdate": rolling}
    obj = cluster.store.create(workload("Deployment", replicas=3, strategy=strategy))
    await cluster.wait(lambda: sum(map(is_ready, cluster.objects("Pod"))) == 3)
    counts: list[tuple[int, int]] = []
    with cluster.store.observed_by(lambda: counts.append(pod_counts(cluster))):
        cluster.store.change(obj, change_image)
        await cluster.wait(lambda: is_rolled(cluster, 3))
    assert max(pods for pods, _ in counts) <= most
    assert min(ready for _, ready in counts) >= fewest


async def test_a_stateful_set_rolls_from_its_last_pod_and_keeps_names(cluster: Cluster) -> None:
    claim = {"metadata": {"name": "data"}, "spec": {"accessModes": ["ReadWriteOnce"]}}
    obj = cluster.store.create(
        workload("StatefulSet", replicas=3, serviceName="w", volumeClaimTemplates=[claim])
    )
    await cluster.wait(lambda: sum(map(is_ready, cluster.objects("Pod"))) == 3)
    with cluster.store.watching() as events:
        cluster.store.change(obj, change_image)
        await cluster.wait(lambda: is_rolled(cluster, 3))
        gone = []
        while not events.empty():
            event = events.get_nowait()
            if event.type == "DELETED" and event.resource.kind == "Pod":
                gone.append(event.object["metadata"]["name"])
    assert gone == ["w-2", "w-1", "w-0"]
    claims = {c["metadata"]["name"] for c in cluster.objects("PersistentVolumeClaim")}
    assert claims == {"data-w-0", "data-w-1", "data-w-2"}


async def test_what_an_owner_leaves_behind_is_collected(cluster: Cluster) -> None:
    obj = cluster.store.create(workload("Deployment", replicas=2))
    await cluster.wait(lambda: len(cluster.objects("Pod")) == 2)
    cluster.store.delete_object(obj)
    await cluster.wait(lambda: not cluster.objects("Pod") and not cluster.objects("ReplicaSet"))


async def test_a_pod_waits_for_the_gpus_it_asks_for(cluster: Cluster) -> None:
    """The node has eight."""
    obj = workload("Deployment", replicas=3)
    limits = {"limits": {"nvidia.com/gpu": 4}}
    obj["spec"]["template"]["spec"]["containers"][0]["resources"] = limits
    cluster.store.create(obj)
    await cluster.wait(lambda: sum(map(is_ready, cluster.objects("Pod"))) == 2)
    assert len(cluster.objects("Pod")) == 3
    placed = next(p for p in cluster.objects("Pod") if is_ready(p))
    cluster.scale("Deployment", "w", 2)
    await cluster.wait(lambda: len(cluster.objects("Pod")) == 2)
    assert placed["metadata"]["uid"] in {p["metadata"]["uid"] for p in cluster.objects("Pod")}
