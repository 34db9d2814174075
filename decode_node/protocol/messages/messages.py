"""Reads the bodies of /v1/messages (Anthropic's API), and says the same as a chat."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from decode_node.protocol.bodies.body import Ignored, Int, Name, StrictBody
from decode_node.protocol.bodies.ignored_fields import TierFields
from decode_node.protocol.chat.other_chat import ChatOfAnother
from decode_node.protocol.chat.thinking import Thinking
from decode_node.protocol.messages.messages_input import chat_messages, left_out_blocks
from decode_node.protocol.messages.messages_tools import MessageTools
from decode_node.protocol.other_names import named_fields
from edge.http.error_forms import THREAD_UNSUPPORTED
from edge.http.errors import BadRequest

_SAME_IN_CHATS = ("model", "temperature", "top_p", "top_k", "stream", "priority", "cache_salt")
_FORMAT = "output_format"
_CLEAR_THINKING = "clear_thinking_"
_CLEARING = ("clear_tool_uses_", "compact_")


class AnthropicToolChoice(StrictBody):
    """How the model may choose among the tools."""

    type: Literal["auto", "any", "tool", "none"]
    """`any` must call one, `tool` the one that is named."""
    name: Name | None = None
    """The tool to call."""
    disable_parallel_tool_use: bool | None = None
    """At most one call."""


class ChatOfMessages(ChatOfAnother):
    """A request as the chat that it amounts to."""

    other_names: ClassVar[dict[str, str]] = {
        "max_completion_tokens": "max_tokens",
        "stop": "stop_sequences",
        "response_format": "output_config.format",
        "response_format.json_schema": "output_config.format",
        "reasoning_effort": "output_config.effort",
    }

    @property
    def moves_system_turns(self) -> bool:
        return True

    @property
    def effort_switches(self) -> bool:
        return False


class CountTokensRequest(StrictBody):
    """The body of POST /v1/messages/count_tokens."""

    model: Name | None = None
    """A name that this server gives its model; any of them, or none."""
    messages: Annotated[list[dict[str, Any]], Field(fail_fast=True, min_length=1)]
    """The turns so far, of `user` and `assistant`. A last one of the assistant is continued."""
    system: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    """A text, or text blocks, before the turns."""
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    """Tools that the client runs: `name`, `description`, `input_schema`; or of the types `bash`,
    `text_editor` and `memory`. Those that a server would run are ignored where there are others.
    With `defer_loading` one is shown when a result refers to it, or a `tool_addition` of a turn."""
    tool_choice: AnthropicToolChoice | None = None
    """How the model may choose among the tools."""
    thinking: Thinking | None = None
    """Whether the model thinks before it answers."""
    output_config: dict[str, Any] | None = None
    """Has `format`, a JSON schema that the answer follows, and `effort` for the chat template."""
    output_format: dict[str, Any] | None = None
    """The older name of `output_config.format`."""
    mcp_servers: Any = None
    """Only empty: this server calls no other."""
    container: Any = None
    """Only null: this server runs no code."""
    thread: Any = None
    """Only null: this server holds no conversation. Clients send all turns when they learn that."""
    context_management: dict[str, Any] | None = None
    """Edits of thinking, which templates leave out of former turns by themselves. Those that clear
    results of tools or compact the turns are ignored: nothing is cleared."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the model's chat template; an extension."""
    betas: Ignored = None
    """Names of features; each is honoured or refused by its own field."""
    cache_control: Ignored = None
    """Prefixes are found by their content."""

    @cached_property
    def read_tools(self) -> MessageTools:
        """The tools as functions. Raises `BadRequest`."""
        return MessageTools.of(self.tools or [], self.messages)

    def unknown_fields(self) -> list[str]:
        names = super().unknown_fields() + [f"tools.{kind}" for kind in self.read_tools.left_out]
        names += [f"context_management.{kind}" for kind in self._edits() if _is_clearing(kind)]
        return names + [f"messages.{kind}" for kind in left_out_blocks(self.messages)]

    def named_fields(self) -> AbstractContextManager[None]:
        """Names fields of the chat in errors as this API does."""
        names = {f"tools.{i}": place for i, place in enumerate(self.read_tools.places)}
        if self._has_older_format:
            names |= {"response_format": _FORMAT, "response_format.json_schema": _FORMAT}
        return named_fields(ChatOfMessages.other_names | names)

    def check_supported(self) -> None:
        """Raises `BadRequest` for what would run on the server."""
        for name in ("mcp_servers", "container"):
            if getattr(self, name):
                raise _refused(name, "this server answers from the request alone")
        if self.thread is not None:
            raise BadRequest(
                "thread is not supported: this server holds no conversation; send all turns",
                param="thread",
                code=THREAD_UNSUPPORTED,
            )
        if not all(_is_clearing(kind) or _is_of_thinking(kind) for kind in self._edits()):
            raise _refused("context_management", "edits of this type are not known")

    def _edits(self) -> list[Any]:
        """Returns the types of the edits of `context_management`."""
        edits = (self.context_management or {}).get("edits") or []
        if not isinstance(edits, list):
            return [None]
        return [edit.get("type") if isinstance(edit, dict) else edit for edit in edits]

    @property
    def _has_older_format(self) -> bool:
        return self.output_format is not None and not (self.output_config or {}).get("format")

    def to_chat(self) -> ChatOfMessages:
        """Returns the same request as a chat. Raises `BadRequest`."""
        self.check_supported()
        chat = ChatOfMessages.of(self._chat_fields())
        chat._hidden_tools = frozenset(self.read_tools.deferred)
        chat._removed_tools = frozenset(self.read_tools.removed)
        return chat

    def _chat_fields(self) -> dict[str, Any]:
        tools = self.read_tools
        messages, is_open = chat_messages(self.system, self.messages, tools.deferred, tools.unsaid)
        fields: dict[str, Any] = {
            "messages": messages,
            "continue_final_message": is_open or None,
            "tools": tools.functions or (None if self.tools is None else []),
            "reasoning_effort": (self.output_config or {}).get("effort"),
            "response_format": self._response_format(),
            "chat_template_kwargs": self.chat_template_kwargs,
            "thinking": self.thinking and self.thinking.model_dump(exclude_none=True),
        }
        if (choice := self.tool_choice) is not None:
            fields["tool_choice"] = _chat_choice(choice)
            fields["parallel_tool_calls"] = False if choice.disable_parallel_tool_use else None
        return fields

    def _response_format(self) -> dict[str, Any] | None:
        form, place = (self.output_config or {}).get("format"), "output_config.format"
        if self._has_older_format:
            form, place = self.output_format, _FORMAT
        if form is None:
            return None
        if not isinstance(form, dict):
            raise BadRequest(f"{place} must be an object", param=place, code="invalid_type")
        if form.get("type") not in (None, "json_schema"):
            raise BadRequest(f"{place}.type must be json_schema", param=f"{place}.type")
        schema = {"name": "answer", "schema": form.get("schema"), "strict": True}
        return {"type": "json_schema", "json_schema": schema}


