"""One export on the producer's side: which of its chunks are computed, and for how long it is kept.

    prompt  |─── computed ───|─── announced ───|──────|
              per layer        a step that is running

    1. `announce`   a step (or a cached prefix) will have computed tokens up to here
    2. `advance`    layers of that step are done: whole chunks become ready, layer by layer, and
                    the transports learn of them
    3. `narrow`     the first pull has come: what its puller holds nothing wants

A chunk becomes ready when all of its tokens are computed, so a chunk that two steps share waits
for the second.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from kv_transfer.errors import KVTransferError
from kv_transfer.layout import KVLayout
from kv_transfer.metadata import ExportMeta, SendMeta, StepProgress
from kv_transfer.transports.base import Export, ProducerTransfer
from kv_transfer.wire.chunk_grid import ChunkGrid

_COMPUTED_ALREADY = -1


@dataclass(slots=True)
class _Lane:
    """One layer of one group, on its way to be ready span by span."""

    group: int
    layer: int
    """Within the group; `model_layer` is its number in the model."""
    model_layer: int
    next_span: int
    num_tokens: int = 0
    """That were computed in it when it was last looked at."""


class SendTransfer(Export):
    """One export, with what was computed of it and its lease.

    `share`: (number of this process, processes of its rank).
    """

    def __init__(
        self, meta: ExportMeta, layout: KVLayout, chunk_bytes: int, share: tuple[int, int]
    ) -> None:
        super().__init__(meta, layout, chunk_bytes, share)
        self.parts: dict[int, ProducerTransfer] = {}
        """Parts by `TransportId`."""
        self.lease_ends_at = 0.0
        self.lease_capped_at = math.inf
        """Monotonic seconds at which it ends, pulled or not; known once all is computed."""
        self.num_bytes_sent = 0
        self.num_pulls_seen = 0
        self._is_narrowed = False
        self._computed = 0
        """Leading tokens that every layer has."""
        self._steps: deque[tuple[int, int]] = deque()
        """Pairs (step, tokens computed when it is done) of steps that may still be running."""
        self._lanes = [
            _Lane(group, layer, model_layer, self.grid.groups[group].first_span)
            for group, kind in enumerate(layout.groups)
            for layer, model_layer in enumerate(kind.layers)
        ]
        self._lanes.sort(key=lambda lane: lane.model_layer)

    @property
    def is_computed(self) -> bool:
        """Returns whether every layer has all tokens."""
        return not self._lanes

    @property
    def blocks_are_free(self) -> bool:
        """Returns whether no transport needs the blocks."""
        return all(part.blocks_are_free for part in self.parts.values())

    def announce(self, send: SendMeta, progress: StepProgress) -> None:
        """Raises ValueError for tokens that leave a gap, or are computed twice: their first KV
        may be on its way already, from blocks that changed meanwhile."""
        stop = send.first_token + send.num_tokens
        self.block_ids = send.block_ids
        if send.step_id == _COMPUTED_ALREADY:
            self._computed = max(self._computed, stop)
        elif send.first_token != self._announced:
            raise ValueError(
                f"step {send.step_id} begins at token {send.first_token}, but "
                f"{self._announced} tokens were announced before"
            )
        else:
            self._steps.append((send.step_id, stop))
        self.advance(progress)

    def advance(self, progress: StepProgress) -> None:
        """Hands chunks that became ready to the transports."""
        if not self._lanes:
            return
        last_layer = self._lanes[-1].model_layer
        while self._steps and _has_done(progress, self._steps[0][0], last_layer):
            self._computed = max(self._computed, self._steps.popleft()[1])
        ready: list[int] = []
        for lane in self._lanes:
            num_tokens = self._computed_in(lane.model_layer, progress)
            if num_tokens > lane.num_tokens:
                lane.num_tokens = num_tokens
                ready += self._newly_ready(lane)
        if self._computed >= self.num_tokens:
            self._lanes = []
        if ready:
            for part in self.parts.values():
                part.ready(ready)

    def narrow(self, grid: ChunkGrid) -> None:
        """A pull wants `grid`. The first one says what nothing wants; all pulls of a transfer hold
        the same. Raises KVTransferError for one that wants more than the first."""
        if not self._is_narrowed:
            self._is_narrowed = True
            if grid is not self.grid:  # Grids of the same chunks are mostly one object.
                self.grid = grid
                for part in self.parts.values():
                    part.narrow()
        for wanted, kept in zip(grid.groups, self.grid.groups, strict=True):
            if wanted.first_block < kept.first_block:
                raise KVTransferError("tokens are asked for that another pull was said to hold")

    @property
    def _announced(self) -> int:
        return self._steps[-1][1] if self._steps else self._computed

    def _computed_in(self, layer: int, progress: StepProgress) -> int:
        tokens = self._computed
        for step_id, stop in self._steps:
            if not _has_done(progress, step_id, layer):
                break
            tokens = max(tokens, stop)
        return tokens

    def _newly_ready(self, lane: _Lane) -> range:
        wanted = self.grid.groups[lane.group].wanted_spans
        stop = min(self._spans_within(lane.group, lane.num_tokens), wanted.stop)
        spans = range(max(lane.next_span, wanted.start), stop)
        if not spans:
            return range(0)
        lane.next_span = spans.stop
        found = self.grid.striped(lane.group, lane.layer, spans, *self.share)
        if found:
            self.layer_times.ready(lane.model_layer)
        return found

    def _spans_within(self, group: int, num_tokens: int) -> int:
        """Returns behind which wanted span this many leading tokens end; the last may be short."""
        grid = self.grid.groups[group]
        if num_tokens >= self.num_tokens:
            return grid.wanted_spans.stop
        return num_tokens // (grid.blocks_per_chunk * self._layout.groups[group].block_size)


def _has_done(progress: StepProgress, step_id: int, layer: int) -> bool:
    """Returns whether `layer` of step `step_id` is in the cache, as far as `progress` tells. Steps
    run in order, so a later step's progress says that all earlier ones are done."""
    if step_id == progress.step_id:
        return layer < progress.num_layers_done
    return step_id < progress.step_id
