"""A scheduler, a worker, transfers and clients, moved one small step at a time by the test.

After every move all blocks are accounted for: each block's reference count is the number of its
users, and what is free and what is used make up the whole cache.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from engine.config import EngineConfig
from engine.contracts.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    KVTransferResult,
    PrefixAsk,
)
from engine.contracts.outputs import ModelRunnerOutput, PromptLogprobs
from engine.contracts.request import Request
from engine.contracts.scheduler_output import SchedulerOutput
from engine.contracts.steps.step_launches import StepLaunches
from engine.kv_cache.capacity import tokens_that_fit
from engine.sched.arrivals.arrival import WITH_BLOCKS, ArrivalState, KVSource, TransferArrival
from engine.sched.prompts.prompt_order import PromptOrder
from engine.sched.rows.row import RowPhase
from engine.sched.scheduler import Scheduler
from kv_transfer.metadata import KVPeer
from kv_transfer.tier import LoadTicket
from tests.engine.sched.factories import remote_prefill
from tests.engine.sched.fake_worker import (
    FakeWorker,
    PagedMemory,
    expected_output,
    lying_drafter,
    prompt_ranks,
)
from tests.engine.sched.memory_connector import MemoryConnector
from tests.engine.sched.memory_host_tier import MemoryHostTier, Store


@dataclass(slots=True)
class Client:
    """Remembers what one request's client has seen. The request of a prompt with choices has a
    client too, who hears of transfers; `expected` are the choices' first tokens."""

    request: Request
    expected: list[int]
    choices: list[Client] = field(default_factory=list)
    prompt: Client | None = None
    tokens: list[int] = field(default_factory=list)
    finish_reason: str = ""
    error: str = ""
    kv_results: list[KVTransferResult] = field(default_factory=list)
    num_cached_tokens: int | None = None
    prompt_ranks: list[int] = field(default_factory=list)


