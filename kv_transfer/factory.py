"""Makes the two halves of a connector. Imports gRPC only where it is used."""

from __future__ import annotations

from collections.abc import Sequence

from host.life_signs import LifeSigns
from host.process_host import ProcessHost
from kv_transfer.base import KVCacheHandle, KVConnectorScheduler, KVConnectorWorker
from kv_transfer.config import KVTransferConfig
from kv_transfer.connectors.no_connector import NoConnectorScheduler, NoConnectorWorker
from kv_transfer.layout import KVLayout


def create_scheduler_connector(
    config: KVTransferConfig | None,
    engine_id: str,
    epoch: int,
    layout: KVLayout,
    handles: list[KVCacheHandle],
    hosts: Sequence[ProcessHost] = (),
    signs: LifeSigns | None = None,
) -> KVConnectorScheduler:
    """Starts the transfer processes of the engine and waits until they are ready. Without a
    `config` the engine exchanges no KV, and there is nothing to start.

    `handles`: one for each rank, in rank order. `hosts`: where each rank runs, and so its transfer
    processes; empty: all on this host. `signs`: of the transfer processes; one that falls silent is
    started again. None: it is not noticed. The calling thread must outlive the connector.

    Raises:
        KVTransferError: A transfer process did not start; says which and why.
    """
    if config is None:
        return NoConnectorScheduler()
    from kv_transfer.control.scheduler import GrpcConnectorScheduler

    return GrpcConnectorScheduler(config, engine_id, epoch, layout, handles, hosts, signs)


def create_worker_connector(
    config: KVTransferConfig | None, engine_id: str, rank: int
) -> KVConnectorWorker:
    """Makes the half of one rank. Without a `config` it does nothing."""
    if config is None:
        return NoConnectorWorker(rank)
    if config.kv_role == "kv_consumer":
        from kv_transfer.consumer.worker import ConsumerConnectorWorker

        return ConsumerConnectorWorker(config, rank)
    from kv_transfer.producer.worker import GrpcConnectorWorker

    return GrpcConnectorWorker(config, engine_id, rank)
