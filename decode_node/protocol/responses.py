"""Reads the bodies of /v1/responses, and says the same as a chat.

Nothing is kept between requests: what refers to earlier ones is refused by name.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Annotated, Any, ClassVar

from pydantic import Field

from decode_node.protocol.body import Ignored, Int, Name, StrictBody
from decode_node.protocol.generation_body import first_given
from decode_node.protocol.other_chat import ChatOfAnother
from decode_node.protocol.other_names import named_fields
from decode_node.protocol.responses_input import chat_messages
from edge.http.errors import BadRequest
from engine.models.sampling_defaults import SamplingDefaults

_NEEDS_STATE = "nothing is kept between requests here; send all earlier items as input"
_SAME_IN_CHATS = (
    "model", "temperature", "top_p", "stream", "seed", "top_k", "min_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "stop", "priority", "cache_salt",
    "parallel_tool_calls", "chat_template_kwargs",
)  # fmt: skip
"""Fields that chats have under the same name, with the same meaning."""


class ReasoningOptions(StrictBody):
    """How much the model thinks."""

    effort: Name | None = None
    """Goes to the chat template; `none` turns thinking off where the template can."""
    summary: Ignored = None
    """All of the reasoning is told, and nothing is summarised."""
    generate_summary: Ignored = None
    """All of the reasoning is told, and nothing is summarised."""


class ResponseText(StrictBody):
    """The form of the answer's text."""

    format: dict[str, Any] | None = None
    """`{"type": "text"}`, `json_object`, or `json_schema` with `name`, `schema` and `strict`."""
    verbosity: Name | None = None
    """Only `medium`: ask for the length in the instructions."""


class ChatOfResponses(ChatOfAnother):
    """A request as the chat that it amounts to."""

    other_names: ClassVar[dict[str, str]] = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
        "response_format.json_schema": "text.format",
        "reasoning_effort": "reasoning.effort",
    }


