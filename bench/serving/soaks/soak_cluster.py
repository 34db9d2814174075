"""The cluster of a soak: which nodes it has, what each of them is given, and what is done to their
processes."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from bench.serving.clusters.processes import below, module_of
from bench.serving.soaks.soak_everything import DECODE_ARGS, NODE_ARGS, SEES, write_adapters
from cli.local_cluster.cluster import DEMO_CHECKPOINT, UpSettings, cluster_specs
from cli.local_cluster.supervisor import Service, ServiceSpec, ServiceState

_TRANSFER = "kv_transfer.control.process"
_HELPERS = ("decode_node.grammar.checks.checker_process", "decode_node.images.image_child")
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


_ALL_TIERS = (
    "--enable-prefix-caching",
    "--kv-cache-memory-bytes", str(12 << 20),
    "--kv-host-memory-bytes", str(8 << 20),
    "--kv-disk-bytes", str(64 << 20),
    "--kv-share-prefixes", "always",
)  # fmt: skip
_VISION_ARGS = ("--num-blocks", "128", "--served-model-name", SEES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Says what to start. `everything`: see `soak_everything`; with at least two nodes of a tier,
    the last one may be killed whole."""

    model: str
    device: str
    prefill: int
    decode: int
    kv_transports: str
    node_args: str
    all_tiers: bool
    everything: bool

    @property
    def settings(self) -> UpSettings:
        return self._settings(self.model or str(DEMO_CHECKPOINT), self.prefill, self.decode)

    @property
    def routable(self) -> UpSettings:
        """Has the numbers of nodes that a router must know."""
        more = int(self.everything)
        return self.settings.model_copy(
            update={"prefill": self.prefill + more, "decode": self.decode + more}
        )

    def specs(self, folder: Path) -> list[ServiceSpec]:
        """Returns the router and all nodes. Files of theirs lie in `folder`."""
        caching = _ALL_TIERS if self.all_tiers else ("--no-enable-prefix-caching",)
        name = ["--served-model-name", "demo"] if self.model else []
        args = [*name, "--kv-transports", self.kv_transports, *caching, *self.node_args.split()]
        if self.everything:
            write_adapters(folder / "adapters", Path(self.settings.model))
            args += [*NODE_ARGS, "--lora-dir", str(folder / "adapters")]
        router, *nodes = cluster_specs(self.settings, args)
        if self.everything:
            nodes = [always_decoding(one) for one in nodes]
        if self.all_tiers:
            nodes = [with_disk(one, folder) for one in nodes]
        if not self.everything:
            return [router, *nodes]
        seeing = self._seeing(folder)
        return [merged(router, seeing[0]), *nodes, *(sees(one) for one in seeing[1:])]

    def _seeing(self, folder: Path) -> list[ServiceSpec]:
        # Transformers makes it, whose import takes longer than that of all the rest.
        from tests.e2e.vision_node_checkpoint import save

        checkpoint = save(folder / SEES)
        args = ["--kv-transports", self.kv_transports, *_VISION_ARGS]
        settings = self._settings(str(checkpoint), 1, 1).model_copy(update={"switchable": 0})
        return cluster_specs(settings, args)

    def _settings(self, model: str, prefill: int, decode: int) -> UpSettings:
        return UpSettings(
            model=model,
            prefill=prefill,
            decode=decode,
            device=self.device,
            switchable=int(self.everything),
            port=0,
            _cli_parse_args=[],
        )


def with_disk(spec: ServiceSpec, folder: Path) -> ServiceSpec:
    """Gives a node a folder of its own."""
    return replace(spec, argv=(*spec.argv, "--kv-disk-path", str(folder / spec.name)))


def always_decoding(spec: ServiceSpec) -> ServiceSpec:
    """Gives the first node that always decodes drafts and data-parallel groups; answers of others
    equal its."""
    if spec.name != "decode-0":
        return spec
    return replace(spec, argv=(*spec.argv, *DECODE_ARGS))


def sees(spec: ServiceSpec) -> ServiceSpec:
    return replace(spec, name=f"{SEES}-{spec.name}")


def merged(router: ServiceSpec, other: ServiceSpec) -> ServiceSpec:
    """Returns a router of both routers' nodes."""
    argv = list(router.argv)
    for option in ("--prefill", "--decode"):
        argv[argv.index(option) + 1] += "," + other.argv[other.argv.index(option) + 1]
    return replace(router, argv=tuple(argv))


def mortal(names: Sequence[str]) -> list[str]:
    """Returns the nodes that may be killed whole: the last of each tier that has others, so that
    the memory of those can be followed as long as the run lasts."""
    tiers = ([name for name in names if name.startswith(tier)] for tier in ("decode-", "prefill-"))
    return [tier[-1] for tier in tiers if len(tier) > 1]
