"""A tokenizer whose model thinks and calls, and a client that joins the chunks of a stream."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from engine.frontend.templates.chat_template import ChatTemplate
from engine.frontend.tokenizer import Tokenizer
from tests.engine.frontend.small_tokenizers import byte_level_backend

CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}<tool_call></tool_call>{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    "{% if add_generation_prompt and open_thinking %}<think>\n{% endif %}"
)
MESSAGES = [{"role": "user", "content": "hello"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
    for name in ("get_weather", "get_time")
]

WEATHER = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'
)
TIME = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
SCRIPT = f"<think>\nask\n</think>\n\nI look.\n{WEATHER}\n{TIME}"
"""An answer with everything: reasoning, content, two calls."""


@cache
def thinking_tokenizer() -> Tokenizer:
    backend = byte_level_backend()
    backend.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    return Tokenizer(backend, ChatTemplate(TEMPLATE, {}))


@dataclass
class Accumulated:
    """Holds one choice as a client has it when it has joined all chunks."""

    role: list[str] = field(default_factory=list)
    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, str]] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)

    def add(self, choice: dict[str, Any]) -> None:
        """Joins a chunk, by the rules of the API: an id and a name come first, and once."""
        assert not self.finish_reasons, "a chunk behind the end"
        delta = choice["delta"]
        self.role += [delta["role"]] if "role" in delta else []
        self.content += delta.get("content", "")
        self.reasoning += delta.get("reasoning_content", "")
        assert len(delta.get("tool_calls", [])) < 2, "calls come one after the other"
        for call in delta.get("tool_calls", []):
            if call["index"] == len(self.calls):
                assert call["type"] == "function" and call["id"] and call["function"]["name"]
                assert call["function"]["arguments"] == ""
                self.calls.append({"id": call["id"], "name": call["function"]["name"], "json": ""})
            else:
                assert call["index"] == len(self.calls) - 1, "calls come one after the other"
                assert "id" not in call and "name" not in call["function"]
            self.calls[-1]["json"] += call["function"]["arguments"]
        self.logprobs += (choice["logprobs"] or {}).get("content", [])
        self.token_ids += choice.get("token_ids", [])
        self.finish_reasons += [choice["finish_reason"]] if choice["finish_reason"] else []


def accumulated(chunks: list[dict[str, Any]]) -> list[Accumulated]:
    """Joins the chunks of a stream by choice."""
    found: dict[int, Accumulated] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            found.setdefault(choice["index"], Accumulated()).add(choice)
    for one in found.values():
        assert one.role == ["assistant"]
        assert len(one.finish_reasons) == 1
    return [found[index] for index in sorted(found)]


def as_accumulated(choice: dict[str, Any]) -> Accumulated:
    """Returns the choice of a whole answer in the same shape."""
    message = choice["message"]
    return Accumulated(
        role=[message["role"]],
        content=message["content"] or "",
        reasoning=message.get("reasoning_content") or "",
        calls=[
            {
                "id": call["id"],
                "name": call["function"]["name"],
                "json": call["function"]["arguments"],
            }
            for call in message.get("tool_calls", [])
        ],
        logprobs=(choice["logprobs"] or {}).get("content", []),
        token_ids=choice.get("token_ids", []),
        finish_reasons=[choice["finish_reason"]],
    )


def groups(events: list[str]) -> list[str]:
    """Joins events that count only together, as a router does."""
    found: list[str] = []
    missing = 0
    for event in events:
        if missing:
            found[-1] += "\n\n" + event
            missing -= 1
            continue
        found.append(event)
        if event.startswith(":& "):
            missing = int(event.split("\n")[0].removeprefix(":& ")) - 1
    return found
