"""Prefixes that peers hold: when they are asked, what is pulled, and what is held for peers."""

from __future__ import annotations

import random

import pytest

from engine.contracts.prefix_holder import HashChains
from engine.contracts.request import RequestStatus
from engine.sched.arrivals import peer_source
from engine.sched.arrivals.pull_rates import PullRates
from engine.sched.counters import PrefillRate
from engine.sched.departures import prefix_offers
from engine.sched.departures.prefix_offers import OfferedAnswers
from kv_transfer.config import KVRole, KVTransferConfig
from tests.engine.sched.factories import (
    BLOCK_SIZE,
    make_config,
    make_request,
    remote_decode,
    remote_prefill,
)
from tests.engine.sched.step_machine import Client, StepMachine

PROMPT = list(range(1, 22))
NUM_FULL = 20 // BLOCK_SIZE


def machine_of(
    role: KVRole = "kv_producer", num_blocks: int = 64, num_host_slots: int = 0, **settings: int
) -> StepMachine:
    transfer = KVTransferConfig(kv_role=role, shares_prefixes=True)
    config = make_config(kv_transfer=transfer, **settings)
    return StepMachine(config, num_blocks, num_host_slots=num_host_slots)


def add(machine: StepMachine, name: str = "r", **more: object) -> Client:
    settings = {"prefix_peer": "peer:1", "max_tokens": 3, **more}
    return machine.add(make_request(name, PROMPT, **settings))


def begin_to_ask(machine: StepMachine) -> Client:
    client = add(machine)
    machine.schedule()
    assert client.request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    return client


def learn_rate(machine: StepMachine) -> None:
    """Computes prompts, none like another, until the machine knows how quickly it does so."""
    for i in range(60, 68):
        machine.add(make_request(f"other {i}", [i] * 9, max_tokens=1))
        machine.finish()
    assert machine.scheduler.stats().prefill_tokens_per_s


def computed(machine: StepMachine) -> int:
    return machine.scheduler.stats().prompt_tokens_computed


@pytest.mark.parametrize("num_blocks", [1, 3, NUM_FULL])
def test_what_a_peer_holds_is_pulled_and_the_rest_computed(num_blocks: int) -> None:
    machine = machine_of()
    machine.peer_tokens = lambda ask: num_blocks * BLOCK_SIZE
    client = add(machine)
    machine.finish()
    assert computed(machine) == len(PROMPT) - num_blocks * BLOCK_SIZE
    assert client.num_cached_tokens == num_blocks * BLOCK_SIZE
    counters = machine.scheduler.stats().kv_transfer
    assert counters["prefix_pulled_tokens"] == num_blocks * BLOCK_SIZE
    machine.check_all_done()


def test_a_late_answer_is_none_to_a_later_request_of_the_same_id() -> None:
    """It is about another prompt."""
    machine = machine_of()
    begin_to_ask(machine)
    (late,) = machine.scheduler.remote.peers.take_asks()
    machine.abort("r")
    machine.settle()
    del machine.clients["r"]
    machine.add(make_request("r", PROMPT[::-1], prefix_peer="peer:1", max_tokens=3))
    machine.schedule()
    answer = remote_prefill("late"), NUM_FULL * BLOCK_SIZE
    machine.scheduler.remote.peers.answered(late.request_id, late.number, *answer)
    assert not machine.connector.pulls
    machine.finish()
    assert machine.num_asked == 1
    machine.check_all_done()


def test_a_pulled_prefix_is_exported_and_cached() -> None:
    machine = machine_of()
    machine.peer_tokens = lambda ask: NUM_FULL * BLOCK_SIZE
    add(machine, kv=remote_decode("t"), max_tokens=1)
    machine.finish()
    before = computed(machine)
    add(machine, "again")
    machine.finish()
    assert computed(machine) - before == 1, "the cache has it now: nobody is asked"
    assert machine.num_asked == 1
    machine.check_all_done()


