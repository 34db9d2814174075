"""Holds what became of one request, for people who look at the cluster. Never content.

1. begun      the head is here, and with it the tenant (`RequestTrace` has the times)
2. read       the body is: model, session, size
3. placed     nodes were chosen; again if one failed the request before its first byte
4. answered   the first byte is here, and what the node says of the prompt
5. moved      the node was lost, or stops, and another one goes on; maybe several times
6. ended      with the status that the client got, and where the node says that the time went
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from edge.http.answers.answer_times import AnswerTimes
from router.request.info import RequestInfo
from router.request.trace import RequestTrace

_OK, _CLIENT_LEFT = 200, 499
MAX_MOVES = 16
"""Moves of one answer that are kept."""


@dataclass(slots=True)
class Move:
    """Is one move of an answer to another decode node, by monotonic seconds. Its client learns
    nothing from `from_at` until `until`, which is 0.0 as long as it lasts."""

    reason: str
    from_at: float
    node: str = ""
    until: float = 0.0


@dataclass(slots=True, eq=False)
class RequestHistory:
    """Is filled while a request is answered. Times are CLOCK_MONOTONIC seconds, 0.0 for not yet.

    Attributes:
        at: Unix seconds of the beginning.
        names: By which clients know the answer.
        is_aborted: Its end is wanted.
        early_aborts: Names of answers whose end was wanted while its body was being read.
        is_sent: It went to a decode node before its end was wanted.
        ended: Is set with its end.
        on_gap: Is called with the seconds between two pieces of a stream, from the second on.
        choice: Why the first prefill node was chosen; `predicted_s` was expected until the first
            token.
        num_tried: Decode nodes that failed the request before its first byte.
        asked_at: The node that answers now was asked.
        prefill_queue_s, prefill_s: What a prefill node says.
        broken: The answer ended too early, which is not the client's doing.
        num_pieces: Pieces of the answer that came, which are tokens, or several, or not quite.
    """

    trace: RequestTrace
    on_gap: Callable[[float], None]
    tenant: str = ""
    at: float = field(default_factory=time.time)
    generates: bool = True
    names: frozenset[str] = frozenset()
    is_aborted: bool = False
    early_aborts: list[Collection[str]] = field(default_factory=list)
    is_sent: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    model: str = ""
    session: bytes = b""
    session_source: str = ""
    num_prompt_tokens: int = 0
    choice: str = ""
    decode: str = ""
    prefill: str = ""
    predicted_s: float = 0.0
    num_tried: int = 0
    asked_at: float = 0.0
    num_cached_tokens: int = 0
    prefill_queue_s: float = 0.0
    prefill_s: float = 0.0
    moves: list[Move] = field(default_factory=list)
    num_pieces: int = 0
    last_event_at: float = 0.0
    times: AnswerTimes | None = None
    ended_at: float = 0.0
    status: int = 0
    broken: bool = False
    encoded: bytes = b""
    """Is kept by who shows the record, once it has ended."""

    def read(self, info: RequestInfo) -> None:
        self.generates = info.generates
        self.names = frozenset((*info.given_names, info.request_id))
        self.is_aborted |= any(not self.names.isdisjoint(names) for names in self.early_aborts)
        self.model = info.model
        self.session = info.session_key
        self.session_source = info.session_source
        self.num_prompt_tokens = info.num_prompt_tokens

    def placed(
        self, decode: str, prefills: Sequence[str], choice: str, ttft_s: float, num_tried: int
    ) -> None:
        """Records a placement, in words. Later ones, of an answer that has begun, do not count."""
        if self.trace.answered_at:
            return
        self.decode, self.choice = decode, choice
        self.prefill = prefills[0] if prefills else ""
        self.predicted_s = ttft_s
        self.num_tried = num_tried

    def answered(
        self, asked_at: float, prefill: str, num_cached: int, queue_s: float, prefill_s: float
    ) -> None:
        """Records that the node that was asked then has begun, and what it says of the prompt."""
        self.asked_at = asked_at
        self.prefill = prefill
        self.num_cached_tokens = num_cached
        self.prefill_queue_s, self.prefill_s = queue_s, prefill_s

    def broke(self, why: str) -> None:
        """Records that the answer has to end too early."""
        self.broken, self.trace.failure = True, why

    def event(self, num_pieces: int, now: float, *, is_stream: bool) -> None:
        """Records that some of the answer is here, which has now this many pieces. Of an answer
        that its client gets whole they come from time to time: the gaps mean nothing."""
        if self.num_pieces:
            if is_stream:
                self.on_gap(now - self.last_event_at)
            if self.moves and not self.moves[-1].until:
                self.moves[-1].until = now
        self.num_pieces = num_pieces
        self.last_event_at = now

    def moved(self, reason: str, node: str, asked_at: float) -> None:
        """Records that another node goes on. A node that is lost before it tells anything belongs
        to the move before."""
        self.asked_at, self.decode = asked_at, node
        if self.moves and not self.moves[-1].until:
            self.moves[-1].node = node
        elif len(self.moves) < MAX_MOVES:
            since = self.last_event_at or self.trace.answered_at
            self.moves.append(Move(reason, since, node))

    @property
    def first_token_s(self) -> float:
        """Returns the seconds until the first byte; 0.0 for not yet, or where it has no token."""
        trace = self.trace
        has_tokens = self.generates and self.status in (0, _OK, _CLIENT_LEFT)
        if not trace.answered_at or not has_tokens:
            return 0.0
        return trace.answered_at - trace.started_at

    @property
    def queue_s(self) -> float:
        """Returns the seconds that nothing worked on it, here and at the nodes, as far as known."""
        trace = self.trace
        here = trace.admitted_at - trace.started_at if trace.admitted_at else 0.0
        told = self.times.queue if self.times and not self.moves else self.prefill_queue_s
        return here + told

    @property
    def num_tokens(self) -> int:
        """Returns the tokens of the answer; until the node has sent them, the pieces of it."""
        return self.times.tokens if self.times else self.num_pieces
