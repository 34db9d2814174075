"""Carries W3C Trace Context: the caller's trace goes on through every hop, or one begins here.

It travels in HTTP headers and as gRPC metadata. Each service names the trace in its log (level
debug), and its own span of the request is the parent of those that it calls:

    client's span ◀── router ◀── decode node, one for each choice ◀── prefill node, for each attempt

traceparent: 00-<32 hex: trace>-<16 hex: the caller's span>-<2 hex: flags>
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_STATE = re.compile(r"[\x20-\x7e]{1,512}")


def _new_span_id() -> str:
    return secrets.token_hex(8)


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Is one hop. `span_id` is ours, `parent_id` the caller's: empty when the trace begins here.
    `state` belongs to whoever began the trace."""

    trace_id: str
    flags: str = "00"
    state: str = ""
    parent_id: str = ""
    span_id: str = field(default_factory=_new_span_id)

    @classmethod
    def from_headers(cls, headers: Mapping[str, str]) -> TraceContext:
        """Returns the caller's trace, or else a new one, not sampled."""
        match = _PARENT.fullmatch(headers.get("traceparent", ""))
        if match is None or not int(match[1], 16) or not int(match[2], 16):
            return cls(secrets.token_hex(16))
        state = headers.get("tracestate", "")
        return cls(match[1], match[3], state if _STATE.fullmatch(state) else "", match[2])

    def sibling(self) -> TraceContext:
        """Returns another span of ours below the same parent."""
        return replace(self, span_id=_new_span_id())

    def child_headers(self) -> dict[str, str]:
        """Returns the headers for calls to the next hop, whose spans are children of ours."""
        headers = {"traceparent": f"00-{self.trace_id}-{self.span_id}-{self.flags}"}
        return headers | {"tracestate": self.state} if self.state else headers
