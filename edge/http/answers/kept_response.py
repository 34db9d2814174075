"""Says of a response that a router keeps what only the router knows, for the node that forms it.

The router sends it as the header `edge.http.headers.RESPONSE`, so that every byte of the answer is
right when it leaves the node, and the router passes it on as it is.
"""

from __future__ import annotations

from typing import Any

import msgspec


class KeptResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    """Is echoed in the answer.

    Attributes:
        id: The response's name; empty: the node's own.
        created_at: Unix seconds; 0: the node's.
        num_events: Events of its stream that the router has sent. `response.created` is among them.
        is_check: The node says whether it would answer, and answers nothing.
    """

    id: str = ""
    created_at: int = 0
    store: bool = False
    background: bool = False
    previous_response_id: str | None = None
    conversation: str = ""
    num_events: int = 0
    is_check: bool = False

    def header(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def of_header(cls, text: str) -> KeptResponse | None:
        """Returns what a router says; None where it says nothing, or what nothing understands."""
        try:
            return msgspec.json.decode(text, type=cls) if text else None
        except msgspec.MsgspecError:
            return None

    def echoed_fields(self) -> dict[str, Any]:
        """Returns the fields of the response that it decides."""
        return {
            "background": self.background,
            "conversation": {"id": self.conversation} if self.conversation else None,
            "previous_response_id": self.previous_response_id,
            "store": self.store,
        }
