"""The timeline says when things happened to one request.

    received ── admitted ─────────────── first token ── second token ─ … ─ finished
                  └ prefill node: queue_s ── prefill_s ┘
                        KV: first byte ───────── last byte

Times inside are CLOCK_MONOTONIC seconds; a `Timeline` counts from `received`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from decode_node.observe.token_gaps import TokenGaps
from edge.http.answers.answer_times import AnswerTimes
from engine.frontend.output_processor import RequestOutput
from kv_transfer.metadata import TransferStats

Path = Literal["remote", "local"]


class RequestMetrics(msgspec.Struct, kw_only=True):
    """Times of one answer as vLLM tells them.

    Attributes:
        time_to_first_token_ms: From the end of the wait in queues to the first token.
        generation_time_ms: From the first token to the last.
        queue_time_ms: From when the decode node received the request until its prompt was begun.
        mean_itl_ms: Between two tokens; None for a single one.
        tokens_per_second: Tokens of the answer by the time from the end of that wait to the last.
    """

    time_to_first_token_ms: float
    generation_time_ms: float
    queue_time_ms: float
    mean_itl_ms: float | None
    tokens_per_second: float


class Timeline(msgspec.Struct, kw_only=True):
    """Times that a client may ask to see, in seconds since the decode node received the request.

    Attributes:
        admitted_s: Until the request was read and its KV had room on the decode node; part of
            `queue_s` where a prefill node computed the prompt.
        queue_s: Waiting, here and on the prefill node, before the prompt was begun.
        prefill_s: From then to the first token, where it was computed.
        kv_first_byte_s, kv_last_byte_s: None when no KV moved.
        cached_tokens: Prompt tokens that nothing had to compute.
        path: Where the KV of the prompt was computed in the end.
        attempts: Prefill nodes that were given the prompt.
    """

    admitted_s: float
    queue_s: float
    prefill_s: float
    first_token_s: float
    second_token_s: float | None
    total_s: float
    kv_first_byte_s: float | None
    kv_last_byte_s: float | None
    kv_bytes: int
    kv_streams: int
    cached_tokens: int
    prefill_node: str | None
    path: Path
    attempts: int


@dataclass(slots=True)
class PrefillRecord:
    """Facts about how one prompt was computed; its choices share them."""

    admitted_at: float = 0.0
    num_cached_tokens: int | None = None
    remote_queue_s: float | None = None
    remote_prefill_s: float = 0.0
    prefill_node: str | None = None
    path: Path = "local"
    attempts: int = 0
    failures: list[str] = field(default_factory=list)
    """Codes of failed attempts, and of nodes that were passed over, in order."""
    failed_nodes: list[tuple[str, str]] = field(default_factory=list)
    """Has (host:port, code) of the prefill nodes that failed, in order."""
    kv: TransferStats | None = None

    @property
    def cached_tokens(self) -> int:
        return self.num_cached_tokens or 0


@dataclass(slots=True)
class RequestRecord:
    """Facts about one request, or one choice, filled by the proxy while it runs; read for usage,
    timeline and metrics."""

    num_prompt_tokens: int
    max_tokens: int = 0
    operation: str = "text_completion"
    """`chat`, or `text_completion`, as traces call it."""
    received_at: float = field(default_factory=time.monotonic)
    prefill: PrefillRecord = field(default_factory=PrefillRecord)
    first_token_at: float = 0.0
    second_token_at: float = 0.0
    last_token_at: float = 0.0
    gaps: TokenGaps = field(default_factory=TokenGaps)
    """Times between outputs after the first."""
    num_output_tokens: int = 0
    new_token_ids: list[int] = field(default_factory=list)
    """Those of them that came from this node."""
    local_queue_s: float = 0.0
    finish_reason: str | None = None

    def on_output(self, output: RequestOutput) -> None:
        if output.is_replay:
            self.num_output_tokens += len(output.token_ids)
            self.finish_reason = output.finish_reason
            return
        now = time.monotonic()
        if self.prefill.num_cached_tokens is None:
            self.prefill.num_cached_tokens = output.num_cached_tokens
        self.local_queue_s = max(self.local_queue_s, output.queue_s)
        if output.token_ids:
            if not self.first_token_at:
                self.first_token_at = now
            else:
                self.second_token_at = self.second_token_at or now
                self.gaps.add(now - self.last_token_at)
            self.last_token_at = now
            self.num_output_tokens += len(output.token_ids)
            self.new_token_ids += output.token_ids
        self.finish_reason = output.finish_reason

    @property
    def queue_s(self) -> float:
        prefill = self.prefill
        if prefill.remote_queue_s is None:
            return self.local_queue_s
        return max(0.0, prefill.admitted_at - self.received_at) + prefill.remote_queue_s

    @property
    def prefill_s(self) -> float:
        if self.prefill.remote_queue_s is not None:
            return self.prefill.remote_prefill_s
        return max(0.0, self._since(self.first_token_at) - self.local_queue_s)

    @property
    def joined_at(self) -> float:
        """Returns the time when KV from elsewhere and token one were both here; 0.0 if no
        KV came.
        """
        kv = self.prefill.kv
        return max(self.first_token_at, kv.last_byte_at) if kv and kv.num_bytes else 0.0

    def timeline(self) -> Timeline:
        prefill = self.prefill
        kv = prefill.kv if prefill.kv is not None and prefill.kv.num_bytes else None
        return Timeline(
            admitted_s=self._since(prefill.admitted_at),
            queue_s=self.queue_s,
            prefill_s=self.prefill_s,
            first_token_s=self._since(self.first_token_at),
            second_token_s=self._since(self.second_token_at) if self.second_token_at else None,
            total_s=self._since(self.last_token_at),
            kv_first_byte_s=self._since(kv.first_byte_at) if kv else None,
            kv_last_byte_s=self._since(kv.last_byte_at) if kv else None,
            kv_bytes=kv.num_bytes if kv else 0,
            kv_streams=kv.num_streams if kv else 0,
            cached_tokens=prefill.cached_tokens,
            prefill_node=prefill.prefill_node,
            path=prefill.path,
            attempts=prefill.attempts,
        )

    def metrics(self) -> RequestMetrics:
        told, tokens = self.timeline(), self.num_output_tokens
        between = told.total_s - told.first_token_s
        computed = max(0.0, told.total_s - told.queue_s)
        return RequestMetrics(
            time_to_first_token_ms=1e3 * max(0.0, told.first_token_s - told.queue_s),
            generation_time_ms=1e3 * between,
            queue_time_ms=1e3 * told.queue_s,
            mean_itl_ms=1e3 * between / (tokens - 1) if tokens > 1 else None,
            tokens_per_second=tokens / computed if computed else 0.0,
        )

    def answer_times(self) -> AnswerTimes:
        """Returns what a router learns at the end."""
        told = self.timeline()
        return AnswerTimes(
            prompt=self.num_prompt_tokens,
            cached=told.cached_tokens,
            tokens=self.num_output_tokens,
            path=told.path,
            queue=_micro(told.queue_s),
            prefill=_micro(told.prefill_s),
            first=_micro(told.first_token_s),
            second=_micro(told.second_token_s or 0.0),
            kv_first=_micro(told.kv_first_byte_s or 0.0),
            kv_last=_micro(told.kv_last_byte_s or 0.0),
            kv_bytes=told.kv_bytes,
            total=_micro(told.total_s),
        )

    def _since(self, moment: float) -> float:
        return max(0.0, moment - self.received_at)


def _micro(seconds: float) -> float:
    """Returns whole microseconds: the rest is below what clocks resolve."""
    return round(seconds, 6)
