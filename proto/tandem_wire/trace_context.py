"""W3C Trace Context: the caller's trace goes on through every hop, or one begins here.

It travels in HTTP headers and as gRPC metadata. Each service names the trace in its log (level
debug).

traceparent: 00-<32 hex: trace>-<16 hex: the caller's span>-<2 hex: flags>
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_STATE = re.compile(r"[\x20-\x7e]{1,512}")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """`state` belongs to whoever began the trace."""

    trace_id: str
    flags: str = "00"
    state: str = ""

    @classmethod
    def from_headers(cls, headers: Mapping[str, str]) -> TraceContext:
        """A new trace, not sampled, unless the caller has one."""
        match = _PARENT.fullmatch(headers.get("traceparent", ""))
        if match is None or not int(match[1], 16) or not int(match[2], 16):
            return cls(secrets.token_hex(16))
        state = headers.get("tracestate", "")
        return cls(match[1], match[3], state if _STATE.fullmatch(state) else "")

    def child_headers(self) -> dict[str, str]:
        """For one call to the next hop: a span of its own."""
        headers = {"traceparent": f"00-{self.trace_id}-{secrets.token_hex(8)}-{self.flags}"}
        return headers | {"tracestate": self.state} if self.state else headers
