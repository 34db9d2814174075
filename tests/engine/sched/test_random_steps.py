"""Random order of everything, at depth 1 and 2: every output is right and nothing is left.

The fake worker checks all KV it reads; the step machine checks all blocks after every move.
"""

from __future__ import annotations

import random
import time
from bisect import bisect
from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from typing import Any
from unittest import mock

import pytest

from engine.contracts.messages import EngineCoreOutputs, PrefixAsk
from engine.contracts.outputs import ModelRunnerOutput
from engine.contracts.request import Request, RequestStatus
from engine.contracts.request_spec import IDLE_PRIORITY
from engine.contracts.scheduler_output import SchedulerOutput
from engine.sched.departures.prefix_offers import _Offer
from kv_transfer.config import KVTransferConfig
from kv_transfer.metadata import KVTransferParams
from kv_transfer.tiers import load_pieces
from tests.engine.sched.factories import (
    make_config,
    make_order,
    make_request,
    remote_decode,
    remote_prefill,
)
from tests.engine.sched.memory_host_tier import new_store
from tests.engine.sched.step_machine import StepMachine

_NUM_REQUESTS = 40
_MAX_MOVES = 6000
SHARING = KVTransferConfig(kv_role="kv_producer", shares_prefixes=True)
KINDS = [
    ["local"], ["local", "pull"], ["export", "local"], ["choices", "pull", "local"],
    ["again", "export", "local"],
]  # fmt: skip


class RandomClock:
    """Goes on whenever it is read, now and then by as much as a machine that is busy stands still:
    what takes too long is the same in every run."""

    def __init__(self, seed: float) -> None:
        self._rng = random.Random(seed)
        self._now = 1000.0

    def __call__(self) -> float:
        mean_s = 1e-5 if self._rng.random() < 0.98 else 0.1
        self._now += self._rng.expovariate(1 / mean_s)
        return self._now


