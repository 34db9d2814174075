"""Prefixes of models with windows, states and rows of several tokens: they end where all groups of
layers can go on, and nothing is kept of one that came in part."""

from __future__ import annotations

import pytest

from engine.config import KVLayers
from kv_transfer.config import KVTransferConfig
from tests.engine.sched.factories import (
    compressed_layers,
    kv_layers,
    make_config,
    make_request,
    with_states,
)
from tests.engine.sched.step_machine import Client, StepMachine

PROMPT = list(range(1, 46))
SHAPES = {
    "windows": (kv_layers(None, 7), 4, 44),
    "windows alone": (kv_layers(7), 4, 44),
    "other heads": (kv_layers(None, 9, heads=2), 4, 40),
    "states": (with_states(kv_layers(None)), 4, 44),
    "states beside windows": (with_states(kv_layers(None, 6)), 4, 44),
    "rows of several tokens": (compressed_layers(), 2, 40),
}
"""Layers, a block size, and where a prefix of the prompt ends."""
shapes = pytest.mark.parametrize(
    ("layers", "block_size", "end"), list(SHAPES.values()), ids=list(SHAPES)
)


def machine_of(layers: tuple[KVLayers, ...], block_size: int, num_blocks: int = 400) -> StepMachine:
    transfer = KVTransferConfig(kv_role="kv_producer", shares_prefixes=True, pulls_always=True)
    config = make_config(
        kv_layers=layers, block_size=block_size, max_num_batched_tokens=16, kv_transfer=transfer
    )
    return StepMachine(config, num_blocks)


def ask(machine: StepMachine, prompt: list[int], name: str = "r", peer: str = "peer:1") -> Client:
    return machine.add(make_request(name, prompt, max_tokens=3, prefix_peer=peer))


def computed(machine: StepMachine) -> int:
    return machine.scheduler.stats().prompt_tokens_computed


@shapes
def test_the_longest_prefix_of_all_groups_is_offered_and_pulled(
    layers: tuple[KVLayers, ...], block_size: int, end: int
) -> None:
    holder, asker = machine_of(layers, block_size), machine_of(layers, block_size)
    ask(holder, PROMPT, peer="")
    holder.finish()
    longer = [*PROMPT, *range(1, 20)]
    named = make_request("named", longer)
    chains = holder.scheduler._kv_cache.behind.chains(named, len(longer))
    transfer_id, count = holder.scheduler.remote.offers.offer(chains)
    assert count == end
    holder.connector.exports[transfer_id].prompt = PROMPT[:count]
    holder.check_blocks()
    holder.connector.finish(transfer_id)
    holder.poll_connector()
    holder.check_all_done()

    asker.peer_tokens = lambda ask: count
    client = ask(asker, longer)
    asker.finish()
    assert client.num_cached_tokens == count
    assert computed(asker) == len(longer) - count
    asker.check_all_done()


@shapes
@pytest.mark.parametrize("at", ["inside a block", "beyond the prompt"])
def test_an_answer_that_no_prefix_has_is_a_miss(
    layers: tuple[KVLayers, ...], block_size: int, end: int, at: str
) -> None:
    machine = machine_of(layers, block_size)
    machine.peer_tokens = lambda ask: end - 1 if at == "inside a block" else 2 * end
    ask(machine, PROMPT)
    machine.finish()
    assert computed(machine) == len(PROMPT)
    assert machine.scheduler.stats().kv_transfer["prefix_misses"] == 1
    machine.check_all_done()


@shapes
def test_of_a_pull_that_breaks_off_nothing_is_used(
    layers: tuple[KVLayers, ...], block_size: int, end: int
) -> None:
    """Tokens behind the part that came find other windows, and no state."""
    machine = machine_of(layers, block_size)
    machine.peer_tokens = lambda ask: end
    ask(machine, PROMPT)
    machine.schedule()
    machine.answer_asks()
    (transfer_id,) = machine.connector.transfer_ids()
    machine.connector.advance(transfer_id)
    machine.connector.fail(transfer_id)
    machine.poll_connector()
    machine.finish()
    assert computed(machine) == len(PROMPT)
    assert machine.scheduler.stats().kv_transfer["prefix_pull_failures"] == 1
    machine.check_all_done()


@shapes
@pytest.mark.parametrize("is_like", [False, True])
def test_what_came_in_part_is_found_by_nobody(
    is_like: bool, layers: tuple[KVLayers, ...], block_size: int, end: int
) -> None:
    """A peer with other blocks sends the tokens of windows that the next one sees, not all of their
    first block."""
    machine = machine_of(layers, block_size)
    machine.peer_is_like = is_like
    machine.peer_tokens = lambda ask: machine.scheduler._kv_cache.behind.last_end(end // 2)
    ask(machine, PROMPT)
    machine.finish()
    for length in range(1, len(PROMPT), 3):
        ask(machine, PROMPT[:length], f"again-{length}", peer="")
        machine.finish()
    machine.check_all_done()


def test_a_pull_writes_into_no_block_that_others_find() -> None:
    """The cache has the conversation's tokens, and no states: both come, into new blocks."""
    layers, block_size, end = SHAPES["states"]
    machine = machine_of(layers, block_size)
    first = machine.add(make_request("first", PROMPT, max_tokens=20))
    machine.finish()
    pool = machine.scheduler._kv_cache.block_pool
    states = [(one, one.block_hash) for one in pool.blocks if len(one.block_hash or b"") == 33]
    pool.yield_first(states)
    pool.free_blocks(pool.get_new_blocks(len(states)))
    machine.peer_tokens = lambda ask: end + 16
    second = ask(machine, [*PROMPT, *first.expected, 7, 8, 9])
    machine.schedule()
    machine.answer_asks()
    (pull,) = machine.connector.pulls.values()
    assert pull.position == 0
    written = [block for table in pull.block_ids for block in table[pull.position // block_size :]]
    assert all(pool.blocks[block].block_hash is None for block in written)
    machine.finish()
    assert second.num_cached_tokens == end + 16
    machine.check_all_done()


def test_a_long_prefix_is_cut_where_more_blocks_would_be_held_than_may_be() -> None:
    """One block in eight: of windows only what is seen counts."""
    layers, block_size, _ = SHAPES["windows"]
    machine = machine_of(layers, block_size, num_blocks=64)
    ask(machine, PROMPT, peer="")
    machine.finish()
    chains = machine.scheduler._kv_cache.behind.chains(make_request("n", PROMPT), len(PROMPT))
    assert machine.scheduler.remote.offers.offer(chains)[1] == 24, "6 blocks and 2 of a window"