class MessagesRequest(CountTokensRequest, TierFields):
    """The body of POST /v1/messages."""

    form_advice = "it is called output_config.format here"

    max_tokens: Int
    """The most tokens to generate, thinking included. More than the context has left gets that, and
    stop_reason `model_context_window_exceeded` if it ends there (`--strict-max-tokens` refuses)."""
    stop_sequences: Annotated[list[str], Field(fail_fast=True)] | None = None
    """Up to 64 texts that end the answer; it ends before them."""
    stream: bool | None = None
    """Send the answer as events while it is generated."""
    temperature: float | None = None
    """Takes the most likely token where it is 0; up to 100."""
    top_p: float | None = None
    """Sample from the smallest set of tokens whose probability reaches this; 0 to 1."""
    top_k: Int | None = None
    """Sample from the k most likely tokens; 0 or -1 takes all."""
    seed: Int | None = None
    """The same seed gives the same answer; an extension."""
    priority: Int | None = None
    """Smaller runs first, where nodes schedule by priority; an extension."""
    cache_salt: Name | None = None
    """Requests share cached prefixes only with requests of the same salt; an extension."""
    metadata: Ignored = None
    """Nothing is kept by user."""
    inference_geo: Ignored = None
    """There is one place."""
    speed: Ignored = None
    """There is one speed."""
    fallbacks: Ignored = None
    """Nothing is declined here that other models would answer."""
    fallback_credit_token: Ignored = None
    """Nothing is billed."""
    billing_policy: Ignored = None
    """Nothing is billed."""
    diagnostics: Ignored = None
    """The usage tells what was cached."""

    def _chat_fields(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in (*_SAME_IN_CHATS, "seed")}
        # The last events tell usage.
        options = {"include_usage": True} if self.stream else None
        return {
            **super()._chat_fields(),
            **fields,
            "max_completion_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "stream_options": options,
        }


def _is_of_thinking(kind: Any) -> bool:
    return isinstance(kind, str) and kind.startswith(_CLEAR_THINKING)


def _is_clearing(kind: Any) -> bool:
    """Says whether an edit makes the turns shorter, which is not done here."""
    return isinstance(kind, str) and kind.startswith(_CLEARING)


def _refused(name: str, why: str) -> BadRequest:
    return BadRequest(f"{name} is not supported: {why}", param=name, code="unsupported_parameter")


def _chat_choice(choice: AnthropicToolChoice) -> Any:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type
