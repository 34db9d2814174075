"""A step that workers have and whose result is not here yet."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.request import Request
from engine.sched.row import Row
from kv_transfer.layout import BlockIds


@dataclass(slots=True)
class PromptChunk:
    """Tokens of one request that a step computes, as a connector reads it."""

    request: Request
    first_token: int
    num_tokens: int
    block_ids: BlockIds


@dataclass(slots=True)
class InFlightStep:
    """A step on its way. `chunks[i]` is a row, and how many of its leading tokens have KV once the
    step is done."""

    step_id: int
    issued_at: float
    chunks: list[tuple[Row, int]] = field(default_factory=list)
    num_prompt_tokens: int = 0
