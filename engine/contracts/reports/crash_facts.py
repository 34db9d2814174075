"""Holds what a crash report says of an engine. Torch-free; crosses processes as msgspec.

Nothing here has content: requests are named by a hash of their id, tokens are counted; sessions,
prompts, answers and keys do not occur.
"""

from __future__ import annotations

import hashlib
import traceback
from typing import Any

import msgspec

_MAX_MESSAGE = 500
_MAX_FRAMES = 40
_MAX_CAUSES = 8


class StepFacts(msgspec.Struct, kw_only=True):
    """One step. Times are in seconds; `seconds` is None while workers have it."""

    step_id: int
    num_rows: int
    num_tokens: int
    num_prompt_tokens: int
    seconds_ago: float
    seconds: float | None = None


class RequestFacts(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request: `request` is the hash of its id (`hash_id`). A row's phase is in `state`."""

    request: str
    state: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int = 0
    max_tokens: int = 0
    num_preemptions: int = 0
    row: int | None = None
    is_exported: bool = False


class ExceptionFacts(msgspec.Struct):
    """One exception of a chain; `frames` from the outermost call to where it was raised."""

    type: str
    message: str
    frames: list[str]


class EngineFacts(msgspec.Struct, kw_only=True):
    """Holds what the engine core knows when it is asked, or dies.

    Attributes:
        requests: All in rows, then others, as far as the report's limit goes.
        num_requests: All there are.
        exceptions: By the name of the process, each chain from the first cause on.
        names: Names of processes, by id.
        num_late_kernels, late_kernels: How many were compiled while requests waited, and the last
            of them, each with all that its compilation depends on.
    """

    requests: list[RequestFacts] = []
    num_requests: int = 0
    blocks: dict[str, int] = {}
    queues: dict[str, int] = {}
    transfers: dict[str, float] = {}
    exceptions: dict[str, list[ExceptionFacts]] = {}
    names: dict[int, str] = {}
    num_late_kernels: int = 0
    late_kernels: list[str] = []


def hash_id(request_id: str) -> str:
    """Returns the name of a request in reports: the beginning of the SHA-256 of its id."""
    return hashlib.sha256(request_id.encode()).hexdigest()[:16]


def chain_of(error: BaseException) -> list[ExceptionFacts]:
    """Returns the exception and what it came from, the first cause first. Frames say file, line and
    function, without source text and values."""
    chain: list[ExceptionFacts] = []
    current: BaseException | None = error
    while current is not None and len(chain) < _MAX_CAUSES:
        frames = traceback.extract_tb(current.__traceback__)[-_MAX_FRAMES:]
        chain.append(
            ExceptionFacts(
                type(current).__name__,
                str(current)[:_MAX_MESSAGE],
                [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames],
            )
        )
        hides_context = current.__suppress_context__
        current = current.__cause__ or (None if hides_context else current.__context__)
    return chain[::-1]


def to_json(report: dict[str, Any]) -> bytes:
    """Returns the text of a report."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1)
