"""Renders a model's chat template: messages become one prompt string, as the checkpoint's author
meant it.

Templates come from the checkpoint, or from a client where the operator allows it, and run in
Jinja's sandbox with the functions and the `generation` block that templates on the hub rely on,
within bounds of time and text (`engine.frontend.templates.bounded_templates`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from engine.frontend.templates.bounded_templates import BoundedEnvironment
from engine.frontend.templates.template_budget import TemplateTooCostly, budget

ChatMessage = Mapping[str, Any]
"""A message: `role`, `content` and what else a template may read."""

RESERVED_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
)
"""Names that a client's template arguments may not replace."""

_XML_TOOLS = "xml_tools"
"""The name that SmolLM3's template has for tools that are called by JSON between tags."""
_CONTINUE_HERE = "\ufdd0continue\ufdd1"
"""Marks the end of a message that the answer continues. Unicode keeps these characters out of
text."""
_MAX_INDENT = 64
_BLANK = " \n"
"""Stands behind the mark, and shows which blanks the template trims."""


class ChatTemplateError(ValueError):
    """The template refuses these messages, or it is broken. The text is the template's own."""


class ChatTemplateTooCostly(ChatTemplateError):
    """Rendering needs more time, or makes more text, than one request may have."""


class _GenerationBlock(Extension):
    """`{% generation %}` marks an assistant's turn for training; here its body is printed."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


_now: ContextVar[float | None] = ContextVar("now", default=None)


class ChatTemplate:
    """One compiled template. `special_tokens` are its variables bos_token, eos_token and so on."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = BoundedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ChatTemplateError(f"the chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)
        self.source = source

    def replaced_by(self, source: str) -> ChatTemplate:
        """Returns another template for the same special tokens. Raises `ChatTemplateError`."""
        return ChatTemplate(source, self._special_tokens)

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns the prompt's text, special tokens included. With `continue_final_message` it ends
        with the last message's content. Raises `ChatTemplateError`."""
        extra = {k: v for k, v in (variables or {}).items() if k not in RESERVED_VARIABLES}
        if tools and _XML_TOOLS in self.source:
            extra.setdefault(_XML_TOOLS, list(tools))
        shown = list(messages)
        continued = _continued(shown[-1]) if continue_final_message else ""
        if continue_final_message:
            shown[-1] = {**shown[-1], "content": continued + _CONTINUE_HERE + _BLANK}
        try:
            text = self._template.render(
                **{**self._special_tokens, **extra},
                messages=shown,
                tools=list(tools) if tools else None,
                documents=list(documents) if documents else None,
                add_generation_prompt=add_generation_prompt,
            )
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
        ) as error:
            raise ChatTemplateError(f"the chat template refuses these messages: {error}") from error
        except RecursionError:
            raise ChatTemplateError("these messages are nested too deeply") from None
        except TemplateTooCostly as error:
            raise ChatTemplateTooCostly(
                f"the chat template makes too much of these messages: {error}"
            ) from None
        return _cut_at_mark(text, continued) if continue_final_message else text


def _continued(message: ChatMessage) -> str:
    content = message.get("content")
    if not isinstance(content, str):
        raise ChatTemplateError("a message that is to be continued needs text as its content")
    return content


def _cut_at_mark(text: str, content: str) -> str:
    """Returns a prompt up to the mark, without those blanks at the content's end that the template
    would trim."""
    before, mark, behind = text.rpartition(_CONTINUE_HERE)
    if not mark:
        raise ChatTemplateError(
            "the chat template does not write the last message's content as it is, so that "
            "the message cannot be continued"
        )
    if behind.startswith(_BLANK) or not content.strip():
        trimmed = ""
    else:
        trimmed = content[len(content.rstrip(None if behind[:1] != " " else "\n")) :]
    before = before.removesuffix(trimmed)
    return before.replace(_CONTINUE_HERE + _BLANK, "").replace(_CONTINUE_HERE, "")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


@contextmanager
def rendered_at(seconds: float | None) -> Iterator[None]:
    """Has templates write the date of then (seconds since 1970); None: that of now. An answer that
    moves to another node keeps its prompt past midnight, and whatever that node's clock says."""
    before = _now.set(seconds)
    try:
        yield
    finally:
        _now.reset(before)


def _strftime_now(pattern: str) -> str:
    seconds = _now.get()
    now = datetime.now() if seconds is None else datetime.fromtimestamp(seconds)
    return now.astimezone().strftime(pattern)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Writes JSON without HTML escapes, unlike Jinja's own filter. Arguments are those that
    templates on the hub give, as transformers takes them."""
    if isinstance(indent, int) and indent > _MAX_INDENT:
        raise TemplateTooCostly(f"it indents by more than {_MAX_INDENT}")
    text = json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    budget().make(len(text))
    return text