class Traffic:
    """Clients, peers and node server of one step machine, all deciding at random."""

    def __init__(self, machine: StepMachine, seed: int, kinds: list[str]) -> None:
        self.machine = machine
        self.rng = random.Random(seed)
        self.kinds = kinds
        self.num_added = 0
        has_objective = machine.config.scheduler.itl_objective_ms > 0
        self.priorities = (0, 1, IDLE_PRIORITY if has_objective else 2)
        self.computed_here: set[str] = set()
        """Pulls that the node server gave up: their first token comes from here."""
        self.answered_failures: dict[str, int] = {}
        self.attempts: dict[str, int] = {}
        self.exports: dict[str, tuple[str, int]] = {}
        """The latest request of each export, and its attempt, by transfer."""
        self.num_moves = 0
        self.moves: list[tuple[int, Callable[[], None]]] = [
            (3, self._add),
            (10, self._schedule),
            (10, self._run),
            (10, self._update),
            (8, self._transfer),
            (4, self._first_token),
            (4, self._answer_failures),
            (1, self._abort),
            (1, self._change_mind),
        ]
        self.asks_peers = machine.scheduler.remote.peers.is_on
        if self.asks_peers:
            self.moves += [(3, machine.answer_asks), (2, self._offer)]
            machine.peer_tokens = self._tokens_of_peer

    def run(self) -> None:
        with mock.patch.object(time, "monotonic", RandomClock(self.rng.random())):
            self._run_and_drain()

    def _run_and_drain(self) -> None:
        weights = list(accumulate(weight for weight, _ in self.moves))
        for _ in range(_MAX_MOVES):
            self.num_moves += 1
            place = bisect(weights, self.rng.random() * weights[-1])
            self.moves[place][1]()
            if self.num_added == _NUM_REQUESTS and not self._has_requests():
                break
        self._drain()

    def _has_requests(self) -> bool:
        return self.machine.scheduler.has_unfinished_requests()

    def _drain(self) -> None:
        """Does the same, without new trouble. Ends, or somebody waits for ever."""
        for _ in range(_MAX_MOVES):
            if not self._has_requests():
                break
            self._first_token()
            self._answer_failures()
            self.machine.answer_asks()
            self._transfer(may_fail=False)
            self.machine.step()
        assert not self._has_requests(), self.machine.scheduler.check_empty()
        self.machine.finish()
        self.machine.check_all_done()

    # Moves ------------------------------------------------------------------------------------

    def _add(self) -> None:
        if self.num_added == _NUM_REQUESTS:
            return
        name = f"r{self.num_added}"
        self.num_added += 1
        kind = self.rng.choice(self.kinds)
        kv: KVTransferParams | None = None
        max_tokens = self.rng.randint(1, 30)
        if kind == "pull":
            kv = remote_prefill(f"t-{name}")
        elif kind in ("export", "again"):
            kv, max_tokens = self._export(name, is_again=kind == "again"), 1
        elif kind == "choices":
            kv = remote_prefill(f"t-{name}") if self.rng.random() < 0.5 else None
        num_choices = self.rng.randint(2, 5) if kind == "choices" else 1
        self.machine.add(self._request(name, kv, max_tokens, num_choices))

    def _export(self, name: str, *, is_again: bool) -> KVTransferParams:
        """Begins an export; or another attempt of one, of which a peer mostly calls the latest
        off."""
        transfer_id, attempt = f"t-{name}", 0
        if is_again and self.exports:
            transfer_id, (latest, attempt) = self.rng.choice(list(self.exports.items()))
            attempt += 1
            if self.rng.random() < 0.7:
                self.machine.abort(latest)
        self.exports[transfer_id] = name, attempt
        return remote_decode(transfer_id, attempt)

    def _request(
        self, name: str, kv: KVTransferParams | None, max_tokens: int, num_choices: int
    ) -> Request:
        # Few different beginnings, so that prefixes are found.
        rng = self.rng
        beginning = [rng.randint(1, 2)] * rng.choice([0, 4, 8, 9])
        rest = [rng.randint(1, 60) for _ in range(rng.randint(1, 20))]
        more: dict[str, Any] = {}
        if rng.random() < 0.3:
            more["stop_token_ids"] = tuple(rng.sample(range(1, 60), 5))
        if rng.random() < 0.3:
            more["min_tokens"] = rng.randint(0, max_tokens)
        if rng.random() < 0.2:
            more["prompt_logprobs"] = 0
        return make_request(
            name,
            beginning + rest,
            kv=kv,
            num_choices=num_choices,
            seed=rng.randint(0, 9),
            priority=self.priorities[rng.randint(0, 2)],
            cache_salt=rng.choice(["", "", "tenant"]),
            max_tokens=max_tokens,
            prefix_peer=rng.choice(["", "peer:1"]) if self.asks_peers else "",
            ignore_eos=rng.random() < 0.5,
            **more,
        )

    def _schedule(self) -> None:
        if self.machine.num_out < self.machine.depth:
            self.machine.schedule()

    def _run(self) -> None:
        if self.machine.may_run:
            self.machine.run()

    def _update(self) -> None:
        if self.machine.ran:
            self.machine.update()

    def _transfer(self, may_fail: bool = True) -> None:
        connector = self.machine.connector
        if connector.host is not None:
            connector.host.advance(may_fail=may_fail)
        transfer_ids = connector.transfer_ids()
        if transfer_ids:
            transfer_id = self.rng.choice(transfer_ids)
            if may_fail and self.rng.random() < 0.1:
                connector.fail(transfer_id, tells_part=self.rng.random() < 0.7)
            else:
                connector.advance(transfer_id)
        if self.rng.random() < 0.7:
            self.machine.poll_connector()

    def _pulls(self) -> list[str]:
        """Returns requests that still expect their first token from a peer."""
        return [
            name
            for name, client in self.machine.clients.items()
            if not client.finish_reason
            and not client.tokens
            and name not in self.computed_here
            and client.prompt is None
            and not any(choice.tokens for choice in client.choices)
            and client.request.kv_transfer_params is not None
            and client.request.kv_transfer_params.do_remote_prefill
        ]

    def _first_token(self) -> None:
        for name in self._pulls():
            if self.rng.random() < 0.3:
                self.machine.supply_first_token(name)

    def _answer_failures(self) -> None:
        """Answers as the node server does, for each attempt that was reported as failed."""
        for name, client in self.machine.clients.items():
            if client.request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
                continue
            failures = sum(not result.ok for result in client.kv_results)
            if failures > self.answered_failures.get(name, 0):
                self.answered_failures[name] = failures
                if self.rng.random() < 0.5:
                    self._retry(name)
                else:
                    self._prefill_locally(name)

    def _change_mind(self) -> None:
        """Changes the plan, while nothing has failed."""
        pulls = self._pulls()
        if pulls:
            name = self.rng.choice(pulls)
            if self.rng.random() < 0.5:
                self._retry(name)
            else:
                self._prefill_locally(name)

    def _retry(self, name: str) -> None:
        self.attempts[name] = self.attempts.get(name, 0) + 1
        params = remote_prefill(f"t-{name}", self.attempts[name])
        self.machine.take(self.machine.scheduler.retry_remote(name, params))

    def _prefill_locally(self, name: str) -> None:
        if not self.machine.clients[name].tokens:
            self.computed_here.add(name)
        self.machine.take(self.machine.scheduler.prefill_locally(name))

    def _offer(self) -> None:
        """A peer asks for what some request's prompt begins with."""
        if self.machine.clients:
            request = self.rng.choice(list(self.machine.clients.values())).request
            scheduler = self.machine.scheduler
            chains = scheduler._kv_cache.behind.chains(request, request.num_prompt_tokens)
            transfer_id, count = scheduler.remote.offers.offer(chains)
            if count:
                prompt = request.all_token_ids[:count]
                self.machine.connector.exports[transfer_id].prompt = prompt
            self.machine.check_blocks()

    def _tokens_of_peer(self, ask: PrefixAsk) -> int:
        """A peer has some of what it is asked for, where a prefix can end, or says nonsense."""
        behind = self.machine.scheduler._kv_cache.behind
        most = min(size * len(names) for size, names in ask.chains.items())
        count = self.rng.randint(0, most + 1)
        return behind.last_end(count) if self.rng.random() < 0.9 else count

    def _abort(self) -> None:
        if self.machine.clients and self.rng.random() < 0.5:
            self.machine.abort(self.rng.choice(list(self.machine.clients)))


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_random_traffic(depth: int, policy: str, seed: int, kinds: list[str]) -> None:
    _random_traffic(depth, policy, seed, kinds, 1)


