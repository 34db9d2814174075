"""The table of all KV that arrives: what changes there are, and what a source needs to have."""

from __future__ import annotations

import pytest

from engine.contracts.request import Request, RequestStatus
from engine.sched.arrivals.arrival import ArrivalState, KVArrival, WriterKey
from engine.sched.arrivals.arrivals import Arrivals
from engine.sched.arrivals.host_source import HostSource
from engine.sched.arrivals.peer_source import PeerSource
from engine.sched.arrivals.prefill_source import PrefillSource
from kv_transfer.config import KVTransferConfig
from tests.engine.sched.factories import BLOCK_SIZE, make_config, make_request
from tests.engine.sched.fake_worker import kv_of
from tests.engine.sched.step_machine import Client, StepMachine
from tests.engine.sched.test_random_steps import SHARING, Traffic

_S = ArrivalState
STATES_OF = {
    PrefillSource: {
        _S.QUEUED, _S.COMING, _S.RETRYING, _S.STOPPING, _S.HERE, _S.PART, _S.NOTHING,
        _S.RECLAIMED, _S.READY, _S.ENDED,
    },
    HostSource: {
        _S.QUEUED, _S.COMING, _S.EARLY, _S.HERE, _S.NOTHING, _S.READY, _S.ENDED,
    },
    PeerSource: {_S.QUEUED, _S.ASKED, _S.COMING, _S.HERE, _S.PART, _S.READY, _S.ENDED},
}  # fmt: skip
"""The states that `arrival.py` says each source uses."""
PROMPT = list(range(1, 22))


def test_each_source_uses_its_own_states(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[type, set[ArrivalState]] = {source: set() for source in STATES_OF}
    move = Arrivals.move

    def seen_move(self: Arrivals, arrival: KVArrival, state: ArrivalState) -> None:
        seen[type(arrival.source)] |= {arrival.state, state}
        move(self, arrival, state)

    monkeypatch.setattr(Arrivals, "move", seen_move)
    for seed in range(6):
        config = make_config(
            max_num_seqs=6, max_num_batched_tokens=16, max_model_len=64, kv_transfer=SHARING
        )
        machine = StepMachine(config, 13, depth=2, seed=seed, num_host_slots=6, num_files=20)
        Traffic(machine, seed, ["pull", "local"]).run()
    for source, states in STATES_OF.items():
        assert seen[source] <= states
        assert {ArrivalState.COMING, ArrivalState.READY, ArrivalState.ENDED} <= seen[source]


class Store:
    """A source that is only this: KV by name, which comes when the test says so."""

    finds_certainly, writes_by_token = False, False

    def __init__(self, machine: StepMachine, num_tokens: int) -> None:
        self.arrivals = machine.scheduler.remote.arrivals
        self.machine = machine
        self.num_tokens = num_tokens
        self.coming: list[KVArrival] = []
        self.stopped: list[tuple[KVArrival, int]] = []

    def find(self, request: Request, num_computed_tokens: int) -> int:
        return max(0, self.num_tokens - num_computed_tokens)

    def begin(self, request: Request, num_computed_tokens: int, num_tokens: int) -> None:
        arrival = KVArrival(request, self)
        self.arrivals.begin(arrival, num_computed_tokens, num_tokens, ArrivalState.COMING)
        self.coming.append(arrival)

    def check(self) -> None:
        """Waits for whatever the test does."""

    def stop(self, arrival: KVArrival) -> WriterKey | None:
        if arrival not in self.coming:
            return None
        self.coming.remove(arrival)
        self.stopped.append((arrival, -len(self.stopped) - 1))
        return self.stopped[-1][1]

    def bring(self, num_tokens: int) -> None:
        """Lets KV of the first `num_tokens` tokens be there, and no more."""
        arrival = self.coming.pop()
        name = arrival.request.request_id
        block_ids = self.machine.scheduler._kv_cache.get_block_ids(name)
        for position, kv in enumerate(kv_of(PROMPT)[:num_tokens]):
            if position >= arrival.num_before:
                self.machine.memory.write(block_ids, position, kv, len(PROMPT))
        self.arrivals.here(arrival, num_tokens)


def waiting_for(store: Store) -> Client:
    machine = store.machine
    store.arrivals.prefix_sources.append(store)
    client = machine.add(make_request("r", PROMPT, prefix_peer="peer:1", max_tokens=3))
    machine.schedule()
    machine.answer_asks()
    assert client.request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    return client


@pytest.mark.parametrize("num_there", [0, 2 * BLOCK_SIZE, 4 * BLOCK_SIZE])
def test_a_source_is_found_begun_and_ends(num_there: int) -> None:
    store = Store(StepMachine(make_config(), 32), 4 * BLOCK_SIZE)
    waiting_for(store)
    store.bring(num_there)
    store.machine.finish()
    store.machine.check_all_done()
    assert store.machine.scheduler.stats().prompt_tokens_computed == len(PROMPT) - num_there


def test_a_source_brings_what_those_before_it_lack() -> None:
    """The peer has two blocks of the prompt, and the store has four."""
    transfer = KVTransferConfig(kv_role="kv_producer", shares_prefixes=True)
    machine = StepMachine(make_config(kv_transfer=transfer), 32)
    machine.peer_tokens = lambda ask: 2 * BLOCK_SIZE
    store = Store(machine, 4 * BLOCK_SIZE)
    waiting_for(store)
    assert not store.coming
    machine.connector.finish("prefix-1")
    machine.poll_connector()
    (arrival,) = store.coming
    assert (arrival.num_before, arrival.num_coming) == (2 * BLOCK_SIZE, 2 * BLOCK_SIZE)
    store.bring(4 * BLOCK_SIZE)
    machine.finish()
    machine.check_all_done()
    assert machine.scheduler.stats().prompt_tokens_computed == len(PROMPT) - 4 * BLOCK_SIZE


def test_blocks_of_a_source_that_is_stopped_are_held_until_it_has_ended() -> None:
    store = Store(StepMachine(make_config(), 32), 4 * BLOCK_SIZE)
    waiting_for(store)
    machine = store.machine
    machine.abort("r")
    ((_, key),) = store.stopped
    assert machine.scheduler.check_empty() != []
    machine.scheduler.remote.held.release(key)
    machine.check_all_done()
