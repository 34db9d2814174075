"""Turns workloads into pods and pods into endpoints, as kube-controller-manager does.

Each controller is a function that looks at the whole store and writes what is missing; it is
called again after every change until nothing changes any more:

    change ──▶ [drain the queue] ──▶ every controller once ──▶ its writes are changes again ─┐
      ▲                                                                                      │
      └──────────────────────────────────────────────────────────────────────────────────────┘

So a controller remembers nothing, and the order of events does not matter. Changes of what no
controller looks at call none; what goes with its owner is looked for when something was deleted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from tests.kubernetes_stand_in.disruption import reconcile_budgets
from tests.kubernetes_stand_in.garbage import collect_garbage, empty_namespaces
from tests.kubernetes_stand_in.jobs import reconcile_jobs
from tests.kubernetes_stand_in.leader_worker_sets import reconcile_leader_worker_sets
from tests.kubernetes_stand_in.nodes import reconcile_nodes
from tests.kubernetes_stand_in.object_store import ObjectStore
from tests.kubernetes_stand_in.replica_sets import reconcile_replica_sets
from tests.kubernetes_stand_in.rolling_update import reconcile_deployments
from tests.kubernetes_stand_in.scheduling import schedule_pods
from tests.kubernetes_stand_in.services import bind_claims, reconcile_services
from tests.kubernetes_stand_in.stateful_sets import reconcile_stateful_sets

Controller = Callable[[ObjectStore], None]

CONTROLLERS: tuple[Controller, ...] = (
    reconcile_deployments,
    reconcile_replica_sets,
    reconcile_stateful_sets,
    reconcile_leader_worker_sets,
    reconcile_jobs,
    bind_claims,
    reconcile_nodes,
    schedule_pods,
    reconcile_services,
    reconcile_budgets,
)
_COLLECTORS: tuple[Controller, ...] = (collect_garbage, empty_namespaces)
_LOOKED_AT = {
    "Deployment", "EndpointSlice", "Job", "LeaderWorkerSet", "Namespace", "Node",
    "PersistentVolumeClaim", "Pod", "PodDisruptionBudget", "ReplicaSet", "Service", "StatefulSet",
}  # fmt: skip


class ControllerManager:
    """`start` → `close`. An error in a controller ends it, and `close` raises it."""

    def __init__(self, store: ObjectStore, controllers: Sequence[Controller] = CONTROLLERS) -> None:
        self._store = store
        self._controllers = controllers
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="controllers")

    async def close(self) -> None:
        assert self._task is not None
        self._task.cancel()
        (result,) = await asyncio.gather(self._task, return_exceptions=True)
        if isinstance(result, Exception):
            raise result

    async def _run(self) -> None:
        with self._store.watching() as queue:
            self._reconcile(self._controllers)
            while True:
                events = [await queue.get()]
                await asyncio.sleep(0)
                while not queue.empty():
                    events.append(queue.get_nowait())
                if any(event.type == "DELETED" for event in events):
                    self._reconcile(_COLLECTORS)
                if any(event.resource.kind in _LOOKED_AT for event in events):
                    self._reconcile(self._controllers)

    def _reconcile(self, controllers: Sequence[Controller]) -> None:
        for controller in controllers:
            controller(self._store)
