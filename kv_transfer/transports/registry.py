"""The transports there are: the only list. A new one is a folder here, an id, and a line in each
function."""

from __future__ import annotations

from kv_transfer.config import KVTransferConfig, TransportName
from kv_transfer.layout import KVLayout
from kv_transfer.memory.cache_view import KVCacheView
from kv_transfer.transports.base import ConsumerTransport, ExportOwner, ProducerTransport
from kv_transfer.transports.cuda_ipc.consumer import CudaIpcConsumer
from kv_transfer.transports.cuda_ipc.producer import CudaIpcProducer
from kv_transfer.transports.nixl.consumer import NixlConsumer
from kv_transfer.transports.nixl.environment import is_tried
from kv_transfer.transports.nixl.producer import NixlProducer
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
    names = transport_names(config, cache)
    found: list[ProducerTransport] = []
    for name in names:
        match name:
            case "nixl":
                found.append(NixlProducer(config, layout, cache, owner))
            case "cuda_ipc":
                found.append(CudaIpcProducer(config, cache, owner))
            case "stream":
                waits = len(names) > 1
                found.append(StreamProducer(config, layout, rank, cache, owner, waits))
    return found


def transport_names(config: KVTransferConfig, cache: KVCacheView) -> tuple[TransportName, ...]:
    """Returns the transports of a transfer process, in order of preference. If NIXL
    and the stream are to be compared, it is before the stream."""
    names = config.transports_for(cache.device.is_gpu)
    return (*names[:-1], "nixl", names[-1]) if is_tried(config) else names


def consumer_transports(config: KVTransferConfig, cache: KVCacheView) -> list[ConsumerTransport]:
    """Returns those by which a transfer process pulls, in order of preference."""
    found: list[ConsumerTransport] = []
    for name in transport_names(config, cache):
        match name:
            case "nixl":
                found.append(NixlConsumer(config, cache, has_to_win=not config.names_nixl))
            case "cuda_ipc":
                found.append(CudaIpcConsumer(cache))
            case "stream":
                found.append(StreamConsumer(cache))
    return found
