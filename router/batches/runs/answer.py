"""Has one request of a batch answered by the router's own API.

answered      with a status of its own: 200, or what is wrong with the request
no room       429 or 503: again a little later, for as long as the batch may run
fault         500, 502, 504, or an answer that broke off: again, `_MAX_FAULTS` times in all
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message

from edge.http import headers as names
from router.batches.lines.input_line import InputLine
from router.batches.lines.result_line import ResultLine, answered, not_executed
from router.batches.runs.idle_room import IdlePlace
from router.observe.batch_metrics import BatchTotals
from router.request.tenants import Tenant
from router.responses.background.detached_call import ask

_NO_ROOM = (429, 503)
_FAULTS = (500, 502, 504)
_MAX_FAULTS = 3
_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
_MAX_DOUBLINGS = 8


@dataclass(slots=True)
class _Plain:
    """Is an answer that is no stream."""

    status: int = 0
    retry_after_s: float = 0.0
    request_id: str = ""
    body: bytearray = field(default_factory=bytearray)
    is_whole: bool = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = {name.lower(): value for name, value in message["headers"]}
            self.retry_after_s = float(headers.get(b"retry-after", b"0"))
            self.request_id = headers.get(names.REQUEST_ID.encode(), b"").decode("latin-1")
            return
        self.body += message.get("body", b"")
        self.is_whole = not message.get("more_body", False)


@dataclass(slots=True)
class Answering:
    """Asks `api`. `pause_s` is the shortest pause before it asks again."""

    api: ASGIApp
    totals: BatchTotals
    pause_s: float = _PAUSE_S

    async def answer(
        self, line: InputLine, endpoint: str, tenant: Tenant, place: IdlePlace
    ) -> ResultLine:
        """Returns what becomes of a request that is in its place. While it pauses, others may be
        there."""
        num_faults, num_pauses = 0, 0
        while True:
            found = _Plain()
            body = line.body
            await ask(self.api, found.send, body, {}, tenant, "", path=endpoint, is_idle=True)
            if found.status not in _NO_ROOM:
                if found.status not in _FAULTS and found.is_whole:
                    return answered(line, found.status, found.request_id, bytes(found.body))
                num_faults += 1
                if num_faults == _MAX_FAULTS:
                    return _given_up(line, found)
            self.totals.num_retried += 1
            place.leave()
            await asyncio.sleep(self._next_pause_s(num_pauses, found.retry_after_s))
            num_pauses += 1
            await place.enter()

    def _next_pause_s(self, num_pauses: int, retry_after_s: float) -> float:
        doubled = 1 << min(num_pauses, _MAX_DOUBLINGS)
        pause_s = max(self.pause_s * doubled, retry_after_s)
        return min(pause_s, _LONGEST_PAUSE_S) * random.uniform(0.5, 1.0)


def _given_up(line: InputLine, found: _Plain) -> ResultLine:
    if found.is_whole:
        return answered(line, found.status, found.request_id, bytes(found.body))
    return not_executed(line, "server_error", "The answer broke off, several times.")
