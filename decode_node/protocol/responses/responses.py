"""Reads the bodies of /v1/responses, and says the same as a chat.

A node keeps nothing between requests: what refers to earlier ones is refused by name. A router that
keeps responses sends the items themselves (`router.responses`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from decode_node.protocol.bodies.body import Ignored, Int, Name, StrictBody
from decode_node.protocol.bodies.generation_body import first_given
from decode_node.protocol.bodies.ignored_fields import (
    AccountFields,
    SessionFields,
    SummaryFields,
    TransferFields,
)
from decode_node.protocol.bodies.parse_body import validate
from decode_node.protocol.chat.other_chat import ChatOfAnother
from decode_node.protocol.other_names import named_fields
from decode_node.protocol.responses.client_tools import CLIENT_TOOLS
from decode_node.protocol.responses.compaction import is_summary_asked, user_messages
from decode_node.protocol.responses.responses_input import (
    SETTINGS,
    chat_messages,
    left_out_items,
)
from decode_node.protocol.responses.responses_tools import ResponseTools, flat_name
from decode_node.protocol.responses.tool_search import TOOL
from edge.http.errors import BadRequest
from engine.models.config.sampling_defaults import SamplingDefaults

_NEEDS_STATE = "nothing is kept between requests here; send all earlier items as input"
_OF_STATE = ("previous_response_id", "conversation")
_SAME_IN_CHATS = (
    "model", "temperature", "top_p", "stream", "seed", "top_k", "min_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "stop", "priority", "cache_salt",
    "parallel_tool_calls", "chat_template_kwargs", "extra_key", "logit_bias", "stop_token_ids",
    "ignore_eos", "include_reasoning", "include_stop_str_in_output", "skip_special_tokens",
    "spaces_between_special_tokens",
)  # fmt: skip
"""Fields that chats have under the same name, with the same meaning."""
_NO_PROMPTS = (
    "no prompts are stored here; send its text as instructions and input, with the variables "
    "filled in"
)
_FORMAT = "text.format"
_EFFORT = "reasoning.effort"
_LOGPROBS = "message.output_text.logprobs"


class ReasoningOptions(SummaryFields):
    """How much the model thinks."""

    effort: Name | None = None
    """Goes to the chat template; `none` turns thinking off where the template can."""
    generate_summary: Ignored = None
    """All of the reasoning is sent, and nothing is summarised."""


class ResponseText(StrictBody):
    """The form of the answer's text."""

    format: dict[str, Any] | None = None
    """`{"type": "text"}`, `json_object`, or `json_schema` with `name`, `schema` and `strict`."""
    verbosity: Name | None = None
    """Goes to the chat template as its variable `verbosity`."""


class Settings(StrictBody):
    """How answers are made: what a request says, or an item of its input from there on."""

    reasoning: ReasoningOptions | None = None
    """How much the model thinks."""
    text: ResponseText | None = None
    """The form of the answer's text."""


class ChatOfResponses(ChatOfAnother):
    """A request as the chat that it amounts to."""

    other_names: ClassVar[dict[str, str]] = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "response_format": _FORMAT,
        "response_format.json_schema": _FORMAT,
        "reasoning_effort": _EFFORT,
        "verbosity": "text.verbosity",
    }


