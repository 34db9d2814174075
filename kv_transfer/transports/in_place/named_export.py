"""The producer's side of transports that read blocks where they lie: pullers get the addresses.

    1. `open_pull`   a read lease is taken: the blocks stay as they are until the export has ended
    2. messages      name chunks as they become ready, many in one; all layers of a span of tokens
                     lie in the same blocks, so these come once
    3. `end`         the lease is taken back before anything learns of the end

Where all of an export was staged before the pull came, its blocks may serve another already: the
pull is refused with `NotServed`, and comes again over the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from edge.h2.out_message import OutMessage
from kv_transfer.errors import NotServed
from kv_transfer.transports.base import Export, ExportOwner, ProducerTransfer, ProducerTransport
from kv_transfer.transports.in_place.read_leases import ReadLease, ReadLeases
from kv_transfer.transports.open_pull import OpenPull, PullTerms
from kv_transfer.wire.chunk import HEADER, ChunkHeader, ChunkKind, encode_chunk, shape_code
from kv_transfer.wire.chunk_grid import ChunkPlace

_MOST_NAMED = 128
"""Chunks of which one message says where they lie."""


class NamingProducer(ProducerTransport):
    """Names blocks instead of sending them; subclasses say how a puller reaches these."""

    def __init__(self, chunk_bytes: int, owner: ExportOwner) -> None:
        self.leases = ReadLeases()
        self.owner = owner
        self.chunk_bytes = chunk_bytes

    def open(self, export: Export) -> NamedExport:
        return NamedExport(self, export)


class NamedExport(ProducerTransfer):
    """One export whose blocks are named to pullers.

    `named`: chunks that are ready, in the order in which they became so.
    """

    def __init__(self, producer: NamingProducer, export: Export) -> None:
        self.producer = producer
        self.export = export
        self.named: list[int] = []
        self.lease: ReadLease | None = None
        self._pulls: list[NamesPull] = []

    @property
    def blocks_are_free(self) -> bool:
        return self.lease is None

    def ready(self, indices: Sequence[int]) -> None:
        self.named += indices
        for pull in self._pulls:
            pull.wake.set()

    def narrow(self) -> None:
        return

    def open_pull(self, terms: PullTerms) -> OpenPull:
        if self.lease is None:
            if self.export.is_staged:
                raise NotServed("the blocks serve others already: all of it was copied out")
            self.lease = self.producer.leases.take()
        self.export.keeps_blocks = True
        pull = NamesPull(self, self.lease, terms)
        self._pulls.append(pull)
        return pull

    def close_pull(self, pull: OpenPull) -> None:
        self._pulls = [other for other in self._pulls if other is not pull]

    def end(self, then: Callable[[], None]) -> None:
        if self.lease is not None:
            self.lease.release()
        then()


class NamesPull(OpenPull):
    """A call whose messages name chunks."""

    def __init__(self, part: NamedExport, lease: ReadLease, terms: PullTerms) -> None:
        super().__init__(terms)
        self._part = part
        self._lease = lease
        self._cursor = 0

    def next_message(self) -> OutMessage | None:
        indices = self._next_named()
        if not indices:
            return None
        export, owner = self._part.export, self._part.producer.owner
        layers, spans = self.grid.layers_and_spans(indices)
        for group, layer in layers:
            export.saved(ChunkPlace(group, layer, 0))
        message = self._names(export, indices, sorted(spans))
        num_bytes = len(message) - HEADER.size

        def on_end(is_sent: bool) -> None:
            if is_sent:
                owner.was_sent(export, num_bytes)

        return OutMessage([message], on_end)

    def _next_named(self) -> list[int]:
        found: list[int] = []
        named = self._part.named
        while self._cursor < len(named) and len(found) < _MOST_NAMED:
            some = named[self._cursor : self._cursor + _MOST_NAMED - len(found)]
            self._cursor += len(some)
            found += self.take_all(some)
        return found

    def _names(self, export: Export, indices: list[int], spans: list[tuple[int, int]]) -> bytes:
        """Returns the message; `spans` are the pairs (group, span) that occur in these chunks."""
        words = [self._lease.slot, self._lease.number, len(indices), *indices]
        for group, span in spans:
            blocks = self.grid.groups[group].blocks_of(span)
            words += export.block_ids[group][blocks.start : blocks.stop]
        header = ChunkHeader(
            kind=ChunkKind.BLOCKS,
            transfer_id=export.transfer_id,
            attempt=export.attempt,
            shape=shape_code(*self.share),
            chunk_bytes=self._part.producer.chunk_bytes,
        )
        return encode_chunk(header, [np.array(words, "<u4")])
