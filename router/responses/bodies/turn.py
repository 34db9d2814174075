"""Is one request for a response, with all that it refers to at hand."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from edge.http.answers.kept_response import KeptResponse
from edge.http.errors import RequestTooLarge
from router.responses.bodies.json_fields import UNREADABLE, encode, raw_list, value_of
from router.responses.bodies.state_fields import StateFields
from router.store.conversations import ConversationRow
from router.store.items import Item
from router.store.responses import ResponseRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Says what a node is asked, and what is kept afterwards.

    Attributes:
        id: Of the response; empty where it is not kept.
        chain: Responses that this one goes on from, the first one first.
        history: What was said before, in order.
        items: The request's own.
    """

    tenant: str
    state: StateFields
    id: str = ""
    created_at: float = 0.0
    chain: tuple[ResponseRow, ...] = ()
    conversation: ConversationRow | None = None
    history: tuple[Item, ...] = ()
    items: tuple[Item, ...] = ()

    @property
    def model(self) -> str:
        """Returns the name that the client wrote; empty when it wrote none."""
        try:
            return str(value_of(self.state.fields, "model") or "")
        except UNREADABLE:
            return ""

    def node_body(self, max_bytes: int, *, is_stream: bool | None = None) -> bytes:
        """Returns the body as a client would send it that keeps all items itself. Raises
        `RequestTooLarge`."""
        fields = dict(self.state.fields)
        fields["input"] = raw_list([item.data for item in (*self.history, *self.items)])
        if is_stream is not None:
            fields["stream"] = msgspec.Raw(b"true" if is_stream else b"false")
        body = encode(fields)
        if len(body) > max_bytes:
            raise RequestTooLarge(
                f"the input with all that came before it is larger than {max_bytes} bytes"
            )
        return body

    def kept_header(self, *, num_events: int = 0) -> KeptResponse:
        """Returns what the answer says of itself."""
        return KeptResponse(
            id=self.id,
            created_at=int(self.created_at),
            store=self.state.keeps,
            background=self.state.background,
            previous_response_id=self.state.previous or None,
            conversation=self.state.conversation,
            num_events=num_events,
        )
