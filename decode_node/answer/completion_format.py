"""Forms the bodies of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from msgspec import UNSET, UnsetType

from decode_node.answer.choice import Choice, ChoiceResult, unpacked
from decode_node.answer.event import TextEvent, event
from decode_node.answer.format import FormatOptions, ResponseFormat, stop_reason
from decode_node.answer.logprobs import (
    TokenTexts,
    completion_logprobs,
    echoed_logprobs,
    text_length,
)
from decode_node.observe.timeline import Timeline
from decode_node.protocol.completions import Completion, CompletionChoice, CompletionLogprobs
from decode_node.protocol.usage import Usage
from engine.contracts.outputs import TokenLogprobs
from engine.frontend.output_processor import RequestOutput


class CompletionFormat(ResponseFormat):
    """Forms bodies of /v1/completions."""

    id_prefix = "cmpl"

    def __init__(
        self, request_id: str, model: str, tokenizer: TokenTexts, options: FormatOptions
    ) -> None:
        super().__init__(request_id, model, tokenizer, options)
        self._offsets: dict[int, int] = {}
        """The place where the text of the next token begins, by choice; only of those that have
        begun."""
        self._plain: dict[int, TextEvent] = {}
        """Events in the midst of a choice, by its number."""

    def events(
        self, choice: Choice, output: RequestOutput, timeline: Timeline | UnsetType = UNSET
    ) -> list[bytes]:
        if (plain := self._plain.get(choice.index)) and not (output.logprobs or output.finished):
            return [plain.of(output.text)] if output.text else []
        is_first = choice.index not in self._offsets
        text = choice.prompt_text + output.text if is_first else output.text
        if not (text or self._has_news(output)):
            return []
        offset = self._offsets.get(choice.index, len(choice.prompt_text))
        # Only log probabilities tell offsets, and where one output has them, all have.
        length = text_length(self._tokenizer, output.token_ids) if output.logprobs else 0
        self._offsets[choice.index] = offset + length
        if is_first and self._has_text_events:
            self._plain[choice.index] = TextEvent(partial(self._text_event, choice))
        item = CompletionChoice(
            index=choice.index,
            text=text,
            logprobs=self._chunk_logprobs(choice, output, offset, is_first=is_first),
            finish_reason=output.finish_reason,
            stop_reason=stop_reason(output),
            token_ids=self._token_ids(output.token_ids),
            prompt_token_ids=self._prompt_ids(choice) if is_first else UNSET,
        )
        return [event(self._encode([item], self._chunk_usage(choice), timeline))]

    def _text_event(self, choice: Choice, text: str) -> bytes:
        item = CompletionChoice(index=choice.index, text=text)
        return event(self._encode([item], self._chunk_usage(choice), UNSET))

    def resume(self, choice: Choice, output: RequestOutput) -> None:
        length = text_length(self._tokenizer, output.token_ids)
        self._offsets[choice.index] = len(choice.prompt_text) + length

    def usage_events(self, usage: Usage, timeline: Timeline | UnsetType) -> list[bytes]:
        return [event(self._encode([], usage, timeline))]

    def body(
        self, results: Sequence[ChoiceResult], usage: Usage, timeline: Timeline | UnsetType
    ) -> bytes:
        items = [
            CompletionChoice(
                index=result.choice.index,
                text=result.choice.prompt_text + result.text,
                logprobs=self._logprobs(result.choice, result.logprobs, result.prompt_logprobs),
                finish_reason=result.finish_reason,
                stop_reason=result.stop_reason,
                token_ids=self._token_ids(result.token_ids),
                prompt_token_ids=self._prompt_ids(result.choice),
                prompt_logprobs=self._prompt_logprobs(result),
            )
            for result in results
        ]
        return self._encode(items, usage, timeline)

    def _chunk_logprobs(
        self, choice: Choice, output: RequestOutput, offset: int, *, is_first: bool
    ) -> CompletionLogprobs | None:
        if is_first:
            of_prompt = unpacked(output.prompt_logprobs) if choice.echoes_logprobs else []
            return self._logprobs(choice, output.logprobs or [], of_prompt)
        if not output.logprobs:
            return None
        return completion_logprobs(self._tokenizer, output.logprobs, offset)

    def _logprobs(
        self, choice: Choice, logprobs: list[TokenLogprobs], of_prompt: list[TokenLogprobs]
    ) -> CompletionLogprobs | None:
        """Returns log probabilities from the beginning of the answer."""
        generated = completion_logprobs(self._tokenizer, logprobs, len(choice.prompt_text))
        if not choice.echoes_logprobs:
            return generated if logprobs else None
        prompt = choice.request.spec.own_prompt_token_ids
        whole = echoed_logprobs(self._tokenizer, prompt, choice.prompt_text, of_prompt)
        whole.extend(generated)
        return whole

    def _encode(
        self,
        choices: list[CompletionChoice],
        usage: Usage | UnsetType | None,
        timeline: Timeline | UnsetType,
    ) -> bytes:
        return self._encoder.encode(
            Completion(
                id=self.id,
                created=self.created,
                model=self.model,
                choices=choices,
                system_fingerprint=self.fingerprint,
                usage=usage,
                timeline=timeline,
                metrics=self.metrics,
            )
        )