class ResponsesRequest(Settings, AccountFields, SessionFields, TransferFields):
    """The body of POST /v1/responses."""

    form_advice = "it is called text.format here"

    model: Name | None = None
    """A name that this server gives its model; any of them, or none."""
    input: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)]
    """A text of the user, or items: messages, calls of all kinds of tools, their outputs,
    reasoning, `additional_tools`, which add to `tools`, `configuration_update`, whose effort
    and form of the text count from then on, `compaction_trigger` at the end, which asks for a
    summary, and `compaction`, which has one."""
    instructions: str | None = None
    """A system message before the input."""
    max_output_tokens: Int | None = None
    """The most tokens to generate, reasoning included; as `max_tokens` of chats."""
    stream: bool | None = None
    """Send the answer as events while it is generated."""
    temperature: float | None = None
    """Takes the most likely token where it is 0; up to 100."""
    top_p: float | None = None
    """Sample from the smallest set of tokens whose probability reaches this; 0 to 1."""
    tools: list[dict[str, Any]] | None = None
    """Tools that the client runs: `function`, `namespace`, `custom`, `local_shell`, `shell`,
    `apply_patch`, and `tool_search` with `"execution": "client"`. Those that a server would run are
    ignored where there are others."""
    tool_choice: Any = None
    """`none`, `auto`, `required`, the one to call: `{"type": "function", "name": ...}`, or some:
    `{"type": "allowed_tools", "mode": "auto", "tools": [...]}`."""
    parallel_tool_calls: bool | None = None
    """Whether one answer may hold several calls; on unless it is false."""
    store: bool | None = None
    """A router that keeps responses keeps this one unless it is false. Elsewhere true is
    ignored."""
    previous_response_id: str | None = None
    """Only null where no router keeps responses; else the response to go on from."""
    conversation: Any = None
    """Only null where no router keeps responses; else the conversation that it belongs to, as an id
    or `{"id": ...}`."""
    background: bool | None = None
    """Only false where no router keeps responses; else it is answered without a connection."""
    prompt: Any = None
    """Only null: there are no stored prompts."""
    truncation: Literal["auto", "disabled"] | None = None
    """`auto` leaves out the oldest turns of an input that is too long; else it is refused."""
    top_logprobs: Int | None = None
    """The number of most likely tokens to tell for each place of the answer's text."""

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
    extra_key: Name | None = None
    """The same, besides `cache_salt`; SGLang's name."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the model's chat template."""
    logit_bias: dict[str, float] | None = None
    """Adds an amount from -100 to 100 to the logits of token ids."""
    stop_token_ids: Annotated[list[Int], Field(fail_fast=True)] | None = None
    """Up to 256 token ids that end the answer, besides the model's own."""
    ignore_eos: bool | None = None
    """The model's own end of sequence does not end the answer."""
    include_reasoning: bool | None = None
    """Tell what the model thinks; on unless it is false."""
    include_stop_str_in_output: bool | None = None
    """The answer ends with the stop text or stop token that ended it."""
    skip_special_tokens: bool | None = None
    """Special tokens have no text; on unless it is false."""
    spaces_between_special_tokens: bool | None = None
    """Put spaces between special tokens where the tokenizer does; on unless it is false."""

    include: Annotated[list[str], Field(fail_fast=True)] | None = None
    """`message.output_text.logprobs` tells log probabilities. Others are sent anyway, or belong to
    tools of the server."""
    stream_options: Ignored = None
    """The last event always tells the usage."""
    metadata: dict[str, Any] | None = None
    """Returned with the answer."""
    max_tool_calls: Ignored = None
    """It counts calls of tools of the server."""
    client_metadata: Ignored = None
    """Codex describes itself in it."""
    background_options: Ignored = None
    """Work in the background is done as soon as there is room."""
    access_programs: Ignored = None
    """There are none."""
    image: Ignored = None
    """No images are made."""

    @classmethod
    def check_meant(cls, content: dict[str, Any]) -> None:
        """Raises `BadRequest` for what stands for the input: a stored prompt, and what only a
        router knows that keeps responses."""
        if content.get("prompt") is not None:
            raise _refused("prompt", _NO_PROMPTS)
        for name in _OF_STATE:
            if content.get("input") is None and content.get(name) is not None:
                raise _refused(name, _NEEDS_STATE)

    def check_supported(self) -> None:
        """Raises `BadRequest` for what needs state, or is not built."""
        for name in _OF_STATE:
            if getattr(self, name) is not None:
                raise _refused(name, _NEEDS_STATE)
        if self.background:
            raise _refused("background", "answers are given at once; leave it out")

    def unknown_fields(self) -> list[str]:
        names = super().unknown_fields() + (["store"] if self.store else [])
        names += [f"tools.{kind}" for kind in self.read_tools.left_out]
        return names + [f"input.{kind}" for kind in left_out_items(self.input)]

    @property
    def asks_summary(self) -> bool:
        """Says whether the answer is a summary of the conversation, whatever form others have."""
        return is_summary_asked(self.input)

    @cached_property
    def read_tools(self) -> ResponseTools:
        """The tools as functions. Raises `BadRequest`."""
        return ResponseTools.of(self.tools or [], self.input)

    def named_fields(self) -> AbstractContextManager[None]:
        """Names fields of the chat in errors as this API does."""
        places = {f"tools.{i}": place for i, place in enumerate(self.read_tools.places)}
        return named_fields(ChatOfResponses.other_names | places | self._places_of_settings())

    def _places_of_settings(self) -> dict[str, str]:
        """Returns the places in items of what counts in place of the request's own fields."""
        (form, _), (effort, _) = self._last_format, self._last_effort
        names = dict.fromkeys(("response_format", "response_format.json_schema", _FORMAT), form)
        names |= dict.fromkeys(("reasoning_effort", _EFFORT), effort)
        return names

    def echoed_fields(self, defaults: SamplingDefaults) -> dict[str, Any]:
        """Returns the fields that an answer repeats, with the values of those not given: the
        model's `defaults`, or else the API's."""
        return {
            "background": False,
            "frequency_penalty": self.frequency_penalty or 0.0,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "presence_penalty": self.presence_penalty or 0.0,
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": self._effort, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": first_given(self.temperature, defaults.temperature, 1.0),
            "text": {
                "format": self._format or {"type": "text"},
                "verbosity": (self.text and self.text.verbosity) or "medium",
            },
            "tool_choice": self.tool_choice or ("auto" if self.read_tools.functions else "none"),
            "tools": self.tools or [],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": first_given(self.top_p, defaults.top_p, 1.0),
            "truncation": self.truncation or "disabled",
        }

    def to_chat(self) -> ChatOfResponses:
        """Returns the same request as a chat. Raises `BadRequest`."""
        self.check_supported()
        fields = {name: getattr(self, name) for name in _SAME_IN_CHATS}
        fields |= {
            "messages": chat_messages(
                self.instructions,
                self.input,
                self.read_tools.found,
                asks_summary=self.asks_summary,
            ),
            "max_completion_tokens": self.max_output_tokens,
            "tools": self.read_tools.functions or self.tools,
            "tool_choice": None if self.asks_summary else _chat_choice(self.tool_choice),
            "reasoning_effort": self._effort,
            "response_format": None if self.asks_summary else _chat_format(self._format),
            "verbosity": self.text.verbosity if self.text else None,
            "logprobs": True if self._wants_logprobs else None,
            "top_logprobs": self.top_logprobs or None,
        }
        # The last event tells usage.
        fields["stream_options"] = {"include_usage": True} if self.stream else None
        chat = ChatOfResponses.of(fields)
        chat._drops_turns = self.truncation == "auto"
        chat._hidden_tools = self.read_tools.hidden
        return chat

    @cached_property
    def _settings(self) -> list[tuple[str, Settings]]:
        """Holds what items say, the last one first, then what the request says of itself; each
        behind the beginning of its place. Raises `BadRequest`."""
        found: list[tuple[str, Settings]] = [("", self)]
        for i, item in enumerate([] if isinstance(self.input, str) else self.input):
            if item.get("type") == SETTINGS:
                places = {name: f"input.{i}.{name}" for name in Settings.model_fields}
                with named_fields(places):
                    found.append((f"input.{i}.", validate(item, Settings)))
        return found[::-1]

    @property
    def _last_effort(self) -> tuple[str, str | None]:
        """Returns the place of the effort that counts, and the effort."""
        for place, one in self._settings:
            if one.reasoning and one.reasoning.effort is not None:
                return place + _EFFORT, one.reasoning.effort
        return _EFFORT, None

    @property
    def _last_format(self) -> tuple[str, dict[str, Any] | None]:
        """Returns the place of the form that counts, and the form."""
        for place, one in self._settings:
            if one.text and one.text.format is not None:
                return place + _FORMAT, one.text.format
        return _FORMAT, None

    @property
    def _effort(self) -> str | None:
        return self._last_effort[1]

    @property
    def _format(self) -> dict[str, Any] | None:
        return self._last_format[1]

    @property
    def _wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or _LOGPROBS in (self.include or ())


