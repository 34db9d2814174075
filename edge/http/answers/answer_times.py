"""Tells a router where the time of one answer went, in the journal of its last event.

    :t {"prompt":1234,"tokens":56,"path":"remote","queue":0.012,"prefill":0.031,"first":0.045}

A decode node writes it once, at the end, and only to a router. No answer depends on it: a
router that cannot read it goes without.
"""

from __future__ import annotations

import math

import msgspec

PREFIX = b":t "
_MAX_BYTES = 1024
_MAX_PATH = 16


class AnswerTimes(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Holds times of an answer's first choice, in seconds since the decode node received the
    request; 0 for what never happened.

    Attributes:
        prompt, cached: Tokens of the prompt, and those that nothing had to compute.
        tokens: Of all choices.
        path: `remote` or `local`: where the prompt was computed in the end.
        queue: Until the prompt was begun.
        prefill: From then until the first token.
        kv_first, kv_last: First and last byte of KV from elsewhere; `kv_bytes` came.
    """

    prompt: int = 0
    cached: int = 0
    tokens: int = 0
    path: str = ""
    queue: float = 0.0
    prefill: float = 0.0
    first: float = 0.0
    second: float = 0.0
    kv_first: float = 0.0
    kv_last: float = 0.0
    kv_bytes: int = 0
    total: float = 0.0

    def line(self) -> bytes:
        return b"%b%b\n" % (PREFIX, _encode(self))


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(AnswerTimes).decode


def read_answer_times(line: bytes) -> AnswerTimes | None:
    """Returns what `line` tells, without its end; None when it is not of this kind, or makes no
    sense."""
    if not line.startswith(PREFIX) or len(line) > _MAX_BYTES:
        return None
    try:
        times = _decode(line[len(PREFIX) :])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    numbers = [value for value in msgspec.structs.astuple(times) if not isinstance(value, str)]
    is_sane = all(math.isfinite(value) and value >= 0 for value in numbers)
    return times if is_sane and len(times.path) <= _MAX_PATH else None
