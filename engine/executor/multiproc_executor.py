"""All workers on this host, as children of this process, fed through shared memory."""

from __future__ import annotations

from collections.abc import Sequence

from edge.logs.setup import log_style
from engine.config import EngineConfig
from engine.executor.abstract import ReportProgress
from engine.executor.process_executor import ProcessExecutor
from engine.executor.queues.message_queue import MessageQueueWriter
from engine.executor.worker_messages import WorkerProcConfig
from host.life_signs import LifeSigns
from host.process_host import LocalHost, ProcessHost
from host.sockets.local_socket import Context


class MultiprocExecutor(ProcessExecutor):
    """`--distributed-executor-backend mp`."""

    _core_address = "127.0.0.1"

    def __init__(
        self,
        config: EngineConfig,
        context: Context,
        *,
        step_timeout_s: float = 300.0,
        signs: LifeSigns | None = None,
    ) -> None:
        super().__init__(config, context, step_timeout_s=step_timeout_s, signs=signs)
        self._queue = MessageQueueWriter(
            context,
            f"tandem-{config.engine_id}-steps",
            [self._address(f"steps{rank}") for rank in range(self._num_ranks)],
            self._check_alive,
        )

    def _find_hosts(self, report: ReportProgress) -> Sequence[ProcessHost]:
        return [LocalHost()] * self._num_ranks

    def _worker_config(self, rank: int, rendezvous: str) -> WorkerProcConfig:
        return WorkerProcConfig(
            engine=self._config,
            rank=rank,
            rendezvous=rendezvous,
            queue=self._queue.handle,
            reader=rank,
            reply_address=self._reply_address,
            log=log_style(),
            life_sign=self._life_sign(rank),
        )

    def _enqueue(self, message: bytes) -> None:
        self._queue.enqueue(message)

    def _has_unread(self, rank: int) -> bool:
        return self._queue.num_unread(rank) > 0

    def _close(self) -> None:
        self._queue.close()
