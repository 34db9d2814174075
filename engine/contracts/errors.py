"""The errors with which an engine ends, fails to begin, or refuses a request."""

from __future__ import annotations

from engine.contracts.reports.crash_facts import ExceptionFacts


class CannotStartError(Exception):
    """The engine cannot do what was asked with what is there. The message says what is missing
    and what to change, so nothing needs to see where in the code it was noticed."""


class EngineDeadError(Exception):
    """This engine cannot go on; every request of it fails with this. The message names who died
    and why. There is no way back but a new process: end, and let the supervisor start one.

    `exceptions`, by the name of the process, are for the crash report.
    """

    def __init__(
        self, reason: str, exceptions: dict[str, list[ExceptionFacts]] | None = None
    ) -> None:
        super().__init__(reason)
        self.exceptions = exceptions or {}


class EngineCallTimeout(Exception):
    """The engine core has not answered a call in its time. It may still do what it was asked to do.
    `timeout_s`: the seconds waited."""

    def __init__(self, call: str, timeout_s: float) -> None:
        super().__init__(
            f"the engine has not answered {call} within {timeout_s:.0f} s; it may still follow it: "
            f"look at the node's log, then call again"
        )
        self.timeout_s = timeout_s


class RoleSwitchRefused(Exception):
    """A node does not change its role, and goes on as it was. The message says why."""


class InvalidRequest(ValueError):
    """The request cannot be served as it is. `param` names the field, `code` is for programs."""

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


def check(condition: bool, param: str, message: str) -> None:
    """Raises `InvalidRequest` with "`param` `message`" unless `condition` holds."""
    if not condition:
        raise InvalidRequest(f"{param} {message}", param)


CONTEXT_EXCEEDED = "context_length_exceeded"
"""The code of both refusals below. Clients know them by this and by their words, which are those of
OpenAI's, of Anthropic's and of vLLM's: they shorten a conversation, or ask for a shorter answer."""


def prompt_too_long(context: int, size: str) -> str:
    """Returns why a prompt of this `size`, such as "9 tokens", leaves no room for an answer."""
    return (
        f"this model's maximum context length is {context} tokens, and the prompt is too long: "
        f"{size} > {context - 1} maximum; shorten it"
    )


def answer_too_long(context: int, num_prompt_tokens: int, max_tokens: int) -> str:
    """Returns why an answer of up to `max_tokens` does not fit behind the prompt."""
    return (
        f"this model's maximum context length is {context} tokens, but you requested {max_tokens} "
        f"output tokens and your prompt contains {num_prompt_tokens} input tokens: input length "
        f"and `max_tokens` exceed context limit: {num_prompt_tokens} + {max_tokens} > {context}; "
        "shorten either"
    )
