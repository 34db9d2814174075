"""Keeps an answer on its way to the client: the response is in the store before the client has its
last byte.

An answer in one piece waits for the store. Of a stream only the last event does. What is no
complete response is passed on, and nothing of it is kept.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.types import Message, Send

from edge.http.answers.event_writer import WriteDirectly
from edge.http.errors import HttpError, send_error
from router.responses.bodies.json_fields import UNREADABLE, fields_of, value_of
from router.responses.bodies.response_bodies import event_of, failed_body

_END = b"\n\n"
_OK = 200
_LAST_EVENTS = tuple(
    f"event: response.{name}\n".encode() for name in ("completed", "incomplete", "failed")
)

Keep = Callable[[bytes], Awaitable[None]]
"""Keeps a response object; raises `HttpError`."""


def last_event(events: bytes) -> tuple[bytes, bytes]:
    """Returns what is in front of a stream's last event, and that event; empty if it is not
    there."""
    for name in _LAST_EVENTS:
        if events.startswith(name):
            return b"", events
        if (end := events.find(_END + name)) >= 0:
            return events[: end + len(_END)], events[end + len(_END) :]
    return events, b""


def data_of(event: bytes) -> bytes:
    """Returns the JSON of an event; empty for a comment."""
    return event.partition(b"data: ")[2].rstrip(b"\n")


class KeptAnswer:
    """Is the `send` of a request whose response is kept by `keep`."""

    def __init__(self, send: Send, keep: Keep) -> None:
        self._send = send
        self._keep = keep
        self._start: Message | None = None
        self._is_stream = False
        self._body = b""
        self.is_kept = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self._begin(message)
        elif self._start is not None:
            await self._take_whole(message)
        elif self._is_stream:
            await self._take_events(message)
        else:
            await self._send(message)

    def directly(self, write: WriteDirectly) -> WriteDirectly:
        """Returns what writes events that nothing waits for at once. The last one waits."""
        return lambda data: self._is_stream and not last_event(data)[1] and write(data)

    async def _begin(self, message: Message) -> None:
        headers = {name.lower(): value for name, value in message["headers"]}
        if message["status"] == _OK:
            self._is_stream = headers.get(b"content-type", b"").startswith(b"text/event-stream")
            if not self._is_stream:
                self._start = message
                return
        await self._send(message)

    async def _take_whole(self, message: Message) -> None:
        assert self._start is not None
        self._body += message.get("body", b"")
        if message.get("more_body", False):
            return
        try:
            await self._kept(self._body)
        except (*UNREADABLE, KeyError):
            pass
        except HttpError as error:
            await send_error(self._send, error)
            return
        await self._send(self._start)
        await self._send({**message, "body": self._body})

    async def _take_events(self, message: Message) -> None:
        before, last = last_event(message.get("body", b""))
        if last:
            if before:
                await self._send({**message, "body": before, "more_body": True})
            before = await self._kept_event(last)
        await self._send({**message, "body": before})

    async def _kept_event(self, event: bytes) -> bytes:
        """Returns the event that ends the stream: another one where the store fails."""
        try:
            fields = fields_of(data_of(event))
            response = bytes(fields["response"])
            await self._kept(response)
        except (*UNREADABLE, KeyError):
            return event
        except HttpError as error:
            number = value_of(fields, "sequence_number")
            failed = failed_body(response, "server_error", error.message)
            return event_of("response.failed", number, failed)
        return event

    async def _kept(self, response: bytes) -> None:
        await self._keep(response)
        self.is_kept = True
