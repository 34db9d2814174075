"""The job of one stream of a transfer says what it shall bring."""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.layout import PageShape
from kv_transfer.metadata import RecvMeta


@dataclass(frozen=True, slots=True)
class PullSource:
    """One rank of the peer, and what our `rank` of `tp_size` takes from it.

    Attributes:
        peer_rank: The rank that is asked.
        share: By group, see `KVLayout.share`.
    """

    rank: int
    tp_size: int
    peer_rank: int
    share: tuple[PageShape, ...]


@dataclass(frozen=True, slots=True)
class FetchJob:
    """One stream shall bring this: chunks with index i % `num_streams` == `stream`."""

    meta: RecvMeta
    source: PullSource
    stream: int
    num_streams: int