def test_only_what_the_cache_lacks_is_pulled() -> None:
    machine = machine_of()
    machine.peer_tokens = lambda ask: len(ask.chains[BLOCK_SIZE]) * BLOCK_SIZE
    machine.add(make_request("beginning", PROMPT[:9], max_tokens=1))
    machine.finish()
    add(machine)
    machine.finish()
    counters = machine.scheduler.stats().kv_transfer
    assert counters["prefix_pulled_tokens"] == 20 - 8
    machine.check_all_done()


def test_what_host_memory_lacks_is_pulled() -> None:
    transfer = KVTransferConfig(kv_role="kv_producer", shares_prefixes=True)
    machine = StepMachine(make_config(kv_transfer=transfer), 12, num_host_slots=64)
    machine.peer_tokens = lambda ask: len(ask.chains[BLOCK_SIZE]) * BLOCK_SIZE
    machine.add(make_request("beginning", PROMPT[:9], max_tokens=1))
    machine.finish()
    machine.add(make_request("other", [50] * 46, max_tokens=1))
    machine.finish()
    before = computed(machine)
    client = add(machine)
    machine.finish()
    stats = machine.scheduler.stats()
    assert (stats.prompt_tokens_loaded, stats.prompt_tokens_pulled) == (8, 12)
    assert computed(machine) - before == 1 and client.num_cached_tokens == 20
    machine.check_all_done()


