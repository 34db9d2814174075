"""Forms the answers of /v1/messages (Anthropic's API): one message, or named events.

message_start, ping                      with the first output, so that it waits for a token
content_block_start, _delta, _stop       each block (`decode_node.answer.messages.message_blocks`)
message_delta, message_stop              why it ended, and usage
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from decode_node.answer.chat_format import ChatOptions
from decode_node.answer.choice import Choice, ChoiceResult
from decode_node.answer.event import event
from decode_node.answer.format import CUT, FormatOptions, ResponseFormat
from decode_node.answer.logprobs import TokenTexts
from decode_node.answer.messages.message_blocks import MessageBlocks
from decode_node.observe.timeline import Timeline
from decode_node.protocol.usage import Usage
from edge.http.error_forms import ErrorForm
from edge.http.errors import HttpError
from engine.frontend.output_processor import RequestOutput

Json = dict[str, Any]


class MessagesFormat(ResponseFormat):
    """Forms bodies and events of /v1/messages."""

    id_prefix = "msg"
    done = b""

    def __init__(
        self,
        request_id: str,
        model: str,
        tokenizer: TokenTexts,
        options: FormatOptions,
        chat: ChatOptions,
    ) -> None:
        super().__init__(request_id, model, tokenizer, options)
        self.id = f"msg_{request_id}"
        self._chat = chat
        self._readers = chat.readers
        self._made: MessageBlocks | None = None
        self._has_begun = False
        self._stop: Json = {"stop_reason": None, "stop_sequence": None}

    def events(
        self, choice: Choice, output: RequestOutput, timeline: Timeline | UnsetType = UNSET
    ) -> list[bytes]:
        found = self._read(choice, output)
        if not (found or output.finished):
            return []
        if not self._has_begun:
            self._has_begun = True
            usage = _usage(choice.record.num_prompt_tokens, choice.cached_tokens, 0)
            start = {"type": "message_start", "message": self._message([], usage)}
            found = [start, {"type": "ping"}, *found]
        return [self._event(one) for one in found]

    def resume(self, choice: Choice, output: RequestOutput) -> None:
        self._read(choice, output)
        self._has_begun = True

    def usage_events(self, usage: Usage, timeline: Timeline | UnsetType) -> list[bytes]:
        delta: Json = {"type": "message_delta", "delta": self._stop, "usage": self._usage(usage)}
        if timeline is not UNSET:
            delta["timeline"] = timeline
        return [self._event(delta), self._event({"type": "message_stop"})]

    def error_event(self, error: HttpError) -> bytes:
        return event(self.error_body(error), "error")

    def error_body(self, error: HttpError) -> bytes:
        return ErrorForm.ANTHROPIC.body(error)

    def body(
        self, results: Sequence[ChoiceResult], usage: Usage, timeline: Timeline | UnsetType
    ) -> bytes:
        (result,) = results
        self._blocks.take(self._readers.read_whole(result))
        self._blocks.finish()
        self._note_end(result.choice, result.finish_reason, result.stop_reason)
        message = self._message(self._blocks.blocks, self._usage(usage))
        if timeline is not UNSET:
            message["timeline"] = timeline
        return self._encoder.encode(message)

    @property
    def _blocks(self) -> MessageBlocks:
        """Returns the blocks so far. Their ids need the answer's creation, which a journal may say
        after this format was made."""
        if self._made is None:
            ids = self._chat.call_ids(self.identity)
            signature = hashlib.blake2s(self.identity.encode()).hexdigest()
            self._made = MessageBlocks(lambda index, name: ids.name(0, index, name), signature)
        return self._made

    def _read(self, choice: Choice, output: RequestOutput) -> list[Json]:
        found = self._blocks.take(self._readers.read(choice.index, output))
        if output.finished:
            self._note_end(choice, output.finish_reason, output.stop_reason)
            found += self._blocks.finish()
        return found

    def _note_end(self, choice: Choice, reason: str | None, stop_reason: int | str | None) -> None:
        self._stop = {"stop_reason": "end_turn", "stop_sequence": None}
        if reason in CUT:
            why = "model_context_window_exceeded" if choice.is_cut else "max_tokens"
            self._stop["stop_reason"] = why
        elif isinstance(stop_reason, str):
            self._stop = {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
        elif self._blocks.num_calls:
            self._stop["stop_reason"] = "tool_use"

    def _usage(self, usage: Usage) -> Json:
        cached = usage.prompt_tokens_details.cached_tokens
        told = _usage(usage.prompt_tokens, cached, usage.completion_tokens)
        if self._readers.has_parsers:
            count = self._readers.num_reasoning_tokens
            told["output_tokens_details"] = {"thinking_tokens": count}
        return told

    def _message(self, blocks: list[Json], usage: Json) -> Json:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": blocks,
            **self._stop,
            "usage": usage,
        }

    def _event(self, data: Json) -> bytes:
        return event(self._encoder.encode(data), data["type"])


def _usage(prompt: int, cached: int, output: int) -> Json:
    """Returns usage as this API counts it: tokens from a cache are counted apart."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
    }
