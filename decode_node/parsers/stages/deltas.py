"""Deltas: the news in an answer, by part.

    ReasoningText*   ContentText*   ( CallStart  CallArguments*  CallEnd )*

A client concatenates texts of a kind, and arguments by the call's index. Calls come one after the
other, with indices 0, 1, 2 and so on; content may stand before, between and behind them, and with
channels reasoning too. No text in a delta is empty.
"""

from __future__ import annotations

import msgspec

from engine.contracts.outputs import TokenLogprobs


class ReasoningText(msgspec.Struct, frozen=True):
    """More of what the model thinks."""

    text: str


class ContentText(msgspec.Struct, frozen=True):
    """More of what the model says. `logprobs`: of its tokens, where a request wants them."""

    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()


class CallStart(msgspec.Struct, frozen=True):
    """The model calls the function `name`."""

    index: int
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """More of a call's arguments: a fragment of JSON text, verbatim from the model where its format
    has JSON."""

    index: int
    text: str


class CallEnd(msgspec.Struct, frozen=True):
    """The call's arguments have ended. Without `is_complete` they broke off."""

    index: int
    is_complete: bool = True


Delta = ReasoningText | ContentText | CallStart | CallArguments | CallEnd
