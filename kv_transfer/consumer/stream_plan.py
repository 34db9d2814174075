"""How a transfer is cut into streams: from which process of which rank each chunk is pulled."""

from __future__ import annotations

from kv_transfer.config import KVTransferConfig
from kv_transfer.layout import KVLayout
from kv_transfer.metadata import RecvMeta
from kv_transfer.transports.fetch_job import FetchJob, PullSource
from kv_transfer.wire.chunk_grid import ChunkGrid, num_streams_for, streams_of


def plan_streams(
    meta: RecvMeta, config: KVTransferConfig, ours: KVLayout, rank: int, index: int
) -> list[tuple[FetchJob, str]]:
    """Returns the streams of process `index` of `rank`, from every rank of the peer that holds what
    we need, and the address of each."""
    jobs = []
    for peer_rank, addresses in enumerate(meta.peer.endpoints):
        share = meta.peer.layout.share(peer_rank, rank, ours.tp_size)
        if not any(page.num_bytes for page in share):
            continue
        source = PullSource(rank, ours.tp_size, peer_rank, share)
        num_streams = _num_streams(meta, config, source, len(addresses))
        for number in streams_of(num_streams, index, config.num_processes):
            job = FetchJob(meta, source, number, num_streams)
            jobs.append((job, addresses[number % len(addresses)]))
    return jobs


def _num_streams(
    meta: RecvMeta, config: KVTransferConfig, source: PullSource, sender_processes: int
) -> int:
    chunk_bytes = config.chunk_bytes
    grid = ChunkGrid.of(meta.peer.layout, chunk_bytes, meta.first_token, meta.num_tokens)
    num_bytes = sum(
        group.num_layers * (group.num_blocks - group.first_block) * page.num_bytes
        for group, page in zip(grid.groups, source.share, strict=True)
    )
    return num_streams_for(config.num_streams, num_bytes, chunk_bytes, sender_processes)
