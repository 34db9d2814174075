"""The transports there are: the only list. A new one is a folder here, an id, and a line in each
function."""

from __future__ import annotations

from kv_transfer.config import KVTransferConfig
from kv_transfer.layout import KVLayout
from kv_transfer.memory.cache_view import KVCacheView
from kv_transfer.transports.base import ConsumerTransport, ExportOwner, ProducerTransport
from kv_transfer.transports.cuda_ipc.consumer import CudaIpcConsumer
from kv_transfer.transports.cuda_ipc.producer import CudaIpcProducer
from kv_transfer.transports.stream.consumer import StreamConsumer
from kv_transfer.transports.stream.producer import StreamProducer


def producer_transports(
    config: KVTransferConfig,
    layout: KVLayout,
    rank: int,
    cache: KVCacheView,
    owner: ExportOwner,
) -> list[ProducerTransport]:
    """Returns those that a transfer process of `rank` serves."""
    transports: list[ProducerTransport] = []
    if config.shares_memory(cache.device.is_gpu):
        transports.append(CudaIpcProducer(config, cache, owner))
    waits = bool(transports)
    transports.append(StreamProducer(config, layout, rank, cache, owner, waits_for_pulls=waits))
    return transports


def consumer_transports(config: KVTransferConfig, cache: KVCacheView) -> list[ConsumerTransport]:
    """Returns those by which a transfer process pulls, in order of preference."""
    transports: list[ConsumerTransport] = []
    if config.shares_memory(cache.device.is_gpu):
        transports.append(CudaIpcConsumer(cache))
    transports.append(StreamConsumer(cache))
    return transports
