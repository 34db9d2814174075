"""Runs the pods of one of the stand-in's nodes as processes of this machine.

start ──▶ for each pod with a node: an address of its own and a `PodWorker`
  │         pod gets a deletionTimestamp ──▶ its worker stops it within its grace period
  │         pod vanishes                 ──▶ killed
  │         Secret or ConfigMap changes  ──▶ its files change in the pods that mount it
lose  ──▶ everything is killed, and nobody is told: the node has no power any more
close ──▶ everything is killed and waited for
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

from tests.kubernetes_stand_in.machine import Machine
from tests.kubernetes_stand_in.object_store import Event, ObjectStore, copy_of
from tests.kubernetes_stand_in.pod_state import is_terminating
from tests.kubernetes_stand_in.pod_worker import PodWorker
from tests.kubernetes_stand_in.resources import Object

_KILL_S = 20.0
"""The seconds for killed processes to be gone, on a machine that is very busy."""


class Kubelet:
    """`start` → `close`."""

    def __init__(self, store: ObjectStore, machine: Machine, node: str) -> None:
        self._store = store
        self._machine = machine
        self._node = node
        self._pods_folder = machine.folder / "pods" / node
        self._workers: dict[str, PodWorker] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._watching: asyncio.Task[None] | None = None
        self._numbers = itertools.count(1)

    def start(self) -> None:
        self._watching = asyncio.create_task(self._watch(), name="kubelet")

    def lose(self) -> None:
        """Ends all that it runs, without a word to the cluster."""
        assert self._watching is not None
        self._watching.cancel()
        for worker in self._workers.values():
            worker.lose()

    async def close(self) -> None:
        """Returns when every process has ended. Raises what went wrong in the kubelet itself."""
        assert self._watching is not None
        self._watching.cancel()
        await asyncio.wait([self._watching])
        for worker in self._workers.values():
            worker.kill()
        tasks = list(self._tasks.values())
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=_KILL_S)
            for task in late:
                task.cancel()
        ended = await asyncio.gather(self._watching, *tasks, return_exceptions=True)
        for result in ended:
            if isinstance(result, Exception):
                raise result

    def pids(self) -> list[int]:
        """Returns the process ids of all containers' main processes."""
        return [
            container.pid
            for worker in self._workers.values()
            for container in worker.containers
            if container.pid is not None
        ]

    def running(self) -> list[tuple[Object, int]]:
        """Returns each pod with the process id of a container's main process."""
        return [
            (worker.pod, container.pid)
            for worker in self._workers.values()
            for container in worker.containers
            if container.pid is not None
        ]

    def logs(self) -> str:
        """Returns the logs of every container that ever ran, for a failing test to show."""
        texts = [
            f"--- {path.parent.name}/{path.name}\n{path.read_text(errors='replace')}"
            for path in sorted(self._pods_folder.glob("*/*.log"))
        ]
        return "\n".join(texts)

    def claims(self, name: str) -> list[Path]:
        """Returns the files of a persistent volume claim."""
        return sorted((self._machine.claims / name).rglob("*"))

    def log(self, pod: Object) -> str:
        return "\n".join(c.log() for c in self._workers[pod["metadata"]["uid"]].containers)

    async def _watch(self) -> None:
        async for event in self._store.events(["Pod", "Secret", "ConfigMap"]):
            if event.resource.kind == "Pod":
                self._handle(event)
            elif event.type == "MODIFIED":
                for worker in self._workers.values():
                    worker.refresh_files()

    def _handle(self, event: Event) -> None:
        pod = event.object
        uid = pod["metadata"]["uid"]
        if event.type == "DELETED":
            if uid in self._workers:
                self._workers[uid].kill()
        elif uid in self._workers:
            self._workers[uid].take_annotations(pod)
            if is_terminating(pod):
                self._workers[uid].terminate()
        elif pod["spec"].get("nodeName") == self._node and not is_terminating(pod):
            self._start(copy_of(pod))

    def _start(self, pod: Object) -> None:
        uid = pod["metadata"]["uid"]
        name = pod["metadata"]["name"]
        folder = self._pods_folder / f"{next(self._numbers):03d}-{name}"
        worker = PodWorker(self._store, pod, self._store.network.next_pod(), folder, self._machine)
        self._workers[uid] = worker
        self._tasks[uid] = asyncio.create_task(worker.run(), name=f"pod {name}")
