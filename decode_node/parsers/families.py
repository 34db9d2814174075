"""The formats in which models think and call, as data.

Formats are public: chat templates show them. Names of parsers are vLLM's, so that a command line
that works there works here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningFamily:
    """A family of models by what they write around their reasoning.

    Attributes:
        names: Names of the parser on the command line.
        ends_before: A marker that ends reasoning although it belongs to what follows.
    """

    names: tuple[str, ...]
    begin: str
    end: str
    ends_before: str = ""

    @property
    def literals(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.begin, self.end, self.ends_before)))


REASONING_FAMILIES = (
    ReasoningFamily(
        ("deepseek_r1", "deepseek_v3", "qwen3", "glm45"),
        begin="<think>",
        end="</think>",
    ),
    ReasoningFamily(
        ("kimi_k2",),
        begin="<think>",
        end="</think>",
        ends_before="<|tool_calls_section_begin|>",
    ),
    ReasoningFamily(("mistral",), begin="[THINK]", end="[/THINK]"),
)