class CompactRequest(ResponsesRequest):
    """The body of POST /v1/responses/compact: a conversation that is to be summed up. What would
    shape the text of another answer changes nothing. A summary that `max_output_tokens` would cut
    off is a 400: clients forget the conversation for it."""

    @property
    def asks_summary(self) -> bool:
        return True

    def check_supported(self) -> None:
        super().check_supported()
        if self.stream:
            raise _refused("stream", "a summary is sent when it is complete")

    def user_messages(self) -> list[dict[str, Any]]:
        """Returns what the user said, as items, of an input that `to_chat` can read."""
        return user_messages(self.input)


class InputTokensRequest(ResponsesRequest):
    """The body of POST /v1/responses/input_tokens: what shapes the prompt of a response. Fields
    that only sampling uses change nothing."""


def _refused(name: str, advice: str) -> BadRequest:
    return BadRequest(
        f"{name} is not supported: {advice}", param=name, code="unsupported_parameter"
    )


def _chat_choice(choice: Any) -> Any:
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "allowed_tools":
        tools = choice.get("tools")
        allowed = [_chat_choice(one) for one in tools] if isinstance(tools, list) else tools
        return {"type": kind, kind: {"mode": choice.get("mode"), "tools": allowed}}
    if kind in ("function", "custom"):
        name = choice.get("name")
        flat = flat_name(choice.get("namespace"), name) if isinstance(name, str) else name
        return {"type": "function", "function": {"name": flat}}
    if kind in (*CLIENT_TOOLS, TOOL):
        return {"type": "function", "function": {"name": kind}}
    return choice


def _chat_format(form: dict[str, Any] | None) -> dict[str, Any] | None:
    if form is None or form.get("type") != "json_schema":
        return form
    schema = {k: v for k, v in form.items() if k != "type"}
    return {"type": "json_schema", "json_schema": schema}
