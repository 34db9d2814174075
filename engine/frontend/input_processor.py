"""What a client asks for, checked and completed into a `GenerationRequest`.

Everything that can be wrong with a request is found here, before an engine sees it: the engine
takes what it gets as correct.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from edge.tracing.context import TraceContext
from engine.config import EngineConfig
from engine.sampling_params import MAX_LOGPROBS, SamplingParams
from kv_transfer.metadata import KVTransferParams

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
_SEED_BITS = 64


class InvalidRequest(ValueError):
    """The client's mistake. `param` names the field, `code` is for programs."""

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


@dataclass(slots=True)
class GenerationRequest:
    """One prompt and how to continue it. Checked; `sampling.seed` and `max_tokens` are set.

    `num_resumed_tokens`: so many at the end of `prompt_token_ids` are output that another node
    has given already. They count as output for penalties, `min_tokens` and `max_tokens`, and the
    first output of the stream is what they amount to.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    num_resumed_tokens: int = 0
    eos_token_ids: tuple[int, ...] = ()
    priority: int = 0
    cache_salt: str = ""
    kv_transfer_params: KVTransferParams | None = None
    trace: TraceContext | None = None
    prefix_hash: int = 0
    """What routers call the prompt's beginning; 0: nothing. The engine does not use it."""
    arrival_time: float = field(default_factory=time.monotonic)
    """CLOCK_MONOTONIC seconds."""

    @property
    def own_prompt_token_ids(self) -> list[int]:
        """Without resumed output."""
        tokens = self.prompt_token_ids
        return tokens[: len(tokens) - self.num_resumed_tokens]

    @property
    def needs_one_token(self) -> bool:
        """The next token is the last."""
        return self.sampling.max_tokens == self.num_resumed_tokens + 1

    @property
    def resumed_token_ids(self) -> list[int]:
        tokens = self.prompt_token_ids
        return tokens[len(tokens) - self.num_resumed_tokens :]


class InputProcessor:
    """Checks requests against one engine's limits."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._model = config.model

    def process(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        *,
        max_tokens: int | None,
        seed: int | None = None,
        priority: int = 0,
        cache_salt: str = "",
        resumed_token_ids: Sequence[int] = (),
    ) -> GenerationRequest:
        """Raises `InvalidRequest`. `max_tokens` None: what is left of the context.

        `seed` None: a random one, so that the same draw can be repeated on any node.
        `resumed_token_ids`: output to continue after; `max_tokens` counts it.
        """
        self.check_prompt(prompt_token_ids)
        limit = self._max_tokens(len(prompt_token_ids), max_tokens)
        if seed is None:
            seed = secrets.randbits(_SEED_BITS)
        sampling = msgspec.structs.replace(
            sampling, max_tokens=limit, seed=seed & ((1 << _SEED_BITS) - 1)
        )
        check_sampling(sampling, self._model.vocab_size)
        self._check_resumed(resumed_token_ids, limit)
        return GenerationRequest(
            request_id=request_id,
            prompt_token_ids=[*prompt_token_ids, *resumed_token_ids],
            sampling=sampling,
            num_resumed_tokens=len(resumed_token_ids),
            eos_token_ids=self._model.eos_token_ids,
            priority=priority,
            cache_salt=cache_salt,
        )

    def check_prompt(self, prompt_token_ids: list[int]) -> None:
        """Not empty, ids in range, short enough for one more token."""
        if not prompt_token_ids:
            raise InvalidRequest("the prompt is empty; send at least one token", "prompt")
        vocab_size = self._model.vocab_size
        if min(prompt_token_ids) < 0 or max(prompt_token_ids) >= vocab_size:
            wrong = next(i for i in prompt_token_ids if not 0 <= i < vocab_size)
            raise InvalidRequest(
                f"token id {wrong} is out of range; this model's ids are 0 to {vocab_size - 1}",
                "prompt",
            )
        scheduler = self._config.scheduler
        if not scheduler.enable_chunked_prefill:
            budget = scheduler.max_num_batched_tokens
            if len(prompt_token_ids) > budget:
                raise InvalidRequest(
                    f"the prompt has {len(prompt_token_ids)} tokens; without chunked prefill "
                    f"this server computes at most {budget} at once",
                    "prompt",
                    "context_length_exceeded",
                )

    def _check_resumed(self, token_ids: Sequence[int], max_tokens: int) -> None:
        vocab_size = self._model.vocab_size
        _check(
            len(token_ids) < max_tokens and all(0 <= i < vocab_size for i in token_ids),
            "resume",
            "does not belong to this request, or to another model",
        )

    def _max_tokens(self, num_prompt_tokens: int, max_tokens: int | None) -> int:
        context = self._model.max_model_len
        left = context - num_prompt_tokens
        if left < 1:
            raise InvalidRequest(
                f"this model's context is {context} tokens and the prompt has "
                f"{num_prompt_tokens}, which leaves no room for an answer; shorten the prompt",
                "prompt",
                "context_length_exceeded",
            )
        if max_tokens is None:
            return left
        _check(max_tokens >= 1, "max_tokens", f"must be at least 1, not {max_tokens}")
        if max_tokens > left:
            raise InvalidRequest(
                f"this model's context is {context} tokens, but {num_prompt_tokens} in the "
                f"prompt and {max_tokens} for the answer (max_tokens) make "
                f"{num_prompt_tokens + max_tokens}; shorten either",
                "max_tokens",
                "context_length_exceeded",
            )
        return max_tokens


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Raises `InvalidRequest` naming the first parameter that is out of its range."""
    _check_ranges(params)
    _check(0 <= params.top_k < 1 << 31, "top_k", f"must be 0 (off) or more, not {params.top_k}")
    _check(
        0 <= params.min_tokens <= params.max_tokens,
        "min_tokens",
        f"must be between 0 and max_tokens ({params.max_tokens}), not {params.min_tokens}",
    )
    for name in ("logprobs", "prompt_logprobs"):
        asked = getattr(params, name)
        _check(
            asked is None or 0 <= asked <= MAX_LOGPROBS,
            name,
            f"must be between 0 and {MAX_LOGPROBS}, not {asked}",
        )
    _check_stop(params, vocab_size)
    _check_logit_bias(params, vocab_size)


