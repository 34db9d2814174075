"""One engine's place in a running Ray cluster.

    1. `connect`   as a driver; this host must belong to the cluster
    2. `reserve`   waits until the cluster has a place for every rank, takes it with a placement
                   group, and starts an actor in each
    3. `close`     ends actors, placement group and connection; Ray does the same when this
                   process dies

The cluster is started by others: `ray start`, by hand or by the chart. It is a trusted zone:
a program that reaches its ports, and knows its token if it has one, can run programs on its hosts.
"""

from __future__ import annotations

import logging
import socket
import time
from contextlib import suppress

import msgspec
import ray
from ray.actor import ActorHandle
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from edge.installed_version import UNKNOWN_VERSION
from engine.config import Device, ParallelConfig
from engine.contracts.errors import EngineDeadError
from engine.executor.abstract import ReportProgress
from engine.executor.ray.ray_host import HostFacts, RankActor, RayHost
from host.sockets.secure_socket import HostLink, LinkKey

_CONNECT_TIMEOUT_S = 5.0
_ACTOR_TIMEOUT_S = 120.0
_LOOK_INTERVAL_S = 1.0
_ON_THIS_HOST = 0.001
"""A share of the resource `node:<address>`, which each host has one of: pins a rank to it."""

logger = logging.getLogger(__name__)


class RayCluster:
    """The driver's view. Use in one process at a time: Ray's connection is the process's."""

    def __init__(self, config: ParallelConfig, device: Device, name: str) -> None:
        self._config = config
        self._resource = "GPU" if device == "cuda" else "CPU"
        self._name = name
        self._own: HostFacts | None = None
        self._group: PlacementGroup | None = None
        self._actors: list[ActorHandle[RankActor]] = []
        self._logged_total = -1.0

    @property
    def address(self) -> str:
        """Returns the address of this host within the cluster."""
        assert self._own is not None
        return self._own.address

    def connect(self) -> None:
        """Raises EngineDeadError when there is no cluster here."""
        address = self._config.ray_address or "auto"
        try:
            if address != "auto":
                _check_reachable(address)
            ray.init(
                address=address,
                namespace=self._name,
                logging_level=logging.WARNING,
                log_to_driver=True,
            )
        except Exception as error:
            raise EngineDeadError(
                f"found no Ray cluster at {self._config.ray_address or 'this host'}: {error}; "
                f"start one with `ray start --head` here and `ray start --address` on the other "
                f"hosts, with the same versions of Python and Ray everywhere"
            ) from error
        self._own = HostFacts.gather()

    def reserve(self, key: LinkKey, report: ReportProgress) -> list[RayHost]:
        """Reserves a place for each rank: this host first, and the ranks of one host in a row.

        Raises:
            EngineDeadError: The cluster has not enough of the resource, or its hosts differ.
        """
        self._group = self._reserve_bundles(report)
        report("starting workers", 0.0)
        self._actors = [self._start_actor(index) for index in self._ranks_to_bundles()]
        found = ray.get([actor.facts.remote() for actor in self._actors], timeout=_ACTOR_TIMEOUT_S)
        facts = [msgspec.json.decode(one, type=HostFacts) for one in found]
        self._check_versions(facts)
        return [
            RayHost(actor, self._link(of_rank, key))
            for actor, of_rank in zip(self._actors, facts, strict=True)
        ]

    def _reserve_bundles(self, report: ReportProgress) -> PlacementGroup:
        num_ranks = self._config.num_ranks
        here = {self._resource: 1.0, f"node:{self.address}": _ON_THIS_HOST}
        bundles = [here] + [{self._resource: 1.0}] * (num_ranks - 1)
        group = placement_group(bundles, strategy="PACK", name=self._name)
        deadline = time.monotonic() + self._config.ray_timeout_s
        self._report_hosts(report)
        while not group.wait(_LOOK_INTERVAL_S):
            if time.monotonic() > deadline:
                remove_placement_group(group)
                raise EngineDeadError(self._describe_shortage())
            self._report_hosts(report)
        return group

    def _report_hosts(self, report: ReportProgress) -> None:
        """Logs the hosts whenever they have changed."""
        num_ranks, total = self._config.num_ranks, self._total()
        if total != self._logged_total:
            self._logged_total = total
            logger.info(
                "the Ray cluster has %g %s, %d are needed", total, self._resource, num_ranks
            )
        report("waiting for hosts", min(1.0, total / num_ranks))

    def _total(self) -> float:
        return float(ray.cluster_resources().get(self._resource, 0.0))

    def _describe_shortage(self) -> str:
        hosts = ", ".join(
            f"{node['NodeManagerAddress']} with {node['Resources'].get(self._resource, 0):g}"
            for node in ray.nodes()
            if node["Alive"]
        )
        free = float(ray.available_resources().get(self._resource, 0.0))
        return (
            f"{self._config.num_ranks} workers need one {self._resource} each, the "
            f"first of them on {self.address}, and after {self._config.ray_timeout_s:g} s the Ray "
            f"cluster has {self._total():g}, {free:g} of them free: {hosts}; start Ray on the "
            f"other hosts with `ray start --address`, or end what holds them"
        )

    def _ranks_to_bundles(self) -> list[int]:
        """Returns the bundle of each rank."""
        assert self._own is not None
        hosts: dict[int, str] = placement_group_table(self._group)["bundles_to_node_id"]
        own = self._own.node_id
        return sorted(hosts, key=lambda index: (hosts[index] != own, hosts[index], index))

    def _start_actor(self, bundle: int) -> ActorHandle[RankActor]:
        on_gpu = self._resource == "GPU"
        handle: ActorHandle[RankActor] = (
            ray.remote(RankActor)
            .options(
                num_cpus=0 if on_gpu else 1,
                num_gpus=1 if on_gpu else 0,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self._group, placement_group_bundle_index=bundle
                ),
            )
            .remote()
        )
        return handle

    def _check_versions(self, facts: list[HostFacts]) -> None:
        assert self._own is not None
        for other in facts:
            if other.version != self._own.version:
                raise EngineDeadError(
                    f"host {other.address} has tandem {other.version} and this host has "
                    f"{self._own.version}; all hosts of an engine need the same"
                )
            if other.version == UNKNOWN_VERSION and other.node_id != self._own.node_id:
                raise EngineDeadError(
                    f"it is unknown whether host {other.address} has the same tandem as this host, "
                    f"as both run sources that are not installed; install the same release on "
                    f"all hosts of an engine"
                )

    def _link(self, facts: HostFacts, key: LinkKey) -> HostLink | None:
        assert self._own is not None
        if (facts.node_id, facts.sharing) == (self._own.node_id, self._own.sharing):
            return None
        return HostLink(core_address=self.address, host_address=facts.address, key=key)

    def close(self) -> None:
        """Gives the reservation back. Idempotent."""
        if not ray.is_initialized() or self._own is None:
            return
        with suppress(ray.exceptions.RayError, ConnectionError, ValueError):
            for actor in self._actors:
                ray.kill(actor)
            if self._group is not None:
                remove_placement_group(self._group)
        self._actors, self._group, self._own = [], None, None
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Checks that the cluster answers; Ray itself would go on trying for minutes. Raises OSError or
    ValueError.
    """
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        raise ValueError("an address is host:port, of the head's own port, without a scheme")
    with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S):
        return
