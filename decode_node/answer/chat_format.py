"""Forms the bodies of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec
from msgspec import UNSET, UnsetType

from decode_node.answer.call_ids import CallIds
from decode_node.answer.choice import Choice, ChoiceResult
from decode_node.answer.event import TextEvent, event
from decode_node.answer.format import FormatOptions, ResponseFormat, stop_reason
from decode_node.answer.logprobs import TokenTexts, chat_logprobs
from decode_node.answer.output_readers import CallNews, News, OutputReaders
from decode_node.observe.timeline import Timeline
from decode_node.parsers.stages.deltas import ContentText, Delta, ReasoningText
from decode_node.protocol.chat.chat_answer import (
    CalledFunctionOut,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessageOut,
    FunctionDelta,
    ToolCallDelta,
    ToolCallOut,
)
from decode_node.protocol.usage import CompletionTokensDetails, Usage
from engine.contracts.outputs import TokenLogprobs
from engine.frontend.output_processor import RequestOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """Says how messages are read and written.

    Attributes:
        is_named: The request names the function to call; the API ends such an answer with `stop`.
        tells_reasoning: Reasoning is part of the answer.
        names_reasoning_twice: Reasoning also has vLLM's newer name.
    """

    readers: OutputReaders = field(default_factory=OutputReaders)
    call_style: str = ""
    num_calls_before: int = 0
    is_named: bool = False
    tells_reasoning: bool = True
    names_reasoning_twice: bool = False

    def call_ids(self, answer: str) -> CallIds:
        """Returns the ids of the calls of `answer`, as `ResponseFormat.identity` names it."""
        return CallIds(answer, self.call_style, self.num_calls_before)


class ChatFormat(ResponseFormat):
    """Forms bodies of /v1/chat/completions. Text that a parser keeps back is sent with a later
    chunk; token ids and log probabilities are sent with their own output."""

    id_prefix = "chatcmpl"

    def __init__(
        self,
        request_id: str,
        model: str,
        tokenizer: TokenTexts,
        options: FormatOptions,
        chat: ChatOptions | None = None,
    ) -> None:
        super().__init__(request_id, model, tokenizer, options)
        self._chat = chat or ChatOptions()
        self._readers = self._chat.readers
        self._begun: set[int] = set()
        """Choices whose role was sent."""
        self._text_events: dict[tuple[int, str], TextEvent] = {}
        """Events of more text in the midst of a choice, by its number and the kind of text."""

    def events(
        self, choice: Choice, output: RequestOutput, timeline: Timeline | UnsetType = UNSET
    ) -> list[bytes]:
        found = self._readers.read(choice.index, output)
        is_plain = choice.index in self._begun and not (output.logprobs or output.finished)
        if is_plain and (plain := self._plain_events(choice, found)) is not None:
            return plain
        news = News.joined(found)
        if not (self._shows(news) or self._has_more(output)):
            return []
        is_first = choice.index not in self._begun
        prompt_ids = UNSET if self._begun else self._prompt_ids(choice)
        self._begun.add(choice.index)
        deltas = self._deltas(choice, news, is_first=is_first)
        items = [ChatChunkChoice(index=choice.index, delta=delta) for delta in deltas]
        last = items[-1]
        last.logprobs = self._logprobs(output.logprobs)
        last.finish_reason = self._finish_reason(choice, output.finish_reason)
        last.stop_reason = stop_reason(output)
        last.token_ids = self._token_ids(output.token_ids)
        usage = self._usage_so_far(choice)
        return [
            self._event(
                [item],
                usage,
                timeline if item is last else UNSET,
                prompt_ids if item is items[0] else UNSET,
                is_last=item is last,
            )
            for item in items
        ]

    def _plain_events(self, choice: Choice, found: list[Delta]) -> list[bytes] | None:
        """Returns the events of an output in the midst of a choice that is nothing but more text,
        or nothing at all; None if there is more to it."""
        if not self._has_text_events or len(found) > 1:
            return None
        if not found:
            return []
        delta = found[0]
        if isinstance(delta, ContentText):
            return [self._text_event(choice, "content").of(delta.text)]
        if isinstance(delta, ReasoningText) and self._chat.tells_reasoning:
            return [self._text_event(choice, "reasoning").of(delta.text)]
        return None

    def _text_event(self, choice: Choice, kind: str) -> TextEvent:
        known = self._text_events.get((choice.index, kind))
        if known is None:
            known = TextEvent(partial(self._event_of_text, choice, kind))
            self._text_events[choice.index, kind] = known
        return known

    def _event_of_text(self, choice: Choice, kind: str, text: str) -> bytes:
        news = News(content=text) if kind == "content" else News(reasoning=text)
        [delta] = self._deltas(choice, news, is_first=False)
        item = ChatChunkChoice(index=choice.index, delta=delta)
        return self._event([item], self._usage_so_far(choice), UNSET)

    def resume(self, choice: Choice, output: RequestOutput) -> None:
        self._readers.read(choice.index, output)
        self._begun.add(choice.index)

    def usage_events(self, usage: Usage, timeline: Timeline | UnsetType) -> list[bytes]:
        return [self._event([], self._with_details(usage), timeline)]

    def body(
        self, results: Sequence[ChoiceResult], usage: Usage, timeline: Timeline | UnsetType
    ) -> bytes:
        choices = [
            ChatChoice(
                index=result.choice.index,
                message=self._message(result),
                logprobs=self._logprobs(result.logprobs),
                finish_reason=self._finish_reason(result.choice, result.finish_reason),
                stop_reason=result.stop_reason,
                token_ids=self._token_ids(result.token_ids),
            )
            for result in results
        ]
        return self._encoder.encode(
            ChatCompletion(
                id=self.id,
                created=self.created,
                model=self.model,
                choices=choices,
                system_fingerprint=self.fingerprint,
                usage=self._with_details(usage),
                prompt_token_ids=self._prompt_ids(results[0].choice),
                prompt_logprobs=self._prompt_logprobs(results[0]),
                timeline=timeline,
                metrics=self.metrics,
            )
        )

    def _shows(self, news: News) -> bool:
        return bool(news.content or news.calls or (news.reasoning and self._chat.tells_reasoning))

    def _has_more(self, output: RequestOutput) -> bool:
        """Says whether an output has something to tell besides its text."""
        has_tokens = self._options.return_token_ids and output.token_ids
        return bool(output.logprobs or output.finished or has_tokens)

    def _deltas(self, choice: Choice, news: News, *, is_first: bool) -> list[ChatDelta]:
        """Returns the deltas of one output. A call begins with a delta of its own, without
        arguments, and calls come one after the other."""
        opens_with_text = is_first and not self._readers.has_parsers
        delta = ChatDelta(
            role="assistant" if is_first else UNSET,
            content=news.content if news.content or opens_with_text else UNSET,
        )
        if news.reasoning and self._chat.tells_reasoning:
            delta.reasoning_content = news.reasoning
            if self._chat.names_reasoning_twice:
                delta.reasoning = news.reasoning
        parts = [part for call in news.calls for part in self._call_deltas(choice, call)]
        if parts:
            delta.tool_calls = parts[:1]
        return [delta, *(ChatDelta(tool_calls=[part]) for part in parts[1:])]

    def _call_deltas(self, choice: Choice, call: CallNews) -> list[ToolCallDelta]:
        found = []
        if call.name is not None:
            begin = ToolCallDelta(
                index=call.index,
                id=self._chat.call_ids(self.identity).name(choice.index, call.index, call.name),
                type="function",
                function=FunctionDelta(name=call.name),
            )
            found.append(begin)
        if call.arguments:
            more = FunctionDelta(arguments=call.arguments)
            found.append(ToolCallDelta(index=call.index, function=more))
        return found

    def _message(self, result: ChoiceResult) -> ChatMessageOut:
        news = News.joined(self._readers.read_whole(result))
        has_parsers = self._readers.has_parsers
        message = ChatMessageOut(content=(news.content or None) if has_parsers else news.content)
        if self._chat.tells_reasoning and has_parsers:
            message.reasoning_content = news.reasoning or None
            if self._chat.names_reasoning_twice:
                message.reasoning = message.reasoning_content
        if news.calls:
            ids, choice = self._chat.call_ids(self.identity), result.choice.index
            message.tool_calls = [
                ToolCallOut(
                    id=ids.name(choice, call.index, call.name or ""),
                    function=CalledFunctionOut(call.name or "", call.arguments),
                )
                for call in news.calls
            ]
        return message

    def _finish_reason(self, choice: Choice, reason: str | None) -> str | None:
        """Returns `tool_calls` for an answer that ended behind its calls, unless the client had
        named the function."""
        is_called = reason == "stop" and self._readers.has_called(choice.index)
        return "tool_calls" if is_called and not self._chat.is_named else reason

    def _with_details(self, usage: Usage) -> Usage:
        if not self._readers.has_parsers:
            return usage
        details = CompletionTokensDetails(self._readers.num_reasoning_tokens)
        return msgspec.structs.replace(usage, completion_tokens_details=details)

    def _logprobs(self, logprobs: list[TokenLogprobs] | None) -> ChatLogprobs | None:
        if not logprobs:
            return None
        return chat_logprobs(self._tokenizer, logprobs, are_named=self._options.has_named_logprobs)

    def _usage_so_far(self, choice: Choice) -> Usage | UnsetType | None:
        usage = self._chunk_usage(choice)
        return self._with_details(usage) if isinstance(usage, Usage) else usage

    def _event(
        self,
        choices: list[ChatChunkChoice],
        usage: Usage | UnsetType | None,
        timeline: Timeline | UnsetType,
        prompt_token_ids: list[int] | UnsetType = UNSET,
        *,
        is_last: bool = True,
    ) -> bytes:
        chunk = ChatChunk(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            system_fingerprint=self.fingerprint,
            prompt_token_ids=prompt_token_ids,
            usage=usage,
            timeline=timeline,
            metrics=self.metrics if is_last else UNSET,
        )
        return event(self._encoder.encode(chunk))
