"""One pod on this machine.

1. address and volumes       (what is missing is waited for)
2. init containers           one after the other, each must end well
3. containers                all at once
4. over                      all have ended for good: Succeeded or Failed
-  deleted                   every container is stopped within the grace period; then the
                             object is removed, and with it the folders
-  removed (grace 0)         everything is killed at once
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from pathlib import Path
from typing import Any

from tests.kubernetes_stand_in.container import Container
from tests.kubernetes_stand_in.container_command import CommandBuilder
from tests.kubernetes_stand_in.machine import Machine
from tests.kubernetes_stand_in.object_store import ObjectStore, now
from tests.kubernetes_stand_in.pod_files import MountError, PodFiles
from tests.kubernetes_stand_in.resources import Object

_MOUNT_RETRY_S = 0.2


class PodWorker:
    """`run` is the whole life; `terminate` and `kill` are called from outside of it."""

    def __init__(
        self, store: ObjectStore, pod: Object, address: str, folder: Path, machine: Machine
    ) -> None:
        self._store = store
        self._is_lost = False
        self._pod = pod
        self._pod["status"] = {"podIP": address}
        self._files = PodFiles(store, pod, folder, machine)
        self._folder = folder
        self._machine = machine
        self._started_at = now()
        self._phase = "Pending"
        self._is_deleted = asyncio.Event()
        self.containers: list[Container] = []
        self._init: list[Container] = []

    async def run(self) -> None:
        living = asyncio.create_task(self._live())
        deleted = asyncio.create_task(self._is_deleted.wait())
        try:
            await asyncio.wait({living, deleted}, return_when=asyncio.FIRST_COMPLETED)
            if living.done():
                living.result()
                await deleted
            else:
                await self._stop()
        finally:
            living.cancel()
            deleted.cancel()
            await asyncio.gather(living, return_exceptions=True)
            self.kill()
        if not self._is_lost:
            self._store.delete_object(self._pod, grace_s=0)
        shutil.rmtree(self._folder / "volumes", ignore_errors=True)

    def terminate(self) -> None:
        self._is_deleted.set()

    @property
    def pod(self) -> Object:
        return self._pod

    def lose(self) -> None:
        """Kills everything, and tells nobody: its node is gone."""
        self._is_lost = True
        self.kill()

    def refresh_files(self) -> None:
        """Brings the files of Secrets, ConfigMaps and annotations up to date. What is missing now
        stays as it was."""
        with contextlib.suppress(MountError):
            self._files.refresh()

    def take_annotations(self, pod: Object) -> None:
        """Takes what was written on the pod since it began, for the downward API."""
        new = pod["metadata"].get("annotations", {})
        if new != self._pod["metadata"].get("annotations", {}):
            self._pod["metadata"]["annotations"] = new
            self.refresh_files()

    def kill(self) -> None:
        for container in (*self._init, *self.containers):
            container.kill()
        self._is_deleted.set()

    # Inside ------------------------------------------------------------------------------------

    async def _live(self) -> None:
        self._publish()
        await self._mount()
        builder = CommandBuilder(self._store, self._pod, self._folder, self._machine)
        spec = self._pod["spec"]
        for init_spec in spec.get("initContainers", ()):
            container = self._container(init_spec, builder)
            self._init.append(container)
            if await container.run() != 0:
                self._set_phase("Failed")
                return
        self.containers = [self._container(c, builder) for c in spec["containers"]]
        self._set_phase("Running")
        codes = await asyncio.gather(*(container.run() for container in self.containers))
        self._set_phase("Failed" if any(codes) else "Succeeded")

    async def _mount(self) -> None:
        while True:
            try:
                self._files.prepare()
                return
            except MountError:
                await asyncio.sleep(_MOUNT_RETRY_S)

    def _container(self, spec: Object, builder: CommandBuilder) -> Container:
        mounts = self._files.mounts(spec)
        return Container(self._pod, spec, builder, mounts, self._folder, self._publish)

    async def _stop(self) -> None:
        current = self._store.find(
            "Pod", self._pod["metadata"]["namespace"], self._pod["metadata"]["name"]
        )
        grace_s = float(
            (current or {"metadata": {}})["metadata"].get("deletionGracePeriodSeconds", 0)
        )
        everything = (*self._init, *self.containers)
        await asyncio.gather(*(container.stop(grace_s) for container in everything))

    def _set_phase(self, phase: str) -> None:
        self._phase = phase
        self._publish()

    def _publish(self) -> None:
        if self._is_lost:
            return
        status = self._status()

        def edit(pod: Object) -> None:
            pod["status"] = status

        self._store.change(self._pod, edit)

    def _status(self) -> dict[str, Any]:
        is_running = self._phase == "Running"
        is_ready = is_running and all(c.is_ready for c in self.containers)
        conditions = {
            "PodScheduled": True,
            "Initialized": bool(self.containers),
            "ContainersReady": is_ready,
            "Ready": is_ready,
        }
        return {
            "phase": self._phase,
            "podIP": self._pod["status"]["podIP"],
            "podIPs": [{"ip": self._pod["status"]["podIP"]}],
            "hostIP": "127.0.0.1",
            "startTime": self._started_at,
            "conditions": [
                {"type": type_, "status": str(value)} for type_, value in conditions.items()
            ],
            "initContainerStatuses": [c.status for c in self._init],
            "containerStatuses": [c.status for c in self.containers],
        }
