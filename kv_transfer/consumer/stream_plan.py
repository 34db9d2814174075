"""How a transfer is cut into streams: from which process of which rank each chunk is pulled."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm

from kv_transfer.config import KVTransferConfig
from kv_transfer.layout import KVLayout
from kv_transfer.metadata import RecvMeta
from kv_transfer.stages import ALL_LAYERS, positions_of
from kv_transfer.transports.fetch_job import FetchJob, PullSource
from kv_transfer.wire.chunk_grid import ChunkGrid, num_streams_for, streams_of


@dataclass(frozen=True, slots=True)
class PlannedStreams:
    """The part of a transfer that one of our processes has from one process of the peer.

    Attributes:
        job: All of it, as one stream.
        num_streams: Of the transfer, when it is cut into as many as the settings want.
        num_addresses: Processes of the peer's rank.
    """

    job: FetchJob
    num_streams: int
    address: str
    num_addresses: int

    def only(self, job: FetchJob) -> PlannedStreams:
        """Returns the plan for one of its streams alone."""
        return replace(self, job=job)

    def cut(self) -> list[FetchJob]:
        """Returns the same part as several streams: together they carry the chunks of `job`."""
        whole = self.job
        numbers = range(whole.stream, self.num_streams, whole.num_streams)
        return [FetchJob(whole.meta, whole.source, i, self.num_streams) for i in numbers]


def plan_streams(
    meta: RecvMeta, config: KVTransferConfig, ours: KVLayout, rank: int, index: int
) -> list[PlannedStreams]:
    """Returns what process `index` of `rank` has from every process of every rank of the peer that
    holds what we need. Other processes of the rank may cut theirs or not, as they like."""
    planned = []
    for peer_rank, addresses in enumerate(meta.peer.endpoints):
        source = _source(meta.peer.layout, peer_rank, ours, rank)
        layout = meta.peer.layout.of_rank(peer_rank)
        if not _has_any(layout, source):
            continue
        num_streams = _num_streams(meta, config, layout, source, len(addresses))
        # Stream i belongs to process i % ours and is asked of process i % theirs. Streams that
        # agree in both are one, unless so few are wanted that some processes would have none.
        num_pairs = lcm(len(addresses), config.num_processes)
        joined = num_pairs if num_streams % num_pairs == 0 else num_streams
        for number in streams_of(joined, index, config.num_processes):
            job = FetchJob(meta, source, number, joined)
            address = addresses[number % len(addresses)]
            planned.append(PlannedStreams(job, num_streams, address, len(addresses)))
    return planned


def _source(theirs: KVLayout, peer_rank: int, ours: KVLayout, rank: int) -> PullSource:
    """Returns what our rank has of a rank of the peer. Either may have a stage's layers alone; the
    last of ours takes what the peer has behind them, too, which is a drafter's, and drops it."""
    there, here = theirs.first_layer_on(peer_rank), ours.first_layer_on(rank)
    num_layers = theirs.of_rank(peer_rank).num_layers
    later = [start for start in ours.stage_starts if start > here]
    stop = later[0] - there if later else ALL_LAYERS.stop
    layers = range(max(0, here - there), stop)
    if layers.start == 0 and stop >= num_layers:
        layers = ALL_LAYERS
    share = theirs.share(peer_rank, rank % ours.tp_size, ours.tp_size)
    return PullSource(rank % ours.tp_size, ours.tp_size, peer_rank, share, layers, here)


def _has_any(theirs: KVLayout, source: PullSource) -> bool:
    pages = zip(theirs.groups, source.share, strict=True)
    return any(page.num_bytes and positions_of(g.layers, source.layers) for g, page in pages)


def _num_streams(
    meta: RecvMeta,
    config: KVTransferConfig,
    theirs: KVLayout,
    source: PullSource,
    sender_processes: int,
) -> int:
    chunk_bytes = config.chunk_bytes
    grid = ChunkGrid.of(theirs, chunk_bytes, meta.first_token, meta.num_tokens)
    layers = [positions_of(group.layers, source.layers) for group in theirs.groups]
    num_bytes = sum(
        len(wanted) * (group.num_blocks - group.first_block) * page.num_bytes
        for group, page, wanted in zip(grid.groups, source.share, layers, strict=True)
    )
    return num_streams_for(config.num_streams, num_bytes, chunk_bytes, sender_processes)