def test_traffic_whose_last_load_for_a_peer_was_over_and_not_reported() -> None:
    _random_traffic(2, "fcfs", 23, ["local", "pull"], 1)


def test_traffic_whose_pull_began_anew_before_its_failure_was_read() -> None:
    _random_traffic(2, "fcfs", 337, ["local", "pull"], 4)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_random_traffic_with_drafts(depth: int, seed: int, kinds: list[str]) -> None:
    """Results have 1 to 4 tokens for each row."""
    _random_traffic(depth, ["fcfs", "priority"][seed % 2], 100 + seed, kinds, 4)


@pytest.mark.parametrize("query_len", [1, 4])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_random_traffic_in_which_the_idle_class_sits_steps_out(
    query_len: int, seed: int, kinds: list[str]
) -> None:
    policy, depth = ["fcfs", "priority"][seed % 2], 1 + seed % 3
    _random_traffic(depth, policy, 200 + seed, kinds, query_len, itl_objective_ms=1e-6)


def _random_traffic(
    depth: int,
    policy: str,
    seed: int,
    kinds: list[str],
    decode_query_len: int,
    itl_objective_ms: float = 0.0,
) -> None:
    """Plays requests; with an objective some are of the idle class."""
    rng = random.Random(seed)
    config = make_config(
        itl_objective_ms=itl_objective_ms,
        decode_query_len=decode_query_len,
        policy=policy,
        max_num_seqs=rng.choice([1, 3, 6]),
        max_num_batched_tokens=rng.choice([6, 16, 64]),
        long_prefill_token_threshold=rng.choice([0, 5]),
        enable_prefix_caching=rng.random() < 0.8,
        max_model_len=64,
        kv_transfer=SHARING if seed % 2 else None,
    )
    num_blocks = rng.choice([13, 16, 24])
    num_slots = rng.choice([0, 3, 12]) if config.cache.enable_prefix_caching else 0
    machine = StepMachine(
        config,
        num_blocks,
        depth=depth,
        seed=seed,
        num_host_slots=num_slots,
        num_files=rng.choice([0, 20]),
        store=new_store() if rng.random() < 0.5 else None,
        order=make_order() if seed % 3 == 1 else None,
    )
    Traffic(machine, seed, kinds).run()


