"""Shows the record of a request: facts, and a timeline of segments.

    | queue | sending | prefill queue | prefill | sending |     decode     |  move  |  decode  |
                                           | transfer |                    another node goes on
                                                          ^ first token

Segments are [kind, from, until] in seconds since the request came; `transfer` lies beside others.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from router.request.request_history import RequestHistory

_KEY = secrets.token_bytes(16)
_ENDPOINT = "/v1/"

Segment = tuple[str, float, float]


def session_name(session: bytes) -> str:
    """Returns what stands for a session as long as this process lives. It leads back neither to
    what the client calls it nor to its prompt."""
    return hashlib.blake2b(session, digest_size=4, key=_KEY).hexdigest() if session else ""


def encoded_record(record: RequestHistory, number: int) -> bytes:
    """Returns the record as JSON. That of a request that has ended is made once."""
    if record.encoded:
        return record.encoded
    encoded = msgspec.json.encode(_shown(record, number))
    if record.ended_at:
        record.encoded = encoded
    return encoded


def _shown(record: RequestHistory, number: int) -> dict[str, Any]:
    end = record.ended_at or time.monotonic()
    times = record.times
    facts: dict[str, Any] = {
        "n": number,
        "id": record.trace.request_id,
        "trace": record.trace.context.trace_id,
        "at": round(record.at, 3),
        "path": record.trace.path.removeprefix(_ENDPOINT),
        "model": record.model if record.decode else "",
        "tenant": record.tenant,
        "session": session_name(record.session),
        "status": record.status,
        "broken": record.broken,
        "prompt": times.prompt if times else record.num_prompt_tokens,
        "guess": times is None,
        "cached": times.cached if times else record.num_cached_tokens,
        "tokens": record.num_tokens,
        "decode": record.decode,
        "prefill": record.prefill,
        "choice": record.choice,
        "tries": record.num_tried,
        "first": _brief(record.first_token_s),
        "predicted": _brief(record.predicted_s),
        "queue": _brief(record.queue_s),
        "kv_bytes": times.kv_bytes if times else 0,
        "total": _brief(end - record.trace.started_at),
        "segments": [(kind, _brief(a), _brief(b)) for kind, a, b in segments(record, end)],
        "moves": [(move.reason, move.node) for move in record.moves],
    }
    return {name: value for name, value in facts.items() if value or name in ("n", "status")}


def segments(record: RequestHistory, end: float) -> Iterator[Segment]:
    """Yields the segments, in order; `end` is now, for a request that is open."""
    trace, times = record.trace, record.times
    since = trace.started_at
    admitted = trace.admitted_at or end
    yield "queue", 0.0, admitted - since
    if not trace.admitted_at:
        return
    answered = trace.answered_at or end
    yield from _until_first_token(record, answered)
    if times is not None and times.kv_last > times.kv_first:
        asked = record.asked_at - since
        yield "transfer", asked + times.kv_first, min(asked + times.kv_last, end - since)
    if not record.first_token_s:
        return
    at = answered
    for move in record.moves:
        until = move.until or end
        yield "decode", at - since, move.from_at - since
        yield "move", move.from_at - since, until - since
        at = until
    if at < end:
        yield "decode", at - since, end - since


def _until_first_token(record: RequestHistory, answered: float) -> Iterator[Segment]:
    """Yields what came before the first token, as far as a node has reported. Its clock is not
    ours: it counts from when it was asked."""
    since, admitted, times = record.trace.started_at, record.trace.admitted_at, record.times
    if times is not None and not record.moves:
        asked = record.asked_at
        begun = min(asked + times.queue, answered)
        token = min(begun + times.prefill, answered)
    else:
        token = answered
        begun = max(admitted, token - record.prefill_s)
        asked = max(admitted, begun - record.prefill_queue_s)
    for kind, start, end in (
        ("sending", admitted, asked),
        ("prefill queue", asked, begun),
        ("prefill", begun, token),
        ("sending", token, answered),
    ):
        if end > start or kind != "sending":
            yield kind, start - since, end - since


def _brief(seconds: float) -> float:
    return round(seconds, 4 if seconds < 10 else 2)
