"""Turns the tokens of one request into what a client reads.

One `OutputProcessor` for each request:

    0. `replay`, when the request goes on where another node left off
    1. `process` with each output of the engine core, or `process_first_token` with the token
       that a prefill node sampled; gives new tokens and text
    2. a stop string becomes complete: `finished`, and the caller aborts in the engine core
    3. the core says why it ended: `finished`; text that was kept back is given
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.contracts.outputs import PromptLogprobs, SiblingTokens, TokenLogprobs
from engine.frontend.input_processor import GenerationRequest
from engine.frontend.text.answer_text import PieceText, PlainText
from engine.frontend.text.byte_detokenizer import create_detokenizer
from engine.frontend.text.detokenizer import WINDOW, TokenDecoder
from engine.frontend.text.pieces import Piece
from engine.frontend.text.stop_strings import StopStringMatcher, VisibleStops


@dataclass(slots=True)
class RequestOutput:
    """The news of one request since its last output.

    Attributes:
        text: Certain text only: never half a character, never a part of a stop string. Empty with
            `pieces`.
        pieces: The text in pieces, with the marker tokens that the request's reader names; None
            when nothing reads them.
        num_hidden: At the end, characters that the pieces make visible behind a stop string.
        logprobs: One for each of `token_ids`, or None when not asked for.
        prompt_logprobs: With the first token: of all tokens of the prompt but its first, in parts
            and in order. None when not asked for, or when the prompt has one token.
        finish_reason: `stop`, `length`, `abort` or `error`; None while it goes on.
        stop_reason: The stop string or stop token id that ended it, if one of the request's did.
        num_cached_tokens: With the first output: prompt tokens that were not computed.
        queue_s: With the first output: seconds until first scheduled.
        error: With finish_reason `error`: what was wrong and what to do. With `abort`: why only
            another node can go on; empty: something wanted it to end.
        is_replay: Nothing new: what another node gave before this one took over.
        siblings: With the first token, of a request without choices of its own that draws for
            several: the first tokens of the others.
        draft_feature: With the first token on a prefill node: what a drafter reads of the last
            prompt token.
        group: Comes alone and first, on a prefill node with data-parallel groups: the one that
            computes the prompt. -1 otherwise.
    """

    request_id: str
    token_ids: list[int]
    text: str
    pieces: list[Piece] | None = None
    num_hidden: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[PromptLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int | None = None
    queue_s: float = 0.0
    error: str = ""
    is_replay: bool = False
    siblings: SiblingTokens | None = None
    draft_feature: bytes = b""
    group: int = -1

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class OutputStream(Protocol):
    """Gives the outputs of one request, in order; the last is `finished`."""

    def __aiter__(self) -> AsyncIterator[RequestOutput]: ...
    async def __anext__(self) -> RequestOutput: ...
    def close(self) -> None:
        """Aborts the request unless it has ended. Idempotent."""


class OutputProcessor:
    """Finds the text and the end of one request. Without a `tokenizer` there is no text, and stop
    strings never match."""

    def __init__(self, request: GenerationRequest, tokenizer: TokenDecoder | None) -> None:
        self.request_id = request.request_id
        sampling = self._sampling = request.spec.sampling
        self._eos_token_ids = () if sampling.ignore_eos else request.eos_token_ids
        self._shows_stop = request.text.include_stop_str_in_output
        self._text = None if tokenizer is None else _text(request, tokenizer)
        self._num_resumed_tokens = request.spec.num_resumed_tokens
        self.num_prompt_tokens = len(request.spec.prompt_token_ids)
        self._prompt_logprobs: list[PromptLogprobs] = []
        """Log probabilities of the prompt, until they are given."""
        self.num_output_tokens = 0
        self.finished = False

    @property
    def num_new_tokens(self) -> int:
        """Returns the number of output tokens of this node."""
        return self.num_output_tokens - self._num_resumed_tokens

    def replay(self, token_ids: list[int]) -> RequestOutput:
        """Takes in what was given already. Comes before anything else. The text that follows is the
        same as if all tokens had come from here."""
        output = self.process(token_ids)
        output.is_replay = True
        return output

    def add_prompt_logprobs(self, part: PromptLogprobs) -> None:
        """Takes a part of the prompt's log probabilities. Parts come in order; one that begins with
        the prompt begins anew: the prompt is computed again, after a preemption or by another node.
        After the first token they mean nothing."""
        if part.first_position == 1:
            self._prompt_logprobs = []
        if self.num_new_tokens == 0:
            self._prompt_logprobs.append(part)

    def process(
        self,
        token_ids: list[int],
        logprobs: list[TokenLogprobs] | None = None,
        *,
        finish_reason: str = "",
        stop_reason: int | str | None = None,
        num_cached_tokens: int | None = None,
        queue_s: float = 0.0,
        error: str = "",
    ) -> RequestOutput:
        """Takes in new tokens and returns what is new. An empty `finish_reason` means that it is
        not the end yet, as far as the core knows."""
        hides_last = finish_reason == "stop" and not self._shows_stop
        used = self._add(token_ids, hides_last=hides_last)
        text, source = "", self._text
        if source is not None:
            if finish_reason and source.matched is None:
                source.end(token_ids[-1] if hides_last and token_ids else None)
            if source.matched is not None:
                finish_reason, stop_reason = "stop", source.matched
            text = source.take(is_end=bool(finish_reason))
        self.finished = bool(finish_reason)
        prompt_logprobs: list[PromptLogprobs] | None = None
        if token_ids and self._prompt_logprobs:
            prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, []
        return RequestOutput(
            request_id=self.request_id,
            token_ids=token_ids[:used],
            text=text,
            pieces=None if source is None else source.pieces,
            num_hidden=0 if source is None else source.num_hidden,
            logprobs=logprobs[:used] if logprobs else None,
            prompt_logprobs=prompt_logprobs,
            finish_reason=finish_reason or None,
            stop_reason=stop_reason,
            num_cached_tokens=num_cached_tokens,
            queue_s=queue_s,
            error=error,
        )

    def process_first_token(
        self, token_id: int, logprobs: TokenLogprobs | None = None
    ) -> RequestOutput:
        """Takes in token one from a prefill node, before the core knows it. `finished` when it is
        also the last: an end-of-sequence token, a stop token, or the only one allowed."""
        sampling = self._sampling
        finish_reason, stop_reason = "", None
        if token_id in self._eos_token_ids:
            finish_reason = "stop"
        elif token_id in sampling.stop_token_ids:
            finish_reason, stop_reason = "stop", token_id
        elif self.num_output_tokens + 1 == sampling.max_tokens:
            finish_reason = "length"
        return self.process(
            [token_id],
            [logprobs] if logprobs is not None else None,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )

    def _add(self, token_ids: list[int], *, hides_last: bool) -> int:
        """Returns the number of tokens used: fewer than given when a stop string ends the text
        before.

        With `hides_last` the last one, a stop token, has no text. Before `min_tokens` stop strings
        do not count.
        """
        last = len(token_ids) - 1
        for index, token_id in enumerate(token_ids):
            self.num_output_tokens += 1
            if self._text is None or (hides_last and index == last):
                continue
            may_stop = self.num_output_tokens > self._sampling.min_tokens
            self._text.push(token_id, may_stop=may_stop)
            if self._text.matched is not None:
                return index + 1
        return len(token_ids)


def _text(request: GenerationRequest, tokenizer: TokenDecoder) -> PlainText | PieceText:
    options, stop = request.text, request.spec.sampling.stop
    detokenizer = create_detokenizer(tokenizer, options, _before(request))
    keeps_match = options.include_stop_str_in_output
    if (reader := request.reader) is None:
        return PlainText(detokenizer, StopStringMatcher(stop, keeps_match=keeps_match))
    stops = VisibleStops(reader.read_visible(), stop, keeps_match=keeps_match) if stop else None
    return PieceText(detokenizer, reader.marker_token_ids, stops)


def _before(request: GenerationRequest) -> Sequence[int]:
    """Returns the tokens of the prompt that the text goes on with."""
    if not request.text.continues_prompt:
        return ()
    end = request.spec.num_own_prompt_tokens
    return request.spec.prompt_token_ids[max(0, end - WINDOW) : end]
