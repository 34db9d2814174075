"""Decides how the answer to a chat is read: what is reasoning, and what may be a call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from decode_node.answer.chat_format import ChatOptions
from decode_node.answer.output_readers import MakeParser, OutputReaders
from decode_node.grammar.reasoning import ReasoningState, reasoning_state
from decode_node.parsers.output_parsers import OutputParsers
from decode_node.parsers.visible_text import ParsedText
from decode_node.protocol.bodies.not_built import NOT_BUILT
from decode_node.protocol.chat.chat import ChatCompletionRequest
from decode_node.protocol.chat.tools import ToolUse
from edge.http.errors import BadRequest
from engine.frontend.text.visible_text import PieceReader
from engine.frontend.tokenizer import Tokenizer

_TAIL_TOKENS = 16
"""Tokens at the end of a prompt among which a marker can be, with line ends behind it."""
_WITHIN_TEXT = ("separate_reasoning", "stream_reasoning")
"""Fields whose false asks for reasoning within the text."""


class ChatReading:
    """Knows the formats of one model. `allows_auto`: the model may choose whether to call;
    `names_reasoning_twice`: answers have reasoning under both of its names; `stops_in_reasoning`:
    stop strings count in reasoning too."""

    def __init__(
        self,
        parsers: OutputParsers,
        tokenizer: Tokenizer,
        *,
        allows_auto: bool = True,
        names_reasoning_twice: bool = False,
        stops_in_reasoning: bool = True,
    ) -> None:
        self.parsers = parsers
        self._tokenizer = tokenizer
        self._allows_auto = allows_auto
        self._names_reasoning_twice = names_reasoning_twice
        self._stops_in_reasoning = stops_in_reasoning

    def check_reasoning(self, body: ChatCompletionRequest) -> None:
        """Raises `BadRequest` for reasoning within the text. A model that does not think has none,
        and clients of SGLang send the fields to every model."""
        if self.parsers.reasoning_format is None:
            return
        for name in _WITHIN_TEXT:
            if getattr(body, name) is False:
                raise BadRequest(
                    f"{name} is not supported: {NOT_BUILT[name].advice}",
                    param=name,
                    code="unsupported_parameter",
                )

    def check(self, tool_use: ToolUse) -> None:
        """Raises `BadRequest` for calls that nothing here could find in the answer."""
        if not tool_use.may_call:
            return
        if not self.parsers.tool_call_parser and not tool_use.must_call:
            why = "none was recognised in its chat template"
            if self.parsers.is_unread:
                why = "none reads the calls that its chat template writes"
            raise BadRequest(
                f"tools need a parser of this model's calls, and {why}; send tool_choice required "
                "or a function, which need none; the operator may name one with --tool-call-parser",
                param="tools",
            )
        if tool_use.mode == "auto" and not self._allows_auto:
            raise BadRequest(
                "this server does not let models choose whether to call; send tool_choice none, "
                "required or a function, or start it with --enable-auto-tool-choice",
                param="tool_choice",
            )

    def reader(
        self, body: ChatCompletionRequest, tool_use: ToolUse, prompt: str
    ) -> PieceReader | None:
        """Returns how the outputs of a rendered prompt are read for their stop strings; None when
        nothing reads pieces."""
        if (make := self._make(body, tool_use, prompt)) is None:
            return None

        def read_visible() -> ParsedText:
            return ParsedText(make(), stops_in_reasoning=self._stops_in_reasoning)

        return PieceReader(self.parsers.marker_token_ids, read_visible)

    def options(self, body: ChatCompletionRequest, tool_use: ToolUse, prompt: str) -> ChatOptions:
        """Returns how to read and tell the answer to a rendered prompt."""
        make = self._make(body, tool_use, prompt)
        return ChatOptions(
            readers=OutputReaders(make, has_logprobs=body.wanted_logprobs is not None),
            call_style=self.parsers.tool_call_parser,
            num_calls_before=sum(len(message.tool_calls or ()) for message in body.messages),
            is_named=tool_use.mode == "named",
            tells_reasoning=body.tells_reasoning,
            names_reasoning_twice=self._names_reasoning_twice,
        )

    def reasoning_state(self, body: ChatCompletionRequest, prompt: str) -> ReasoningState:
        """Returns whether the model's turn begins inside of reasoning."""
        form = self.parsers.reasoning_format
        if form is None:
            return ReasoningState.CLOSED
        continued = body.messages[-1].text if body.continue_final_message else ""
        return reasoning_state(prompt, form, continued=continued)

    def state_of_tokens(self, prompt: Sequence[int]) -> ReasoningState:
        """Returns the same for a prompt that is no chat. There, a model that may think is not
        expected to: nothing would tell its thinking from the answer."""
        form = self.parsers.reasoning_format
        if form is None:
            return ReasoningState.CLOSED
        tail = self._tokenizer.decode(prompt[-_TAIL_TOKENS:], skip_special_tokens=False)
        state = reasoning_state(tail, form)
        return ReasoningState.OPEN if state is ReasoningState.OPEN else ReasoningState.CLOSED

    def _make(
        self, body: ChatCompletionRequest, tool_use: ToolUse, prompt: str
    ) -> MakeParser | None:
        """Returns what makes the parser of each choice; None where all is content."""
        if not (tool_use.may_call or self.parsers.read_every_answer):
            return None
        tools = tool_use.tools if tool_use.may_call else ()
        is_open = self.reasoning_state(body, prompt) is ReasoningState.OPEN
        return partial(self.parsers.parser, tools, is_reasoning_open=is_open)