def _check_ranges(params: SamplingParams) -> None:
    """NaN fails every comparison, so it is refused by the same test."""
    for name, low, high in (
        ("temperature", 0.0, 100.0),
        ("top_p", 0.0, 1.0),
        ("min_p", 0.0, 1.0),
        ("repetition_penalty", 0.0, 100.0),
        ("presence_penalty", -2.0, 2.0),
        ("frequency_penalty", -2.0, 2.0),
    ):
        value = getattr(params, name)
        _check(low <= value <= high, name, f"must be between {low:g} and {high:g}, not {value}")
    for name in ("top_p", "repetition_penalty"):
        _check(getattr(params, name) > 0, name, "must be greater than 0")


def _check_stop(params: SamplingParams, vocab_size: int) -> None:
    count = len(params.stop)
    _check(count <= MAX_STOP_STRINGS, "stop", f"has {count} strings, more than {MAX_STOP_STRINGS}")
    for stop in params.stop:
        _check(
            0 < len(stop) <= MAX_STOP_LENGTH,
            "stop",
            f"strings must have 1 to {MAX_STOP_LENGTH} characters",
        )
    count = len(params.stop_token_ids)
    _check(
        count <= MAX_STOP_TOKEN_IDS,
        "stop_token_ids",
        f"has {count} ids, more than {MAX_STOP_TOKEN_IDS}",
    )
    for token_id in params.stop_token_ids:
        _check_token_id(token_id, vocab_size, "stop_token_ids")


def _check_logit_bias(params: SamplingParams, vocab_size: int) -> None:
    count = len(params.logit_bias)
    _check(
        count <= MAX_LOGIT_BIAS, "logit_bias", f"has {count} entries, more than {MAX_LOGIT_BIAS}"
    )
    for token_id, bias in params.logit_bias.items():
        _check_token_id(token_id, vocab_size, "logit_bias")
        _check(
            math.isfinite(bias) and abs(bias) <= 100,
            "logit_bias",
            f"must be between -100 and 100, not {bias}",
        )


def _check_token_id(token_id: int, vocab_size: int, param: str) -> None:
    _check(
        0 <= token_id < vocab_size,
        param,
        f"names token id {token_id}; this model's ids are 0 to {vocab_size - 1}",
    )


def _check(condition: bool, param: str, message: str) -> None:
    if not condition:
        raise InvalidRequest(f"{param} {message}", param)
