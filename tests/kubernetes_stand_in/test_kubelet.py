"""The kubelet runs pods as their specs say: with small shell scripts instead of the services."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.kubernetes_stand_in.cluster import NAMESPACE, Cluster
from tests.kubernetes_stand_in.dns_server import may_serve
from tests.kubernetes_stand_in.pod_state import is_ready, is_terminating, phase
from tests.kubernetes_stand_in.resources import Object
from tests.processes import is_alive


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with Cluster.real(tmp_path) as cluster:
        yield cluster
        pids = cluster.kubelet.pids()
    assert not [pid for pid in pids if is_alive(pid)]


def start(
    cluster: Cluster, script: str, *, name: str = "p", spec: Any = None, **container: Any
) -> Object:
    """Starts a pod whose one container runs `script`."""
    return cluster.store.create(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": NAMESPACE, "labels": {"app": "p"}},
            "spec": {
                "containers": [
                    {"name": "c", "command": ["sh", "-c", script], **container},
                ],
                "terminationGracePeriodSeconds": 5,
                **(spec or {}),
            },
        }
    )


async def log_of_ended(cluster: Cluster, pod: Object) -> str:
    await cluster.wait(lambda: phase(cluster.get("Pod", "p")) in ("Succeeded", "Failed"))
    return cluster.kubelet.log(pod)


NEVER = {"restartPolicy": "Never"}


async def test_a_container_sees_its_environment_and_files(cluster: Cluster) -> None:
    for kind, data in {"ConfigMap": {"k": "from the map"}, "Secret": {"k": "a2V5"}}.items():
        meta = {"name": "x", "namespace": NAMESPACE}
        cluster.store.create({"kind": kind, "metadata": meta, "data": data})
    pod = start(
        cluster,
        'echo "$IP $BOTH"; cat /etc/x/k; echo; cat "$FILE"',
        spec={
            **NEVER,
            "volumes": [
                {"name": "x", "configMap": {"name": "x"}},
                {"name": "y", "secret": {"secretName": "x"}},
            ],
        },
        env=[
            {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "x", "key": "k"}}},
            {"name": "BOTH", "value": "$(KEY) $$(KEY)"},
            {"name": "FILE", "value": "/run/y/k"},
        ],
        volumeMounts=[
            {"name": "x", "mountPath": "/etc/x"},
            {"name": "y", "mountPath": "/run/y"},
        ],
    )
    lines = (await log_of_ended(cluster, pod)).splitlines()
    address = cluster.get("Pod", "p")["status"]["podIP"]
    assert lines == [f"{address} key $(KEY)", "from the map", "key"]


async def test_a_pod_waits_for_what_it_mounts(cluster: Cluster) -> None:
    spec = {**NEVER, "volumes": [{"name": "x", "configMap": {"name": "late"}}]}
    pod = start(cluster, "true", spec=spec, volumeMounts=[{"name": "x", "mountPath": "/etc/x"}])
    await cluster.wait(lambda: cluster.get("Pod", "p").get("status", {}).get("podIP"))
    meta = {"name": "late", "namespace": NAMESPACE}
    cluster.store.create({"kind": "ConfigMap", "metadata": meta, "data": {}})
    await log_of_ended(cluster, pod)
    assert phase(cluster.get("Pod", "p")) == "Succeeded"


async def test_deletion_runs_the_hook_then_term_and_gives_time(cluster: Cluster) -> None:
    pod = start(
        cluster,
        "trap 'echo term; exit 0' TERM; touch /out/up; while :; do sleep 0.05; done",
        readinessProbe={"exec": {"command": ["test", "-e", "/out/up"]}, "periodSeconds": 1},
        lifecycle={"preStop": {"exec": {"command": ["sh", "-c", "echo hook > /out/hook"]}}},
        volumeMounts=[{"name": "out", "mountPath": "/out"}],
        spec={"volumes": [{"name": "out", "persistentVolumeClaim": {"claimName": "out"}}]},
    )
    await cluster.wait(lambda: is_ready(cluster.get("Pod", "p")))
    cluster.delete_pod(pod)
    await cluster.wait(lambda: not cluster.objects("Pod"), 10)
    assert "term" in cluster.kubelet.log(pod)
    files = {path.name: path.read_text() for path in cluster.kubelet.claims("out")}
    assert files == {"hook": "hook\n", "up": ""}


async def test_a_container_that_ignores_term_is_killed_after_its_grace(cluster: Cluster) -> None:
    script = "trap '' TERM; while :; do sleep 0.05; done"
    pod = start(cluster, script, spec={"terminationGracePeriodSeconds": 1})
    await cluster.wait(lambda: is_ready(cluster.get("Pod", "p")))
    (pid,) = cluster.kubelet.pids()
    cluster.delete_pod(pod)
    await cluster.wait(lambda: not cluster.objects("Pod"), 10)
    assert not is_alive(pid)


async def test_probes_decide_about_ready_and_alive(cluster: Cluster, tmp_path: Path) -> None:
    def check(name: str) -> dict[str, Any]:
        command = ["test", "-e", str(tmp_path / name)]
        return {"exec": {"command": command}, "periodSeconds": 0.1, "failureThreshold": 1}

    started, ready, alive = (tmp_path / name for name in ("started", "ready", "alive"))
    alive.touch()
    start(
        cluster,
        "sleep 60",
        startupProbe={**check("started"), "failureThreshold": 600},
        readinessProbe=check("ready"),
        livenessProbe=check("alive"),
    )

    def status() -> dict[str, Any]:
        statuses = cluster.get("Pod", "p").get("status", {}).get("containerStatuses") or [{}]
        return dict(statuses[0])

    await cluster.wait(lambda: "running" in status().get("state", {}))
    assert not status()["started"]
    started.touch()
    await cluster.wait(lambda: status()["started"])
    assert not status()["ready"]
    ready.touch()
    await cluster.wait(lambda: status()["ready"])
    ready.unlink()
    await cluster.wait(lambda: not status()["ready"])
    alive.unlink()
    await cluster.wait(lambda: status()["restartCount"] >= 1)


async def test_a_crashing_container_starts_again_and_losing_the_pod_kills_it(
    cluster: Cluster,
) -> None:
    pod = start(cluster, "echo once; exit 3")
    await cluster.wait(
        lambda: (
            cluster.get("Pod", "p").get("status", {}).get("containerStatuses")
            and cluster.get("Pod", "p")["status"]["containerStatuses"][0]["restartCount"] >= 2
        )
    )
    assert cluster.kubelet.log(pod).count("once") >= 2
    cluster.lose_pod(pod)
    await cluster.wait(lambda: not cluster.objects("Pod"))


_ASK_API = """
import json, os, ssl, urllib.request
folder = "/var/run/secrets/kubernetes.io/serviceaccount"
token, namespace = (open(f"{folder}/{name}").read() for name in ("token", "namespace"))
host, port = (os.environ[f"KUBERNETES_SERVICE_{name}"] for name in ("HOST", "PORT"))
url = f"https://{host}:{port}/api/v1/namespaces/{namespace}/pods"
request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
tls = ssl.create_default_context(cafile=f"{folder}/ca.crt")
print(len(json.load(urllib.request.urlopen(request, context=tls))["items"]))
"""


async def test_a_pod_asks_the_api_as_its_service_account(cluster: Cluster) -> None:
    meta = {"name": "s", "namespace": NAMESPACE}
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]
    binding = {
        "subjects": [{"kind": "ServiceAccount", "name": "s"}],
        "roleRef": {"kind": "Role", "name": "s"},
    }
    cluster.store.create({"kind": "ServiceAccount", "metadata": meta})
    cluster.store.create({"kind": "Role", "metadata": meta, "rules": rules})
    cluster.store.create({"kind": "RoleBinding", "metadata": meta, **binding})
    pod = start(
        cluster,
        "",
        spec={**NEVER, "serviceAccountName": "s"},
        command=["python", "-c", _ASK_API],
    )
    assert (await log_of_ended(cluster, pod)).strip() == "1"
    assert ("serving:s", "list", "Pod", "") in cluster.api.requests


@pytest.mark.skipif(not may_serve(), reason="a cluster DNS needs root")
async def test_names_of_services_resolve_in_pods(cluster: Cluster) -> None:
    cluster.store.create(
        {
            "kind": "Service",
            "metadata": {"name": "s", "namespace": NAMESPACE},
            "spec": {"selector": {"app": "none"}, "ports": [{"port": 8080}]},
        }
    )
    await cluster.wait(lambda: cluster.get("Service", "s")["spec"].get("clusterIP"))
    code = "import socket; print(socket.gethostbyname('s'))"
    pod = start(cluster, f'python3 -c "{code}"', spec=NEVER)
    address = cluster.get("Service", "s")["spec"]["clusterIP"]
    assert (await log_of_ended(cluster, pod)).strip() == address


async def test_files_of_a_secret_change_all_at_once(cluster: Cluster, tmp_path: Path) -> None:
    """Each is a link through a link that is turned: what is read through it is of one version."""

    def data(**files: str) -> dict[str, str]:
        return {name: base64.b64encode(text.encode()).decode() for name, text in files.items()}

    meta = {"name": "s", "namespace": NAMESPACE}
    first = {"kind": "Secret", "metadata": meta, "data": data(a="1", b="1")}
    secret = cluster.store.create(first)
    pod = start(
        cluster,
        "until [ -e /etc/s/c ]; do sleep 0.05; done; ls /etc/s; cat /etc/s/a /etc/s/c",
        volumeMounts=[{"name": "s", "mountPath": "/etc/s"}],
        spec={**NEVER, "volumes": [{"name": "s", "secret": {"secretName": "s"}}]},
    )
    await cluster.wait(lambda: phase(cluster.get("Pod", "p")) == "Running")
    (link,) = tmp_path.rglob("s/a")
    assert link.is_symlink() and link.readlink() == Path("..data/a")
    cluster.store.update({**secret, "data": data(a="2", c="2")})
    assert await log_of_ended(cluster, pod) == "a\nc\n22"


async def test_an_annotation_that_comes_late_arrives_in_its_file(cluster: Cluster) -> None:
    field = {"fieldPath": "metadata.annotations['net']"}
    volume = {"name": "i", "downwardAPI": {"items": [{"path": "net", "fieldRef": field}]}}
    pod = start(
        cluster,
        "until [ -s /etc/i/net ]; do sleep 0.05; done; cat /etc/i/net",
        volumeMounts=[{"name": "i", "mountPath": "/etc/i"}],
        spec={**NEVER, "volumes": [volume]},
    )
    await cluster.wait(lambda: phase(cluster.get("Pod", "p")) == "Running")

    def annotate(current: Object) -> None:
        current["metadata"]["annotations"] = {"net": "rail0"}

    cluster.store.change(pod, annotate)
    assert await log_of_ended(cluster, pod) == "rail0"


async def test_a_lost_node_says_nothing_and_keeps_its_pods_until_it_is_removed(
    tmp_path: Path,
) -> None:
    async with Cluster.real(tmp_path, nodes=("a", "b")) as cluster:
        pods = {name: start(cluster, "sleep 60", name=name) for name in ("p", "q")}
        await cluster.wait(lambda: all(is_ready(cluster.get("Pod", name)) for name in pods))
        nodes = {name: cluster.get("Pod", name)["spec"]["nodeName"] for name in pods}
        assert set(nodes.values()) == {"a", "b"}, "they are spread"
        lost = next(name for name, node in nodes.items() if node == "b")
        [pid] = [pid for pod, pid in cluster.running() if pod["metadata"]["name"] == lost]
        cluster.lose_node("b")
        async with asyncio.timeout(60):
            while is_alive(pid):
                await asyncio.sleep(0.02)
        assert is_ready(cluster.get("Pod", lost)), "nobody knows"
        cluster.notice_lost_node("b")
        await cluster.wait(lambda: not is_ready(cluster.get("Pod", lost)))
        cluster.evict_lost_node("b")
        await cluster.wait(lambda: is_terminating(cluster.get("Pod", lost)))
        cluster.remove_node("b")
        await cluster.wait(lambda: len(cluster.objects("Pod")) == 1)
