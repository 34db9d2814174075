"""Makes the two halves of a connector. Imports gRPC only where it is used."""

from __future__ import annotations

from collections.abc import Sequence

from host.process_host import ProcessHost
from kv_transfer.base import KVCacheHandle, KVConnectorScheduler, KVConnectorWorker
from kv_transfer.config import KVTransferConfig
from kv_transfer.layout import KVLayout


def create_scheduler_connector(
    config: KVTransferConfig,
    engine_id: str,
    epoch: int,
    layout: KVLayout,
    handles: list[KVCacheHandle],
    hosts: Sequence[ProcessHost] = (),
) -> KVConnectorScheduler:
    """Starts the transfer processes of the engine and waits until they are ready.

    `handles`: one for each rank, in rank order. `hosts`: where each rank runs, and so its transfer
    processes; empty: all on this host. The calling thread must outlive the connector.

    Raises:
        KVTransferError: A transfer process did not start; says which and why.
    """
    from kv_transfer.control.scheduler import GrpcConnectorScheduler

    return GrpcConnectorScheduler(config, engine_id, epoch, layout, handles, hosts)


def create_worker_connector(
    config: KVTransferConfig | None, engine_id: str, rank: int
) -> KVConnectorWorker:
    """Only producers have something to say: a consumer's KV arrives without its workers."""
    if config is None or config.kv_role == "kv_consumer":
        from kv_transfer.no_connector import NoConnectorWorker

        return NoConnectorWorker(rank)
    from kv_transfer.producer.worker import GrpcConnectorWorker

    return GrpcConnectorWorker(config, engine_id, rank)
