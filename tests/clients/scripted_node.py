"""Serves the API of a decode node whose model says what a script says.

Agents act on answers, so a test of one needs answers that make sense to it. Everything but the
engine is tandem's: HTTP, templates, parsers, formats.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

from engine.frontend.templates.chat_template import ChatTemplate
from engine.frontend.tokenizer import Tokenizer
from tests.decode_node.decode_fakes import FakeRequest
from tests.decode_node.http_node import http_node, live
from tests.engine.frontend.small_tokenizers import byte_level_backend

MODEL = "tiny"
CONTEXT = 500_000
BLOCK_SIZE = 8192
TOOL_TURN = "<|tool|>"
MARKERS = ("<tool_call>", "</tool_call>", TOOL_TURN)
TEMPLATE = """\
{%- for m in messages if m.role == 'system' %}{{ m.content }}\n{% endfor -%}
{%- if tools %}<tool_call>name arguments</tool_call>{% endif -%}
{%- for t in tools or [] %}{{ t | tojson }}\n{% endfor -%}
{%- for m in messages if m.role != 'system' -%}
{{- '<|' + m.role + '|>' + (m.content or '') -}}
{%- for c in m.tool_calls or [] -%}
{{- '<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' -}}
{{- (c.function.arguments | tojson) + '}\n</tool_call>' -}}
{%- endfor -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>{% endif -%}
"""
"""System text first, then tools as Hermes models have them, then turns."""

Script = Callable[[str], str]
"""Says what the model answers to a prompt."""


def call(name: str, **arguments: Any) -> str:
    """Returns a call as the model writes it."""
    text = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{text}\n</tool_call>"


class ScriptedNode:
    """Runs while it is open, in a thread. `url` is where clients find it, `prompts` what they
    asked."""

    def __init__(self, script: Script) -> None:
        backend = byte_level_backend()
        backend.add_tokens(list(MARKERS))
        self._tokenizer = Tokenizer(backend, ChatTemplate(TEMPLATE, {}))
        self._script = script
        self._is_up = threading.Event()
        self._end = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))
        self.prompts: list[str] = []
        self.url = ""

    def __enter__(self) -> ScriptedNode:
        self._thread.start()
        if not self._is_up.wait(60):
            raise SystemExit("the scripted node did not start")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    async def _serve(self) -> None:
        async with http_node(
            tokenizer=self._tokenizer, scripts=["-"], context=CONTEXT, block_size=BLOCK_SIZE
        ) as node:

            def answer(request: FakeRequest) -> None:
                ids = request.request.spec.prompt_token_ids
                prompt = self._tokenizer.decode(ids, skip_special_tokens=False)
                self.prompts.append(prompt)
                text = self._script(prompt)
                node.engine.scripts = [self._tokenizer.encode(text + "</s>")]

            node.engine.on_generate = answer
            async with live(node) as self.url:
                self._is_up.set()
                await self._end.wait()
