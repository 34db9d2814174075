"""Defines profiles: traces of torch.profiler on every rank, asked for by an operator.

Torch-free: the node server, the engine core and the workers all use it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

RefusalCode = Literal[
    "profiler_not_configured", "profile_running", "no_profile", "invalid_value", "profile_failed"
]


class ProfileOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Says what is asked for; also the JSON body of `POST /start_profile`.

    Attributes:
        num_steps: The profile ends after this many steps; None: after the most that settings allow.
        seconds: And after this many seconds.
        with_stack: Record where in the Python code each operator was called.
        record_shapes: Record the shapes of operators' inputs.
    """

    num_steps: int | None = None
    seconds: float | None = None
    with_stack: bool = False
    record_shapes: bool = False


class RankTrace(msgspec.Struct, frozen=True):
    """The trace of one rank: a file on `host`, or `error`, which says why there is none."""

    rank: int
    host: str
    path: str = ""
    error: str = ""


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """A profile that runs (no `traces` yet) or has ended.

    Attributes:
        name: Begins the names of its files.
        num_steps, seconds: When it ends by itself.
        ended_by: "call", "steps" or "seconds"; "" while it runs.
        traces: One a rank, in their order.
    """

    name: str
    num_steps: int
    seconds: float
    ended_by: str = ""
    traces: tuple[RankTrace, ...] = ()


class ProfileRefused(Exception):
    """A profile cannot be started or stopped. The message says why, and what to do."""

    def __init__(self, message: str, code: RefusalCode) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
