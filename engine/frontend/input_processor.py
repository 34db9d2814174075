"""Checks what a client asks for and completes it into a `GenerationRequest`.

Everything that can be wrong with a request is found here, before an engine sees it: the engine
takes what it gets as correct.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from edge.tracing.calls import TraceCalls
from edge.tracing.context import TraceContext
from edge.tracing.rpc import prefill_calls
from engine.config import EngineConfig
from engine.contracts.errors import (
    CONTEXT_EXCEEDED,
    InvalidRequest,
    answer_too_long,
    check,
    prompt_too_long,
)
from engine.contracts.messages import EngineCoreRequest
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import check_sampling
from engine.contracts.token_parts import token_parts
from engine.frontend.text.text_options import TextOptions
from engine.frontend.text.visible_text import PieceReader
from engine.images.image_input import ImagePixels
from engine.images.vision_spec import VisionSpec
from kv_transfer.metadata import KVTransferParams

_SEED_BITS = 64


@dataclass(slots=True)
class GenerationRequest:
    """A request on its way into one engine: a checked spec, and what belongs to this node alone.

    With `choice_ids` it is several, one for each of `spec.seeds`, and `request_id` names the prompt
    that they share.
    """

    request_id: str
    spec: RequestSpec
    eos_token_ids: tuple[int, ...] = ()
    kv_transfer_params: KVTransferParams | None = None
    trace: TraceContext | None = None
    calls: TraceCalls = field(default_factory=prefill_calls)
    """Records those of prefill nodes."""
    text: TextOptions = field(default_factory=TextOptions)
    reader: PieceReader | None = None
    """Reads the outputs in `RequestOutput.pieces`; None: nothing reads pieces."""
    arrival_time: float = field(default_factory=time.monotonic)
    """The CLOCK_MONOTONIC seconds at which the request arrived."""
    choice_ids: tuple[str, ...] = ()
    prefix_holder: str = ""
    """Names who may hold a prefix of the prompt (`contracts.prefix_holder`); empty: nothing."""
    pixels: tuple[ImagePixels, ...] = ()
    """Holds what a vision tower is given of the prompt's images, one for each digest."""
    has_encoder: bool = False
    """This node encodes images: its engine gets their pixels."""
    group: int = -1
    """The data-parallel group that is to serve it; -1: the engine chooses."""

    @classmethod
    def of_choices(cls, request_id: str, choices: Sequence[GenerationRequest]) -> GenerationRequest:
        """Returns the request for all `choices`, which differ in their ids and seeds alone. One
        choice is returned as it is."""
        first, *others = choices
        if not others:
            return first
        return replace(
            first,
            request_id=request_id,
            spec=first.spec.with_siblings([choice.spec for choice in others]),
            choice_ids=tuple(choice.request_id for choice in choices),
        )

    @property
    def prefill_spec(self) -> RequestSpec:
        """Returns what a prefill node is asked for."""
        if self.spec.sampling.beam is None:
            return self.spec
        return self.spec.for_candidates(self.eos_token_ids)

    def for_core(self) -> EngineCoreRequest:
        """Returns the message that brings it to the engine core."""
        return EngineCoreRequest(
            request_id=self.request_id,
            spec=self.spec,
            eos_token_ids=self.eos_token_ids,
            arrival_time=self.arrival_time,
            kv_transfer_params=self.kv_transfer_params,
            choice_ids=self.choice_ids,
            prefix_peer=self.prefix_holder,
            pixels=self.pixels if self.has_encoder else (),
            group=self.group,
        )


