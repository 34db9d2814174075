"""The requests of `parity.py`, and what they get."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import msgspec
from llguidance import LLMatcher

from engine.contracts.messages import EngineCoreOutput, EngineCoreRequest
from engine.contracts.outputs import TokenLogprobs
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams

VOCAB, MAX_LEN, EOS = 300, 160, 0
PER_ROUND, MAX_TOKENS = 48, 110
_NEXT_TURN = 20
"""Tokens of a second answer."""
_GRAMMARS = (
    LLMatcher.grammar_from_json_schema(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 9},
                "counts": {"type": "array", "items": {"type": "integer"}, "maxItems": 4},
                "is_done": {"type": "boolean"},
            },
            "required": ["name", "counts", "is_done"],
            "additionalProperties": False,
        }
    ),
    LLMatcher.grammar_from_regex("[a-f]{2,40}(-[0-9]{2}){1,9}"),
)
_KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "bad_words": ((5,), (6, 6), (7, 8))},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "logprobs": 3},
    {"min_tokens": 10, "min_p": 0.02, "logit_bias": {5: 1.5}, "stop_token_ids": (8, 9, 10)},
    {"temperature": 0.7, "allowed_token_ids": (5, 6, 7), "ignore_eos": True, "logprobs": 1},
    {"temperature": 1.0, "top_k": 3, "ignore_eos": True, "no_repeat_ngram_size": 2},
    {"temperature": 0.3, "logprobs": 5, "prompt_logprobs": 1, "presence_penalty": 1.5},
    {"temperature": 0.9, "grammar": _GRAMMARS[0]},
    {"temperature": 0.5, "grammar": _GRAMMARS[1], "logprobs": 2, "frequency_penalty": 0.3},
    {"temperature": 0.0, "ignore_eos": True},
]

Answer = tuple[list[int], str, list[TokenLogprobs], dict[int, TokenLogprobs]]


@dataclass
class Answers:
    """Collects what clients get, by the name of the answer."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, str] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    of_prompts: dict[str, dict[int, TokenLogprobs]] = field(default_factory=dict)
    """Log probabilities of prompt tokens, by their place."""

    def take(self, outputs: list[EngineCoreOutput]) -> None:
        for output in outputs:
            name = output.request_id
            self.tokens.setdefault(name, []).extend(output.new_token_ids)
            self.logprobs.setdefault(name, []).extend(output.logprobs or [])
            if (part := output.prompt_logprobs) is not None:
                found = self.of_prompts.setdefault(name, {})
                found.update(enumerate(part.unpack(), part.first_position))
            if output.finish_reason:
                self.ends[name] = f"{output.finish_reason} {output.stop_reason} {output.error}"

    def of(self, name: str) -> Answer:
        return (
            self.tokens.get(name, []),
            self.ends.get(name, ""),
            self.logprobs.get(name, []),
            self.of_prompts.get(name, {}),
        )


def names_of(request: EngineCoreRequest) -> tuple[str, ...]:
    """Returns the names of a request's answers."""
    return request.choice_ids or (request.request_id,)


def requests_of(
    seed: int, count: int = PER_ROUND, max_tokens: int = MAX_TOKENS
) -> list[EngineCoreRequest]:
    """Returns the requests of a round, whose prompts repeat themselves and partly begin alike."""
    rng = random.Random(seed)
    shared = [rng.randrange(5, VOCAB) for _ in range(16)]
    made = []
    for index in range(count):
        part = [rng.randrange(5, VOCAB) for _ in range(rng.choice([1, 3, 7]))]
        prompt = (shared if rng.random() < 0.5 else []) + part * rng.choice([2, 3])
        kind = _KINDS[(seed + index) % len(_KINDS)]
        sampling = SamplingParams(
            seed=rng.randrange(2**64),
            max_tokens=rng.choice([1, *(max_tokens * part // 3 for part in (1, 2, 3))]),
            **kind,
        )
        spec, name = RequestSpec(prompt, sampling), f"{seed}-{index}"
        choices: tuple[str, ...] = ()
        if index % 8 == 3 and "prompt_logprobs" not in kind:
            others = [spec.with_sampling(seed=rng.randrange(2**64)) for _ in range(2)]
            spec = spec.with_siblings(others)
            choices = tuple(f"{name}.{i}" for i in range(3))
        made.append(
            EngineCoreRequest(request_id=name, spec=spec, eos_token_ids=(EOS,), choice_ids=choices)
        )
    return made


def continued(requests: list[EngineCoreRequest], found: Answers) -> list[EngineCoreRequest]:
    """Returns the next turns of conversations: each goes on behind its first answer."""
    made = []
    for request in requests:
        name, spec = names_of(request)[0], request.spec.of_choice(0)
        known = [*spec.prompt_token_ids, *found.tokens.get(name, [])][: MAX_LEN - _NEXT_TURN - 2]
        sampling = msgspec.structs.replace(
            spec.sampling, max_tokens=_NEXT_TURN, min_tokens=0, prompt_logprobs=None
        )
        spec = RequestSpec([*known, 7, 9], sampling)
        name = f"{request.request_id}, again"
        made.append(msgspec.structs.replace(request, request_id=name, spec=spec, choice_ids=()))
    return made


def resumed(requests: list[EngineCoreRequest], found: Answers) -> list[EngineCoreRequest]:
    """Returns what clients ask of another node, when some have died after they gave `found`: each
    answer that has not ended, from where it is."""
    left = []
    for request in requests:
        for index, name in enumerate(names_of(request)):
            if name in found.ends:
                continue
            spec, tokens = request.spec.of_choice(index), found.tokens.get(name, [])
            if tokens:
                spec = spec.with_sampling(prompt_logprobs=None)
            spec = spec.resumed_after(tokens)
            left.append(msgspec.structs.replace(request, request_id=name, spec=spec, choice_ids=()))
    return left
