"""Forms the answers of /v1/responses: one response object, or numbered events.

    response.created, response.in_progress         with the first output
    response.output_item.added ... .done           each item (`response_items.py` makes them)
    response.completed | .incomplete | .failed     the whole response, with its usage

Numbers go on where another node left off: the journal says how many events were sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from msgspec import UNSET, UnsetType

from decode_node.answer.chat_format import ChatOptions
from decode_node.answer.choice import Choice, ChoiceResult
from decode_node.answer.event import event
from decode_node.answer.format import CUT, FormatOptions, ResponseFormat
from decode_node.answer.journal import Resume
from decode_node.answer.logprobs import TokenTexts
from decode_node.answer.responses.response_items import Event, ResponseItems
from decode_node.errors import CannotFollow, GenerationFailed
from decode_node.observe.timeline import Timeline
from decode_node.protocol.responses.compaction import ITEM
from decode_node.protocol.responses.responses_tools import ResponseTools
from decode_node.protocol.usage import Usage
from edge.http.answers.kept_response import KeptResponse
from edge.http.errors import HttpError
from engine.frontend.output_processor import RequestOutput

Json = dict[str, Any]


class ResponsesFormat(ResponseFormat):
    """Forms bodies and events of /v1/responses. `echoed_fields` are the request's fields that the
    answer repeats, but for what a router says that keeps it (`kept`); `tools` are the
    request's."""

    id_prefix = "resp"
    done = b""
    numbers_events = True
    is_summary: ClassVar[bool] = False
    """The text of the answer is a summary of the conversation."""

    def __init__(
        self,
        request_id: str,
        model: str,
        tokenizer: TokenTexts,
        options: FormatOptions,
        chat: ChatOptions,
        echoed_fields: Json,
        tools: ResponseTools,
        kept: KeptResponse | None = None,
    ) -> None:
        super().__init__(request_id, model, tokenizer, options)
        self.id = f"resp_{request_id}"
        self._num_sent = 0
        """The events that the router sent before ours."""
        if kept is not None:
            echoed_fields = echoed_fields | kept.echoed_fields()
            self.id = kept.id or self.id
            self.num_events = self._num_sent = kept.num_events
        self._chat = chat
        self._readers = chat.readers
        self._echoed_fields = echoed_fields
        self._tools = tools
        self._made: ResponseItems | None = None
        self._has_begun = False
        self._finish_reason: str | None = None

    def take_over(self, resume: Resume) -> None:
        super().take_over(resume)
        self._has_begun = resume.num_events > self._num_sent
        self.num_events = max(resume.num_events, self._num_sent)

    def events(
        self, choice: Choice, output: RequestOutput, timeline: Timeline | UnsetType = UNSET
    ) -> list[bytes]:
        found = self._read(choice, output)
        if not (found or output.finished):
            return []
        if not self._has_begun:
            self._has_begun = True
            begun = {"response": self._response("in_progress", [], None)}
            created = [] if self._num_sent else [("response.created", begun)]
            found = [*created, ("response.in_progress", begun), *found]
        return [self._event(*one) for one in found]

    def resume(self, choice: Choice, output: RequestOutput) -> None:
        self._read(choice, output)

    def usage_events(self, usage: Usage, timeline: Timeline | UnsetType) -> list[bytes]:
        status = self._status()
        response = self._response(status, self._items.items, usage, timeline)
        return [self._event(f"response.{status}", {"response": response})]

    def error_event(self, error: HttpError) -> bytes:
        response = self._response("failed", self._items.items, None)
        response["error"] = {"code": "server_error", "message": error.message}
        return self._event("response.failed", {"response": response})

    def body(
        self, results: Sequence[ChoiceResult], usage: Usage, timeline: Timeline | UnsetType
    ) -> bytes:
        (result,) = results
        self._items.take(self._readers.read_whole(result))
        self._finish_reason = result.finish_reason
        self._items.close(is_complete=result.finish_reason not in CUT)
        response = self._response(self._status(), self._items.items, usage, timeline)
        return self._encoder.encode(response)

    @property
    def _items(self) -> ResponseItems:
        """Returns the items so far. Their ids need the answer's creation, which a journal may say
        after this format was made."""
        if self._made is None:
            ids = self._chat.call_ids(self.identity)
            self._made = ResponseItems.of_calls(
                ids, self._tools, self._tokenizer, is_summary=self.is_summary
            )
        return self._made

    def _read(self, choice: Choice, output: RequestOutput) -> list[Event]:
        found = self._items.take(self._readers.read(choice.index, output))
        if output.finished:
            self._finish_reason = output.finish_reason
            found += self._items.close(is_complete=output.finish_reason not in CUT)
        return found

    def _status(self) -> str:
        return "incomplete" if self._finish_reason in CUT else "completed"

    def _event(self, name: str, fields: Json) -> bytes:
        data = {"type": name, "sequence_number": self.num_events, **fields}
        self.num_events += 1
        return event(self._encoder.encode(data), name)

    def _response(
        self,
        status: str,
        output: list[Json],
        usage: Usage | None,
        timeline: Timeline | UnsetType = UNSET,
    ) -> Json:
        is_cut = status == "incomplete"
        response: Json = {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": self.model,
            "output": output,
            "usage": None if usage is None else self._usage(usage),
            **self._echoed_fields,
        }
        if timeline is not UNSET:
            response["timeline"] = timeline
        return response

    def _usage(self, usage: Usage) -> Json:
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.prompt_tokens_details.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._readers.num_reasoning_tokens},
            "total_tokens": usage.total_tokens,
        }


class SummaryFormat(ResponsesFormat):
    """Forms the same where the input asks for a summary."""

    is_summary = True


class CompactedFormat(SummaryFormat):
    """Forms the bodies of /v1/responses/compact. All that they repeat of the request is what the
    user said (`said`). No field tells of a summary that is cut off or missing, and clients forget
    the conversation for it, so that is an error."""

    def body(
        self, results: Sequence[ChoiceResult], usage: Usage, timeline: Timeline | UnsetType
    ) -> bytes:
        body = super().body(results, usage, timeline)
        if self._finish_reason == "length":
            raise CannotFollow(
                "the summary did not end within max_output_tokens, or what is left of the context",
                param="max_output_tokens",
            )
        has_summary = any(item["type"] == ITEM for item in self._items.items)
        if self._finish_reason in CUT or not has_summary:
            raise GenerationFailed("there is no summary: the model wrote none, or was ended")
        return body

    def _response(
        self,
        status: str,
        output: list[Json],
        usage: Usage | None,
        timeline: Timeline | UnsetType = UNSET,
    ) -> Json:
        whole = super()._response(status, output, usage, timeline)
        summaries = [item for item in output if item["type"] == ITEM]
        response = {
            "id": whole["id"],
            "object": "response.compaction",
            "created_at": whole["created_at"],
            "output": [*whole["said"], *summaries],
            "usage": whole["usage"],
        }
        return response if timeline is UNSET else {**response, "timeline": timeline}
