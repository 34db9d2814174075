"""Random traffic of conversations that come back: each prompt continues one of a few long texts."""

from __future__ import annotations

import random

from engine.contracts.request import Request
from kv_transfer.metadata import KVTransferParams
from tests.engine.sched.factories import make_request
from tests.engine.sched.step_machine import StepMachine
from tests.engine.sched.test_random_steps import Traffic

_NUM_TEXTS = 4
_MAX_TOKENS = 44


class ReturningTraffic(Traffic):
    """Texts differ in their first token, so that nothing but their own turns brings them back."""

    def __init__(self, machine: StepMachine, seed: int, kinds: list[str]) -> None:
        super().__init__(machine, seed, kinds)
        rng = random.Random(seed)
        self._texts = [
            [1 + index, *(rng.randint(1, 60) for _ in range(_MAX_TOKENS - 1))]
            for index in range(_NUM_TEXTS)
        ]

    def _request(
        self, name: str, kv: KVTransferParams | None, max_tokens: int, num_choices: int
    ) -> Request:
        rng = self.rng
        prompt = rng.choice(self._texts)[: rng.choice([20, 28, 37, 41, _MAX_TOKENS])]
        return make_request(
            name,
            prompt if rng.random() < 0.8 else [*prompt[:30], *(rng.randint(1, 60),) * 5],
            kv=kv,
            num_choices=num_choices,
            seed=rng.randint(0, 9),
            priority=rng.randint(0, 2),
            max_tokens=max_tokens,
            prefix_peer=rng.choice(["", "peer:1"]) if self.asks_peers else "",
            ignore_eos=rng.random() < 0.5,
        )
