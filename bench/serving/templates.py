#!/usr/bin/env python3
"""Measures what chat templates cost: at a node's start, and for each prompt.

For each template of the environment that `make test-templates` makes, in milliseconds: compiling
it, the probe of what it wants, and choosing the parser that reads its calls, which a node does
once; and rendering a chat of an agent with 16 calls, whole and the template alone. It is time of
the CPU, because other programs share the machine: at the start of the only round, as nodes have it,
and of prompts the fastest of several.

    make test-templates
    python -m bench.serving.templates .venv-templates
"""

from __future__ import annotations

import gc
import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from bench.record import write_result
from decode_node.chat_templates.history import history, shown_tools
from decode_node.chat_templates.probe import ARGUMENTS, PARAMETERS, TOOL_NAME, probe
from decode_node.parsers.output_parsers import OutputParsers, WrittenCall
from decode_node.protocol.chat import ChatCompletionRequest
from decode_node.protocol.parse_body import validate
from decode_node.protocol.tools import Tool
from decode_node.serving.chat_prompt import ChatPrompt
from edge.http.errors import BadRequest
from engine.frontend.chat_template import ChatTemplate
from engine.frontend.tokenizer import Tokenizer
from tests.engine.frontend.small_tokenizers import byte_level_backend

_ROUNDS = 15
_NUM_CALLS = 16
_SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
T = TypeVar("T")


@dataclass(slots=True)
class Case:
    """Milliseconds of the CPU for one template. `start` is what is done once."""

    template: str
    start: float
    probe: float
    render: float
    template_alone: float


class _NoTokens:
    added_token_ids: Mapping[str, int] = {}


def agent_chat() -> ChatCompletionRequest:
    """Returns a chat whose agent has called a tool again and again."""
    parameters = {"type": "object", "properties": {"path": {"type": "string"}}}
    function = {"name": "read_file", "description": "Reads a file", "parameters": parameters}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are an agent. " * 50},
        {"role": "user", "content": "Mend the tests."},
    ]
    for number in range(_NUM_CALLS):
        called = {"name": "read_file", "arguments": json.dumps({"path": f"src/{number}.py"})}
        call = {"id": f"call_{number:09d}", "type": "function", "function": called}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        text = "def f(): return 1\n" * 40
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
    tools = [{"type": "function", "function": function}]
    return validate({"messages": messages, "tools": tools}, ChatCompletionRequest)


def measure(file: Path, chat: ChatCompletionRequest) -> Case | None:
    """Returns the case of one template; None if it refuses such chats."""
    source = file.read_text(encoding="utf-8")
    compiled_ms, template = _timed(lambda: ChatTemplate(source, _SPECIAL))
    probe_ms, found = _timed(lambda: probe(template))
    tool = Tool(TOOL_NAME, PARAMETERS, strict=False, raw={})
    written = WrittenCall(found.written_call, tool, ARGUMENTS)
    chosen_ms, _ = _timed(lambda: OutputParsers.of_model(_NoTokens(), source, written=written))
    prompts = ChatPrompt(Tokenizer(byte_level_backend(), template))
    use = chat.tool_use()
    messages = history(chat.messages, found.forms)
    tools = shown_tools([tool.raw for tool in use.shown], found.forms)
    try:
        whole = min(_timed(lambda: prompts.render(chat, use))[0] for _ in range(_ROUNDS))
    except BadRequest:
        return None
    alone = min(_timed(lambda: template.render(messages, tools=tools))[0] for _ in range(_ROUNDS))
    start_ms = compiled_ms + probe_ms + chosen_ms
    return Case(file.stem, *(round(ms, 3) for ms in (start_ms, probe_ms, whole, alone)))


def _timed(work: Callable[[], T]) -> tuple[float, T]:
    """Returns the milliseconds that `work` takes, and its result."""
    begin = time.process_time()
    result = work()
    return (time.process_time() - begin) * 1e3, result


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    logging.disable(logging.WARNING)
    gc.disable()  # that of the whole run would count for one template
    chat = agent_chat()
    files = sorted((Path(sys.argv[1]) / "templates").glob("*.jinja"))
    cases = [case for file in files if (case := measure(file, chat))]
    print(f"{'ms':32} {'median':>8} {'highest':>8}")
    for name in ("start", "probe", "render", "template_alone"):
        values = [getattr(case, name) for case in cases]
        slowest = max(cases, key=lambda case: float(getattr(case, name)))
        print(f"{name:32} {median(values):8.2f} {max(values):8.2f}  {slowest.template}")
    added = [case.render - case.template_alone for case in cases]
    print(f"{'render besides the template':32} {median(added):8.2f} {max(added):8.2f}")
    print(f"{len(cases)} of {len(files)} templates take this chat")
    write_result("templates", [asdict(case) for case in cases])


if __name__ == "__main__":
    main()