def test_the_tiers_are_used_in_every_way() -> None:
    """The random test means nothing for them if nothing is loaded early, or read from disk."""
    config = make_config(max_num_seqs=6, max_num_batched_tokens=16, max_model_len=64)
    totals = Counter[str]()
    for seed in range(8):
        machine = StepMachine(config, 13, depth=2, seed=seed, num_host_slots=6, num_files=12)
        Traffic(machine, seed, ["local", "export"]).run()
        assert machine.host is not None
        totals.update({name: int(n) for name, n in machine.host.tier.counters.items()})
        totals["early"] += machine.num_early
        totals["let go"] += len(machine.host.release)
    used = "loaded", "spilled", "fetched", "damaged", "lost"
    assert all(totals[f"host_tier_{name}_blocks"] > 0 for name in used), totals
    assert totals["early"] > 0 and totals["let go"] > 0, totals
    assert totals["disk_tier_evicted_blocks"] > 0, totals


@pytest.mark.parametrize("piece", [2, 16])
def test_the_store_is_used_in_every_way(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines come and go, and what one computed another finds; blocks go missing meanwhile."""
    monkeypatch.setattr(load_pieces, "_MOST_BLOCKS", piece)
    config = make_config(max_num_seqs=6, max_num_batched_tokens=16, max_model_len=64)
    totals, store = Counter[str](), new_store()
    for seed in range(8):
        machine = StepMachine(config, 16, depth=2, seed=seed, num_host_slots=12, store=store)
        Traffic(machine, seed % 4, ["local", "export"]).run()
        assert machine.host is not None
        totals.update({name: int(n) for name, n in machine.host.tier.counters.items()})
        totals["tokens"] += machine.scheduler.stats().prompt_tokens_from_store
    for name in ("put", "fetched", "missed"):
        assert totals[f"store_tier_{name}_blocks"] > 0, totals
    assert totals["tokens"] > 0, totals


def test_no_count_of_tokens_that_a_tier_gave_ever_falls() -> None:
    """Whoever reads counters takes a fall for a restart, and adds all that is there."""
    config = make_config(
        max_num_seqs=3, max_num_batched_tokens=16, max_model_len=64, kv_transfer=SHARING
    )
    from_disk = 0
    for seed in range(8):
        machine = StepMachine(config, 16, depth=2, seed=seed, num_host_slots=6, num_files=20)
        _watch_tiers(machine)
        Traffic(machine, seed, ["local", "export"]).run()
        stats = machine.scheduler.stats()
        from_disk += stats.prompt_tokens_from_disk
        assert stats.prefix_cache_hits <= stats.prefix_cache_queries
    assert from_disk > 0


def _watch_tiers(machine: StepMachine) -> None:
    """Looks, whenever loads may have ended, at what came from cache, host memory and disk."""
    poll, before = machine.poll_connector, [0, 0, 0]

    def watched() -> None:
        poll()
        stats = machine.scheduler.stats()
        cached, loaded = stats.prompt_tokens_cached, stats.prompt_tokens_loaded
        from_disk = stats.prompt_tokens_from_disk
        now = [cached - loaded, loaded - from_disk, from_disk]
        assert all(new >= old for new, old in zip(now, before, strict=True)), (before, now)
        before[:] = now

    machine.poll_connector = watched  # type: ignore[method-assign]


def test_peers_are_offered_what_lies_in_host_memory() -> None:
    """Some loads for them fail, and some are given up meanwhile."""
    config = make_config(
        max_num_seqs=3, max_num_batched_tokens=16, max_model_len=64, kv_transfer=SHARING
    )
    totals = Counter[str]()
    for seed in range(8):
        machine = StepMachine(config, 24, depth=2, seed=seed, num_host_slots=12, num_files=20)
        offers, hold = machine.scheduler.remote.offers, machine.scheduler.remote.offers._hold

        def counted(offer: _Offer, is_needed: bool, hold: Callable[..., None] = hold) -> None:
            if offer.loaded:
                totals["ended before" if offer.has_ended else "loaded"] += 1
            hold(offer, is_needed)

        offers._hold = counted  # type: ignore[method-assign]
        Traffic(machine, seed, ["local", "export"]).run()
        totals["tokens"] += offers.num_loaded_tokens
    assert min(totals[what] for what in ("tokens", "loaded", "ended before")) > 0, totals


def test_the_traffic_is_rough_enough() -> None:
    """The random test means nothing if its requests never get in each other's way."""
    config = make_config(max_num_seqs=6, max_num_batched_tokens=16, max_model_len=64)
    totals = {"preemptions": 0, "hits": 0, "transferred": 0, "aborted": 0, "failed": 0}
    for seed in range(8):
        machine = StepMachine(config, 13, depth=2, seed=seed)
        Traffic(machine, seed, ["local", "pull"]).run()
        stats = machine.scheduler.stats()
        totals["preemptions"] += stats.num_preemptions
        totals["hits"] += stats.prefix_cache_hits
        totals["transferred"] += stats.prompt_tokens_transferred
        clients = machine.clients.values()
        totals["aborted"] += sum(c.finish_reason == "abort" for c in clients)
        totals["failed"] += sum(not r.ok for c in clients for r in c.kv_results)
    assert min(totals.values()) >= 20, totals


def test_the_drafts_are_rough_enough() -> None:
    """Results of all lengths, ends of all kinds inside them, and rows that get in each other's
    way while more than one step is out."""
    config = make_config(
        max_num_seqs=6, max_num_batched_tokens=32, max_model_len=64, decode_query_len=4
    )
    lengths: Counter[int] = Counter()
    dropped: Counter[str] = Counter()
    num_preemptions = 0
    for seed in range(6):
        machine = StepMachine(config, 16, depth=2, seed=seed)
        _count_results(machine, lengths, dropped)
        Traffic(machine, seed, ["local", "pull"]).run()
        num_preemptions += machine.scheduler.stats().num_preemptions
    assert num_preemptions >= 20
    assert min(lengths[count] for count in (1, 2, 3, 4)) >= 100, lengths
    assert min(dropped[reason] for reason in ("stop", "length")) >= 10, dropped


def _count_results(machine: StepMachine, lengths: Counter[int], dropped: Counter[str]) -> None:
    """Counts how many tokens rows got, and how often tokens behind an end were dropped."""
    update = machine.scheduler.update_from_output

    def counting(step: SchedulerOutput, output: ModelRunnerOutput) -> EngineCoreOutputs:
        lengths.update(output.counts)
        rows = machine.scheduler._running.table.rows
        given = {
            row.request_id: count
            for index, epoch, count in zip(output.rows, output.epochs, output.counts, strict=True)
            if (row := rows[index]) is not None and row.epoch == epoch
        }
        outputs = update(step, output)
        for out in outputs.outputs:
            if out.finish_reason and len(out.new_token_ids) < given.get(out.request_id, 0):
                dropped[out.finish_reason] += 1
        return outputs

    machine.scheduler.update_from_output = counting  # type: ignore[method-assign]
