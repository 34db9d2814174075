"""Renders the messages of a chat into the text of its prompt.

The template is the checkpoint's: of several named ones `tool_use` where the request has tools, and
a client's own where the operator allows it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from decode_node.chat_templates.control_tokens import ControlTokens
from decode_node.chat_templates.forms import TemplateForms
from decode_node.chat_templates.history import history, shown_tools, tool_variables
from decode_node.chat_templates.probe import probe
from decode_node.protocol.chat.chat import ChatCompletionRequest
from decode_node.protocol.chat.chat_messages import ChatMessage
from decode_node.protocol.chat.tools import ToolUse
from decode_node.serving.prompts.required_prefix import PARAM
from edge.http.errors import BadRequest
from engine.frontend.templates.chat_template import (
    RESERVED_VARIABLES,
    ChatTemplate,
    ChatTemplateError,
    ChatTemplateTooCostly,
)
from engine.frontend.templates.template_budget import rendering_within
from engine.frontend.tokenizer import Tokenizer, TokenizerError
from engine.images.vision_spec import VisionSpec

logger = logging.getLogger(__name__)

_EFFORT = "reasoning_effort"
TOO_COSTLY = "request_too_complex"
RENDER_S = 0.5
_PROBE_S = 1.0
"""Seconds of processor time."""
MAX_TEMPLATE = 1 << 18
"""Limit of characters of a client's own template."""


class ChatPrompt:
    """Renders chats for one model.

    Args:
        trusts_templates: Clients may bring templates of their own.
        sanitizes: Control tokens that users and tools write are cut by marks
            (`decode_node.chat_templates.control_tokens`).
        vision: Says how images are written; None: the model sees none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        trusts_templates: bool = False,
        sanitizes: bool = False,
        vision: VisionSpec | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._vision = vision
        self._control_tokens = ControlTokens(tokenizer.added_token_ids) if sanitizes else None
        self._trusts_templates = trusts_templates
        self._has_warned = False

    def render(
        self, body: ChatCompletionRequest, tool_use: ToolUse, seconds: float = RENDER_S
    ) -> str:
        """Returns the text of the prompt, within `seconds` of processor time. Raises `BadRequest`;
        its code is `TOO_COSTLY` where the template makes too much of the request."""
        if reserved := sorted(RESERVED_VARIABLES & body.template_variables.keys()):
            raise BadRequest(
                f"chat_template_kwargs may not set {', '.join(reserved)}",
                param="chat_template_kwargs",
            )
        tools = [tool.raw for tool in tool_use.shown] if tool_use.may_call else []
        template = self._template(body, has_tools=bool(tools))
        wants_prompt = not body.continue_final_message and body.add_generation_prompt is not False
        with rendering_within(_PROBE_S):
            forms = probe(template).forms
        if tools and not forms.shows_tools:
            self._warn_of_hidden_tools()
        last = body.messages[-1]
        if body.continue_final_message and last.tool_calls and not last.content:
            raise BadRequest(
                "a message that is to be continued needs text as its content, and has calls alone",
                param="messages",
            )
        _check_thoughts(body.messages)
        messages = history(body.messages, forms)
        if self._control_tokens is not None:
            messages = self._control_tokens.sanitize(messages)
        shown = shown_tools(tools, forms)
        with _as_bad_request("messages"), rendering_within(seconds):
            text = template.render(
                messages,
                tools=shown,
                documents=body.documents,
                add_generation_prompt=wants_prompt,
                continue_final_message=bool(body.continue_final_message),
                variables=tool_variables(shown, forms) | _variables(body, forms),
            )
        if self._vision is not None and self._vision.marker and body.image_params:
            # Before it is tokenised: line breaks around an image may be one token with others.
            return text.replace(self._vision.marker, self._vision.framed)
        return text

    def check_order(self, body: ChatCompletionRequest, tool_use: ToolUse, at: int) -> None:
        """Raises `BadRequest` if the template has what follows message `at` before its end."""
        forms = probe(self._template(body, has_tools=tool_use.may_call)).forms
        others = (message.role in ("system", "developer") for message in body.messages[at + 1 :])
        if forms.system != "anywhere" and any(others):
            what = "messages of the system behind the last answer"
        elif len(body.messages[at].tool_calls or ()) > 1 and not forms.parallel_calls:
            what = "several calls in one answer, each with its result,"
        else:
            return
        message = f"{PARAM} does not go with {what} in the order of this model's template"
        raise BadRequest(message, param=PARAM)

    def _template(self, body: ChatCompletionRequest, *, has_tools: bool) -> ChatTemplate:
        with _as_bad_request("messages"):
            template = self._tokenizer.chat_template_for(has_tools=has_tools)
        own = body.chat_template
        if own is None:
            return template
        if not self._trusts_templates:
            raise BadRequest(
                "chat_template is not taken from requests here; the operator may allow it with "
                "--trust-request-chat-template",
                param="chat_template",
            )
        if len(own) > MAX_TEMPLATE:
            raise BadRequest(
                f"chat_template has more than {MAX_TEMPLATE} characters", param="chat_template"
            )
        with _as_bad_request("chat_template"):
            return _replaced(template, own)

    def _warn_of_hidden_tools(self) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        logger.warning(
            "a request has tools, and this model's chat template does not show them: the model "
            "cannot know of them"
        )


def _variables(body: ChatCompletionRequest, forms: TemplateForms) -> dict[str, Any]:
    """Returns what the template gets besides messages and tools: an effort that it takes, unless
    the client names the template's variable itself."""
    found = dict(body.template_variables)
    given = body.effort
    if given is None or _EFFORT in (body.chat_template_kwargs or {}):
        return found
    found.pop(_EFFORT, None)
    effort = forms.effort(given)
    return found if effort is None else found | {_EFFORT: effort}


@lru_cache(maxsize=8)
def _replaced(template: ChatTemplate, source: str) -> ChatTemplate:
    """Returns a client's template, which is compiled and probed once while it is in use."""
    return template.replaced_by(source)


def _check_thoughts(messages: Sequence[ChatMessage]) -> None:
    """Raises `BadRequest` for thoughts of others than assistants, which templates would leave
    out."""
    for message in messages:
        if message.role != "assistant" and message.has_thinking_parts:
            raise BadRequest(
                f"a message of the role {message.role} has a thinking part, as only those of "
                "assistants may; send it as text",
                param="messages",
            )


@contextmanager
def _as_bad_request(param: str) -> Iterator[None]:
    try:
        yield
    except ChatTemplateTooCostly as error:
        raise BadRequest(str(error), param=param, code=TOO_COSTLY) from None
    except (ChatTemplateError, TokenizerError) as error:
        raise BadRequest(str(error), param=param) from None
