"""A scheduler of a model whose linear layers keep a state of each request, beside full attention.

The fake worker computes a token only if the state in its request's block is that of the token
before, so a state that somebody else has written, or that is applied twice, is seen at once.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig, KVLayers
from engine.contracts.request_spec import IDLE_PRIORITY
from tests.engine.sched.factories import (
    compressed_layers,
    kv_layers,
    make_config,
    make_request,
    remote_decode,
    remote_prefill,
    with_states,
)
from tests.engine.sched.memory_host_tier import new_store
from tests.engine.sched.returning_traffic import ReturningTraffic
from tests.engine.sched.step_machine import StepMachine
from tests.engine.sched.test_random_steps import SHARING, Traffic


def hybrid(**config: object) -> EngineConfig:
    return make_config(kv_layers=with_states(kv_layers(None)), **config)  # type: ignore[arg-type]


def blocks_of(machine: StepMachine, request_id: str) -> list[int]:
    """Returns by group how many blocks the request has."""
    return [len(table) for table in machine.scheduler._kv_cache.get_blocks(request_id).tables]


def test_a_state_takes_one_block_however_long_the_request() -> None:
    machine = StepMachine(hybrid(max_num_batched_tokens=16), 40, depth=2)
    machine.add(make_request("a", list(range(1, 38)), max_tokens=60))
    for _ in range(40):
        machine.step()
        assert blocks_of(machine, "a")[1:] == [1, 1]
    assert blocks_of(machine, "a")[0] > 15
    machine.finish()
    machine.check_all_done()


def test_blocks_of_tokens_grow_to_the_size_of_a_state() -> None:
    config = make_config(kv_layers=with_states(kv_layers(None), row_bytes=37))
    attention, *states = config.kv_layout.groups
    assert attention.block_size == 8
    assert all(group.is_state and group.rows_per_block == 1 for group in states)
    assert config.kv_layout.page_bytes == 37
    machine = StepMachine(config, 12, depth=2)
    for name in "abc":
        machine.add(make_request(name, [ord(name)] * 19, max_tokens=12))
    machine.finish()
    machine.check_all_done()


def test_a_preempted_request_computes_its_state_anew() -> None:
    machine = StepMachine(hybrid(), 15, depth=2)
    for name in ("a", "b"):
        machine.add(make_request(name, [ord(name)] * 14, max_tokens=20))
    machine.finish()
    assert machine.scheduler.stats().num_preemptions > 0
    machine.check_all_done()


def test_the_next_owner_of_a_block_is_not_touched_by_a_step_of_the_last() -> None:
    """A request ends by a stop token while its next step is on its way; its blocks come back only
    behind that step."""
    machine = StepMachine(hybrid(max_num_seqs=2), 12, depth=3)
    for index in range(12):
        prompt = [20 + index] * (3 + index % 5)
        machine.add(make_request(f"r{index}", prompt, max_tokens=9, ignore_eos=index % 2 == 0))
        machine.step()
        if index % 4 == 3:
            machine.abort(f"r{index}")
    machine.finish()
    machine.check_all_done()


@pytest.mark.parametrize("prompt_len", [3, 8, 9])
def test_every_choice_has_a_state_of_its_own(prompt_len: int) -> None:
    machine = StepMachine(hybrid(enable_prefix_caching=False), 40, depth=2)
    machine.add(make_request("a", list(range(1, prompt_len + 1)), num_choices=4, max_tokens=12))
    machine.finish()
    machine.check_all_done()
    # All but one copy both states, and the last block of tokens if it is partial.
    assert machine.worker.num_copies == 3 * (2 + (prompt_len % 4 > 0))


def test_a_pulled_state_is_continued_behind_the_last_prompt_token() -> None:
    machine = StepMachine(hybrid(), 60)
    machine.add(make_request("a", list(range(1, 41)), kv=remote_prefill("t")))
    machine.step()
    assert blocks_of(machine, "a") == [11, 1, 1]
    machine.connector.finish("t")
    machine.poll_connector()
    machine.supply_first_token("a")
    machine.finish()
    assert machine.scheduler.stats().prompt_tokens_computed == 0
    machine.check_all_done()


def test_a_state_behind_the_last_token_cannot_give_that_token_s_logits() -> None:
    """All has come, but nobody gives the first token: the last prompt token would be taken in
    twice, so the prompt is computed anew."""
    machine = StepMachine(hybrid(), 60)
    machine.add(make_request("a", list(range(1, 41)), kv=remote_prefill("t")))
    machine.step()
    machine.connector.finish("t")
    machine.poll_connector()
    machine.take(machine.scheduler.prefill_locally("a"))
    machine.finish()
    assert machine.scheduler.stats().prompt_tokens_computed == 40
    machine.check_all_done()


def test_part_of_a_pull_is_of_use_only_to_the_next_pull() -> None:
    for goes_on_here in (True, False):
        machine = StepMachine(hybrid(), 60)
        machine.add(make_request("a", list(range(1, 41)), kv=remote_prefill("t")))
        machine.step()
        while machine.connector.pulls["t"].position < 16:
            machine.connector.advance("t")
        machine.connector.fail("t")
        machine.poll_connector()
        if goes_on_here:
            machine.take(machine.scheduler.prefill_locally("a"))
        else:
            machine.take(machine.scheduler.retry_remote("a", remote_prefill("t", 1)))
            machine.supply_first_token("a")
        machine.finish()
        expected = 40 if goes_on_here else 0
        assert machine.scheduler.stats().prompt_tokens_computed == expected
        machine.check_all_done()


def test_an_export_s_state_stays_until_it_is_sent() -> None:
    machine = StepMachine(hybrid(max_num_batched_tokens=8), 60, depth=2)
    machine.add(make_request("a", list(range(1, 41)), kv=remote_decode("t"), max_tokens=1))
    for number in range(6):
        machine.add(make_request(f"b{number}", [50 + number] * 20))
    machine.finish()
    machine.check_all_done()


def caching(machine: StepMachine, name: str, prompt: list[int], **sampling: object) -> int:
    """Runs a request alone; returns how many tokens it found."""
    client = machine.add(make_request(name, prompt, **sampling))  # type: ignore[arg-type]
    machine.finish()
    machine.check_all_done()
    assert client.num_cached_tokens is not None
    return client.num_cached_tokens


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_prompt_s_states_are_kept_behind_its_last_full_block(depth: int) -> None:
    machine = StepMachine(hybrid(max_num_batched_tokens=16), 60, depth=depth)
    prompt = list(range(1, 31))
    assert caching(machine, "first", prompt, max_tokens=2) == 0
    assert machine.worker.num_copies == 2
    # 28 tokens are seven blocks; behind them there is a token to compute.
    assert caching(machine, "again", prompt, max_tokens=2) == 28
    assert caching(machine, "longer", [*prompt, *range(40, 50)], max_tokens=1) == 28
    # That one has kept its own states, behind 36 tokens, and found those that were there.
    assert machine.worker.num_copies == 2 + 2 + 4
    assert caching(machine, "other", [*prompt[:26], 60, 61, 62, 63]) == 0
    assert caching(machine, "longest", [*prompt, *range(40, 50), 5]) == 36
    assert machine.scheduler.reset_prefix_cache()
    assert caching(machine, "forgotten", prompt) == 0


@pytest.mark.parametrize("depth", [1, 3])
def test_states_are_kept_behind_each_full_block_of_an_answer(depth: int) -> None:
    """All but the last of an answer's copies are displaced before anything else, and do not go to
    host memory."""
    machine = StepMachine(hybrid(max_num_batched_tokens=16), 60, depth=depth, num_host_slots=64)
    client = machine.add(make_request("first", list(range(1, 31)), max_tokens=16))
    machine.finish()
    assert machine.worker.num_copies == 2 * 5, "behind 28, 32, 36, 40 and 44"
    assert machine.host is not None
    assert machine.host.tier.counters["host_tier_stored_blocks"] == 11 + 2 * 2
    pool = machine.scheduler._kv_cache.block_pool
    while pool.num_evicted < 2 * 3:
        pool.free_blocks(pool.get_new_blocks(1 + sum(not b.block_hash for b in pool.blocks)))
    tokens = client.request.all_token_ids
    lengths = [len(tokens), len(tokens) - 1, 44, 29]
    found = [caching(machine, str(n), tokens[:n], max_tokens=1) for n in lengths]
    assert found == [44, 44, 28, 28]


def test_a_preempted_answer_goes_on_behind_the_last_states_that_were_kept() -> None:
    machine = StepMachine(hybrid(), 60, depth=2)
    machine.add(make_request("a", list(range(1, 15)), max_tokens=30))
    while machine.scheduler.stats().generation_tokens < 20:
        machine.step()
    running = machine.scheduler._running
    running.preempt(next(running.table.live()))
    machine.finish()
    assert machine.scheduler.stats().prompt_tokens_computed == 14
    machine.check_all_done()


def test_a_row_that_a_step_takes_away_keeps_nothing_in_it() -> None:
    """Its blocks may be filled from elsewhere while that step runs."""
    machine = StepMachine(hybrid(max_num_seqs=1), 60, depth=2)
    batch = make_request("batch", list(range(1, 30)), max_tokens=30, priority=IDLE_PRIORITY)
    client = machine.add(batch)
    while len(client.tokens) < 6:
        machine.step()
    machine.add(make_request("other", [50] * 9))
    machine.finish()
    assert machine.scheduler.stats().num_preemptions == 1
    machine.check_all_done()


def test_a_kept_state_is_found_where_blocks_of_tokens_are_large() -> None:
    layers = with_states(kv_layers(None, 6, heads=2), row_bytes=40)
    config = make_config(kv_layers=layers, max_num_batched_tokens=16)
    assert [group.block_size for group in config.kv_layout.groups[:2]] == [4, 8]
    machine = StepMachine(config, 60, depth=2)
    prompt = list(range(1, 31))
    assert caching(machine, "first", prompt) == 0
    assert caching(machine, "again", [*prompt, 40]) == 24


def test_states_are_not_kept_where_a_prompt_must_be_whole() -> None:
    machine = StepMachine(hybrid(enable_chunked_prefill=False), 60)
    for name in ("first", "again"):
        assert caching(machine, name, list(range(1, 31)), max_tokens=2) == 0
    assert machine.worker.num_copies == 0


def test_blocks_that_are_short_are_not_spent_on_states() -> None:
    machine = StepMachine(hybrid(), 14)
    for name in ("first", "again"):
        assert caching(machine, name, list(range(1, 31)), max_tokens=2) == 0
    assert machine.worker.num_copies == 0


def test_a_request_that_needs_all_blocks_does_without_kept_states() -> None:
    """To begin with copies it would need these as well, and wait for ever."""
    machine = StepMachine(hybrid(max_model_len=128), 34)
    prompt = list(range(1, 61))
    assert caching(machine, "first", prompt, max_tokens=2) == 0
    assert caching(machine, "again", prompt, max_tokens=2) == 56
    assert caching(machine, "large", [*prompt, *range(1, 67)], max_tokens=2) == 0


@pytest.mark.parametrize("num_shared", [5, 25])
def test_a_pull_finds_tokens_wherever_they_end_and_brings_its_states(num_shared: int) -> None:
    """It does so behind a single block, too."""
    machine = StepMachine(hybrid(), 60)
    prompt = list(range(1, 31))
    caching(machine, "first", prompt)
    prompt = [*prompt[:num_shared], *range(40, 50)]
    client = machine.add(make_request("a", prompt, kv=remote_prefill("t")))
    machine.step()
    machine.connector.finish("t")
    machine.poll_connector()
    machine.supply_first_token("a")
    machine.finish()
    assert client.num_cached_tokens == num_shared - 1
    assert machine.scheduler.stats().prompt_tokens_transferred == len(prompt) - (num_shared - 1)
    machine.check_all_done()


def test_choices_begin_from_a_kept_state() -> None:
    machine = StepMachine(hybrid(max_num_batched_tokens=8), 60, depth=2)
    prompt = list(range(1, 31))
    caching(machine, "first", prompt)
    machine.add(make_request("a", prompt, num_choices=3, max_tokens=12))
    machine.finish()
    assert machine.clients["a.0"].num_cached_tokens == 28
    machine.check_all_done()


_SHAPES = (
    with_states(kv_layers(None)),
    with_states(kv_layers(None, heads=2), row_bytes=40),
    with_states(kv_layers(None, 6)),
    with_states(kv_layers(None), row_bytes=70),
)


@pytest.mark.parametrize("depth", [1, 3])
def test_a_conversation_that_the_cache_forgot_comes_from_host_memory(depth: int) -> None:
    """It comes with its states, and those behind its new turn are kept."""
    machine = StepMachine(hybrid(max_num_batched_tokens=16), 24, depth=depth, num_host_slots=64)
    prompt = list(range(1, 31))
    assert caching(machine, "first", prompt, max_tokens=2) == 0
    caching(machine, "other", [50] * 50, max_tokens=2)
    longer = [*prompt, *range(40, 49)]
    assert caching(machine, "second", longer, max_tokens=2) == 28
    assert machine.scheduler.stats().prompt_tokens_loaded == 28
    caching(machine, "another", [51] * 50, max_tokens=2)
    assert caching(machine, "third", [*longer, 5], max_tokens=2) == 36
    assert machine.scheduler.stats().prompt_tokens_loaded == 28 + 36


def test_only_the_states_come_from_host_memory_where_the_cache_has_the_tokens() -> None:
    """Copies of states are displaced before blocks of tokens, as nothing holds them."""
    machine = StepMachine(hybrid(max_num_batched_tokens=16), 60, num_host_slots=64)
    prompt = list(range(1, 31))
    caching(machine, "first", prompt, max_tokens=2)
    pool = machine.scheduler._kv_cache.block_pool
    for block in [one for one in pool.blocks if one.block_hash and len(one.block_hash) == 33]:
        pool.free_queue.remove(block)
        pool.free_queue.appendleft(block)
    pool.free_blocks(pool.get_new_blocks(2))
    assert caching(machine, "again", prompt, max_tokens=2) == 28
    assert machine.host is not None
    assert machine.host.tier.counters["host_tier_loaded_blocks"] == 2


def test_a_prefix_whose_state_is_damaged_is_computed() -> None:
    machine = StepMachine(hybrid(max_num_batched_tokens=16), 24, num_host_slots=64)
    prompt = list(range(1, 31))
    caching(machine, "first", prompt, max_tokens=2)
    caching(machine, "other", [50] * 50, max_tokens=2)
    client = machine.add(make_request("again", prompt, max_tokens=2))
    machine.schedule()
    assert machine.host is not None
    machine.host.fail_load()
    machine.poll_connector()
    computed = machine.scheduler.stats().prompt_tokens_computed
    machine.finish()
    assert client.num_cached_tokens == 0 and client.tokens == client.expected
    assert machine.scheduler.stats().prompt_tokens_computed == computed + 30
    machine.check_all_done()


_FORGETFUL = (
    *((layers, 4) for layers in _SHAPES),
    *((layers, 4) for layers in (kv_layers(None, 7), kv_layers(None, 7, heads=2), kv_layers(7))),
    (compressed_layers(), 2),
)
"""Pairs of layers and a block size."""


# A store has a part of a prompt: what a window has before that part is not filled, nor found.
@example(seed=686, shape=(kv_layers(None, 7), 4), kinds=["export", "local"])
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    shape=st.sampled_from(_FORGETFUL),
    kinds=st.sampled_from([["local"], ["export", "local"], ["choices", "pull", "local"]]),
)
def test_random_traffic_with_tiers_and_peers(
    seed: int, shape: tuple[tuple[KVLayers, ...], int], kinds: list[str]
) -> None:
    """Their processes die, and blocks are damaged. Windows are groups of their own, too, and so are
    rows that stand for several tokens. Peers ask, and are asked."""
    rng = random.Random(seed)
    layers, block_size = shape
    config = make_config(
        kv_layers=layers,
        block_size=block_size,
        policy=rng.choice(["fcfs", "priority"]),
        max_num_seqs=rng.choice([1, 3, 6]),
        max_num_batched_tokens=rng.choice([6, 16, 64]),
        max_model_len=64,
        kv_transfer=SHARING if seed % 2 else None,
    )
    machine = StepMachine(
        config,
        rng.choice([22, 30, 48]) * (1 if block_size == 4 else 4),
        depth=rng.choice([1, 2, 3]),
        seed=seed,
        num_host_slots=rng.choice([6, 12, 40]) if seed % 3 else 0,
        num_files=rng.choice([0, 20, 60]),
        store=new_store() if rng.random() < 0.5 else None,
    )
    ReturningTraffic(machine, seed, kinds).run()


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [(_FORGETFUL[0], (22, 20, 60)), (_FORGETFUL[-1], (110, 60, 120))],
    ids=["states", "rows"],
)
def test_the_tiers_are_used(
    shape: tuple[tuple[KVLayers, ...], int], sizes: tuple[int, int, int]
) -> None:
    """Traffic finds its way to all of them. `sizes`: blocks of the cache, of host memory, of the
    disk."""
    totals = Counter[str]()
    layers, block_size = shape
    for seed in range(6):
        config = make_config(
            kv_layers=layers,
            block_size=block_size,
            max_num_batched_tokens=16,
            max_model_len=64,
        )
        blocks, slots, files = sizes
        machine = StepMachine(
            config, blocks, depth=2, seed=seed, num_host_slots=slots, num_files=files
        )
        ReturningTraffic(machine, seed, ["local"]).run()
        assert machine.host is not None
        totals.update({name: int(n) for name, n in machine.host.tier.counters.items()})
    used = "loaded", "spilled", "fetched", "damaged", "lost"
    assert all(totals[f"host_tier_{name}_blocks"] > 0 for name in used), totals


@pytest.mark.parametrize(("shape", "most"), [(_FORGETFUL[0], 28), (_FORGETFUL[-1], 24)])
def test_another_node_s_states_and_rows_come_from_a_store(
    shape: tuple[tuple[KVLayers, ...], int], most: int
) -> None:
    store, prompt = new_store(), list(range(1, 31))
    layers, block_size = shape
    config = make_config(kv_layers=layers, block_size=block_size, max_model_len=64)
    for number, name in enumerate(("first", "other")):
        machine = StepMachine(config, 240, seed=number, num_host_slots=64, store=store)
        found = caching(machine, name, [*prompt, *range(40, 40 + 10 * number)], max_tokens=2)
        assert found == machine.scheduler.stats().prompt_tokens_from_store == most * number
        assert machine.scheduler.stats().prompt_tokens_computed == 30 + 10 * number - found


def test_a_store_that_lacks_a_state_is_asked_in_vain() -> None:
    """The request begins with copies of the states that the cache has, as without a store."""
    machine = StepMachine(hybrid(), 60, num_host_slots=64, store=new_store())
    prompt = list(range(1, 31))
    assert caching(machine, "first", prompt, max_tokens=2) == 0
    assert caching(machine, "longer", [*prompt, *range(40, 60)], max_tokens=2) == 28
    stats = machine.scheduler.stats()
    assert (stats.prompt_tokens_from_store, stats.prompt_tokens_computed) == (0, 30 + 22)


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    depth=st.integers(1, 3),
    layers=st.sampled_from(_SHAPES),
    kinds=st.sampled_from(
        [["local"], ["local", "pull"], ["export", "local"], ["choices", "pull", "local"]]
    ),
)
def test_random_traffic(
    seed: int, depth: int, layers: tuple[object, ...], kinds: list[str]
) -> None:
    rng = random.Random(seed)
    config = make_config(
        kv_layers=layers,  # type: ignore[arg-type]
        policy=rng.choice(["fcfs", "priority"]),
        max_num_seqs=rng.choice([1, 3, 6]),
        max_num_batched_tokens=rng.choice([6, 16, 64]),
        long_prefill_token_threshold=rng.choice([0, 5]),
        enable_prefix_caching=rng.random() < 0.8,
        max_model_len=64,
    )
    machine = StepMachine(config, rng.choice([22, 30, 48]), depth=depth, seed=seed)
    Traffic(machine, seed, kinds).run()


def test_the_traffic_is_rough_enough() -> None:
    config = make_config(
        kv_layers=_SHAPES[0], max_num_seqs=6, max_num_batched_tokens=16, max_model_len=64
    )
    totals = {"preemptions": 0, "hits": 0, "transferred": 0, "copies": 0}
    for seed in range(12):
        machine = StepMachine(config, 20, depth=2, seed=seed)
        Traffic(machine, seed, ["local", "pull", "choices"]).run()
        stats = machine.scheduler.stats()
        totals["preemptions"] += stats.num_preemptions
        totals["hits"] += stats.prefix_cache_hits
        totals["transferred"] += stats.prompt_tokens_transferred
        totals["copies"] += machine.worker.num_copies
    assert min(totals.values()) >= 20, totals
