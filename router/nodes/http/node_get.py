"""Asks a decode node a short question: GET, one JSON answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import msgspec

from router.errors import NodeLost, PathUnknown
from router.nodes.http.transport import Transport
from router.nodes.node import Node

_MAX_BYTES = 4 << 20

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class NodeGet:
    """Asks by `transport`, showing `api_key` if there is one."""

    transport: Transport
    api_key: str = ""

    async def json(self, node: Node, path: str, kind: type[T]) -> T:
        """Returns the answer.

        Raises:
            NodeUnreachable, NodeLost: the node does not answer as it should; `PathUnknown` among
                them says that it answers, but nothing at this path.
            msgspec.MsgspecError: its answer is not of this kind.
        """
        headers = {"accept": "application/json"}
        if self.api_key:
            headers["authorization"] = f"Bearer {self.api_key}"
        url = f"http://{node.address.target}{path}"
        response = await self.transport.request("GET", url, headers)
        body = b""
        try:
            while chunk := await response.read_chunk():
                body += chunk
                if len(body) > _MAX_BYTES:
                    raise NodeLost(f"the answer to {path} is too long")
        finally:
            response.close()
        if response.status == 404:
            raise PathUnknown(f"the node serves no {path}")
        if response.status != 200:
            raise NodeLost(f"status {response.status} for {path}")
        return msgspec.json.decode(body, type=kind)
