"""Reads the adapters of one rank into host memory, beside its steps.

handle(LoadAdapter) ──▶ a thread reads and packs it ──▶ AdapterLoaded
handle(DropAdapter) ──▶ its memory is given back, in order with the steps
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from engine.contracts.adapter_commands import DropAdapter, LoadAdapter
from engine.executor.worker_messages import AdapterLoaded
from engine.models.adapters.adapter_files import AdapterError
from engine.worker.worker import Worker

logger = logging.getLogger(__name__)


class AdapterLoader:
    """Loads one adapter at a time. `reply` is called in the thread that reads."""

    def __init__(self, worker: Worker, reply: Callable[[AdapterLoaded], None]) -> None:
        self._worker = worker
        self._reply = reply
        self._thread = ThreadPoolExecutor(1, "reads adapters")

    def handle(self, command: LoadAdapter | DropAdapter) -> None:
        """Starts to load an adapter, or drops one."""
        if isinstance(command, LoadAdapter):
            self._thread.submit(self._load, command)
        else:
            self._worker.drop_adapter(command.digest)

    def close(self) -> None:
        """Waits for what is being read. Idempotent."""
        self._thread.shutdown(cancel_futures=True)

    def _load(self, command: LoadAdapter) -> None:
        error = ""
        try:
            self._worker.load_adapter(command.digest, command.path)
        except AdapterError as fault:
            error = str(fault)
        except Exception as fault:
            logger.exception("an adapter could not be loaded")
            error = f"{type(fault).__name__}: {fault}"
        self._reply(AdapterLoaded(self._worker.rank, command.digest, error))
