"""A Kubernetes cluster on this machine without a container engine, and Helm pointed at it.

    async with Cluster.hollow(gpus=4) as cluster:         nothing runs; pods are ready at once
        ...
    async with Cluster.real(folder) as cluster:           pods are processes
        ...


    Helm ──HTTP──▶ ┌────────────┐ ◀──▶ controllers    Deployment → ReplicaSet → Pod, …
    pods ──TLS───▶ │ ApiServer  │
                   │ ObjectStore│ ◀──▶ Kubelet ──▶ one process for each container
                   └────────────┘        │  probes, preStop, SIGTERM, restarts; status back
    client ──▶ ServiceProxy ──▶ pod      └─ DnsServer for its pods (root only)

Every test has its own; what was started first is closed last.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import trustme

from tests.kubernetes_stand_in.api_server import ApiServer
from tests.kubernetes_stand_in.controllers import CONTROLLERS, ControllerManager
from tests.kubernetes_stand_in.dns_server import DnsServer, may_serve
from tests.kubernetes_stand_in.hollow_kubelet import run_hollow_pods
from tests.kubernetes_stand_in.kubelet import Kubelet
from tests.kubernetes_stand_in.machine import Machine
from tests.kubernetes_stand_in.network import Network
from tests.kubernetes_stand_in.nodes import UNREACHABLE
from tests.kubernetes_stand_in.object_store import ObjectStore
from tests.kubernetes_stand_in.pod_state import is_ready, is_terminating
from tests.kubernetes_stand_in.resources import Object, Target, resource_of
from tests.kubernetes_stand_in.service_proxy import ServiceProxy
from tests.kubernetes_stand_in.writes import Writer

NAMESPACE = "serving"
NODE = "this-machine"


class Cluster:
    """Everything is in `store`; Helm comes through `api`."""

    def __init__(
        self, store: ObjectStore, api: ApiServer, kubelets: Mapping[str, Kubelet] | None = None
    ) -> None:
        self.store = store
        self.api = api
        self._kubelets = kubelets or {}

    @classmethod
    @contextlib.asynccontextmanager
    async def hollow(cls, gpus: int = 8) -> AsyncIterator[Cluster]:
        store = new_store(gpus, Network())
        manager = ControllerManager(store, (*CONTROLLERS, run_hollow_pods))
        api = ApiServer(store)
        manager.start()
        try:
            await api.start()
            yield cls(store, api)
        finally:
            await api.close()
            await manager.close()

    @classmethod
    @contextlib.asynccontextmanager
    async def real(
        cls, folder: Path, gpus: int = 8, nodes: Sequence[str] = (NODE,)
    ) -> AsyncIterator[Cluster]:
        """Pods are processes of this machine, with their files below `folder`, whichever node they
        are on."""
        with Network.claim() as network:
            store = new_store(gpus, network, nodes)
            api, manager = ApiServer(store), ControllerManager(store)
            proxy, dns = ServiceProxy(store), DnsServer(store)
            authority = trustme.CA()
            await api.start(_server_tls(authority))
            machine = _machine(folder, api, authority)
            kubelets = {node: Kubelet(store, machine, node) for node in nodes}
            await dns.start()
            for part in (manager, *kubelets.values(), proxy):
                part.start()
            try:
                yield cls(store, api, kubelets)
            finally:
                for kubelet in kubelets.values():
                    await kubelet.close()
                dns.close()
                await proxy.close()
                await api.close()
                await manager.close()

    @property
    def kubelet(self) -> Kubelet:
        """Returns that of a cluster with one node."""
        (kubelet,) = self._kubelets.values()
        return kubelet

    def pids(self) -> list[int]:
        """Returns the process ids of all containers' main processes, on all nodes."""
        return [pid for kubelet in self._kubelets.values() for pid in kubelet.pids()]

    def running(self) -> list[tuple[Object, int]]:
        """Returns each pod with the process id of a container's main process."""
        return [one for kubelet in self._kubelets.values() for one in kubelet.running()]

    def logs(self) -> str:
        return "\n".join(kubelet.logs() for kubelet in self._kubelets.values())

    @property
    def kubeconfig(self) -> str:
        return kubeconfig(self.api.url)

    # Looking -----------------------------------------------------------------------------------

    def get(self, kind: str, name: str) -> Object:
        """Returns the object; raises `NotFound`."""
        return self.store.get(resource_of(kind), NAMESPACE, name)

    def objects(self, kind: str) -> list[Object]:
        return self.store.objects(resource_of(kind), NAMESPACE)

    def pods(self, component: str) -> list[Object]:
        """Returns the pods without those that are terminating."""
        return [
            pod
            for pod in self.store.list_kind("Pod", NAMESPACE)
            if pod["metadata"]["labels"].get("app.kubernetes.io/component") == component
            and not is_terminating(pod)
        ]

    def uids(self, component: str) -> set[str]:
        return {pod["metadata"]["uid"] for pod in self.pods(component)}

    async def wait(self, condition: Callable[[], Any], timeout_s: float = 30.0) -> Any:
        """Waits for the first true value; asks again whenever anything in the cluster changes."""
        return await self.store.wait(lambda _: condition(), timeout_s)

    async def wait_ready(self, timeout_s: float = 60.0, **replicas: int) -> None:
        """Waits for so many pods, as `wait_ready(prefill=2, decode=1)`: all ready, and no
        terminating one.
        """

        def is_so() -> bool:
            return all(self._is_settled(name, count) for name, count in replicas.items())

        try:
            await self.wait(is_so, timeout_s)
        except TimeoutError:
            raise AssertionError(f"not {replicas} after {timeout_s} s: {self._states()}") from None

    async def wait_rolled_out(self, timeout_s: float = 60.0) -> None:
        """Waits until every Deployment has its newest pods, all available, and no pod is
        terminating.
        """

        def is_so() -> bool:
            deployments = self.store.list_kind("Deployment", NAMESPACE)
            pods = self.store.list_kind("Pod", NAMESPACE)
            return all(map(_is_rolled_out, deployments)) and not any(map(is_terminating, pods))

        try:
            await self.wait(is_so, timeout_s)
        except TimeoutError:
            raise AssertionError(f"no end after {timeout_s} s: {self._states()}") from None

    def _is_settled(self, component: str, count: int) -> bool:
        label = "app.kubernetes.io/component"
        every = self.store.list_kind("Pod", NAMESPACE)
        pods = [pod for pod in every if pod["metadata"]["labels"].get(label) == component]
        return len(pods) == count and all(is_ready(p) and not is_terminating(p) for p in pods)

    def _states(self) -> dict[str, Any]:
        return {pod["metadata"]["name"]: pod.get("status", {}) for pod in self.objects("Pod")}

    # Changing ----------------------------------------------------------------------------------

    def scale(self, kind: str, name: str, replicas: int) -> None:
        """Scales as `kubectl scale` and autoscalers do."""
        target = Target(resource_of(kind), NAMESPACE, name, "scale")
        patch = {"spec": {"replicas": replicas}}
        Writer(self.store).patch(target, "merge", patch, "kubectl", dry_run=False)

    def delete_pod(self, pod: Object) -> None:
        """Deletes as `kubectl delete pod` does: with the pod's own grace period."""
        self.store.delete_object(pod)

    def lose_node(self, name: str) -> None:
        """Loses a node as when its power fails. Nobody knows yet: its pods are listed as ready."""
        self._kubelets[name].lose()

    def notice_lost_node(self, name: str) -> None:
        """Nothing was heard of it for so long that its pods count as not ready."""

        def edit(node: Object) -> None:
            node["status"]["conditions"] = [{"type": "Ready", "status": "Unknown"}]

        self.store.change(self._node(name), edit)

    def evict_lost_node(self, name: str) -> None:
        """Pods that were on it are made anew elsewhere."""

        def edit(node: Object) -> None:
            taint = {"key": UNREACHABLE, "effect": "NoExecute"}
            node.setdefault("spec", {})["taints"] = [taint]

        self.store.change(self._node(name), edit)

    def remove_node(self, name: str) -> None:
        self.store.delete_object(self._node(name))

    def _node(self, name: str) -> Object:
        return self.store.get(resource_of("Node"), "", name)

    def lose_pod(self, pod: Object) -> None:
        """Loses the pod as when its host loses power: SIGKILL, without a word."""
        self.store.delete_object(pod, grace_s=0)