@pytest.mark.parametrize("how", ["nothing", "less than is cached", "no answer"])
def test_without_a_peers_help_the_prompt_is_computed(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = machine_of()
    machine.add(make_request("beginning", PROMPT[:9], max_tokens=1))
    machine.finish()
    before = computed(machine)
    begin_to_ask(machine)
    if how == "no answer":
        (ask,) = machine.scheduler.remote.peers.take_asks()
        monkeypatch.setattr(peer_source, "ASK_LIMIT_S", 0.0)
        machine.schedule()
        machine.scheduler.remote.peers.answered(ask.request_id, ask.number, None, 0)
    else:
        machine.peer_tokens = lambda ask: 0 if how == "nothing" else 2 * BLOCK_SIZE
    machine.finish()
    assert computed(machine) - before == len(PROMPT) - 8
    assert machine.scheduler.stats().kv_transfer["prefix_misses"] == 1
    machine.check_all_done()


@pytest.mark.parametrize("tells_part", [False, True])
def test_a_pull_that_fails_keeps_what_came(tells_part: bool) -> None:
    machine = machine_of()
    learn_rate(machine)
    before = computed(machine)
    machine.peer_tokens = lambda ask: NUM_FULL * BLOCK_SIZE
    client = begin_to_ask(machine)
    machine.answer_asks()
    (transfer_id,) = machine.connector.transfer_ids()
    machine.connector.pulls[transfer_id].position = 0
    machine.connector.advance(transfer_id)
    kept = machine.connector.pulls[transfer_id].position // BLOCK_SIZE * BLOCK_SIZE
    machine.connector.fail(transfer_id, tells_part=tells_part)
    machine.poll_connector()
    machine.finish()
    assert client.tokens == client.expected
    assert computed(machine) - before == len(PROMPT) - (kept if tells_part else 0)
    assert machine.scheduler.stats().kv_transfer["prefix_pull_failures"] == 1
    assert machine.scheduler.remote.peers._rates._of("peer:1").num_takes == 1
    machine.check_all_done()


@pytest.mark.parametrize("moment", ["asked", "pulling"])
def test_an_aborted_request_leaves_nothing(moment: str) -> None:
    """Writers may go on after the abort, into blocks that no other request has."""
    machine = machine_of()
    machine.peer_tokens = lambda ask: NUM_FULL * BLOCK_SIZE
    begin_to_ask(machine)
    if moment == "pulling":
        machine.answer_asks()
        machine.connector.advance(machine.connector.transfer_ids()[0])
    machine.abort("r")
    assert machine.scheduler.stats().num_delayed_frees == (moment == "pulling")
    assert all(pull.stopping for pull in machine.connector.pulls.values())
    machine.answer_asks()
    machine.finish()
    machine.check_all_done()


def test_others_run_while_a_prefix_is_on_its_way() -> None:
    machine = machine_of()
    waiting = begin_to_ask(machine)
    other = machine.add(make_request("other", [7, 8], max_tokens=4))
    for _ in range(8):
        machine.step()
    machine.settle()
    assert other.finish_reason and not waiting.tokens
    machine.finish()
    machine.check_all_done()


def test_nobody_is_asked_where_prefixes_are_not_shared() -> None:
    machine = StepMachine(make_config(), 64)
    add(machine)
    machine.finish()
    assert machine.num_asked == 0 and computed(machine) == len(PROMPT)
    assert machine.scheduler.remote.offers.offer({BLOCK_SIZE: [b"x"]}) == ("", 0)


# What beats computing -------------------------------------------------------------------------


def compute(own: PrefillRate, num_tokens: int, seconds: float) -> None:
    """Adds steps until the rate is known."""
    while not own.tokens_per_s:
        own.add_step(num_tokens, seconds)


def test_measured_rates_decide() -> None:
    own = PrefillRate()
    rates = PullRates(own)
    for _ in range(2):
        rates.pulled("slow:1", 100, 10.0)
    assert rates.is_quicker("slow:1", 500), "how quickly we compute is not known"
    compute(own, 1000, 1.0)
    assert not rates.is_quicker("slow:1", 500)
    assert rates.is_quicker("new:1", 500)
    for _ in range(2):
        rates.pulled("quick:1", 100_000, 10.0)
    assert rates.is_quicker("quick:1", 500)
    rates.asked("quick:1", 0.5)
    assert not rates.is_quicker("quick:1", 500), "to ask takes as long as to compute"
    assert rates.is_quicker("quick:1", 5000)


@pytest.mark.parametrize(("slowness", "chances"), [(1.05, 14), (1.4, 12), (2.0, 5), (10.0, 0)])
def test_a_slow_peer_gets_another_chance_the_later_the_slower_it_was(
    slowness: float, chances: int
) -> None:
    """One prompt in nine at most, however little it costs."""
    own = PrefillRate()
    compute(own, 1000, 1.0)
    rates = PullRates(own)
    for _ in range(2):
        rates.pulled("slow:1", 500, 0.5 * slowness)
    assert sum(rates.is_quicker("slow:1", 500) for _ in range(128)) == chances


def test_a_wire_that_became_quick_is_used_from_its_first_try_on() -> None:
    """Slow pulls before do not outweigh a quick one."""
    own = PrefillRate()
    compute(own, 1000, 1.0)
    rates = PullRates(own)
    for _ in range(10):
        rates.pulled("peer:1", 500, 1.0)
    tries = [rates.is_quicker("peer:1", 500) for _ in range(100)].index(True)
    assert tries < 100
    rates.pulled("peer:1", 500, 0.2)
    assert all(rates.is_quicker("peer:1", 500) for _ in range(20))


def test_what_each_pull_costs_is_told_apart_from_what_its_tokens_cost() -> None:
    """Pulls take 300 ms each and 0.1 ms a token; computing takes 1 ms a token."""
    own = PrefillRate()
    compute(own, 1000, 1.0)
    rates = PullRates(own)
    for num_tokens in (100, 100, 200):
        rates.pulled("peer:1", num_tokens, 0.3 + num_tokens * 1e-4)
    assert not rates.is_quicker("peer:1", 300)
    assert rates.is_quicker("peer:1", 400)


def test_a_much_larger_prefix_is_pulled_on_trust_where_small_ones_are_slow() -> None:
    own = PrefillRate()
    compute(own, 1000, 1.0)
    rates = PullRates(own)
    for _ in range(2):
        rates.pulled("peer:1", 100, 0.3)
    assert not rates.is_quicker("peer:1", 399)
    assert rates.is_quicker("peer:1", 8000)
    rates.pulled("peer:1", 8000, 1.0)
    assert rates.is_quicker("peer:1", 2000) and not rates.is_quicker("peer:1", 100)


def test_a_loss_that_nobody_foresaw_is_paid_back_before_the_next_try() -> None:
    """Twice the time to compute is the most that counts: 50 prompts."""
    own = PrefillRate()
    compute(own, 1000, 1.0)
    tries = []
    for last in (0.6, 0.9):
        rates = PullRates(own)
        for seconds in (0.2, 0.2, *[0.6] * 20, last, *[0.6] * 20):
            rates.pulled("peer:1", 500, seconds)
        tries.append([rates.is_quicker("peer:1", 500) for _ in range(400)].index(True))
    assert tries[1] > tries[0] + 10


def test_credit_that_is_left_over_is_no_use_when_the_peer_becomes_slower() -> None:
    own = PrefillRate()
    compute(own, 1000, 1.0)
    rates = PullRates(own)
    for _ in range(2000):
        if rates.is_quicker("peer:1", 500):
            rates.pulled("peer:1", 500, 0.505)
    for _ in range(20):
        rates.pulled("peer:1", 500, 5.0)
    assert not any(rates.is_quicker("peer:1", 500) for _ in range(100))


def test_one_stall_does_not_make_a_quick_peer_slow_for_long() -> None:
    own = PrefillRate()
    compute(own, 1000, 1.0)
    rates = PullRates(own)
    for seconds in (*[0.1] * 10, 4.0):
        rates.pulled("peer:1", 500, seconds)
    tries = [rates.is_quicker("peer:1", 500) for _ in range(400)].index(True)
    assert 50 <= tries <= 100
    rates.pulled("peer:1", 500, 0.1)
    assert rates.is_quicker("peer:1", 500)


def test_a_peer_whose_pulls_fail_is_not_asked() -> None:
    """However quickly they fail; one failure does not outweigh many pulls."""
    own = PrefillRate()
    compute(own, 1000, 1.0)
    rates = PullRates(own)
    rates.failed("frozen:1", 500, 5.0)
    for _ in range(2):
        rates.failed("refuses:1", 500, 0.001)
    for _ in range(10):
        rates.pulled("quick:1", 500, 0.1)
    rates.failed("quick:1", 500, 0.001)
    for _ in range(6):
        rates.pulled("slow:1", 500, 25.0)
    slow = rates._of("slow:1")
    before = slow.seconds_for(500)
    rates.failed("slow:1", 500, 0.001)
    assert slow.seconds_for(500) == pytest.approx(before)
    for peer, is_asked in (("frozen:1", False), ("refuses:1", False), ("quick:1", True)):
        assert rates.is_quicker(peer, 500) is is_asked


def test_a_failure_says_nothing_before_it_is_known_how_long_computing_takes() -> None:
    own = PrefillRate()
    rates = PullRates(own)
    for _ in range(6):
        rates.failed("refuses:1", 500, 0.001)
    compute(own, 1000, 1.0)
    for _ in range(2):
        rates.failed("refuses:1", 500, 0.001)
    assert not rates.is_quicker("refuses:1", 500)


def test_a_try_is_decided_once_and_ends_in_a_pull() -> None:
    """Weighed again when the peer had answered, it looked slower still, and no try ever pulled."""
    machine = machine_of()
    machine.peer_tokens = lambda ask: NUM_FULL * BLOCK_SIZE
    learn_rate(machine)
    rates = machine.scheduler.remote.peers._rates
    for _ in range(3):
        rates.pulled("peer:1", 20, 1e6)
    rates._of("peer:1").credit_s = 1e9
    for number in range(8):
        machine.add(make_request(f"no {number}", [90 + number, *PROMPT], prefix_peer="peer:1"))
        machine.finish()
    assert machine.num_asked == 0
    add(machine)
    machine.finish()
    assert machine.num_asked == 1
    assert machine.scheduler.stats().kv_transfer["prefix_pulls"] == 1
    assert rates._of("peer:1").seconds_for(20) < 1e3, "good news counts at once"
    machine.check_all_done()


def test_a_first_pull_that_was_slow_gets_a_second_which_counts() -> None:
    """The first one opens connections. One that was hopeless is the last."""
    own = PrefillRate()
    compute(own, 1000, 1.0)
    rates = PullRates(own)
    rates.pulled("cold:1", 500, 1.5)
    assert rates.is_quicker("cold:1", 500)
    rates.pulled("cold:1", 500, 0.45)
    assert all(rates.is_quicker("cold:1", 500) for _ in range(9)), "the first is forgotten"
    rates.pulled("slow:1", 500, 1.5)
    rates.pulled("slow:1", 500, 1.5)
    rates.pulled("hopeless:1", 500, 9.0)
    assert not rates.is_quicker("slow:1", 500) and not rates.is_quicker("hopeless:1", 500)


@pytest.mark.parametrize("slowness", [0.5, 1.1, 2.0, 30.0])
def test_prompts_take_hardly_longer_than_computed_however_slow_a_peer_is(slowness: float) -> None:
    """The first two pulls are on trust, and much larger ones once; all others are decided by what
    was measured."""
    own = PrefillRate()
    compute(own, 1000, 1.0)
    rates, rng = PullRates(own), random.Random(3)
    rates.pulled("peer:1", 500, 0.5 * slowness)
    total = computed_s = 0.0
    for _ in range(4000):
        num_tokens = rng.randint(100, 8000)
        seconds = num_tokens / 1000
        computed_s += seconds
        if rates.is_quicker("peer:1", num_tokens):
            seconds *= slowness * rng.uniform(0.9, 1.1)
            rates.pulled("peer:1", num_tokens, seconds)
        total += seconds
    assert total / computed_s < min(1.04, slowness + 0.01)


def test_a_slow_peer_is_not_asked() -> None:
    machine = machine_of()
    learn_rate(machine)
    machine.scheduler.remote.peers._rates.pulled("peer:1", 1, 1e6)
    add(machine)
    machine.finish()
    assert machine.num_asked == 0
    assert machine.scheduler.stats().kv_transfer["prefix_cheaper_to_compute"] == 1
    machine.check_all_done()


def test_a_slow_peer_does_not_keep_a_prompt_from_computing_while_it_is_loaded() -> None:
    transfer = KVTransferConfig(kv_role="kv_producer", shares_prefixes=True)
    machine = StepMachine(make_config(kv_transfer=transfer), 12, num_host_slots=64)
    learn_rate(machine)
    machine.add(make_request("beginning", PROMPT[:9], max_tokens=1))
    machine.finish()
    machine.add(make_request("other", [50] * 46, max_tokens=1))
    machine.finish()
    machine.scheduler.remote.peers._rates.pulled("peer:1", 1, 1e6)
    client = add(machine)
    machine.schedule()
    assert client.request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert client.request.prefix_peer == "", "nobody will be asked, which `start_early` looks at"
    machine.finish()
    assert machine.num_asked == 0
    machine.check_all_done()


# What is held for peers -----------------------------------------------------------------------


def names_of(machine: StepMachine, prompt: list[int], salt: str = "") -> HashChains:
    request = make_request("names", prompt, cache_salt=salt)
    return machine.scheduler._kv_cache.behind.chains(request, len(prompt))


def offer(machine: StepMachine, prompt: list[int], names: HashChains) -> tuple[str, int]:
    """Offers a prefix, and compares what is sent with the prompt's KV."""
    transfer_id, count = machine.scheduler.remote.offers.offer(names)
    if count:
        machine.connector.exports[transfer_id].prompt = prompt[:count]
    return transfer_id, count


def test_cached_blocks_are_offered_and_kept_until_they_are_taken() -> None:
    machine = machine_of(num_blocks=48)
    add(machine, prefix_peer="", max_tokens=1)
    machine.finish()
    names = names_of(machine, [*PROMPT[:16], 60, 60, 60, 60])
    transfer_id, count = offer(machine, PROMPT, names)
    assert count == 16, "the last block has other tokens"
    machine.check_blocks()
    assert not machine.scheduler.reset_prefix_cache()
    machine.connector.finish(transfer_id)
    machine.poll_connector()
    machine.check_all_done()


def forgotten(role: KVRole = "kv_producer") -> tuple[StepMachine, HashChains, list[int]]:
    """Returns a node that has the KV of a conversation in host memory, but for its first block,
    which is cached; with the names of its blocks, and its tokens."""
    machine = machine_of(role, num_blocks=48, num_host_slots=64)
    client = add(machine, prefix_peer="", max_tokens=4)
    machine.finish()
    tokens = [*PROMPT, *client.expected][: NUM_FULL * BLOCK_SIZE]
    names, pool = names_of(machine, tokens), machine.scheduler._kv_cache.block_pool
    for number in range(6):
        prompt = [*PROMPT[:BLOCK_SIZE], *([50 + number] * 36)]
        machine.add(make_request(f"other{number}", prompt, max_tokens=1))
        machine.finish()
    is_cached = [pool.get_cached_block(name) is not None for name in names[BLOCK_SIZE]]
    assert is_cached == [True] + [False] * 4
    return machine, names, tokens


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_what_lies_in_host_memory_is_loaded_for_a_peer(role: KVRole) -> None:
    machine, names, tokens = forgotten(role)
    stats = machine.scheduler.stats
    more = {BLOCK_SIZE: [*names[BLOCK_SIZE], b"nobody has it"]}
    transfer_id, count = offer(machine, tokens, more)
    assert count == len(tokens)
    assert stats().kv_transfer["prefix_offered_tokens_loaded"] == count - BLOCK_SIZE
    export = machine.connector.exports[transfer_id]
    machine.connector.advance(transfer_id)
    assert not export.rows, "nothing may be pulled before it is there"
    machine.check_blocks()
    machine.finish_loads()
    machine.connector.finish(transfer_id)
    machine.poll_connector()
    assert offer(machine, tokens, names)[1] == count
    num_loaded = stats().kv_transfer["prefix_offered_tokens_loaded"]
    assert num_loaded == count - BLOCK_SIZE, "it is cached now"
    machine.finish()
    machine.check_all_done()


@pytest.mark.parametrize("is_right", [True, False])
def test_an_offer_ends_whose_load_is_over_and_not_reported(is_right: bool) -> None:
    """Nobody says more of it: no request is left, and no job."""
    machine, names, tokens = forgotten()
    assert machine.host is not None
    transfer_id, _ = offer(machine, tokens, names)
    export = machine.connector.exports[transfer_id]
    if is_right:
        machine.host.finish()
    else:
        machine.host.fail_load()
    assert machine.host.tier.num_jobs == 0
    assert not export.rows and not export.stopping, "the scheduler does not know yet"
    with pytest.raises(AssertionError, match=f"transfer {transfer_id} does not end"):
        machine.connector.finish(transfer_id)
    machine.finish()
    assert (bool(export.rows), export.stopping) == (is_right, not is_right)
    machine.check_all_done()


def test_a_load_that_fails_calls_the_offer_off() -> None:
    machine, names, _ = forgotten()
    assert machine.host is not None
    transfer_id, _ = machine.scheduler.remote.offers.offer(names)
    for process in range(2):
        machine.host.tier.process_is_gone(process)
    machine.host._jobs.clear()
    machine.poll_connector()
    assert machine.connector.exports[transfer_id].stopping
    machine.check_blocks()
    while machine.connector.transfer_ids():
        machine.connector.advance(transfer_id)
    machine.poll_connector()
    machine.check_all_done()
    left = machine.scheduler.remote.offers.offer(names)[1]
    assert left == BLOCK_SIZE, "the rest is not found any more"


def test_a_peer_that_gives_up_while_blocks_are_loaded_leaves_nothing() -> None:
    machine, names, _ = forgotten()
    transfer_id, _ = machine.scheduler.remote.offers.offer(names)
    machine.connector.fail(transfer_id)
    machine.poll_connector()
    assert machine.scheduler.check_empty(), "blocks are being written"
    machine.finish_loads()
    machine.check_all_done()


def test_another_tenants_blocks_are_not_offered() -> None:
    machine = machine_of()
    add(machine, prefix_peer="", cache_salt="a", max_tokens=1)
    machine.finish()
    offers = machine.scheduler.remote.offers
    for salt in ("", "b"):
        assert offers.offer(names_of(machine, PROMPT, salt)) == ("", 0)
    assert offers.offer(names_of(machine, PROMPT, "a"))[1] == NUM_FULL * BLOCK_SIZE


def test_few_blocks_are_held_at_a_time() -> None:
    machine = machine_of(num_blocks=24)
    add(machine, prefix_peer="", max_tokens=1)
    machine.finish()
    offers = machine.scheduler.remote.offers
    assert offers.offer(names_of(machine, PROMPT))[1] == 3 * BLOCK_SIZE
    assert offers.offer(names_of(machine, PROMPT)) == ("", 0)
    for transfer_id in machine.connector.transfer_ids():
        machine.connector.finish(transfer_id)
    machine.poll_connector()
    assert offers.offer(names_of(machine, PROMPT))[1] == 3 * BLOCK_SIZE


@pytest.mark.parametrize("how", ["failed", "aborted"])
def test_an_offer_that_nobody_takes_ends(how: str) -> None:
    machine = machine_of()
    add(machine, prefix_peer="", max_tokens=1)
    machine.finish()
    transfer_id, _ = machine.scheduler.remote.offers.offer(names_of(machine, PROMPT))
    if how == "failed":
        machine.connector.fail(transfer_id)
    else:
        machine.connector._events.aborted.append(machine.connector._end(transfer_id))
    machine.poll_connector()
    machine.check_all_done()


def test_decode_offers_answers_that_have_ended() -> None:
    machine = machine_of("kv_consumer")
    client = add(machine, max_tokens=6)
    offers = machine.scheduler.remote.offers
    conversation = [*PROMPT, *client.expected]
    machine.step()
    machine.settle()
    assert offers.offer(names_of(machine, conversation)) == ("", 0)
    machine.finish()
    assert machine.num_asked == 0, "decode nodes pull no prefixes"
    _, count = offers.offer(names_of(machine, conversation))
    assert count == (len(conversation) - 1) // BLOCK_SIZE * BLOCK_SIZE
    for transfer_id in machine.connector.transfer_ids():
        machine.connector.finish(transfer_id)
    machine.poll_connector()
    assert machine.scheduler.reset_prefix_cache()
    assert not offers.answers
    machine.check_all_done()


def test_decode_offers_nothing_of_an_aborted_answer() -> None:
    machine = machine_of("kv_consumer")
    add(machine, max_tokens=30)
    machine.step()
    machine.settle()
    machine.abort("r")
    machine.finish()
    assert machine.scheduler.remote.offers.offer(names_of(machine, PROMPT)) == ("", 0)


def test_offered_answers_have_a_cap_and_a_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(prefix_offers.time, "monotonic", lambda: now)
    answers = OfferedAnswers(4, 10.0)
    answers.add([b"a", b"b", b"c"])
    answers.add([b"a", b"x", b"y"])
    assert b"c" not in answers and b"b" in answers, "tails go first"
    assert len(answers) == 4
    now += 9.0
    answers.add([b"a"])
    now += 2.0
    assert b"a" in answers and b"x" not in answers
    answers.add([b"z"])
    assert len(answers) == 2
