"""Defines once, for the router and decode nodes, the settings that bound what clients send."""

from __future__ import annotations

import json
import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, Field, PrivateAttr

from edge.http.bodies.body_room import BodyRoom
from edge.http.connection.client_connection import LEAST_ROOM, BodyLimits
from edge.http.connection.guarded_protocol import ConnectionLimits
from edge.http.front import HttpFront, check_origin

_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)*")


def _origins(text: str) -> tuple[str, ...]:
    """Returns the origins of a list: comma separated, or JSON as vLLM's setting of this name."""
    named = json.loads(text) if text.startswith("[") else text.split(",")
    return tuple(origin.strip() for origin in named if origin.strip())


def _checked_origins(text: str) -> str:
    for origin in _origins(text):
        check_origin(origin)
    return text


def _checked_root(path: str) -> str:
    if not _PATH.fullmatch(path.removesuffix("/")):
        raise ValueError("a root path begins with a slash and has plain names, such as /llm/v2")
    return path.removesuffix("/")


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
    send_timeout_s: float
    """Seconds after which a client that reads nothing is disconnected. Each service has its own
    default: a router gives up before the nodes behind it."""
    sse_keepalive_s: float = Field(
        default=10.0,
        ge=0,
        description="Longest silence in seconds of a streamed answer: then a comment is sent, "
        "which clients skip, so that no proxy takes the connection for dead. An answer whose first "
        "token takes longer begins with one: its status is 200 then, and an error is an event. "
        "0: none.",
    )
    max_connections_without_key: int = Field(
        default=256,
        ge=0,
        description="Where a key, a certificate or the cluster token is required: connections "
        "that have not presented one yet. To admit one more, the oldest is closed once it has had "
        "two seconds. 0: any number.",
    )

    allowed_origins: Annotated[str, AfterValidator(_checked_origins)] = Field(
        default="",
        description="Sites whose pages may call the API from a browser (CORS), comma separated: "
        "scheme://host or scheme://host:port; * for every site. Empty: none.",
    )
    root_path: Annotated[str, AfterValidator(_checked_root)] = Field(
        default="",
        description="Path below which a proxy serves this API, such as /llm. Requests may come "
        "with or without it.",
    )

    _body_room: BodyRoom | None = PrivateAttr(default=None)

    def http_front(self) -> HttpFront:
        return HttpFront(root_path=self.root_path, origins=_origins(self.allowed_origins))

    def body_limits(self, more_bytes: int = 0) -> BodyLimits:
        """Returns limits for a body and `more_bytes` besides. All share one room."""
        if self._body_room is None:
            self._body_room = BodyRoom(max(LEAST_ROOM, self.max_body_bytes))
        most = self.max_body_bytes + more_bytes
        return BodyLimits(most, self.body_timeout_s, self._body_room)

    def connection_limits(self, max_per_address: int = 0) -> ConnectionLimits:
        return ConnectionLimits(
            header_timeout_s=self.header_timeout_s,
            max_header_bytes=self.max_header_bytes,
            max_per_address=max_per_address,
            max_without_key=self.max_connections_without_key,
            send_timeout_s=self.send_timeout_s,
        )
