"""Forms outputs of a generation into bodies of the two APIs: whole, or chunk by chunk."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from msgspec import UNSET, UnsetType

from decode_node.generation import Choice, ChoiceResult, unpacked
from decode_node.logprobs import (
    TokenTexts,
    chat_logprobs,
    completion_logprobs,
    echoed_logprobs,
    prompt_logprobs,
    text_length,
)
from decode_node.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessageOut,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    PromptLogprobList,
    Usage,
)
from decode_node.timeline import Timeline
from engine.frontend.output_processor import RequestOutput
from engine.outputs import TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatOptions:
    """Options of a request: what it wants to be told besides its text."""

    include_usage: bool
    return_token_ids: bool
    return_prompt_logprobs: bool


class ResponseFormat(ABC):
    """Forms the bodies of one HTTP request, and keeps what later chunks depend on.

    `chunk` gives None when an output has nothing to show. The last chunk of a choice has its
    finish reason.
    """

    id_prefix: str

    def __init__(
        self, request_id: str, model: str, tokenizer: TokenTexts, options: FormatOptions
    ) -> None:
        self.id = f"{self.id_prefix}-{request_id}"
        self.model = model
        self.created = int(time.time())
        """The Unix seconds at which the answer was created. An answer that is resumed keeps its
        own.
        """
        self._tokenizer = tokenizer
        self._options = options
        self._no_usage: UnsetType | None = None if options.include_usage else UNSET
        self._encoder = msgspec.json.Encoder()

    @abstractmethod
    def chunk(
        self, choice: Choice, output: RequestOutput, timeline: Timeline | UnsetType = UNSET
    ) -> bytes | None: ...

    @abstractmethod
    def resume(self, choice: Choice, output: RequestOutput) -> None:
        """Notes that another node has sent chunks for all of `output`."""

    @abstractmethod
    def usage_chunk(self, usage: Usage, timeline: Timeline | UnsetType) -> bytes: ...

    @abstractmethod
    def body(
        self, results: Sequence[ChoiceResult], usage: Usage, timeline: Timeline | UnsetType
    ) -> bytes: ...

    def _token_ids(self, token_ids: list[int]) -> list[int] | UnsetType:
        return token_ids if self._options.return_token_ids else UNSET

    def _prompt_logprobs(self, result: ChoiceResult) -> PromptLogprobList | UnsetType:
        if not self._options.return_prompt_logprobs:
            return UNSET
        return prompt_logprobs(self._tokenizer, result.prompt_logprobs)

    def _has_news(self, output: RequestOutput) -> bool:
        return bool(
            output.text
            or output.logprobs
            or output.finished
            or (self._options.return_token_ids and output.token_ids)
        )


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

    def chunk(
        self, choice: Choice, output: RequestOutput, timeline: Timeline | UnsetType = UNSET
    ) -> bytes | None:
        is_first = choice.index not in self._offsets
        text = choice.prompt_text + output.text if is_first else output.text
        if not (text or self._has_news(output)):
            return None
        offset = self._offsets.get(choice.index, len(choice.prompt_text))
        self._offsets[choice.index] = offset + text_length(self._tokenizer, output.token_ids)
        item = CompletionChoice(
            index=choice.index,
            text=text,
            logprobs=self._chunk_logprobs(choice, output, offset, is_first=is_first),
            finish_reason=output.finish_reason,
            stop_reason=_unset(output.stop_reason),
            token_ids=self._token_ids(output.token_ids),
            prompt_token_ids=self._prompt_ids(choice) if is_first else UNSET,
        )
        return self._encode([item], self._no_usage, timeline)

    def resume(self, choice: Choice, output: RequestOutput) -> None:
        length = text_length(self._tokenizer, output.token_ids)
        self._offsets[choice.index] = len(choice.prompt_text) + length

    def usage_chunk(self, usage: Usage, timeline: Timeline | UnsetType) -> bytes:
        return self._encode([], usage, timeline)

    def body(
        self, results: Sequence[ChoiceResult], usage: Usage, timeline: Timeline | UnsetType
    ) -> bytes:
        items = [
            CompletionChoice(
                index=result.choice.index,
                text=result.choice.prompt_text + result.text,
                logprobs=self._logprobs(result.choice, result.logprobs, result.prompt_logprobs),
                finish_reason=result.finish_reason,
                stop_reason=_unset(result.stop_reason),
                token_ids=self._token_ids(result.token_ids),
                prompt_token_ids=self._prompt_ids(result.choice),
                prompt_logprobs=self._prompt_logprobs(result),
            )
            for result in results
        ]
        return self._encode(items, usage, timeline)

    def _prompt_ids(self, choice: Choice) -> list[int] | UnsetType:
        return self._token_ids(choice.request.spec.own_prompt_token_ids)

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
                usage=usage,
                timeline=timeline,
            )
        )


class ChatFormat(ResponseFormat):
    """Forms bodies of /v1/chat/completions."""

    id_prefix = "chatcmpl"

    def __init__(
        self, request_id: str, model: str, tokenizer: TokenTexts, options: FormatOptions
    ) -> None:
        super().__init__(request_id, model, tokenizer, options)
        self._begun: set[int] = set()
        """Choices whose role was sent."""

    def chunk(
        self, choice: Choice, output: RequestOutput, timeline: Timeline | UnsetType = UNSET
    ) -> bytes | None:
        if not self._has_news(output):
            return None
        is_first = choice.index not in self._begun
        self._begun.add(choice.index)
        item = ChatChunkChoice(
            index=choice.index,
            delta=ChatDelta(
                role="assistant" if is_first else UNSET,
                content=output.text if output.text or is_first else UNSET,
            ),
            logprobs=self._logprobs(output.logprobs),
            finish_reason=output.finish_reason,
            stop_reason=_unset(output.stop_reason),
            token_ids=self._token_ids(output.token_ids),
        )
        return self._encode([item], self._no_usage, timeline)

    def resume(self, choice: Choice, output: RequestOutput) -> None:
        self._begun.add(choice.index)

    def usage_chunk(self, usage: Usage, timeline: Timeline | UnsetType) -> bytes:
        return self._encode([], usage, timeline)

    def body(
        self, results: Sequence[ChoiceResult], usage: Usage, timeline: Timeline | UnsetType
    ) -> bytes:
        choices = [
            ChatChoice(
                index=result.choice.index,
                message=ChatMessageOut(content=result.text),
                logprobs=self._logprobs(result.logprobs),
                finish_reason=result.finish_reason,
                stop_reason=_unset(result.stop_reason),
                token_ids=self._token_ids(result.token_ids),
                prompt_token_ids=self._token_ids(result.choice.request.spec.own_prompt_token_ids),
            )
            for result in results
        ]
        return self._encoder.encode(
            ChatCompletion(
                id=self.id,
                created=self.created,
                model=self.model,
                choices=choices,
                usage=usage,
                prompt_logprobs=self._prompt_logprobs(results[0]),
                timeline=timeline,
            )
        )

    def _logprobs(self, logprobs: list[TokenLogprobs] | None) -> ChatLogprobs | None:
        return chat_logprobs(self._tokenizer, logprobs) if logprobs else None

    def _encode(
        self,
        choices: list[ChatChunkChoice],
        usage: Usage | UnsetType | None,
        timeline: Timeline | UnsetType,
    ) -> bytes:
        return self._encoder.encode(
            ChatChunk(
                id=self.id,
                created=self.created,
                model=self.model,
                choices=choices,
                usage=usage,
                timeline=timeline,
            )
        )


def _unset(value: int | str | None) -> int | str | UnsetType:
    return UNSET if value is None else value
