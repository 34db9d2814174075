"""Rows of several tokens beside windows that roll: an oracle knows what every place of the cache
holds, and every token finds there what it reads, whoever computed it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contracts.request import Request
from engine.kv_cache.capacity import hit_stride, num_blocks_for, tokens_that_fit
from engine.kv_cache.group_manager import NULL_BLOCK
from engine.kv_cache.kv_cache_manager import KVCacheManager
from kv_transfer.layout import KVGroup
from kv_transfer.planes import Plane
from tests.engine.kv_cache.test_kv_cache_manager import make_request

STEP_TOKENS = 12


def rows(block_size: int, *, ratio: int = 1, window: int | None = None, align: int = 1) -> KVGroup:
    return KVGroup(
        layers=(0,),
        planes=(Plane("kv", 1, 4, replicated=True),),
        block_size=block_size,
        dtype="float32",
        window=window,
        compress_ratio=ratio,
        window_align=align,
    )


GROUPS = (
    rows(4, window=6),
    rows(8, ratio=4),
    rows(2, window=5, align=4),
    rows(16, ratio=8),
    rows(4, window=1, align=8),
)
"""As DeepSeek V4 has them, with a tenth of the tokens. A prefix is found at multiples of 16."""


def first_read(group: KVGroup, token: int) -> int:
    """Returns what kernels read: a window; and of open rows the row of this token, with the one
    before it where rows overlap."""
    if group.window is None:
        return 0
    if group.window_align > 1:
        overlap = group.window // group.window_align
        return max(0, (token // group.window_align - overlap) * group.window_align)
    return max(0, token - group.window + 1)


@dataclass
class Running:
    request: Request
    tables: list[list[int]] = field(default_factory=list)
    """Holds ids as a worker appended them."""
    num_scheduled: int = 0


@dataclass
class Step:
    running: Running
    start: int
    stop: int


class Machine:
    def __init__(self, num_blocks: int) -> None:
        self.manager = KVCacheManager(num_blocks, GROUPS, True, step_tokens=STEP_TOKENS)
        self.num_blocks = num_blocks
        self.held: dict[tuple[int, int], tuple[int, ...]] = {}
        """The tokens up to and with the last of a row, by (block, row in it)."""
        self.running: list[Running] = []
        self.steps: deque[Step] = deque()

    def start(self, tokens: list[int]) -> bool:
        request = make_request(tokens, f"r{len(self.running)}-{id(tokens)}")
        found, num_cached = self.manager.get_computed_blocks(request, request.num_tokens - 1)
        assert num_cached % hit_stride(GROUPS) == 0
        if not self.manager.can_allocate(request.num_tokens, found):
            return False
        blocks = self.manager.allocate_slots(request, request.num_tokens, found)
        assert blocks is not None
        tables = list(self.manager.get_block_ids(request.request_id))
        self.running.append(Running(request, tables, num_cached))
        return True

    def schedule(self, running: Running, count: int) -> None:
        request, first = running.request, running.num_scheduled
        stop = min(first + min(count, STEP_TOKENS), request.num_tokens)
        blocks = self.manager.get_blocks(request.request_id)
        is_prompt = first < blocks.num_prompt_tokens
        grown = (self.manager.extend if is_prompt else self.manager.grow)(blocks, stop)
        if grown is None:
            assert self.steps or not is_prompt, "what was promised is not there"
            return
        for group, ids in grown:
            running.tables[group] += ids
        running.num_scheduled = stop
        self.steps.append(Step(running, first, stop))

    def retire(self) -> None:
        """The oldest step runs, as late as it can, and is confirmed."""
        step = self.steps.popleft()
        request = step.running.request
        tokens = tuple(request.all_token_ids)
        for token in range(step.start, step.stop):
            for group, table in zip(GROUPS, step.running.tables, strict=True):
                ratio = group.compress_ratio
                at = place(group, table, token // ratio)
                if (token + 1) % ratio == 0 and at[0] >= 0:
                    self.held[at] = tokens[: token + 1]
        for token in range(step.start, step.stop):
            for group, table in zip(GROUPS, step.running.tables, strict=True):
                ratio = group.compress_ratio
                # What its own tokens leave for open rows, a step has at hand.
                stop = step.start if group.is_open else token + 1
                for row in range(first_read(group, token) // ratio, stop // ratio):
                    last = (row + 1) * ratio
                    assert self.held[place(group, table, row)] == tokens[:last], (group, row)
        self.manager.confirm(request, step.stop)

    def finish(self, running: Running) -> None:
        while any(step.running is running for step in self.steps):
            self.retire()
        self.running.remove(running)
        self.manager.free(running.request)

    def check(self) -> None:
        used = {
            block.block_id
            for one in self.running
            for block in self.manager.held_blocks(one.request.request_id)
        }
        free = self.manager.block_pool.num_free_blocks
        assert len(used) + free == self.num_blocks
        promised = sum(
            self.manager.get_blocks(one.request.request_id).num_promised for one in self.running
        )
        assert self.manager.num_free_blocks == free - promised


def place(group: KVGroup, table: list[int], row: int) -> tuple[int, int]:
    number, offset = divmod(row, group.rows_per_block)
    return table[number], offset


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_token_finds_what_it_reads(data: st.DataObject) -> None:
    machine = Machine(data.draw(st.integers(40, 90)))
    for _ in range(data.draw(st.integers(5, 60))):
        action = data.draw(st.sampled_from(["start", "step", "step", "step", "retire", "finish"]))
        if action == "start":
            length = data.draw(st.sampled_from([1, 3, 4, 5, 8, 15, 16, 17, 31, 33, 48, 49, 70]))
            fork = data.draw(st.sampled_from([0, 4, 16, 32, 47, 48]))
            machine.start([min(place, fork) * 7 + (place > fork) for place in range(length)])
        elif action == "finish" and machine.running:
            machine.finish(data.draw(st.sampled_from(machine.running)))
        elif action == "retire" and machine.steps:
            machine.retire()
        elif action == "step" and machine.running and len(machine.steps) < 2:
            running = data.draw(st.sampled_from(machine.running))
            if running.num_scheduled == running.request.num_tokens:
                running.request.append_output_token(5)
            machine.schedule(running, data.draw(st.integers(1, STEP_TOKENS)))
        machine.check()
    for running in list(machine.running):
        machine.finish(running)
    machine.check()
    assert machine.manager.num_free_blocks == machine.num_blocks


def computed(machine: Machine, tokens: list[int]) -> int:
    """Computes a prompt to its end, and returns how much of it was found."""
    assert machine.start(tokens)
    (running,) = machine.running
    num_cached = running.num_scheduled
    while running.num_scheduled < len(tokens):
        machine.schedule(running, STEP_TOKENS)
        machine.retire()
    machine.finish(running)
    return num_cached


def test_a_prefix_is_found_where_all_groups_have_what_the_next_token_needs() -> None:
    machine = Machine(60)
    assert computed(machine, list(range(50))) == 0
    assert computed(machine, list(range(50))) == 48
    assert computed(machine, [*range(40), 99]) == 32
    assert computed(machine, [*range(48), 99]) == 48
    assert computed(machine, list(range(16))) == 0, "the last token is always computed"


@pytest.mark.parametrize(
    ("lost", "found"), [((0, 11), 32), ((2, 23), 32), ((1, 5), 32), ((3, 0), 0)]
)
def test_a_hit_ends_where_any_group_lacks_something(lost: tuple[int, int], found: int) -> None:
    machine = Machine(60)
    assert machine.start(list(range(49)))
    (running,) = machine.running
    while running.num_scheduled < 49:
        machine.schedule(running, STEP_TOKENS)
        machine.retire()
    group, number = lost
    table = running.tables[group]
    machine.finish(running)
    block = machine.manager.block_pool.blocks[table[number]]
    assert block.block_hash is not None
    machine.manager.block_pool._forget(block, block.block_hash)
    assert computed(machine, list(range(49))) == found


def test_a_long_prompt_takes_blocks_of_windows_for_its_next_steps_alone() -> None:
    """How long a prompt may be follows from what it keeps for good."""
    groups = GROUPS
    length = 1600
    kept = sum(group.num_blocks_for(length) for group in groups if group.window is None)
    at_once = num_blocks_for(groups, length, STEP_TOKENS)
    assert kept == 200 + 100
    assert at_once == kept + (9 + 16 + 6)
    assert tokens_that_fit(groups, at_once, STEP_TOKENS) >= length
    machine = Machine(at_once)
    assert computed(machine, list(range(length))) == 0
    machine = Machine(at_once - 1)
    assert not machine.start(list(range(length)))


def test_running_requests_need_no_room_for_windows_to_roll_on() -> None:
    """They give back as many blocks as they take."""
    assert Machine(60).manager.num_blocks_more(32) == 4 + 2


def test_what_no_hit_can_see_is_the_first_to_be_taken_again() -> None:
    """Windows that rolled over leave the cache to what can be found: their two blocks, and two of
    overlapping rows, at each multiple of 16."""
    machine = Machine(200)
    computed(machine, list(range(160)))
    pool = machine.manager.block_pool
    named = sum(block.block_hash is not None for block in pool.blocks)
    assert named == 20 + 10 + 10 * (2 + 2)
    nameless = [block for block in pool.blocks if block.block_hash is None]
    assert {block.block_id for block in pool.get_new_blocks(len(nameless))} == {
        block.block_id for block in nameless
    }


def test_blocks_of_what_a_peer_sends_are_taken_at_once_and_no_others() -> None:
    """The decode node's side: only what the next token sees has blocks."""
    machine = Machine(60)
    request = make_request(list(range(46)))
    tables = machine.manager.without_unseen([[] for _ in GROUPS], 46)
    blocks = machine.manager.allocate_slots(request, 47, tables, 46, 46)
    assert blocks is not None
    for group, table in zip(GROUPS, blocks.tables, strict=True):
        real = [block is not NULL_BLOCK for block in table]
        assert len(table) == group.num_blocks_for(47 if group.window is None else 46)
        assert real == [number >= group.first_block_seen(46) for number in range(len(table))]
    held = sum(block is not NULL_BLOCK for table in blocks.tables for block in table)
    assert machine.manager.num_free_blocks == 60 - held - blocks.num_promised
    assert blocks.num_promised == 1, "token 46 is the first of a block of rows that overlap"
    machine.manager.confirm(request, 46)
    machine.manager.free(request)
    assert machine.manager.num_free_blocks == 60


@pytest.mark.parametrize("length", [1, 3, 4, 5, 127, 128, 129, 131, 132, 133, 255, 256, 260])
def test_open_rows_reach_back_to_the_first_token_of_their_row(length: int) -> None:
    """The arithmetic of rows of 4, which overlap, and of 128, which do not."""
    overlapping, alone = rows(16, window=5, align=4), rows(16, window=1, align=128)
    assert overlapping.first_token_seen(length) == first_read(overlapping, length)
    assert alone.first_token_seen(length) == length // 128 * 128
    for ratio in (4, 128):
        closed = rows(1024, ratio=ratio)
        assert closed.rows_to_pull(0, length) == range(length // ratio)
        held = closed.rows_to_pull(length - 1, length)
        assert len(held) == (length % ratio == 0), "a row travels once it is closed"


def test_a_window_longer_than_all_blocks_widens_the_stride() -> None:
    groups = (rows(4, window=40), rows(8, ratio=4))
    assert hit_stride(groups) == 40
    assert hit_stride((msgspec.structs.replace(groups[0], window=42), groups[1])) == 48
