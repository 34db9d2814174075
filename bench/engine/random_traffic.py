"""Requests of `bench.engine.random_steps`: regimes that follow each other, none like the last."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.contracts.messages import EngineCoreRequest
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import BeamParams, SamplingParams

_STEPS_OF_A_REGIME = 120
_CONCURRENCY = (1, 2, 3, 5, 8, 13, 24, 48, 96, 160, 256)
_LONGEST = (4, 40, 300, 1500, 6000, 20_000)
_KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20, "min_p": 0.02},
    {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
    {"temperature": 0.6, "presence_penalty": 1.0, "logprobs": 1},
    {"temperature": 0.0, "logprobs": 0},
    {"temperature": 0.9, "logprobs": 20, "top_p": 0.5},
    {"temperature": 0.3, "logprobs": 5, "prompt_logprobs": 2},
    {"temperature": 0.0, "prompt_logprobs": 0},
    {"temperature": 0.7, "logit_bias": {5: 1.5, 17: -3.0}, "min_tokens": 1, "stop_token_ids": (8,)},
    {"temperature": 0.7, "allowed_token_ids": (5, 6, 7, 90), "bad_words": ((5, 6), (7,))},
    {"temperature": 0.5, "logprob_token_ids": (3, 4, 5), "logprobs": 3},
)


@dataclass(frozen=True, slots=True)
class Regime:
    """Describes traffic for a while.

    Attributes:
        running: Requests at once, about.
        longest: Prompt tokens at most; they are spread evenly over the logarithm.
        max_tokens: Of an answer at most.
        kinds: What requests ask of their sampling.
        repeats: The share of prompts that begin like an earlier one.
    """

    running: int
    longest: int
    max_tokens: int
    kinds: Sequence[dict[str, Any]]
    repeats: float


class RandomTraffic:
    """Makes requests, and changes its regime every 120 steps.

    Args:
        seed: The same seed makes the same requests where steps are the same.
        max_model_len: Prompt and answer together.
        max_num_seqs: Running requests at most.
    """

    def __init__(self, seed: int, vocab_size: int, max_model_len: int, max_num_seqs: int) -> None:
        self._random = random.Random(seed)
        self._vocab_size, self._max_model_len = vocab_size, max_model_len
        self._max_num_seqs = max_num_seqs
        self._made = 0
        self._earlier: list[list[int]] = []
        self.regime = self._next_regime()

    def requests(self, num_steps: int, num_running: int) -> list[EngineCoreRequest]:
        """Returns those that come before step `num_steps`, while `num_running` have not ended."""
        if num_steps % _STEPS_OF_A_REGIME == 0:
            self.regime = self._next_regime()
        room = self.regime.running - num_running
        # Some steps get none, so that batches grow and shrink.
        wanted = self._random.randint(0, max(0, room)) if self._random.random() < 0.5 else 0
        return [self._request() for _ in range(max(wanted, int(num_running == 0)))]

    def _next_regime(self) -> Regime:
        chance = self._random
        running = min(chance.choice(_CONCURRENCY), self._max_num_seqs)
        most = max(1, self._max_model_len - 2)
        return Regime(
            running=running,
            longest=min(chance.choice(_LONGEST), most),
            max_tokens=chance.choice((1, 4, 30, 200)),
            kinds=chance.sample(_KINDS, chance.choice((1, 1, 3, len(_KINDS)))),
            repeats=chance.choice((0.0, 0.0, 0.5)),
        )

    def _request(self) -> EngineCoreRequest:
        chance, regime = self._random, self.regime
        self._made += 1
        length = max(1, round(regime.longest ** chance.random()))
        prompt = self._prompt(length)
        max_tokens = chance.randint(1, min(regime.max_tokens, self._max_model_len - len(prompt)))
        kind = chance.choice(regime.kinds)
        beam = None
        if chance.random() < 0.02:
            kind, beam = {}, BeamParams(width=chance.choice((2, 4, 8)))
        sampling = SamplingParams(
            seed=chance.getrandbits(64), max_tokens=max_tokens, ignore_eos=True, beam=beam, **kind
        )
        spec, name = RequestSpec(prompt, sampling), str(self._made)
        choices: tuple[str, ...] = ()
        if beam is None and "prompt_logprobs" not in kind and chance.random() < 0.05:
            count = chance.randint(2, min(8, self._max_num_seqs))
            others = [spec.with_sampling(seed=chance.getrandbits(64)) for _ in range(count - 1)]
            spec = spec.with_siblings(others)
            choices = tuple(f"{name}.{index}" for index in range(count))
        return EngineCoreRequest(request_id=name, spec=spec, choice_ids=choices)

    def _prompt(self, length: int) -> list[int]:
        chance = self._random
        prompt: list[int] = []
        if self._earlier and chance.random() < self.regime.repeats:
            prompt = chance.choice(self._earlier)[:length]
        # Words that return, so that drafts by n-grams find some.
        words = [chance.randrange(1, self._vocab_size) for _ in range(min(64, length))]
        prompt = prompt + chance.choices(words, k=length - len(prompt))
        self._earlier = [*self._earlier[-7:], prompt]
        return prompt
