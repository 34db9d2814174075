"""Workers on the hosts of a Ray cluster, one GPU each: tensor parallelism over several hosts.

    engine core, leader's host                     each host
    ┌──────────────┐      Ray: start, watch, end   ┌────────────┐ child ┌──────────┐
    │ RayExecutor  │ ────────────────────────────▶ │ RankActor  │ ────▶ │ worker r │
    │              │                               └────────────┘       └──────────┘
    │              │   steps: ring (this host), RemoteQueue over TCP (others)  ▲ │
    │              │ ──────────────────────────────────────────────────────────┘ │
    │              │ ◀───────────────────────────────────────────────────────────┘
    └──────────────┘   replies: socket names (this host), encrypted TCP (others)

The worker is the same program as under `MultiprocExecutor`. Rank 0 runs beside the engine core.
Ray finds the places, starts the actors and tells of their end; nothing of a step goes through it.
"""

from __future__ import annotations

from collections.abc import Sequence

import ray

from edge.logs.setup import log_style
from engine.config import EngineConfig
from engine.contracts.errors import EngineDeadError
from engine.executor.abstract import ReportProgress
from engine.executor.process_executor import ProcessExecutor
from engine.executor.queues.message_queue import MessageQueueWriter
from engine.executor.queues.remote_queue import RemoteQueueWriter
from engine.executor.ray.ray_cluster import RayCluster
from engine.executor.ray.ray_host import RayHost, describe
from engine.executor.worker_messages import WorkerProcConfig
from host.life_signs import LifeSigns
from host.process_host import ProcessHost
from host.sockets.local_socket import Context
from host.sockets.secure_socket import LinkKey, listen


class RayExecutor(ProcessExecutor):
    """`--distributed-executor-backend ray`."""

    _death_notice_s = 5.0
    """Ray takes a second or two to tell of an actor's end."""

    def __init__(
        self,
        config: EngineConfig,
        context: Context,
        *,
        step_timeout_s: float = 300.0,
        signs: LifeSigns | None = None,
    ) -> None:
        super().__init__(config, context, step_timeout_s=step_timeout_s, signs=signs)
        self._cluster = RayCluster(
            config.parallel, config.device.device, f"tandem-{config.engine_id}"
        )
        self._key = LinkKey.create()
        self._hosts: list[RayHost] = []
        """The worker processes by rank."""
        self._reader: list[int] = []
        """Number of each rank among the readers of its queue."""
        self._near: MessageQueueWriter | None = None
        self._far: RemoteQueueWriter | None = None
        self._far_reply_address = ""

    def _find_hosts(self, report: ReportProgress) -> Sequence[ProcessHost]:
        self._cluster.connect()
        try:
            self._hosts = self._cluster.reserve(self._key, report)
        except ray.exceptions.RayError as error:
            raise EngineDeadError(
                f"Ray could not start the workers: {describe(error)}; the logs of its processes "
                f"are under /tmp/ray on the hosts"
            ) from error
        self._open_queues()
        return self._hosts

    def _open_queues(self) -> None:
        num_near = num_far = 0
        for host in self._hosts:
            self._reader.append(num_far if host.link is not None else num_near)
            num_far += host.link is not None
            num_near += host.link is None
        if num_near:
            self._near = MessageQueueWriter(
                self._context,
                f"tandem-{self._config.engine_id}-steps",
                [self._address(f"steps{reader}") for reader in range(num_near)],
                self._check_alive,
            )
        if num_far:
            self._far = RemoteQueueWriter(
                self._context, self._core_address, self._key, num_far, self._check_alive
            )
            self._far_reply_address = listen(self._socket, self._core_address, self._key)

    @property
    def _core_address(self) -> str:
        return self._cluster.address

    def _worker_config(self, rank: int, rendezvous: str) -> WorkerProcConfig:
        link = self._hosts[rank].link
        queue = self._near if link is None else self._far
        assert queue is not None
        return WorkerProcConfig(
            engine=self._config,
            rank=rank,
            rendezvous=rendezvous,
            queue=queue.handle,
            reader=self._reader[rank],
            reply_address=self._reply_address if link is None else self._far_reply_address,
            log=log_style(),
            life_sign=self._life_sign(rank) if link is None else None,
            gpu=0,
            link=link,
        )

    def _enqueue(self, message: bytes) -> None:
        """Sends a message to all ranks, to those on other hosts first."""
        if self._far is not None:
            self._far.enqueue(message)
        if self._near is not None:
            self._near.enqueue(message)

    def _has_unread(self, rank: int) -> bool:
        queue = self._near if self._hosts[rank].link is None else self._far
        return queue is not None and queue.num_unread(self._reader[rank]) > 0

    def _close(self) -> None:
        for queue in (self._near, self._far):
            if queue is not None:
                queue.close()
        self._cluster.close()
