"""One transfer on the producer's side, as one transfer process sees it.

    prompt  |─── held by the puller ───|── staged ──|── computed ──|── announced ──|──────|
                                                     per layer      a step that is running

    1. `announce`   a step (or a cached prefix) will have computed tokens up to here
    2. `advance`    layers of that step are done: whole chunks become ready, layer by layer
    3. `pop_ready` / `add_staged`   by the sender, as staging memory allows
       `name_ready`                 or at once, if pullers read the blocks themselves
       `pop_ready_for` / `was_sent_straight`   a pull that waits gets a chunk straight from the
                                    blocks; until it is sent it is in `straight`
    4. `Pull`s read staged chunks in the order in which they were staged

A chunk becomes ready when all of its tokens are computed, so a chunk that two steps share waits
for the second.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from kv_transfer.layer_times import LayerTimes
from kv_transfer.layout import BlockIds, KVLayout, PageShape
from kv_transfer.memory.staging import StagedChunk
from kv_transfer.metadata import OfferMeta, SendMeta, StepProgress
from kv_transfer.transports.cuda_ipc.read_leases import Hold
from kv_transfer.wire.chunk_grid import ChunkGrid, ChunkPlace
from kv_transfer.wire.out_message import OutMessage
from kv_transfer.wire.pull_wish import PullWish

_COMPUTED_ALREADY = -1
_MOST_NAMED = 128
"""Chunks of which one message says where they lie."""


class SentChunk:
    """A staged chunk, and how many pulls have carried it. `chunk` None: its blocks are named to
    pullers that read them themselves."""

    __slots__ = ("chunk", "index", "num_sent")

    def __init__(self, index: int, chunk: StagedChunk | None) -> None:
        self.index = index
        self.chunk = chunk
        self.num_sent = 0


class ZeroCopyChunk:
    """A chunk on its way from the blocks to a socket. `staged` is the copy that was made after
    all, because the peer is slow; `entry` exists once nobody reads the blocks any more."""

    __slots__ = ("entry", "index", "message", "place", "since", "staged")

    def __init__(self, index: int, place: ChunkPlace) -> None:
        self.index = index
        self.place = place
        self.since = time.monotonic()
        self.message: OutMessage | None = None
        self.staged: StagedChunk | None = None
        self.entry: SentChunk | None = None


@dataclass(slots=True)
class _Lane:
    """One layer of one group, on its way to be ready span by span."""

    group: int
    layer: int
    """Within the group; `model_layer` is its number in the model."""
    model_layer: int
    next_span: int


class SendTransfer:
    """Readiness and staged chunks of one transfer. `process` of `num_processes` of its rank."""

    def __init__(
        self,
        offer: OfferMeta,
        layout: KVLayout,
        chunk_bytes: int,
        process: int,
        num_processes: int,
    ) -> None:
        self.transfer_id = offer.transfer_id
        self.attempt = offer.attempt
        self.num_tokens = offer.num_tokens
        self.grid = ChunkGrid.of(layout, chunk_bytes, offer.num_tokens_held, offer.num_tokens)
        self.block_ids: BlockIds = ()
        self.staged: list[SentChunk] = []
        """In the order in which they were staged, which is the order in which they are sent."""
        self.straight: set[ZeroCopyChunk] = set()
        self.gone: set[int] = set()
        """Chunks that went straight to their puller: nothing is kept of them."""
        self.pulls: set[Pull] = set()
        self.lease_ends_at = 0.0
        self.stage_after = 0.0
        """Until then nothing is staged for a puller that is not here."""
        self.num_bytes_sent = 0
        self.num_pulls_seen = 0
        self.layer_times = LayerTimes(layout.num_layers)
        self._has_told = False
        self.needs_blocks = False
        """Pullers are told where blocks lie."""
        self.hold: Hold | None = None
        """From the first time that they were."""
        self.end_reason = ""
        """Not empty once the transfer has ended: pulls stop with it."""
        self._layout = layout
        self._share = (process, num_processes)
        self._num_unstaged = sum(1 for _ in self.grid.stripe(*self._share))
        self._computed = 0
        """Leading tokens that every layer has."""
        self._steps: deque[tuple[int, int]] = deque()
        """(step, tokens computed when it is done), steps that may still be running."""
        self._lanes = [
            _Lane(group, layer, model_layer, self.grid.groups[group].first_span)
            for group, kind in enumerate(layout.groups)
            for layer, model_layer in enumerate(kind.layers)
        ]
        self._lanes.sort(key=lambda lane: lane.model_layer)
        self._ready: deque[ChunkPlace] = deque()

    @property
    def is_staged(self) -> bool:
        return self._num_unstaged == 0

    def take_staged(self) -> bool:
        """True once, when all chunks have left the blocks."""
        is_news = self.is_staged and not self.needs_blocks and not self._has_told
        self._has_told |= is_news
        return is_news

    @property
    def has_ready(self) -> bool:
        return bool(self._ready)

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
        """Queues all chunks that became ready."""
        if self.is_staged:
            return
        last_layer = self._lanes[-1].model_layer
        while self._steps and _has_done(progress, self._steps[0][0], last_layer):
            self._computed = max(self._computed, self._steps.popleft()[1])
        for lane in self._lanes:
            self._queue_ready(lane, self._computed_in(lane.model_layer, progress))

    def pop_ready(self) -> ChunkPlace:
        """Returns what to stage next; must then be given to `add_staged`."""
        return self._ready.popleft()

    def blocks_of(self, place: ChunkPlace) -> list[int]:
        """Returns the physical blocks of a ready chunk."""
        blocks = self.grid.blocks_of(place)
        return self.block_ids[place.group][blocks.start : blocks.stop]

    @property
    def next_ready(self) -> ChunkPlace:
        """What `pop_ready` would return."""
        return self._ready[0]

    def name_ready(self) -> bool:
        """Chunks that are ready need no copy if every puller that is here reads blocks itself:
        then they are told of them. Whether that is so."""
        if not self.pulls or not all(pull.wish.direct for pull in self.pulls):
            return False
        while self._ready:
            self.add_staged(self.grid.index(self._ready.popleft()), None)
        return True

    def pop_ready_for(self, pull: Pull) -> ZeroCopyChunk | None:
        """A ready chunk that this pull wants and may have straight from the blocks."""
        if not pull.goes_straight:
            return None
        for i, place in enumerate(self._ready):
            index = self.grid.index(place)
            if pull.wants(index):
                del self._ready[i]
                pull.forget(index)
                straight = ZeroCopyChunk(index, place)
                self.straight.add(straight)
                return straight
        return None

    def put_back(self, straight: ZeroCopyChunk) -> None:
        """It was not sent: it has to be staged now."""
        self.straight.discard(straight)
        self._ready.appendleft(straight.place)

    def was_sent_straight(self, straight: ZeroCopyChunk) -> None:
        """It has left the blocks."""
        self.gone.add(straight.index)
        self._num_unstaged -= 1
        self._saved(straight.place)

    def is_pulled_straight(self, slow_s: float) -> bool:
        """Whether pulls that keep up take what is ready: then nothing needs to be staged. A peer
        that takes longer than `slow_s` for a chunk does not keep up."""
        if not any(pull.goes_straight for pull in self.pulls):
            return False
        horizon = time.monotonic() - slow_s
        return all(straight.since > horizon for straight in self.straight)

    def add_staged(self, index: int, chunk: StagedChunk | None) -> SentChunk:
        """`chunk` None: the blocks must stay as they are until the transfer has ended."""
        self.needs_blocks |= chunk is None
        entry = SentChunk(index, chunk)
        self.staged.append(entry)
        self._num_unstaged -= 1
        self._saved(self.grid.position(index))
        for pull in self.pulls:
            if pull.wants(index):
                pull.wake.set()
        return entry

    def end(self, reason: str) -> None:
        self.end_reason = reason
        if self.hold is not None:
            self.hold.let_go()
        self._ready.clear()
        for pull in self.pulls:
            pull.wake.set()

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

    def _queue_ready(self, lane: _Lane, num_tokens: int) -> None:
        spans = range(lane.next_span, self._spans_within(lane.group, num_tokens))
        if not spans:
            return
        for index in self.grid.striped(lane.group, lane.layer, spans, *self._share):
            self._ready.append(self.grid.position(index))
            self.layer_times.ready(lane.model_layer)
            self._wake_straight(index)
        lane.next_span = spans.stop

    def _spans_within(self, group: int, num_tokens: int) -> int:
        """Returns behind which wanted span so many leading tokens end; the last may be short."""
        grid = self.grid.groups[group]
        if num_tokens >= self.num_tokens:
            return grid.wanted_spans.stop
        return num_tokens // (grid.blocks_per_chunk * self._layout.groups[group].block_size)

    def _saved(self, place: ChunkPlace) -> None:
        self.layer_times.saved(self._layout.groups[place.group].layers[place.layer])

    def _wake_straight(self, index: int) -> None:
        for pull in self.pulls:
            if pull.goes_straight and pull.wants(index):
                pull.wake.set()


class Pull:
    """One PullKV call that reads from a transfer. `wake` is set when there is more to see."""

    def __init__(
        self,
        transfer: SendTransfer,
        wish: PullWish,
        share: tuple[PageShape, ...],
        num_pullers: tuple[int, ...],
        grid: ChunkGrid,
        goes_straight: bool = False,
    ) -> None:
        """`share`: what it takes of each block; `num_pullers`: the calls that carry each chunk,
        this one included; both by group. `grid`: that of its tokens."""
        self.transfer = transfer
        self.wish = wish
        self.goes_straight = goes_straight
        """It alone wants its chunks, and as they lie in the blocks."""
        self.share = share
        self._num_pullers = num_pullers
        self.grid = grid
        self.wake = asyncio.Event()
        self.is_writing = False
        self._wanted = {
            index
            for index in grid.stripe_of(share, wish.stream, wish.num_streams)
            if not wish.repeat or index in wish.repeat
        }
        self._cursor = 0

    def wants(self, index: int) -> bool:
        return index in self._wanted

    def wants_any(self, indices: set[int]) -> bool:
        return not self._wanted.isdisjoint(indices)

    def forget(self, index: int) -> None:
        """It has got it."""
        self._wanted.discard(index)

    def num_pullers_of(self, entry: SentChunk) -> int:
        """Returns how many calls carry this chunk."""
        return self._num_pullers[self.grid.position(entry.index).group]

    @property
    def is_complete(self) -> bool:
        return not self._wanted

    def staged(self) -> Iterator[SentChunk]:
        """Chunks of this stream that are staged and were not returned before."""
        chunks = self.transfer.staged
        while self._cursor < len(chunks):
            entry = chunks[self._cursor]
            self._cursor += 1
            if entry.index in self._wanted:
                self._wanted.discard(entry.index)
                yield entry

    def next_entries(self) -> list[SentChunk]:
        """One staged chunk, or as many that are only named as follow each other."""
        first = next(self.staged(), None)
        if first is None:
            return []
        found, chunks = [first], self.transfer.staged
        while found[-1].chunk is None and len(found) < _MOST_NAMED:
            if self._cursor == len(chunks) or chunks[self._cursor].chunk is not None:
                break
            entry = chunks[self._cursor]
            self._cursor += 1
            if entry.index in self._wanted:
                self._wanted.discard(entry.index)
                found.append(entry)
        return found


def _has_done(progress: StepProgress, step_id: int, layer: int) -> bool:
    """Whether `layer` of step `step_id` is in the cache, as far as `progress` tells. Steps run
    in order, so a later step's progress says that all earlier ones are done."""
    if step_id == progress.step_id:
        return layer < progress.num_layers_done
    return step_id < progress.step_id