class StepMachine:
    """Plays steps. `depth`: steps that may be out at once. Results may be held back up to that
    depth.
    """

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        *,
        depth: int = 1,
        seed: int = 0,
        num_host_slots: int = 0,
        num_files: int = 0,
        store: Store | None = None,
        order: PromptOrder | None = None,
        launches: StepLaunches | None = None,
    ) -> None:
        self.config = config
        self.depth = depth
        self.num_blocks = num_blocks
        self.rng = random.Random(seed)
        self.memory = PagedMemory(num_blocks, config.kv_layout.groups)
        query_len = config.decode_query_len
        self.worker = FakeWorker(self.memory, query_len, lying_drafter(random.Random(seed)))
        host_rng = random.Random(seed)
        self.host = (
            MemoryHostTier(self.memory, num_host_slots, host_rng, num_files, store)
            if num_host_slots
            else None
        )
        self.connector = MemoryConnector(self.memory, self.rng, self.host)
        self.scheduler = Scheduler(
            config, num_blocks, self.connector, order=order, launches=launches
        )
        self.peer_tokens: Callable[[PrefixAsk], int] = lambda ask: 0
        """How many tokens of the prompt that a peer is asked for it says to have."""
        self.peer_is_like = seed % 4 < 3
        """Its blocks are as large as ours, and come whole."""
        self.num_asked = 0
        self.num_early = 0
        """Steps that began before all KV was there that they read."""
        self.clients: dict[str, Client] = {}
        self.ended: list[str] = []
        """Requests in the order in which they ended."""
        self.scheduled: deque[SchedulerOutput] = deque()
        """Steps the worker has not run."""
        self.ran: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        """Steps whose results the scheduler has not seen."""

    # Moves ------------------------------------------------------------------------------------

    def add(self, request: Request) -> Client:
        """Adds a request, with a client for each of its choices."""
        client = Client(request, [])
        for index, name in enumerate(request.choice_ids):
            choice = Client(_alone(request, name, index), [], prompt=client)
            client.choices.append(choice)
        for one in client.choices or [client]:
            one.expected = expected_output(one.request, self._max_len)
            self.clients[one.request.request_id] = one
        client.expected = client.expected or [t for c in client.choices for t in c.expected[:1]]
        self.clients[request.request_id] = client
        self.connector.prompts[request.request_id] = request.all_token_ids
        self.take(self.scheduler.add_request(request))
        return client

    @property
    def _max_len(self) -> int:
        step_tokens = self.config.scheduler.max_num_batched_tokens
        room = tokens_that_fit(self.memory.groups, self.num_blocks, step_tokens)
        return min(self.config.model.max_model_len, room + 2 - self.config.decode_query_len)

    def abort(self, request_id: str) -> None:
        self.take(self.scheduler.abort_requests([request_id]))

    def supply_first_token(self, request_id: str) -> None:
        """Supplies it as the node server does: the client has it before the engine."""
        client = self.clients[request_id]
        assert client.tokens == []
        client.tokens += client.expected if client.choices else client.expected[:1]
        for choice in client.choices:
            if not choice.finish_reason:
                choice.tokens.append(choice.expected[0])
        first, *siblings = client.tokens
        self.take(self.scheduler.supply_first_token(request_id, first, siblings))

    @property
    def num_out(self) -> int:
        return len(self.scheduled) + len(self.ran)

    def schedule(self) -> SchedulerOutput | None:
        assert self.num_out < self.depth
        step = self.scheduler.schedule()
        if step is not None:
            self.scheduled.append(step)
            self.check_copies(step)
        self.check_blocks()
        self.check_bounds()
        return step

    @property
    def may_run(self) -> bool:
        """Returns whether the oldest step waits for nothing but the worker."""
        ticket = self._ticket()
        return bool(self.scheduled) and (
            ticket is None or (self.host is not None and self.host.may_read(ticket))
        )

    def _ticket(self) -> LoadTicket | None:
        kv = self.scheduled[0].kv if self.scheduled else None
        return kv.load if kv is not None else None

    def run(self) -> None:
        while not self.may_run:
            assert self.host is not None
            self.host.advance()
            self.poll_connector()
        ticket = self._ticket()
        step = self.scheduled.popleft()
        if ticket is not None and self.host is not None:
            self.num_early += 1
            self.worker.reads_garbage = not self.host.is_right(ticket)
        self.ran.append((step, self.worker.execute(step)))
        self.worker.reads_garbage = False
        self.connector.done_step = step.step_id
        self.check_bounds()

    def update(self) -> None:
        self.take(self.scheduler.update_from_output(*self.ran.popleft()))

    def poll_connector(self) -> None:
        events = self.connector.get_finished()
        if events is not None:
            self.take(self.scheduler.update_from_connector(events))

    def answer_asks(self) -> None:
        """Plays the node server and the peers that it asks."""
        peers = self.scheduler.remote.peers
        for ask in peers.take_asks():
            self.num_asked += 1
            # One that was preempted asks for the KV of its answer, too.
            request = self.clients[ask.request_id].request
            self.connector.prompts[ask.request_id] = list(request.all_token_ids)
            count = self.peer_tokens(ask)
            params = remote_prefill(f"prefix-{self.num_asked}") if count else None
            if params is not None and self.peer_is_like:
                peer = KVPeer(engine_id="peer", epoch=1, layout=self.config.kv_layout)
                params = replace(params, peer=peer, is_prefix=True)
            peers.answered(ask.request_id, ask.number, params, count)
        self.check_blocks()

    def make_room(self) -> None:
        """Lets the oldest results arrive, until another step may go out."""
        while self.num_out >= self.depth:
            self._settle_oldest()

    def step(self) -> SchedulerOutput | None:
        """Schedules one step; results come as late as the depth allows."""
        self.make_room()
        step = self.schedule()
        if step is None and self.num_out:
            self._settle_oldest()
        return step

    def _settle_oldest(self) -> None:
        if not self.ran:
            self.run()
        self.update()

    def settle(self) -> None:
        """Runs and confirms everything that is out."""
        while self.num_out:
            self._settle_oldest()

    def finish(self, max_steps: int = 2000) -> None:
        """Runs until no request is left, with transfers that all succeed."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished_requests():
                break
            self.step()
            self.answer_asks()
            for transfer_id in self.connector.transfer_ids():
                self.connector.advance(transfer_id)
            if self.host is not None:
                self.host.advance()
            self.poll_connector()
        self.settle()
        self.finish_loads()
        for transfer_id in self.connector.transfer_ids():
            self.connector.finish(transfer_id)
        self.finish_loads()

    def finish_loads(self) -> None:
        """Lets all that goes to host memory arrive, and all that comes from there. What has arrived
        may not have been reported.
        """
        self.poll_connector()
        while self.host is not None and self.host.tier.num_jobs:
            self.host.finish()
            self.poll_connector()

    # Checks -----------------------------------------------------------------------------------

    def take(self, outputs: EngineCoreOutputs) -> None:
        for output in outputs.outputs:
            client = self.clients[output.request_id]
            assert not client.finish_reason, "an ended request speaks"
            if output.num_cached_tokens is not None:
                assert client.num_cached_tokens is None
                client.num_cached_tokens = output.num_cached_tokens
            if output.prompt_logprobs is not None:
                self._take_prompt_logprobs(client, output.prompt_logprobs)
            elif output.new_token_ids and client.request.sampling.prompt_logprobs is not None:
                self._check_prompt_logprobs(client)
            client.tokens += output.new_token_ids
            client.finish_reason = output.finish_reason
            client.error = output.error
            if output.finish_reason:
                self.ended.append(output.request_id)
            assert client.tokens == client.expected[: len(client.tokens)]
            prompt = client.prompt
            if prompt is not None and all(choice.finish_reason for choice in prompt.choices):
                prompt.finish_reason = "choices"
        for result in outputs.kv_results:
            self.clients[result.request_id].kv_results.append(result)
        self.check_blocks()
        self.check_bounds()

    def _take_prompt_logprobs(self, client: Client, part: PromptLogprobs) -> None:
        """Takes a part, which follows the one before, or begins anew."""
        if part.first_position == 1:
            client.prompt_ranks = []
        assert part.first_position == 1 + len(client.prompt_ranks)
        client.prompt_ranks += array("i", part.ranks)

    def _check_prompt_logprobs(self, client: Client) -> None:
        """Checks that they are complete with the first token, unless a peer gave them with it."""
        params = client.request.kv_transfer_params
        if params is not None and params.do_remote_prefill and client.tokens:
            return
        prompt = client.request.all_token_ids[: client.request.num_prompt_tokens]
        assert client.prompt_ranks == prompt_ranks(prompt)

    def check_copies(self, step: SchedulerOutput) -> None:
        """Checks that what a step copies belongs to requests, and to each once."""
        targets = [target for _, target in step.block_copies]
        if targets:
            kv_cache = self.scheduler._kv_cache
            names = kv_cache.request_ids()
            owned = {block.block_id for name in names for block in kv_cache.held_blocks(name)}
            assert len(set(targets)) == len(targets) and owned.issuperset(targets)

    def check_blocks(self) -> None:
        """Checks that every block is either free or has exactly the users that its count says."""
        scheduler, users = self.scheduler, [0] * self.num_blocks
        kv_cache, pool = scheduler._kv_cache, scheduler._kv_cache.block_pool
        held = [*scheduler._fence.waiting_blocks(), *scheduler._remote.held.blocks()]
        for request_id in kv_cache.request_ids():
            held += kv_cache.held_blocks(request_id)
        for block in held:
            users[block.block_id] += 1
        assert [block.ref_cnt for block in pool.blocks] == users
        free = pool.free_queue.block_ids()
        assert len(free) == pool.num_free_blocks
        assert sorted(free) == [number for number, count in enumerate(users) if count == 0]
        self.check_arrivals()

    def check_arrivals(self) -> None:
        """Checks that a request for which KV arrives has blocks in the states that say so, and that
        all that lack only a row are queued for one.
        """
        scheduler = self.scheduler
        arrivals = scheduler._remote.arrivals
        found = arrivals._of_request
        if not found:  # As below, where nothing arrives, and sooner.
            assert not any(arrivals._in.values()) and not arrivals.ready
            assert not arrivals._of_transfer and not +arrivals._num_of
            assert arrivals.num_with_blocks == arrivals.num_started == 0
            assert not scheduler._remote.prefill.lacks_token
            return
        in_state = arrivals._in
        with_blocks, queued, named = set(), set(), set()
        started: dict[KVSource[Any], int] = {}
        for name, one in found.items():
            assert in_state[one.state].get(name) is one
            if one.state in WITH_BLOCKS:
                with_blocks.add(name)
            if one.request in scheduler._waiting:
                queued.add(name)
            else:
                started[one.source] = started.get(one.source, 0) + 1
            if isinstance(one, TransferArrival) and one.transfer is not None:
                named.add(one.transfer)
        assert sum(map(len, in_state.values())) == len(found)
        early = in_state[ArrivalState.EARLY].keys()
        assert queued == in_state[ArrivalState.QUEUED].keys()
        assert with_blocks | early == found.keys() & scheduler._kv_cache.request_ids()
        assert len(with_blocks) == arrivals.num_with_blocks
        ready = {request.request_id for request in arrivals.ready}
        assert ready == in_state[ArrivalState.READY].keys()
        assert arrivals.num_started == len(found) - len(queued) - len(early)
        assert scheduler._remote.prefill.lacks_token == bool(in_state[ArrivalState.HERE])
        assert {source: count for source, count in arrivals._num_of.items() if count} == started
        assert arrivals._of_transfer.keys() == named
        assert all(found[name].request.row >= 0 for name in early)

    def check_bounds(self) -> None:
        """Checks that what the worker has of each row lies between what is confirmed and what is
        reserved, and beyond what is certain once it has run all steps.
        """
        running = self.scheduler._running
        calendar, kv_cache = running.calendar, self.scheduler._kv_cache
        for row in running.table.live():
            reserved = row.num_reserved
            if row.phase is RowPhase.DECODE:
                reserved = row.reserved_base + calendar.query_len * running.step_id
                assert row.event_step > running.step_id
            most = row.max_len - 1 + calendar.query_len - 1
            assert min(reserved, most) <= kv_cache.capacity(row.blocks)
            has = self.worker.rows.get(row.index)
            if has is None or has.epoch != row.epoch:
                continue
            assert len(row.tokens) <= len(has.tokens)
            assert row.tokens == has.tokens[: len(row.tokens)]
            assert has.num_computed <= reserved
            if not self.scheduled and row.phase is not RowPhase.PREFILL:
                certain = row.num_certain(reserved, calendar.query_len)
                assert has.num_computed >= min(certain, row.max_len - 1)

    def check_all_done(self) -> None:
        """Checks that every request has ended as it should, and nothing is left anywhere."""
        for client in self.clients.values():
            if client.finish_reason in ("stop", "length"):
                assert client.tokens == client.expected
            else:
                assert client.finish_reason in ("abort", "error", "choices"), client
        assert self.scheduler.check_empty() == []
        assert self.connector.transfer_ids() == []
        assert self.host is None or self.host.tier.leftovers() == []
        self.check_blocks()


def _alone(prompt: Request, name: str, index: int) -> Request:
    """Returns the request that asks for one choice alone."""
    return Request(
        EngineCoreRequest(
            request_id=name,
            spec=prompt.spec.of_choice(index),
            eos_token_ids=prompt.eos_token_ids,
            kv_transfer_params=prompt.kv_transfer_params,
        )
    )
