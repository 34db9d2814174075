"""Defines once, for the router and decode nodes, the settings that bound what clients send."""

from __future__ import annotations

from pydantic import BaseModel, Field

from edge.http.client_connection import BodyLimits
from edge.http.guarded_protocol import ConnectionLimits


class HttpEdgeSettings(BaseModel):
    """Is mixed into the settings of a service that talks to clients."""

    max_body_bytes: int = Field(
        default=8 << 20, ge=1024, description="Largest request body; more is answered with 413."
    )
    body_timeout_s: float = Field(
        default=30.0, gt=0, description="Seconds that a client has to send its request body."
    )
    header_timeout_s: float = Field(
        default=10.0, gt=0, description="Seconds that a client has to send the head of a request."
    )
    max_header_bytes: int = Field(
        default=16 << 10,
        ge=1024,
        description="Largest request line and headers together; more is answered with 431.",
    )
    max_connections_without_key: int = Field(
        default=256,
        ge=0,
        description="Where a key, a certificate or the cluster token is required: connections "
        "that have not presented one yet. To admit one more, the oldest is closed once it has had "
        "two seconds. 0: any number.",
    )

    def body_limits(self, more_bytes: int = 0) -> BodyLimits:
        """Returns limits for a body and `more_bytes` besides."""
        return BodyLimits(self.max_body_bytes + more_bytes, self.body_timeout_s)

    def connection_limits(self, max_per_address: int = 0) -> ConnectionLimits:
        return ConnectionLimits(
            header_timeout_s=self.header_timeout_s,
            max_header_bytes=self.max_header_bytes,
            max_per_address=max_per_address,
            max_without_key=self.max_connections_without_key,
        )
