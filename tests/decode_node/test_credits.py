"""Room for KV: in order of arrival, never more than there is, all back at the end."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_node.disagg.credits import Claim, GroupPreference, KVCredits
from decode_node.server import create_credits, create_prefix_index
from engine.config import CacheConfig, EngineConfig, KVLayers, SchedulerConfig
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from kv_transfer.planes import Plane
from tests.decode_node.decode_fakes import until
from tests.engine.tiny_model import tiny_model


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_claims_are_admitted_in_order_of_arrival() -> None:
    credits = KVCredits(num_blocks=10, block_size=8, max_claims=100)
    first = await credits.acquire(40, 8)
    assert credits.num_free == 4
    big = asyncio.create_task(credits.acquire(40, 8))
    small = asyncio.create_task(credits.acquire(8, 8))
    await settle()
    assert credits.num_waiting == 2
    assert not small.done(), "a small one must not overtake"
    first.release()
    await until(lambda: big.done() and small.done(), "both admitted")
    big.result().release()
    small.result().release()
    assert (credits.num_free, credits.num_claims, credits.num_waiting) == (10, 0, 0)


async def test_a_request_larger_than_everything_is_admitted_alone() -> None:
    credits = KVCredits(num_blocks=4, block_size=8, max_claims=100)
    other = await credits.acquire(8, 1)
    huge = asyncio.create_task(credits.acquire(800, 1))
    await settle()
    assert not huge.done()
    other.release()
    (await huge).release()
    assert credits.num_free == 4


async def test_seats_are_limited() -> None:
    credits = KVCredits(num_blocks=100, block_size=8, max_claims=1)
    claim = await credits.acquire(8, 1)
    second = asyncio.create_task(credits.acquire(8, 1))
    await settle()
    assert not second.done()
    claim.release()
    claim.release()
    (await second).release()
    assert (credits.num_free, credits.num_claims) == (100, 0)


async def test_growth_counts_and_comes_back() -> None:
    credits = KVCredits(num_blocks=4, block_size=8, max_claims=9)
    claim = credits.claim_now(8, 8)
    claim.grow_to(16)
    assert credits.num_free == 2
    claim.grow_to(41)
    assert credits.num_free == -2
    claim.release()
    claim.grow_to(80)
    assert credits.num_free == 4


async def test_choices_count_their_prompt_once() -> None:
    """A prompt of 20 tokens has two full blocks; each choice has the partial one and the next."""
    credits = KVCredits(num_blocks=12, block_size=8, max_claims=4)
    claim = await credits.acquire(20, 8, num_choices=3)
    assert (credits.num_free, credits.num_claims) == (12 - 2 - 3 * 2, 3)
    waiting = asyncio.create_task(credits.acquire(8, 8, num_choices=2))
    await settle()
    assert not waiting.done(), "one seat is free, and two are wanted"
    claim.grow_to(33, choice=1)
    claim.end_choice(0)
    claim.end_choice(0)
    await settle()
    assert waiting.done()
    waiting.result().release()
    assert (credits.num_free, credits.num_claims) == (12 - 2 - 2 - 3, 2)
    claim.end_choice(1)
    claim.grow_to(800, choice=1)
    assert (credits.num_free, credits.num_claims) == (12 - 2 - 2, 1)
    claim.release()
    claim.release()
    assert (credits.num_free, credits.num_claims) == (12, 0)


async def test_states_count_for_each_choice_whatever_its_length() -> None:
    credits = KVCredits(num_blocks=20, block_size=8, max_claims=9, num_states=3)
    claim = await credits.acquire(20, 8, num_choices=2)
    assert credits.num_free == 20 - 2 - 2 * (2 + 3)
    claim.grow_to(33, choice=1)
    assert credits.num_free == 20 - 2 - (2 + 3) - (3 + 3)
    waiting = asyncio.create_task(credits.acquire(40, 8))
    await settle()
    assert not waiting.done(), "its tokens would fit, and its states do not"
    claim.end_choice(0)
    await settle()
    assert waiting.done()
    waiting.result().release()
    claim.release()
    assert (credits.num_free, credits.num_claims) == (20, 0)


async def test_credits_of_a_model_with_states_are_blocks_of_the_pool() -> None:
    attention = KVLayers(layers=(0,), planes=(Plane("k", 1, 8),))
    states = [KVLayers(layers=(i,), planes=(Plane("s", 1, 100),), is_state=True) for i in (1, 2)]
    model = tiny_model(num_layers=3, kv_layers=(attention, *states))
    config = EngineConfig(
        engine_id="e", epoch=1, model=model, cache=CacheConfig(block_size=4),
        scheduler=SchedulerConfig(max_num_seqs=9),
    )  # fmt: skip
    credits = create_credits(config, 30)
    assert (credits.num_blocks, credits.block_size, credits.num_states) == (30, 8, 2)
    prompt = RequestSpec(list(range(40)), SamplingParams())
    index = create_prefix_index(config, credits)
    index.add([*prompt.prompt_token_ids, *range(9)], prompt, is_local=False)
    assert index.num_cached_tokens(list(range(40)), prompt) == [0], "no state is there"
    assert index.num_cached_tokens([*range(40), *range(9)], prompt) == [48]
    index = create_prefix_index(replace(config, decode_query_len=3), credits)
    index.add([*prompt.prompt_token_ids, *range(9)], prompt)
    assert index.num_cached_tokens([*range(40), *range(9)], prompt) == [32]
    plain = replace(config, model=replace(model, kv_layers=()))
    credits = create_credits(plain, 30)
    assert (credits.num_blocks, credits.block_size, credits.num_states) == (30, 4, 0)
    index = create_prefix_index(plain, credits)
    index.add(prompt.prompt_token_ids, prompt)
    assert len(index) == 10


async def test_more_choices_than_seats_are_admitted_alone() -> None:
    credits = KVCredits(num_blocks=100, block_size=8, max_claims=4)
    other = await credits.acquire(8, 1)
    many = asyncio.create_task(credits.acquire(8, 1, num_choices=9))
    await settle()
    assert not many.done()
    other.release()
    (await many).release()
    assert (credits.num_free, credits.num_claims) == (100, 0)


@pytest.mark.parametrize("admit_first", [True, False])
async def test_a_waiter_may_leave_at_any_moment(admit_first: bool) -> None:
    credits = KVCredits(num_blocks=4, block_size=8, max_claims=9)
    claim = await credits.acquire(24, 8)
    leaving = asyncio.create_task(credits.acquire(24, 8))
    staying = asyncio.create_task(credits.acquire(24, 8))
    await settle()
    if admit_first:
        claim.release()
        leaving.cancel()
    else:
        leaving.cancel()
        claim.release()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    (await staying).release()
    assert (credits.num_free, credits.num_claims, credits.num_waiting) == (4, 0, 0)


@pytest.mark.parametrize("is_idle", [True, False])
async def test_waiters_that_leave_from_the_middle_do_not_count(is_idle: bool) -> None:
    credits = KVCredits(num_blocks=4, block_size=8, max_claims=9)
    claim = await credits.acquire(24, 8)
    first = asyncio.create_task(credits.acquire(24, 8, is_idle=is_idle))
    leaving = [asyncio.create_task(credits.acquire(24, 8, is_idle=is_idle)) for _ in range(3)]
    await settle()
    for task in leaving:
        task.cancel()
    await asyncio.gather(*leaving, return_exceptions=True)
    assert credits.num_waiting == 1
    claim.release()
    (await first).release()
    assert (credits.num_free, credits.num_claims, credits.num_waiting) == (4, 0, 0)


async def test_a_waiter_that_leaves_when_all_are_refused_is_cancelled() -> None:
    credits = KVCredits(num_blocks=4, block_size=8, max_claims=9)
    claim = await credits.acquire(24, 8)
    leaving = asyncio.create_task(credits.acquire(24, 8))
    await settle()
    credits.refuse_waiters(RuntimeError("the node stops"))
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    claim.release()
    assert (credits.num_free, credits.num_claims, credits.num_waiting) == (4, 0, 0)


@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=50, deadline=None)
def test_random_arrivals_and_departures_leave_nothing(seed: int) -> None:
    draw = random.Random(seed)

    async def request(credits: KVCredits, held: list[Claim]) -> None:
        num_choices, is_idle = draw.choice([1, 1, 2, 4]), draw.random() < 0.4
        length = draw.randint(1, 60)
        claim = await credits.acquire(length, draw.randint(1, 100), num_choices, is_idle=is_idle)
        held.append(claim)
        try:
            with_seats = [other for other in held if other.num_choices]
            yielding = sum(other.num_yielding for other in with_seats)
            firm = [other for other in with_seats if not other.num_yielding]
            assert credits.num_free + yielding >= 0 or firm == [claim]
            for choice in range(draw.randint(0, 4)):
                if draw.random() < 0.5:
                    claim.grow_to(length + draw.randint(0, 1), choice)
                if draw.random() < 0.5:
                    claim.end_choice(choice)
                await asyncio.sleep(0)
        finally:
            held.remove(claim)
            claim.release()

    async def scenario() -> None:
        credits = KVCredits(num_blocks=16, block_size=8, max_claims=3)
        held: list[Claim] = []
        tasks = []
        for _ in range(30):
            tasks.append(asyncio.create_task(request(credits, held)))
            if draw.random() < 0.5:
                await asyncio.sleep(0)
            if draw.random() < 0.3:
                draw.choice(tasks).cancel()
        async with asyncio.timeout(30):
            results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(r is None or isinstance(r, asyncio.CancelledError) for r in results), results
        assert not held
        assert (credits.num_free, credits.num_claims, credits.num_waiting) == (16, 0, 0)

    asyncio.run(scenario())


async def test_each_group_has_blocks_and_seats_of_its_own() -> None:
    """A request that fits into two groups together waits for one that has all of its room."""
    credits = KVCredits(num_blocks=10, block_size=8, max_claims=2, num_groups=2)
    first = await credits.acquire(48, 0)
    second = await credits.acquire(40, 0)
    assert {first.group, second.group} == {0, 1} and credits.num_free == 9
    waiting = asyncio.create_task(credits.acquire(48, 0))
    await asyncio.sleep(0)
    assert credits.num_waiting == 1
    first.grow_to(64)
    assert credits.num_free == 7
    second.release()
    third = await waiting
    assert third.group == second.group and credits.num_free == 6
    assert credits.claim_now(8, 0).group == third.group
    for claim in (first, third):
        claim.release()
    assert credits.num_free == 19 and credits.num_claims == 1


async def test_a_prefix_is_followed_until_another_group_has_so_much_more_room() -> None:
    credits = KVCredits(num_blocks=20, block_size=8, max_claims=8, num_groups=2)
    has_prefix = GroupPreference(cached_tokens=(0, 48))
    first = await credits.acquire(80, 0, preference=has_prefix)
    assert first.group == 1
    assert (await credits.acquire(24, 0)).group == 0, "nothing is known of it"
    assert (await credits.acquire(8, 0, preference=has_prefix)).group == 0, (
        "three against ten less six"
    )
    assert (await credits.acquire(24, 0, preference=has_prefix)).group in (0, 1)
    only = GroupPreference(cached_tokens=(0, 0), only=(1,))
    assert credits.claim_now(400, 0, preference=only).group == 1, "whatever is free"
    waiting = asyncio.create_task(credits.acquire(8, 0, preference=only))
    await asyncio.sleep(0)
    assert not waiting.done(), "the other group would have room"
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_the_best_group_without_room_leaves_the_request_to_the_next() -> None:
    credits = KVCredits(num_blocks=10, block_size=8, max_claims=1, num_groups=2)
    assert (await credits.acquire(8, 0)).group == 0
    second = await credits.acquire(16, 0, preference=GroupPreference(cached_tokens=(64, 0)))
    assert second.group == 1, "no seat is left where the prefix is"


async def test_windows_that_roll_count_for_each_answer_whatever_its_length() -> None:
    """Beside rows of 4 tokens: 8 tokens a block of rows, and what each answer has besides."""
    kv = (Plane("kv", 1, 8),)
    layers = (
        KVLayers(layers=(0,), planes=kv, window=6),
        KVLayers(layers=(0,), planes=kv, compress_ratio=4),
        KVLayers(layers=(0,), planes=(Plane("open", 1, 16),), window=5, window_align=4),
    )
    config = EngineConfig(
        engine_id="e", epoch=1, model=tiny_model(num_layers=1, kv_layers=layers),
        cache=CacheConfig(block_size=2), scheduler=SchedulerConfig(max_num_seqs=9),
    )  # fmt: skip
    assert [group.block_size for group in config.kv_layout.groups] == [2, 8, 1]
    credits = create_credits(config, 30)
    # Of the window 5 tokens behind and those of two steps, of open rows 7: blocks of 2 and 1.
    assert (credits.num_blocks, credits.block_size, credits.num_states) == (30, 8, 5 + 10)
    prompt = RequestSpec(list(range(40)), SamplingParams())
    index = create_prefix_index(config, credits)
    index.add(prompt.prompt_token_ids, prompt)
    assert len(index) == 0


async def test_others_do_not_wait_for_what_requests_of_the_idle_class_hold() -> None:
    """Not before they run: a prefill node works for them until then."""
    credits = KVCredits(num_blocks=10, block_size=8, max_claims=2)
    batch = await credits.acquire(40, 8, is_idle=True)
    also = await credits.acquire(16, 8, is_idle=True)
    others = asyncio.create_task(credits.acquire(40, 8))
    await settle()
    assert not others.done(), "neither a seat nor its blocks are free"
    batch.grow_to(41)
    await settle()
    assert others.done() and credits.num_claims == 3
    second = asyncio.create_task(credits.acquire(32, 8))
    await settle()
    assert not second.done(), "what other requests hold is theirs"
    also.grow_to(17)
    batch.grow_to(57)
    await settle()
    assert not second.done()
    others.result().release()
    (await second).release()
    batch.release()
    also.release()
    assert (credits.num_free, credits.num_claims) == (10, 0)


async def test_the_idle_class_waits_behind_all_others() -> None:
    credits = KVCredits(num_blocks=10, block_size=8, max_claims=9)
    held = await credits.acquire(72, 8)
    batch = asyncio.create_task(credits.acquire(8, 8, is_idle=True))
    await settle()
    assert credits.has_waiting(is_idle=True) and not credits.has_waiting(is_idle=False)
    others = asyncio.create_task(credits.acquire(64, 8))
    await settle()
    held.release()
    await settle()
    assert others.done() and not batch.done()
    others.result().release()
    (await batch).release()
    assert (credits.num_free, credits.num_claims, credits.num_waiting) == (10, 0, 0)


async def test_a_group_that_has_room_comes_before_one_that_would_preempt() -> None:
    credits = KVCredits(num_blocks=10, block_size=8, max_claims=9, num_groups=2)
    batch = await credits.acquire(56, 8, is_idle=True)
    batch.grow_to(57)
    has_prefix = GroupPreference(cached_tokens=(80, 0) if batch.group == 0 else (0, 80))
    others = await credits.acquire(40, 8, preference=has_prefix)
    assert others.group != batch.group
    assert (await credits.acquire(40, 8)).group == batch.group, "nowhere else is room"
