"""Which chunks are ready when: steps announced, layers that come late, shares of a process."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_caches import layout

from kv_transfer.errors import KVTransferError
from kv_transfer.metadata import ExportMeta, SendMeta, StepProgress
from kv_transfer.producer.send_transfer import SendTransfer
from kv_transfer.transports.base import ProducerTransfer
from kv_transfer.transports.open_pull import OpenPull, PullTerms
from kv_transfer.wire.chunk_grid import ChunkGrid

NONE_YET = StepProgress(0, 0)
SHAPE = layout(num_layers=2)


class Heard(ProducerTransfer):
    """A transport that only hears what is ready."""

    blocks_are_free = True

    def __init__(self) -> None:
        self.indices: list[int] = []
        self.num_narrowed = 0

    def ready(self, indices: Sequence[int]) -> None:
        self.indices += indices

    def narrow(self) -> None:
        self.num_narrowed += 1

    def open_pull(self, terms: PullTerms) -> OpenPull:
        raise NotImplementedError

    def close_pull(self, pull: OpenPull) -> None:
        raise NotImplementedError

    def end(self, then: Callable[[], None]) -> None:
        then()


def grid_from(held: int, num_tokens: int, per_chunk: int = 2) -> ChunkGrid:
    return ChunkGrid.of(SHAPE, per_chunk * SHAPE.page_bytes, held, num_tokens)


def exported(
    num_tokens: int, held: int = 0, per_chunk: int = 2, process: int = 0, num_processes: int = 1
) -> SendTransfer:
    """Returns an export, of which a puller that is here already has `held` tokens."""
    meta = ExportMeta("0" * 32, 0, num_tokens)
    share = (process, num_processes)
    transfer = SendTransfer(meta, SHAPE, per_chunk * SHAPE.page_bytes, share)
    transfer.parts = {0: Heard()}
    if held:
        transfer.narrow(grid_from(held, num_tokens, per_chunk))
    return transfer


def announce(
    transfer: SendTransfer, step_id: int, tokens: range, progress: StepProgress = NONE_YET
) -> None:
    block_ids = list(range(100, 100 + SHAPE.groups[0].num_blocks_for(tokens.stop)))
    transfer.announce(
        SendMeta("0" * 32, 0, step_id, tokens.start, len(tokens), (block_ids,)), progress
    )


def ready(transfer: SendTransfer) -> list[tuple[int, int]]:
    """Returns (layer, span) of what has become ready since the last call."""
    heard = transfer.parts[0]
    assert isinstance(heard, Heard)
    places = [transfer.grid.position(index) for index in heard.indices]
    heard.indices = []
    for place in places:
        assert len(transfer.blocks_of(place)) == len(transfer.grid.blocks_of(place))
    return [(place.layer, place.span) for place in places]


def test_layers_of_a_step_become_ready_one_by_one() -> None:
    transfer = exported(64)
    announce(transfer, 5, range(64))
    assert ready(transfer) == []
    transfer.advance(StepProgress(5, 1))
    assert ready(transfer) == [(0, 0), (0, 1)]
    transfer.advance(StepProgress(5, 2))
    assert ready(transfer) == [(1, 0), (1, 1)]


def test_progress_may_come_before_the_announcement() -> None:
    transfer = exported(64)
    announce(transfer, 5, range(64), StepProgress(5, 1))
    assert ready(transfer) == [(0, 0), (0, 1)]
    transfer.advance(StepProgress(6, 0))
    assert ready(transfer) == [(1, 0), (1, 1)]


def test_a_chunk_that_two_steps_share_waits_for_the_second() -> None:
    transfer = exported(64)
    announce(transfer, 1, range(40))
    announce(transfer, 2, range(40, 64))
    transfer.advance(StepProgress(1, 2))
    assert ready(transfer) == [(0, 0), (1, 0)]
    transfer.advance(StepProgress(2, 1))
    assert ready(transfer) == [(0, 1)]
    transfer.advance(StepProgress(3, 0))
    assert ready(transfer) == [(1, 1)]


def test_a_cached_prefix_is_ready_at_once_and_held_tokens_never() -> None:
    transfer = exported(64, held=32)
    announce(transfer, -1, range(48))
    assert ready(transfer) == []
    announce(transfer, 1, range(48, 64))
    transfer.advance(StepProgress(1, 2))
    assert ready(transfer) == [(0, 1), (1, 1)]


def test_the_end_of_a_request_makes_up_for_lost_progress() -> None:
    transfer = exported(50)
    announce(transfer, 7, range(50))
    announce(transfer, -1, range(50))
    assert ready(transfer) == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize("tokens", [range(20, 40), range(8, 40)], ids=str)
def test_gaps_and_repeats_are_refused(tokens: range) -> None:
    transfer = exported(64)
    announce(transfer, 1, range(16))
    with pytest.raises(ValueError, match="16 tokens were announced"):
        announce(transfer, 2, tokens)


@settings(max_examples=60)
@given(
    num_tokens=st.integers(1, 150),
    held=st.integers(0, 60),
    cached=st.integers(0, 60),
    step=st.integers(1, 70),
    per_chunk=st.integers(1, 5),
    num_processes=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_every_chunk_once_and_never_before_its_tokens(
    num_tokens: int,
    held: int,
    cached: int,
    step: int,
    per_chunk: int,
    num_processes: int,
    seed: int,
) -> None:
    """Announcements and progress in any order that steps allow, some progress lost."""
    rng = random.Random(seed)
    cached = min(cached, num_tokens - 1)
    shares = [exported(num_tokens, held, per_chunk, p, num_processes) for p in range(num_processes)]
    staged: list[tuple[int, int]] = []
    computed = [cached, cached]
    progress = NONE_YET

    def collect() -> None:
        for transfer in shares:
            for layer, span in ready(transfer):
                stop = transfer.grid.groups[0].blocks_of(span).stop * SHAPE.groups[0].block_size
                assert min(stop, num_tokens) <= computed[layer]
                staged.append((layer, span))

    for transfer in shares:
        if cached:
            announce(transfer, -1, range(cached))
    for step_id, first in enumerate(range(cached, num_tokens, step), start=1):
        tokens = range(first, min(first + step, num_tokens))
        for transfer in shares:
            announce(transfer, step_id, tokens, progress)
        for layer in range(2):
            computed[layer] = tokens.stop
            if rng.random() < 0.5:
                progress = StepProgress(step_id, layer + 1)
                for transfer in shares:
                    transfer.advance(progress)
            collect()
    for transfer in shares:
        announce(transfer, -1, range(num_tokens), progress)
    collect()
    grid = shares[0].grid
    assert sorted(staged) == [grid.position(index)[1:] for index in grid.stripe(0, 1)]


def test_the_first_pull_says_what_nobody_wants() -> None:
    """Nobody is told again of what was ready before, and a later pull cannot want more."""
    transfer = exported(128)
    heard = transfer.parts[0]
    assert isinstance(heard, Heard)
    announce(transfer, 1, range(128))
    transfer.advance(StepProgress(1, 1))
    assert ready(transfer) == [(0, 0), (0, 1), (0, 2), (0, 3)]
    transfer.narrow(grid_from(70, 128))
    assert heard.num_narrowed == 1
    assert list(transfer.own_chunks()) == [2, 3, 6, 7]
    transfer.advance(StepProgress(1, 2))
    assert ready(transfer) == [(1, 2), (1, 3)]
    transfer.narrow(grid_from(96, 128))
    assert heard.num_narrowed == 1
    with pytest.raises(KVTransferError, match="another pull"):
        transfer.narrow(grid_from(40, 128))
