"""Keeps the last placements, for whoever asks why a request went where it went. Never content."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field

from router.placement.policy import Placement
from router.request.info import RequestInfo

logger = logging.getLogger(__name__)

_KEPT = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Is one placement, at Unix seconds `at`, after `num_tried` decode nodes had failed the
    request."""

    at: float
    request_id: str
    trace_id: str
    tenant: str
    session: str
    choice: str
    decode: str
    prefills: tuple[str, ...]
    num_prompt_tokens: int
    num_new_tokens: int
    ttft_s: float
    num_tried: int


@dataclass(slots=True)
class DecisionLog:
    """Holds the decisions; the newest of `recent` is the last."""

    recent: deque[Decision] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def note(self, info: RequestInfo, placement: Placement, num_tried: int, trace_id: str) -> None:
        decision = Decision(
            at=time.time(),
            request_id=info.request_id,
            trace_id=trace_id,
            tenant=info.tenant.name,
            session=info.session_source,
            choice=placement.choice,
            decode=str(placement.decode.address),
            prefills=tuple(str(node.address) for node in placement.prefills),
            num_prompt_tokens=info.num_prompt_tokens,
            num_new_tokens=placement.num_new_tokens,
            ttft_s=placement.ttft_s,
            num_tried=num_tried,
        )
        self.recent.append(decision)
        logger.debug("placed: %s", decision)
