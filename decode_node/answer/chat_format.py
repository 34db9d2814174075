"""Forms the bodies of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from decode_node.answer.format import FormatOptions, ResponseFormat, unset
from decode_node.answer.generation import Choice, ChoiceResult
from decode_node.answer.logprobs import TokenTexts, chat_logprobs
from decode_node.observe.timeline import Timeline
from decode_node.protocol.chat import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessageOut,
)
from decode_node.protocol.usage import Usage
from engine.frontend.output_processor import RequestOutput
from engine.outputs import TokenLogprobs


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
            stop_reason=unset(output.stop_reason),
            token_ids=self._token_ids(output.token_ids),
        )
        return self._encode([item], self._chunk_usage(choice), timeline)

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
                stop_reason=unset(result.stop_reason),
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
