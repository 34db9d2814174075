"""Renders a model's chat template: messages become one prompt string, as the checkpoint's author
meant it.

Templates come from the checkpoint, never from a client, and run in Jinja's sandbox with the
functions and the `generation` block that templates on the hub rely on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

ChatMessage = Mapping[str, Any]
"""A message: `role`, `content` and what else a template may read."""

RESERVED_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
)
"""Names that a client's template arguments may not replace."""


class ChatTemplateError(ValueError):
    """The template refuses these messages, or it is broken. The text is the template's own."""


class _GenerationBlock(Extension):
    """`{% generation %}` marks an assistant's turn for training; here its body is printed."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ChatTemplate:
    """One compiled template. `special_tokens` are its variables bos_token, eos_token and so on."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns the prompt's text, special tokens included. Raises `ChatTemplateError`."""
        extra = {k: v for k, v in (variables or {}).items() if k not in RESERVED_VARIABLES}
        try:
            return self._template.render(
                **{**self._special_tokens, **extra},
                messages=list(messages),
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise ChatTemplateError(f"the chat template refuses these messages: {error}") from error


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _to_json(value: object, indent: int | None = None) -> str:
    """Writes JSON without HTML escapes, unlike Jinja's own filter."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
