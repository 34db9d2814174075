"""Has a node check a body before its response is kept: what a node would refuse is refused at once.

The node does all that comes before an answer, and computes nothing. Where none can say so now, the
body counts as good: it is refused when a node is asked to answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

import msgspec
from starlette.types import ASGIApp, Message

from edge.http.answers.kept_response import KeptResponse
from edge.http.errors import ErrorBody
from router.request.tenants import Tenant
from router.responses.background.detached_call import ask
from router.responses.errors import RefusedByNode

PATH = "/v1/responses/input_tokens"
_CHECK = KeptResponse(is_check=True).header()
_decode_error = msgspec.json.Decoder(ErrorBody).decode


@dataclass(slots=True)
class _Verdict:
    status: int = 0
    body: bytearray = field(default_factory=bytearray)

    async def send(self, message: Message) -> None:
        """Takes what the API sends."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.body += message.get("body", b"")


async def check_body(api: ASGIApp, body: bytes, headers: Mapping[str, str], tenant: Tenant) -> None:
    """Raises `RefusedByNode` for a body that a node would not answer."""
    said = _Verdict()
    # A task of its own: the call has a trace of its own.
    await asyncio.create_task(ask(api, said.send, body, headers, tenant, _CHECK, path=PATH))
    is_about_body = HTTPStatus.BAD_REQUEST <= said.status < HTTPStatus.INTERNAL_SERVER_ERROR
    if is_about_body and said.status != HTTPStatus.TOO_MANY_REQUESTS:
        raise RefusedByNode(HTTPStatus(said.status), _decode_error(said.body).error)
