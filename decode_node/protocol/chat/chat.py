"""Reads the bodies of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from decode_node.protocol.bodies.body import Ignored, Int, Name
from decode_node.protocol.bodies.generation_body import GenerationBody
from decode_node.protocol.chat.chat_messages import ChatMessage
from decode_node.protocol.chat.thinking import ThinkingFields
from decode_node.protocol.chat.tools import ToolUse, read_tools
from edge.http.errors import BadRequest


class ChatCompletionRequest(GenerationBody, ThinkingFields):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1)]
    """The chat so far, as the model's template takes it."""
    max_completion_tokens: Int | None = None
    """The same as `max_tokens`; it wins where both are given."""
    logprobs: bool | None = None
    """Tell the log probabilities of the answer's tokens."""
    top_logprobs: Int | None = None
    """The number of most likely tokens to tell for each place, with `logprobs`."""
    modalities: Any = None
    """Only `["text"]`."""
    tools: Any = None
    """Functions that the model may call, by name and JSON schema of their arguments."""
    tool_choice: Any = None
    """`none`, `auto`, `required`, the one to call: `{"type": "function", "function": {...}}`, or
    some: `{"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [...]}}`."""
    parallel_tool_calls: bool | None = None
    """Whether one answer may hold several calls; on unless it is false."""
    functions: Any = None
    """Only an empty list: `tools` replaced it."""
    function_call: Any = None
    """Only `none` and `auto`: `tool_choice` replaced it."""
    verbosity: Name | None = None
    """Goes to the chat template: how long answers are, in the template's words."""
    prediction: Ignored = None
    """Nothing is drafted from it."""

    add_generation_prompt: bool | None = None
    """End the prompt where an answer begins; on unless it is false."""
    continue_final_message: bool | None = None
    """Go on with the last message instead of beginning an answer to it."""
    required_prefix_token_ids: Annotated[list[int], Field(fail_fast=True)] | None = None
    """The prompt begins with these tokens, up to the end of the last answer in `messages`, as NeMo
    Gym asks for it: `prompt_token_ids` and `token_ids` of the call that gave the answer."""
    chat_template: str | None = None
    """A template instead of the model's, where the operator allows it."""
    documents: list[dict[str, Any]] | None = None
    """Texts for templates that have a place for them."""
    mm_processor_kwargs: dict[str, Any] | None = None
    """How images and videos are prepared, as in vLLM: `min_pixels`, `max_pixels`, `fps` and kin."""
    media_io_kwargs: dict[str, dict[str, Any] | None] | None = None
    """Only of videos, `fps` and `num_frames`: which frames are taken."""

    @property
    def wanted_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def continues_prompt(self) -> bool:
        return bool(self.continue_final_message)

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def drops_turns(self) -> bool:
        """Says whether the oldest turns are left out of a chat that is too long."""
        return False

    @property
    def moves_system_turns(self) -> bool:
        """Says whether the API has turns of the system where others have none."""
        return False

    def tool_use(self) -> ToolUse:
        """Returns the tools and how to choose among them. Raises `BadRequest`."""
        return read_tools(self.tools, self.tool_choice, self.parallel_tool_calls)

    @property
    def template_variables(self) -> dict[str, Any]:
        """Returns what the template gets besides messages and tools."""
        verbosity = {} if self.verbosity is None else {"verbosity": self.verbosity}
        return self.thinking_variables | verbosity | (self.chat_template_kwargs or {})

    other_names: ClassVar[dict[str, str]] = {}
    """Fields that the client knows by another name, in an API that amounts to a chat."""

    @property
    def image_params(self) -> Sequence[str]:
        """Returns the names of the parts that are images or videos, in order."""
        return [
            f"messages.{i}.content.{j}"
            for i, message in enumerate(self.messages)
            for j, _ in message.images()
        ]

    def param_name(self, name: str) -> str:
        name = super().param_name(name)
        if name == "max_tokens" and self.max_completion_tokens is not None:
            name = "max_completion_tokens"
        name = _PARAM_NAMES.get(name, name)
        return self.other_names.get(name, name)

    def check_supported(self) -> None:
        super().check_supported()
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        if self.functions:
            raise BadRequest("functions were replaced by tools; send those", param="functions")
        if self.function_call not in (None, "none", "auto"):
            raise BadRequest(
                "function_call was replaced by tool_choice; send that", param="function_call"
            )
        if self.continue_final_message and self.add_generation_prompt:
            raise BadRequest(
                "continue_final_message and add_generation_prompt exclude each other",
                param="add_generation_prompt",
            )
        if self.modalities not in (None, ["text"]):
            raise BadRequest("only text is supported", param="modalities")


_PARAM_NAMES = {"prompt": "messages", "logprobs": "top_logprobs"}
"""Engine parameters that this API calls otherwise."""
