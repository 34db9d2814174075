"""Forms the bodies of /generate, SGLang's own API.

Each event of a stream has all of the answer so far. An event for each token would make an answer of
n tokens n * n / 2 long, so the longer it is, the more tokens come in one: an answer is sent about
`_GROWTH` times in all, and several of one request are not much more: what a client does not read
waits in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import msgspec
from msgspec import UNSET, UnsetType

from decode_node.answer.choice import Choice, ChoiceResult
from decode_node.answer.event import event
from decode_node.answer.format import FormatOptions, ResponseFormat
from decode_node.answer.logprobs import TokenTexts, finite_logprob
from decode_node.observe.timeline import Timeline
from decode_node.protocol.tokens.sglang import (
    FinishReason,
    LogprobEntry,
    MetaInfo,
    SGLangAnswer,
    SGLangRequest,
)
from decode_node.protocol.usage import Usage
from engine.contracts.outputs import TokenLogprobs
from engine.frontend.output_processor import RequestOutput

_GROWTH = 64


@dataclass(slots=True)
class _SoFar:
    """Holds what there is of a choice, and how many tokens it has when the next event is due."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    due_at: int = 1

    @property
    def text(self) -> str:
        self.texts = ["".join(self.texts)]
        return self.texts[0]

    def add(self, output: RequestOutput) -> None:
        self.texts.append(output.text)
        self.token_ids += output.token_ids

    def wait_for_more(self, growth: int) -> None:
        num_tokens = len(self.token_ids)
        self.due_at = num_tokens + 1 + num_tokens // growth


class SGLangFormat(ResponseFormat):
    """Forms bodies of /generate, with what `asked` wants of them."""

    id_prefix = "generate"
    repeats = True

    def __init__(
        self,
        request_id: str,
        model: str,
        tokenizer: TokenTexts,
        options: FormatOptions,
        *,
        asked: SGLangRequest,
    ) -> None:
        super().__init__(request_id, model, tokenizer, options)
        self.id = request_id
        self._asked = asked
        self._so_far: dict[int, _SoFar] = {}
        self._growth = max(4, _GROWTH // asked.num_answers)

    def events(
        self, choice: Choice, output: RequestOutput, timeline: Timeline | UnsetType = UNSET
    ) -> list[bytes]:
        so_far = self._grown(choice, output)
        if not output.finished and len(so_far.token_ids) < so_far.due_at:
            return []
        so_far.wait_for_more(self._growth)
        ids, ended = so_far.token_ids, output.finish_reason
        info = self._info(choice, len(ids), _finish(ended, output.stop_reason, ids))
        info.timeline = timeline
        answer = SGLangAnswer(text=so_far.text, output_ids=ids, meta_info=info)
        if output.finished:
            answer.prompt_token_ids = self._told_prompt(choice)
        if self._asked.is_list:
            answer.index = choice.index
        return [event(self._encoder.encode(answer))]

    def resume(self, choice: Choice, output: RequestOutput) -> None:
        self._grown(choice, output).wait_for_more(self._growth)

    def usage_events(self, usage: Usage, timeline: Timeline | UnsetType) -> list[bytes]:
        return []

    def body(
        self, results: Sequence[ChoiceResult], usage: Usage, timeline: Timeline | UnsetType
    ) -> bytes:
        answers = [self._whole(result) for result in results]
        answers[0].meta_info.timeline = timeline
        # One by one: a single call for all would hold the interpreter for a second.
        encoded = [self._encoder.encode(answer) for answer in answers]
        return b"[%b]" % b",".join(encoded) if self._asked.is_list else encoded[0]

    def _grown(self, choice: Choice, output: RequestOutput) -> _SoFar:
        so_far = self._so_far.setdefault(choice.index, _SoFar())
        so_far.add(output)
        return so_far

    def _whole(self, result: ChoiceResult) -> SGLangAnswer:
        choice, ids = result.choice, result.token_ids
        finish = _finish(result.finish_reason, result.stop_reason, ids)
        info = self._info(choice, len(ids), finish)
        if self._asked.return_logprob:
            self._add_logprobs(info, result)
        prompt = self._told_prompt(choice)
        return SGLangAnswer(
            text=result.text, output_ids=ids, prompt_token_ids=prompt, meta_info=info
        )

    def _told_prompt(self, choice: Choice) -> list[int] | UnsetType:
        tells = self._asked.return_prompt_token_ids
        return choice.request.spec.own_prompt_token_ids if tells else UNSET

    def _info(self, choice: Choice, num_tokens: int, finish: FinishReason | None) -> MetaInfo:
        return MetaInfo(
            id=f"{self.id}_{choice.index}" if self._asked.is_list else self.id,
            finish_reason=finish,
            prompt_tokens=choice.record.num_prompt_tokens,
            completion_tokens=num_tokens,
            cached_tokens=choice.cached_tokens,
        )

    def _add_logprobs(self, info: MetaInfo, result: ChoiceResult) -> None:
        own, others = self._entries(result.logprobs)
        info.output_token_logprobs, info.output_token_logprobs_length = own, len(own)
        if self._options.has_named_logprobs:
            info.output_token_ids_logprobs = others
        elif self._asked.top_logprobs_num:
            info.output_top_logprobs = others
        # Clients look for these whether or not they asked for them.
        info.input_token_logprobs = []
        if self._asked.top_logprobs_num:
            info.input_top_logprobs = []
        if (first := self._asked.first_described) is None:
            return
        prompt = result.choice.request.spec.own_prompt_token_ids[first : first + 1]
        own, others = self._entries(result.prompt_logprobs[first:])
        info.input_token_logprobs = [(None, id_, self._text(id_)) for id_ in prompt] + own
        if self._asked.top_logprobs_num:
            info.input_top_logprobs = [*(None for _ in prompt), *others]

    def _entries(
        self, logprobs: Sequence[TokenLogprobs]
    ) -> tuple[list[LogprobEntry], list[list[LogprobEntry]]]:
        """Returns what each position says of its own token, and, encoded, of the others."""
        own: list[LogprobEntry] = []
        others: list[list[LogprobEntry]] = []
        for position in logprobs:
            pairs = zip(position.logprobs, position.token_ids, strict=True)
            first, *rest = [(finite_logprob(value), id_, self._text(id_)) for value, id_ in pairs]
            own.append(first)
            others.append(cast("list[LogprobEntry]", msgspec.Raw(self._encoder.encode(rest))))
        return own, others

    def _text(self, token_id: int) -> str | None:
        return self._tokenizer.name(token_id) if self._asked.return_text_in_logprobs else None


def _finish(
    reason: str | None, stop_reason: int | str | None, token_ids: list[int]
) -> FinishReason | None:
    """Returns how an answer ended; None while it has not."""
    if reason is None:
        return None
    if reason == "length":
        return FinishReason(type=reason, length=len(token_ids))
    if reason == "abort":
        return FinishReason(type=reason, message="the answer was aborted")
    if stop_reason is None and token_ids:
        stop_reason = token_ids[-1]
    return FinishReason(type=reason, matched=UNSET if stop_reason is None else stop_reason)