class ResponsesRequest(StrictBody):
    """The body of POST /v1/responses."""

    model: Name | None = None
    """A name that this server gives its model; any of them, or none."""
    input: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)]
    """A text of the user, or items: messages, function calls, their outputs, reasoning."""
    instructions: str | None = None
    """A system message before the input."""
    max_output_tokens: Int | None = None
    """The most tokens to generate, reasoning included."""
    stream: bool | None = None
    """Send the answer as events while it is generated."""
    temperature: float | None = None
    """Takes the most likely token where it is 0; up to 100."""
    top_p: float | None = None
    """Sample from the smallest set of tokens whose probability reaches this; 0 to 1."""
    tools: list[dict[str, Any]] | None = None
    """Tools of type `function`; others would run on the server, and none do."""
    tool_choice: Any = None
    """`none`, `auto`, `required`, or the one to call: `{"type": "function", "name": ...}`."""
    parallel_tool_calls: bool | None = None
    """Whether one answer may hold several calls; on unless it is false."""
    text: ResponseText | None = None
    """The form of the answer's text."""
    reasoning: ReasoningOptions | None = None
    """How much the model thinks."""
    store: bool | None = None
    """Only false: nothing is kept."""
    previous_response_id: str | None = None
    """Only null: nothing is kept."""
    conversation: Any = None
    """Only null: nothing is kept."""
    background: bool | None = None
    """Only false: the answer is given at once."""
    prompt: Any = None
    """Only null: there are no stored prompts."""
    truncation: str | None = None
    """Only `disabled`: an input that is too long is refused."""
    top_logprobs: Int | None = None
    """Only 0: chat completions tell log probabilities."""

    seed: Int | None = None
    """The same seed gives the same answer."""
    top_k: Int | None = None
    """Sample from the k most likely tokens; 0 or -1 takes all."""
    min_p: float | None = None
    """Leave out tokens less likely than this share of the most likely one; 0 to 1."""
    repetition_penalty: float | None = None
    """Divides the logits of tokens that prompt or answer have."""
    presence_penalty: float | None = None
    """Lowers tokens that the answer has already; -2 to 2."""
    frequency_penalty: float | None = None
    """Lowers tokens by how often the answer has them; -2 to 2."""
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    """Up to 64 texts that end the answer; it ends before them."""
    priority: Int | None = None
    """Smaller runs first, where nodes schedule by priority."""
    cache_salt: Name | None = None
    """Requests share cached prefixes only with requests of the same salt."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the model's chat template."""

    include: Ignored = None
    """Names parts of the answer that are told anyway, or belong to tools of the server."""
    stream_options: Ignored = None
    """The last event always tells the usage."""
    metadata: dict[str, Any] | None = None
    """Told back with the answer."""
    max_tool_calls: Ignored = None
    """It counts calls of tools of the server."""
    user: Ignored = None
    """Nothing is kept by user."""
    service_tier: Ignored = None
    """There is one tier."""
    safety_identifier: Ignored = None
    """Nothing is kept by user."""
    prompt_cache_key: Ignored = None
    """Prefixes are found by their content."""
    prompt_cache_retention: Ignored = None
    """Prefixes are kept while there is room."""

    def check_supported(self) -> None:
        """Raises `BadRequest` for what needs state, or is not built."""
        for name in ("previous_response_id", "conversation", "prompt"):
            if getattr(self, name) is not None:
                raise _refused(name, _NEEDS_STATE)
        if self.store:
            raise _refused("store", "nothing is kept here; send store false")
        if self.background:
            raise _refused("background", "answers are given at once; leave it out")
        if self.truncation not in (None, "disabled"):
            raise _refused("truncation", "shorten the input, and leave it out")
        if self.top_logprobs:
            raise _refused("top_logprobs", "chat completions tell log probabilities")
        if self.text is not None and self.text.verbosity not in (None, "medium"):
            raise _refused("text.verbosity", "ask for the length in the instructions")

    def named_fields(self) -> AbstractContextManager[None]:
        """Names fields of the chat in errors as this API does."""
        return named_fields(ChatOfResponses.other_names)

    def told_back(self, defaults: SamplingDefaults) -> dict[str, Any]:
        """Returns the fields that an answer repeats, with the values of those not given: the
        model's `defaults`, or else the API's."""
        return {
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": self.reasoning and self.reasoning.effort, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": first_given(self.temperature, defaults.temperature, 1.0),
            "text": {"format": (self.text and self.text.format) or {"type": "text"}},
            "tool_choice": self.tool_choice or ("auto" if self.tools else "none"),
            "tools": self.tools or [],
            "top_logprobs": 0,
            "top_p": first_given(self.top_p, defaults.top_p, 1.0),
            "truncation": "disabled",
        }

    def to_chat(self) -> ChatOfResponses:
        """Returns the same request as a chat. Raises `BadRequest`."""
        self.check_supported()
        fields = {name: getattr(self, name) for name in _SAME_IN_CHATS}
        fields |= {
            "messages": chat_messages(self.instructions, self.input),
            "max_completion_tokens": self.max_output_tokens,
            "tools": None if self.tools is None else _chat_tools(self.tools),
            "tool_choice": _chat_choice(self.tool_choice),
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "response_format": _chat_format(self.text.format if self.text else None),
        }
        # The last event tells usage.
        fields["stream_options"] = {"include_usage": True} if self.stream else None
        return ChatOfResponses.of(fields)


def _refused(name: str, advice: str) -> BadRequest:
    return BadRequest(
        f"{name} is not supported: {advice}", param=name, code="unsupported_parameter"
    )


def _chat_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for i, tool in enumerate(tools):
        if tool.get("type") != "function":
            raise BadRequest(
                f"tools.{i}: only tools of type function are supported; this server runs none",
                param=f"tools.{i}.type",
            )
        function = {k: v for k, v in tool.items() if k != "type" and v is not None}
        found.append({"type": "function", "function": function})
    return found


def _chat_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _chat_format(form: dict[str, Any] | None) -> dict[str, Any] | None:
    if form is None or form.get("type") != "json_schema":
        return form
    schema = {k: v for k, v in form.items() if k != "type"}
    return {"type": "json_schema", "json_schema": schema}
