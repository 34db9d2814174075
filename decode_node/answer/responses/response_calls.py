"""The calls among the output items of /v1/responses, by the kind of tool that they call.

function_call                  arguments, as they come
custom_tool_call               its one text, as it comes
local_shell_call, shell_call, apply_patch_call, tool_search_call
                               all at once, because its fields are objects; arguments that such a
                               call cannot have are sent as a function_call, verbatim
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from decode_node.answer.responses.argument_text import ArgumentText
from decode_node.protocol.responses.client_tools import TOOLS_BY_CALL, ClientTool
from decode_node.protocol.responses.responses_tools import INPUT, CalledTool
from decode_node.protocol.responses.tool_search import CALL, SearchTool

Json = dict[str, Any]
Event = tuple[str, Json]
"""The name of an event, and its data without name, number and place."""


class OpenCall(ABC):
    """One call that is still coming. `item` is what was sent of it when it began."""

    prefix: str

    def __init__(self, tool: CalledTool, call_id: str) -> None:
        self._tool = tool
        self._arguments = ""
        self.item: Json = {"status": "in_progress", "call_id": call_id}

    @property
    def begins_late(self) -> bool:
        """Says whether the item is sent when it is complete."""
        return False

    @abstractmethod
    def add(self, text: str) -> list[Event]:
        """Adds to the arguments, and returns the events of that."""

    @abstractmethod
    def finish(self, *, is_complete: bool) -> list[Event]:
        """Completes `item`, and returns the events in front of its last one."""

    def _named(self) -> Json:
        named = {"name": self._tool.name}
        return named | ({"namespace": self._tool.namespace} if self._tool.namespace else {})


class FunctionCall(OpenCall):
    prefix = "fc"

    def __init__(self, tool: CalledTool, call_id: str) -> None:
        super().__init__(tool, call_id)
        self.item = {"type": "function_call", **self.item, **self._named(), "arguments": ""}

    def add(self, text: str) -> list[Event]:
        self.item["arguments"] += text
        return [("response.function_call_arguments.delta", {"delta": text})]

    def finish(self, *, is_complete: bool) -> list[Event]:
        told = {"name": self.item["name"], "arguments": self.item["arguments"]}
        return [("response.function_call_arguments.done", told)]


class CustomCall(OpenCall):
    prefix = "ctc"

    def __init__(self, tool: CalledTool, call_id: str) -> None:
        super().__init__(tool, call_id)
        self._input = ArgumentText(INPUT)
        self.item = {"type": "custom_tool_call", **self.item, **self._named(), "input": ""}

    def add(self, text: str) -> list[Event]:
        return self._input_events(self._input.push(text))

    def finish(self, *, is_complete: bool) -> list[Event]:
        events = self._input_events(self._input.finish())
        return [*events, ("response.custom_tool_call_input.done", {"input": self.item["input"]})]

    def _input_events(self, text: str) -> list[Event]:
        if not text:
            return []
        self.item["input"] += text
        return [("response.custom_tool_call_input.delta", {"delta": text})]


class ClientCall(OpenCall):
    def __init__(self, tool: CalledTool, call_id: str, own: ClientTool | SearchTool) -> None:
        super().__init__(tool, call_id)
        self._own = own
        self.prefix = own.prefix

    @property
    def begins_late(self) -> bool:
        return True

    def add(self, text: str) -> list[Event]:
        self._arguments += text
        return []

    def finish(self, *, is_complete: bool) -> list[Event]:
        fields = self._own.fields(self._arguments) if is_complete else None
        if fields is None:
            self.prefix = FunctionCall.prefix
            called = {"name": self._own.name, "arguments": self._arguments}
            self.item = {"type": "function_call", **self.item, **called}
        else:
            self.item = {"type": self._own.call, **self.item, **fields}
        return []


def open_call(tool: CalledTool, call_id: str) -> OpenCall:
    """Returns the call of a tool, without arguments yet."""
    if (own := TOOLS_BY_CALL.get(tool.call)) is not None:
        return ClientCall(tool, call_id, own)
    if tool.call == CALL:
        return ClientCall(tool, call_id, SearchTool())
    kind = CustomCall if tool.call == "custom_tool_call" else FunctionCall
    return kind(tool, call_id)
