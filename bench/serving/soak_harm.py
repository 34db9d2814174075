"""Hurts the processes of a cluster, in turn: what a soak does to it."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from bench.serving.process_tree import below, module_of
from cli.local_cluster.supervisor import Service, ServiceState

_TRANSFER = "kv_transfer.control.process"
_HELPERS = ("decode_node.grammar.checker_process", "decode_node.images.image_child")
"""Processes of a decode node that read what clients send."""
_FREEZE_S = 6.0
_PAUSE_S = 0.1
_ENGINE = ("engine.core.core_proc", "engine.executor.worker_proc")


class Harm:
    """Kills processes of `nodes`, and of those in `mortal` also the whole node. The others live as
    long as the run does, so that their memory can be followed.

    Attributes:
        kills: How often what was hurt, by node and process.
    """

    def __init__(self, nodes: Sequence[Service], mortal: Sequence[Service], seed: int) -> None:
        self._nodes = nodes
        self._mortal = mortal
        self._random = random.Random(seed)
        self.kills: Counter[str] = Counter()

    async def processes_forever(self, every_s: float) -> None:
        """Kills transfer processes, and those that read grammars and images."""
        for modules in itertools.cycle(((_TRANSFER,), _HELPERS)):
            for node in self._nodes:
                if self._processes(node, modules):
                    await asyncio.sleep(every_s)
                    self._kill(node, modules)
            await asyncio.sleep(_PAUSE_S)

    async def nodes_forever(self, every_s: float) -> None:
        """Ends whole nodes: by the node, its engine's core, or a worker; every fourth time it is
        frozen for a while."""
        ways = itertools.cycle(("node", *_ENGINE, "frozen"))
        for node in itertools.cycle(self._mortal):
            await asyncio.sleep(every_s)
            if node.state is not ServiceState.READY or node.pid is None:
                continue
            match way := next(ways):
                case "node":
                    self._hit(node, way, node.pid, signal.SIGKILL)
                case "frozen":
                    await self._freeze(node)
                case _:
                    self._kill(node, (way,))

    def _processes(self, node: Service, modules: Sequence[str]) -> list[tuple[int, str]]:
        if node.pid is None:
            return []
        found = [(process.pid, module_of(process)) for process in below(node.pid)]
        return [(pid, module) for pid, module in found if module in modules]

    def _kill(self, node: Service, modules: Sequence[str]) -> None:
        if found := self._processes(node, modules):
            pid, module = self._random.choice(found)
            self._hit(node, module, pid, signal.SIGKILL)

    async def _freeze(self, node: Service) -> None:
        pid = node.pid
        assert pid is not None
        self._hit(node, "frozen", pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(_FREEZE_S)
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _hit(self, node: Service, what: str, pid: int, by: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, by)
            self.kills[f"{node.spec.name} {what}"] += 1