class InputProcessor:
    """Checks requests against one engine's limits. `cuts_answers`: longer answers than the context
    has room for are cut to what is left of it, not refused."""

    def __init__(self, config: EngineConfig, *, cuts_answers: bool = False) -> None:
        self._config = config
        self._model = config.model
        self._cuts_answers = cuts_answers

    def process(
        self, request_id: str, spec: RequestSpec, *, max_tokens: int | None
    ) -> GenerationRequest:
        """Completes `spec` and makes a request of it. Raises `InvalidRequest`."""
        return self.request(request_id, self.complete(spec, max_tokens=max_tokens))

    def request(self, request_id: str, spec: RequestSpec) -> GenerationRequest:
        """Makes a request of a spec that is complete."""
        return GenerationRequest(
            request_id,
            spec,
            eos_token_ids=self._model.eos_token_ids,
            has_encoder=self._config.images.has_encoder,
        )

    def complete(self, spec: RequestSpec, *, max_tokens: int | None) -> RequestSpec:
        """Returns `spec` with `max_tokens` set; all of it is checked. Raises `InvalidRequest`.

        `max_tokens` counts resumed output, and None stands for what is left of the context.
        """
        spec.check()
        self._check_prompt(spec)
        spec = spec.with_sampling(
            max_tokens=self._max_tokens(spec.num_own_prompt_tokens, max_tokens)
        )
        check_sampling(spec.sampling, self._model.vocab_size, self._model.eos_token_ids)
        _check_resumed(spec.num_resumed_tokens < spec.sampling.max_tokens)
        return spec

    def _check_prompt(self, spec: RequestSpec) -> None:
        """Refuses ids out of range, and a prompt that has to fit into one step and does not."""
        wrong = wrong_token(spec.prompt_token_ids, self._model.vocab_size)
        if wrong is not None:
            _check_resumed(wrong < spec.num_own_prompt_tokens)
            check_token_ids(spec.own_prompt_token_ids, self._model.vocab_size)
        if spec.images:
            self._check_images(spec, self._model.vision)
        scheduler = self._config.scheduler
        budget, count = scheduler.max_num_batched_tokens, spec.num_own_prompt_tokens
        if not scheduler.enable_chunked_prefill and count > budget:
            raise InvalidRequest(
                f"the prompt has {count} tokens; without chunked prefill this server computes at "
                f"most {budget} at once",
                "prompt",
                "context_length_exceeded",
            )

    def _check_images(self, spec: RequestSpec, vision: VisionSpec | None) -> None:
        most = self._config.images.max_spans
        check(
            vision is not None and len(spec.images) <= most,
            "images",
            f"and frames are more than the {most} that this node takes in a request "
            f"(--max-images, --max-videos, --max-video-frames)",
        )
        assert vision is not None
        tokens = spec.prompt_token_ids
        check(
            all(
                vision.has_tokens(image, tokens[image.offset : image.end]) for image in spec.images
            ),
            "images",
            "do not stand where the prompt has places for them",
        )

    def _max_tokens(self, num_prompt_tokens: int, max_tokens: int | None) -> int:
        context = self._model.max_model_len
        left = context - num_prompt_tokens
        if left < 1:
            message = prompt_too_long(context, f"{num_prompt_tokens} tokens")
            raise InvalidRequest(message, "prompt", CONTEXT_EXCEEDED)
        if max_tokens is None:
            return left
        check(max_tokens >= 1, "max_tokens", f"must be at least 1, not {max_tokens}")
        if max_tokens > left and not self._cuts_answers:
            message = answer_too_long(context, num_prompt_tokens, max_tokens)
            raise InvalidRequest(message, "max_tokens", CONTEXT_EXCEEDED)
        return min(max_tokens, left)


def wrong_token(token_ids: Sequence[int], vocab_size: int) -> int | None:
    """Returns the place of the first id that the vocabulary does not have; None for none."""
    done = 0
    for part in token_parts(token_ids):
        if not 0 <= min(part) <= max(part) < vocab_size:
            return done + next(i for i, id_ in enumerate(part) if not 0 <= id_ < vocab_size)
        done += len(part)
    return None


def check_token_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises `InvalidRequest` for a prompt with an id that the vocabulary does not have. Who
    decodes a client's ids comes here first: a tokenizer takes no negative ones."""
    wrong = wrong_token(token_ids, vocab_size)
    if wrong is not None:
        raise InvalidRequest(
            f"token id {token_ids[wrong]} is out of range; this model's ids are 0 to "
            f"{vocab_size - 1}",
            "prompt",
        )


def choose_seed(seed: int | None, choice: int = 0) -> int:
    """Returns the seed of a request's choice number `choice`, so that choices differ.

    None draws a random one: seeds are always set, so that any node can repeat the draw.
    """
    if seed is None:
        return secrets.randbits(_SEED_BITS)
    return (seed + choice) & ((1 << _SEED_BITS) - 1)


def _check_resumed(condition: bool) -> None:
    check(condition, "resume", "does not belong to this request, or to another model")
