"""A scheduler of a model with several KV groups, stepped by hand: full attention beside windows."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig, KVLayers
from engine.kv_cache.group_manager import NULL_BLOCK
from tests.engine.sched.factories import (
    compressed_layers,
    kv_layers,
    make_config,
    make_request,
    remote_decode,
    remote_prefill,
)
from tests.engine.sched.step_machine import StepMachine
from tests.engine.sched.test_random_steps import Traffic

WINDOW = 7


def two_groups(**config: object) -> EngineConfig:
    return make_config(kv_layers=kv_layers(None, WINDOW), **config)  # type: ignore[arg-type]


def blocks_of(machine: StepMachine, request_id: str) -> list[int]:
    """Returns by group how many blocks the request really has."""
    tables = machine.scheduler._kv_cache.get_blocks(request_id).tables
    return [sum(block is not NULL_BLOCK for block in table) for table in tables]


@pytest.mark.parametrize("caching", [True, False])
def test_a_window_keeps_few_blocks_however_long_the_answer(caching: bool) -> None:
    machine = StepMachine(two_groups(enable_prefix_caching=caching), 80, depth=2)
    machine.add(make_request("a", list(range(1, 30)), max_tokens=80))
    most = 0
    for _ in range(70):
        machine.step()
        full, window = blocks_of(machine, "a")
        if machine.clients["a"].tokens:
            most = max(most, window)
    assert full > 20
    # 7 tokens touch 3 blocks; one more is reserved for tokens to come, one not confirmed yet.
    assert most <= 5
    machine.finish()
    machine.check_all_done()


def test_blocks_of_both_groups_travel_in_one_message() -> None:
    machine = StepMachine(two_groups(), 40)
    machine.add(make_request("a", list(range(1, 12))))
    step = machine.step()
    assert step is not None
    (new,) = step.new_reqs
    (other,) = step.new_block_ids
    assert other[0] == new.row * 2 + 1
    assert len(other[1]) == len(new.block_ids) == 3
    machine.finish()
    machine.check_all_done()


def test_a_prefix_is_found_although_its_window_has_moved_on() -> None:
    machine = StepMachine(two_groups(), 60)
    prompt = list(range(1, 26))
    machine.add(make_request("a", prompt, max_tokens=20))
    machine.finish()
    client = machine.add(make_request("b", [*prompt, 60, 61]))
    machine.finish()
    assert client.num_cached_tokens == 24
    machine.check_all_done()


def test_a_preempted_request_comes_back_with_the_blocks_of_both_groups() -> None:
    machine = StepMachine(two_groups(), 22, depth=2)
    for name in ("a", "b"):
        machine.add(make_request(name, [ord(name)] * 14, max_tokens=20))
    machine.finish()
    assert machine.scheduler.stats().num_preemptions > 0
    machine.check_all_done()


def test_a_pull_takes_only_the_blocks_that_its_first_token_sees() -> None:
    machine = StepMachine(two_groups(), 60)
    machine.add(make_request("a", list(range(1, 41)), kv=remote_prefill("t")))
    machine.step()
    # 40 tokens and the next one; that one sees tokens from 34 on, in blocks 8 to 10.
    assert blocks_of(machine, "a") == [11, 3]
    machine.supply_first_token("a")
    machine.finish()
    machine.check_all_done()


def test_kv_of_a_window_is_computed_anew_when_a_pull_ends_before_its_first_token() -> None:
    """The KV is complete, but the last prompt token, which gives the first one, sees more than was
    sent.
    """
    machine = StepMachine(two_groups(), 60)
    machine.add(make_request("a", list(range(1, 41)), kv=remote_prefill("t")))
    machine.step()
    machine.connector.finish("t")
    machine.poll_connector()
    machine.take(machine.scheduler.prefill_locally("a"))
    machine.finish()
    assert machine.scheduler.stats().prompt_tokens_computed == 40
    machine.check_all_done()


def test_an_export_s_window_stays_until_it_is_sent() -> None:
    machine = StepMachine(two_groups(max_num_batched_tokens=8), 60, depth=2)
    machine.add(make_request("a", list(range(1, 41)), kv=remote_decode("t"), max_tokens=1))
    for number in range(6):
        machine.add(make_request(f"b{number}", [50 + number] * 20))
    machine.finish()
    machine.check_all_done()


_SHAPES = (
    kv_layers(None, 5),
    kv_layers(None, 9, heads=2),
    kv_layers(4, None, heads=4),
    kv_layers(None, 1, 14),
    kv_layers(3, 11, heads=2),
)


@settings(max_examples=140, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    depth=st.integers(1, 3),
    layers=st.sampled_from(_SHAPES),
    kinds=st.sampled_from(
        [["local"], ["local", "pull"], ["export", "local"], ["choices", "pull", "local"]]
    ),
    decode_query_len=st.sampled_from([1, 1, 3]),
)
def test_random_traffic(
    seed: int, depth: int, layers: tuple[object, ...], kinds: list[str], decode_query_len: int
) -> None:
    rng = random.Random(seed)
    config = make_config(
        kv_layers=layers,  # type: ignore[arg-type]
        decode_query_len=decode_query_len,
        policy=rng.choice(["fcfs", "priority"]),
        max_num_seqs=rng.choice([1, 3, 6]),
        max_num_batched_tokens=rng.choice([6, 16, 64]),
        long_prefill_token_threshold=rng.choice([0, 5]),
        enable_prefix_caching=rng.random() < 0.8,
        max_model_len=64,
    )
    machine = StepMachine(config, rng.choice([18, 24, 48]), depth=depth, seed=seed)
    Traffic(machine, seed, kinds).run()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    depth=st.integers(1, 3),
    kinds=st.sampled_from(
        [["local"], ["local", "pull"], ["export", "local"], ["choices", "pull", "local"]]
    ),
    decode_query_len=st.sampled_from([1, 1, 3]),
)
def test_random_traffic_of_rows_that_stand_for_several_tokens(
    seed: int, depth: int, kinds: list[str], decode_query_len: int
) -> None:
    """Windows roll; drafts that are refused leave rows that are written again."""
    rng = random.Random(seed)
    config = make_config(
        kv_layers=compressed_layers(),
        block_size=2,
        decode_query_len=decode_query_len,
        policy=rng.choice(["fcfs", "priority"]),
        max_num_seqs=rng.choice([1, 3, 6]),
        max_num_batched_tokens=rng.choice([6, 16, 64]),
        long_prefill_token_threshold=rng.choice([0, 5]),
        enable_prefix_caching=rng.random() < 0.8,
        max_model_len=64,
    )
    machine = StepMachine(config, rng.choice([40, 60, 90]), depth=depth, seed=seed)
    Traffic(machine, seed, kinds).run()


@pytest.mark.parametrize(
    ("layers", "block_size", "num_blocks", "least"),
    [(kv_layers(None, 5), 4, 18, 20), (compressed_layers(), 2, 48, 3)],
)
def test_the_traffic_is_rough_enough(
    layers: tuple[KVLayers, ...], block_size: int, num_blocks: int, least: int
) -> None:
    config = make_config(
        kv_layers=layers,
        block_size=block_size,
        max_num_seqs=6,
        max_num_batched_tokens=16,
        max_model_len=64,
    )
    totals = {"preemptions": 0, "hits": 0, "transferred": 0}
    for seed in range(12):
        machine = StepMachine(config, num_blocks, depth=2, seed=seed)
        Traffic(machine, seed, ["local", "pull"]).run()
        stats = machine.scheduler.stats()
        totals["preemptions"] += stats.num_preemptions
        totals["hits"] += stats.prefix_cache_hits
        totals["transferred"] += stats.prompt_tokens_transferred
    assert min(totals.values()) >= least, totals
