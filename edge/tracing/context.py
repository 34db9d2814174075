"""Carries W3C Trace Context: the caller's trace goes on through every hop, or one begins here.

It travels in HTTP headers and as gRPC metadata, and the request's id with it. Each service's own
span of the request is the parent of those that it calls:

    client's span ◀── router ◀── decode node, one for each choice ◀── prefill node, for each attempt

traceparent: 00-<32 hex: trace>-<16 hex: the caller's span>-<2 hex: flags>

The service that begins a trace decides whether it is sampled, and all keep to it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

REQUEST_ID = "x-request-id"

Sampler = Callable[[str], bool]
"""Says of a trace id whether the trace that begins here is sampled."""

# Only versions after 00 may have more behind the flags, and ff is none.
_PARENT = re.compile(
    r"(?!ff)(?!00.{53}.)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?"
)
_STATE = re.compile(r"[\x20-\x7e]{1,512}")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SAMPLED, _NOT_SAMPLED = "01", "00"


def _new_span_id() -> str:
    return secrets.token_hex(8)


def sample_all(trace_id: str) -> bool:
    """Samples every trace."""
    return True


def plain_request_id(headers: Mapping[str, str]) -> str:
    """Returns the caller's id of the request; empty if it has none, or not a plain one."""
    given = headers.get(REQUEST_ID, "")
    return given if _REQUEST_ID.fullmatch(given) else ""


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Is one hop. `span_id` is ours, `parent_id` the caller's: empty when the trace begins here.
    `state` belongs to the service that began the trace. `request_id` names the client's request, in
    all services alike."""

    trace_id: str
    flags: str = _NOT_SAMPLED
    state: str = ""
    parent_id: str = ""
    span_id: str = field(default_factory=_new_span_id)
    request_id: str = ""

    @classmethod
    def from_headers(
        cls, headers: Mapping[str, str], request_id: str = "", sampler: Sampler = sample_all
    ) -> TraceContext:
        """Returns the caller's trace, or else a new one, which `sampler` judges. `request_id` is
        the id of a request whose caller gave none."""
        name = plain_request_id(headers) or request_id
        match = _PARENT.fullmatch(headers.get("traceparent", ""))
        if match is None or not int(match[1], 16) or not int(match[2], 16):
            trace_id = secrets.token_hex(16)
            flags = _SAMPLED if sampler(trace_id) else _NOT_SAMPLED
            return cls(trace_id, flags, request_id=name)
        state = headers.get("tracestate", "")
        state = state if _STATE.fullmatch(state) else ""
        return cls(match[1], match[3], state, match[2], request_id=name)

    @property
    def is_sampled(self) -> bool:
        return bool(int(self.flags, 16) & 1)

    def exemplar(self) -> dict[str, str] | None:
        """Returns what leads from an observation in a histogram to this trace; nothing leads to one
        that is not sampled."""
        return {"trace_id": self.trace_id} if self.is_sampled else None

    def sibling(self) -> TraceContext:
        """Returns another span of ours below the same parent."""
        return replace(self, span_id=_new_span_id())

    def child_headers(self) -> dict[str, str]:
        """Returns the headers for calls to the next hop, whose spans are children of ours."""
        headers = {"traceparent": f"00-{self.trace_id}-{self.span_id}-{self.flags}"}
        if self.state:
            headers["tracestate"] = self.state
        if self.request_id:
            headers[REQUEST_ID] = self.request_id
        return headers


current_trace: ContextVar[TraceContext | None] = ContextVar("current_trace", default=None)
"""Holds the trace of the request that this task works for; log lines read it."""
