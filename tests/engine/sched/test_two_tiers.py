"""Two tiers with hardly any memory, at every ratio: hundreds of requests wait for room, all end.

Real schedulers and real credits; workers, transfers and the proxy are moved by the test. A prefill
node's blocks stay until decode has taken all of them, which is the longest that they ever can.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import pytest

import decode_node.disagg.credits as credits_module
from decode_node.disagg.credits import KVCredits
from engine.contracts.request import Request
from tests.engine.sched.factories import (
    BLOCK_SIZE,
    make_config,
    make_request,
    remote_decode,
    remote_prefill,
)
from tests.engine.sched.step_machine import StepMachine

BLOCKS_OF_ONE_REQUEST = 9
"""The longest that is allowed; pools have room for two of them."""
MAX_ROUNDS = 60_000


def make_machine(depth: int, seed: int) -> StepMachine:
    config = make_config(
        max_model_len=BLOCK_SIZE * BLOCKS_OF_ONE_REQUEST,
        max_num_batched_tokens=16,
        enable_prefix_caching=False,
    )
    return StepMachine(config, 2 * BLOCKS_OF_ONE_REQUEST, depth=depth, seed=seed)


def is_short_of_blocks(machine: StepMachine) -> bool:
    """Returns whether somebody waits, a row is free, and blocks are not."""
    stats = machine.scheduler.stats()
    few = stats.num_free_blocks < BLOCKS_OF_ONE_REQUEST
    return stats.num_waiting > 0 and stats.num_free_rows > 0 and few


@dataclass
class Decode:
    machine: StepMachine
    credits: KVCredits = field(
        default_factory=lambda: KVCredits(2 * BLOCKS_OF_ONE_REQUEST, BLOCK_SIZE, max_claims=8)
    )


class Tiers:
    """The proxies of all decode nodes, and time, which is a number of rounds."""

    def __init__(
        self, num_requests: int, num_prefill: int, num_decode: int, seed: int, most_choices: int = 1
    ) -> None:
        self.num_requests = num_requests
        self.most_choices = most_choices
        self.rng = random.Random(seed)
        self.prefills = [make_machine(1, seed + i) for i in range(num_prefill)]
        self.decodes = [Decode(make_machine(2, seed - i)) for i in range(1, num_decode + 1)]
        self.num_open = 0
        self.most_waiting = 0
        self.rounds_short_of_prefill_blocks = 0

    @property
    def machines(self) -> list[StepMachine]:
        return [*self.prefills, *(decode.machine for decode in self.decodes)]

    async def run(self) -> None:
        clients = [asyncio.create_task(self._client(number)) for number in range(self.num_requests)]
        for _ in range(MAX_ROUNDS):
            if all(client.done() for client in clients):
                break
            await asyncio.sleep(0)
            self._round()
        stuck = [machine.scheduler.check_empty() for machine in self.machines]
        assert all(client.done() for client in clients), stuck
        await asyncio.gather(*clients)

    async def _client(self, number: int) -> None:
        decode = self.decodes[number % len(self.decodes)]
        prefill = self.prefills[number % len(self.prefills)]
        export, pull = self._requests(f"r{number}")
        claim = await decode.credits.acquire(
            pull.num_prompt_tokens, pull.sampling.max_tokens, len(pull.spec.seeds)
        )
        taken = decode.machine.add(pull)
        computed = prefill.add(export)
        while not computed.tokens:
            await asyncio.sleep(0)
        if not taken.tokens:
            decode.machine.supply_first_token(pull.request_id)
        while not taken.finish_reason:
            await asyncio.sleep(0)
            for index, choice in enumerate(taken.choices or [taken]):
                claim.grow_to(pull.num_prompt_tokens + len(choice.tokens), index)
                if choice.finish_reason:
                    claim.end_choice(index)
        claim.release()

    def _requests(self, name: str) -> tuple[Request, Request]:
        length = self.rng.randint(1, BLOCK_SIZE * (BLOCKS_OF_ONE_REQUEST - 1))
        prompt = [self.rng.randint(1, 60) for _ in range(length)]
        longest = BLOCK_SIZE * BLOCKS_OF_ONE_REQUEST - length
        num_choices = self.rng.randint(1, self.most_choices)
        export = make_request(
            name, prompt, kv=remote_decode(f"t-{name}"), max_tokens=1, num_choices=num_choices
        )
        export.choice_ids = ()
        pull = make_request(
            name,
            prompt,
            kv=remote_prefill(f"t-{name}"),
            max_tokens=self.rng.randint(1, longest),
            num_choices=num_choices,
        )
        return export, pull

    def _round(self) -> None:
        self.most_waiting = max(self.most_waiting, *(d.credits.num_waiting for d in self.decodes))
        self.rounds_short_of_prefill_blocks += any(map(is_short_of_blocks, self.prefills))
        for machine in self.machines:
            if self.rng.random() < 0.8:
                machine.step()
        for prefill in self.prefills:
            for transfer_id in list(prefill.connector.exports):
                self._move(transfer_id, prefill)
            prefill.poll_connector()
        for decode in self.decodes:
            decode.machine.poll_connector()

    def _move(self, transfer_id: str, prefill: StepMachine) -> None:
        """Moves to decode what is computed; only then the blocks on prefill are released."""
        number = int(transfer_id.removeprefix("t-r"))
        decode = self.decodes[number % len(self.decodes)].machine
        client = decode.clients[f"r{number}"]
        export, pull = (
            prefill.connector.exports[transfer_id],
            decode.connector.pulls.get(transfer_id),
        )
        is_computed = prefill.clients[f"r{number}"].tokens != []
        if pull is not None and is_computed:
            decode.connector.advance(transfer_id)
        elif client.kv_results or client.finish_reason or export.is_staged:
            prefill.connector.advance(transfer_id)


@pytest.mark.parametrize(
    ("num_requests", "num_prefill", "num_decode"),
    [(500, 1, 1), (120, 2, 1), (120, 1, 2), (120, 3, 1)],
    ids="{}".format,
)
async def test_no_deadlock_with_pools_of_two_requests(
    num_requests: int, num_prefill: int, num_decode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is kept for answers, so those that grow push others out. A prompt takes all its
    blocks at once, so on prefill nobody pushes: who finds too few waits."""
    monkeypatch.setattr(credits_module, "_RESERVED_OUTPUT_TOKENS", 1)
    tiers = Tiers(num_requests, num_prefill, num_decode, seed=11)
    await tiers.run()
    for prefill in tiers.prefills:
        prefill.finish()
    for machine in tiers.machines:
        machine.check_all_done()
    stats = [decode.machine.scheduler.stats() for decode in tiers.decodes]
    assert all(one.num_preemptions > 0 for one in stats), "decode was short of blocks"
    if num_prefill <= num_decode:
        assert tiers.rounds_short_of_prefill_blocks > 50, "so was prefill"
    assert tiers.most_waiting > num_requests // 4, "requests waited for room"
    assert all(decode.credits.num_claims == 0 for decode in tiers.decodes)


async def test_no_deadlock_of_choices_with_pools_of_two_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Up to five choices share prompts that may fill half of a pool."""
    monkeypatch.setattr(credits_module, "_RESERVED_OUTPUT_TOKENS", 1)
    tiers = Tiers(150, 1, 2, seed=12, most_choices=5)
    await tiers.run()
    for prefill in tiers.prefills:
        prefill.finish()
    for machine in tiers.machines:
        machine.check_all_done()
    computed = tiers.prefills[0].scheduler.stats().prompt_tokens_computed
    assert computed == sum(
        client.request.num_prompt_tokens for client in tiers.prefills[0].clients.values()
    )
    stats = [decode.machine.scheduler.stats() for decode in tiers.decodes]
    assert all(one.num_preemptions > 0 for one in stats), "decode was short of blocks"
    assert all(decode.machine.worker.num_copies > 50 for decode in tiers.decodes)
    assert all(decode.credits.num_claims == 0 for decode in tiers.decodes)
