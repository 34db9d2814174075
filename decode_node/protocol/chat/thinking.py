"""Reads how a client wants a model to think, which the APIs of models' makers each say otherwise.

reasoning_effort                        OpenAI
reasoning                               OpenRouter, SGLang
thinking                                Anthropic, DeepSeek, GLM, Kimi
enable_thinking, thinking_budget        Qwen
chat_template_kwargs                    vLLM: the template's own variables, which come first
"""

from __future__ import annotations

from typing import Any, Literal

from decode_node.protocol.bodies.body import Ignored, Int, Name, StrictBody
from decode_node.protocol.bodies.ignored_fields import SummaryFields

_SWITCHES = {"enabled": True, "disabled": False, "between_tools": False}


def thinking_switch(*, is_on: bool) -> dict[str, Any]:
    """Returns the variables by which chat templates let a model think or not."""
    mode = "enabled" if is_on else "disabled"
    return {"enable_thinking": is_on, "thinking": is_on, "thinking_mode": mode}


class Thinking(StrictBody):
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "disabled", "between_tools", "adaptive", "auto"]
    """Goes to the chat template as its switch; `adaptive` and `auto` leave it as it is.
    `between_tools` is `disabled` as well: what the model says between calls is text."""
    budget_tokens: Int | None = None
    """The most tokens of thinking."""
    clear_thinking: bool | None = None
    """Goes to the chat template, which leaves out former thoughts; GLM's name."""
    display: Ignored = None
    """Thinking is sent as it is."""


class Reasoning(SummaryFields):
    """How much the model thinks, as OpenRouter has it."""

    effort: Name | None = None
    """The same as `reasoning_effort`."""
    enabled: bool | None = None
    """Goes to the chat template as its switch."""
    max_tokens: Int | None = None
    """The most tokens of thinking."""
    exclude: bool | None = None
    """Tell nothing of what the model thinks."""


class ThinkingFields(StrictBody):
    """The fields themselves, of chats."""

    reasoning_effort: Name | None = None
    """Goes to the chat template; `none` turns thinking off where the template can, and others turn
    it on."""
    reasoning: Reasoning | None = None
    """How much the model thinks, as OpenRouter has it."""
    thinking: Thinking | bool | None = None
    """Whether the model thinks before it answers, as DeepSeek, GLM and Kimi have it."""
    enable_thinking: bool | None = None
    """The same; Qwen's name."""
    thinking_budget: Int | None = None
    """The most tokens of thinking, where the model thinks; Qwen's name."""
    include_reasoning: bool | None = None
    """Tell what the model thinks; on unless it is false."""
    separate_reasoning: bool | None = None
    """False is refused where a model thinks: reasoning has a field of its own; SGLang's name."""
    stream_reasoning: bool | None = None
    """False is refused where a model thinks: see `include_reasoning`; SGLang's name."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the model's chat template; they win over the other fields."""

    @property
    def effort(self) -> str | None:
        """Returns how much the model thinks, in the client's word."""
        given = self.reasoning.effort if self.reasoning else None
        return given if self.reasoning_effort is None else self.reasoning_effort

    @property
    def effort_switches(self) -> bool:
        """Says whether an effort alone makes a model think that would not."""
        return True

    @property
    def tells_reasoning(self) -> bool:
        is_excluded = self.reasoning is not None and self.reasoning.exclude is True
        return not is_excluded if self.include_reasoning is None else self.include_reasoning

    @property
    def other_budget(self) -> tuple[str, int] | None:
        """Returns the most tokens of thinking, with the name of its field: of those by which
        clients ask any model, also one that does not think and so is within any."""
        thinking = self.thinking if isinstance(self.thinking, Thinking) else None
        asked = {
            "thinking_budget": self.thinking_budget,
            "thinking.budget_tokens": thinking.budget_tokens if thinking else None,
            "reasoning.max_tokens": self.reasoning.max_tokens if self.reasoning else None,
        }
        return next(((name, n) for name, n in asked.items() if n is not None), None)

    @property
    def thinking_variables(self) -> dict[str, Any]:
        """Returns what the template gets: efforts that it refuses included."""
        variables: dict[str, Any] = {}
        if self.effort is not None:
            variables["reasoning_effort"] = self.effort
        if (is_on := self._is_on) is not None:
            variables |= thinking_switch(is_on=is_on)
        if isinstance(self.thinking, Thinking) and self.thinking.clear_thinking is not None:
            variables["clear_thinking"] = self.thinking.clear_thinking
        return variables

    @property
    def _is_on(self) -> bool | None:
        """Returns what the first of the switches says that says something."""
        if self.enable_thinking is not None:
            return self.enable_thinking
        if isinstance(self.thinking, bool):
            return self.thinking
        if self.thinking is not None and self.thinking.type in _SWITCHES:
            return _SWITCHES[self.thinking.type]
        if self.reasoning is not None and self.reasoning.enabled is not None:
            return self.reasoning.enabled
        if self.effort == "none":
            return False
        is_asked = self.effort is not None and self.effort_switches
        return True if is_asked and self.thinking is None else None