def _is_rolled_out(deployment: Object) -> bool:
    status, wanted = deployment.get("status", {}), deployment["spec"].get("replicas", 1)
    counts = [status.get(f"{word}eplicas", 0) for word in ("r", "updatedR", "availableR")]
    is_current = status.get("observedGeneration") == deployment["metadata"]["generation"]
    return is_current and counts == [wanted] * 3


def new_store(gpus: int, network: Network, nodes: Sequence[str] = (NODE,)) -> ObjectStore:
    """Makes an empty cluster with these nodes and the namespaces `default` and `serving`."""
    store = ObjectStore(network)
    for name in ("default", NAMESPACE):
        store.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    allocatable = {"cpu": "64", "memory": "512Gi", "nvidia.com/gpu": str(gpus)}
    for node in nodes:
        store.create(
            {
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": {"name": node, "labels": {"kubernetes.io/hostname": node}},
                "status": {"allocatable": allocatable, "capacity": allocatable},
            }
        )
    return store


def _machine(folder: Path, api: ApiServer, authority: trustme.CA) -> Machine:
    return Machine(
        folder=folder,
        has_dns=may_serve(),
        api_env={
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(api.tls_port),
        },
        ca=authority.cert_pem.bytes().decode(),
    )


def _server_tls(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1", "kubernetes.default.svc").configure_cert(context)
    return context


def kubeconfig(url: str) -> str:
    return f"""\
apiVersion: v1
kind: Config
current-context: stand-in
clusters: [{{name: stand-in, cluster: {{server: "{url}"}}}}]
contexts: [{{name: stand-in, context: {{cluster: stand-in, user: admin, namespace: {NAMESPACE}}}}}]
users: [{{name: admin, user: {{}}}}]
"""
