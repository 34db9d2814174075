"""A request inside the scheduler.

Life cycle:

    WAITING ─────────────────────────────▶ RUNNING ──▶ FINISHED_*
       │                                   ▲   │
       ├─▶ WAITING_FOR_REMOTE_KVS ─────────┤   ▼
       │        (KV comes from a peer)     └─ PREEMPTED   (runs again from its first token)
       └─▶ FINISHED_ABORTED  from anywhere
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from engine.contracts.messages import EngineCoreRequest

if TYPE_CHECKING:
    from engine.config import SchedulingPolicy
    from engine.contracts.request_spec import RequestSpec
    from engine.contracts.sampling_params import SamplingParams
    from kv_transfer.metadata import KVTransferParams


class RequestStatus(IntEnum):
    """States of a request, in order: everything from FINISHED_STOPPED on has ended."""

    WAITING = 0
    WAITING_FOR_REMOTE_KVS = 1
    RUNNING = 2
    PREEMPTED = 3
    FINISHED_STOPPED = 4
    FINISHED_LENGTH = 5
    FINISHED_ABORTED = 6
    FINISHED_ERROR = 7

    @property
    def is_finished(self) -> bool:
        return self >= RequestStatus.FINISHED_STOPPED

    @property
    def is_complete(self) -> bool:
        """Returns whether the request came to its own end: all of its prompt is computed."""
        return self in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH)

    @property
    def finish_reason(self) -> str:
        """Returns stop, length, abort or error."""
        return ("stop", "length", "abort", "error")[self - RequestStatus.FINISHED_STOPPED]


class PulledKV(NamedTuple):
    """Tokens from `first_token` on have KV of a peer. `has_drafts`: a drafter's as well."""

    first_token: int
    has_drafts: bool


class Request:
    """Holds the tokens and the progress of one request. Owned by the scheduler.

    `num_computed_tokens`: leading tokens whose KV existed when the request last entered a row
    (from there the row counts), or will come from a peer.
    `num_tokens`: prompt and confirmed output.
    `choice_ids`: answers to this prompt that are requests of their own
    (`engine.sched.choices.forks`).
    `first_tokens`: theirs, once they are known.
    `num_resumed_tokens`: the end of the prompt that is output of another node. To the KV cache it
    is prompt; to sampling, penalties and limits it is output.
    """

    __slots__ = (
        "all_token_ids",
        "arrival_order",
        "arrival_time",
        "asks_store",
        "block_hashes",
        "choice_ids",
        "draft_feature",
        "due_at",
        "eos_token_ids",
        "first_scheduled_at",
        "first_tokens",
        "group",
        "is_beam",
        "kv_transfer_params",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "pixels",
        "prefix_peer",
        "prompt_work",
        "pulled",
        "reads_disk",
        "request_id",
        "row",
        "sampling",
        "spec",
        "status",
        "tries_prefix_peer",
    )

    def __init__(self, message: EngineCoreRequest) -> None:
        self.request_id = message.request_id
        self.spec: RequestSpec = message.spec
        self.sampling: SamplingParams = message.spec.sampling
        self.eos_token_ids = message.eos_token_ids
        self.choice_ids = message.choice_ids
        self.group = message.group
        self.first_tokens: list[int] = []
        self.is_beam = False
        """It belongs to a beam search (`engine.sched.choices.beams`)."""
        self.arrival_time = message.arrival_time
        self.arrival_order = 0
        """Counts requests as they reach the scheduler."""
        self.due_at = 0.0
        """When it is due (`engine.sched.prompts.prompt_order`), from when that is known."""
        self.prompt_work: float | None = None
        """Counts what is left to compute when it waits, in tokens at the beginning of a prompt;
        None: that is not known yet, or not any more."""
        self.kv_transfer_params: KVTransferParams | None = message.kv_transfer_params
        self.all_token_ids: list[int] = list(message.spec.prompt_token_ids)
        self.num_prompt_tokens = len(self.all_token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens: int | None = None
        """Prompt tokens found in this engine's prefix cache at the first scheduling; None before.
        KV from a peer is not counted."""
        self.num_preemptions = 0
        self.pixels = {image.digest: image for image in message.pixels}
        """Holds what the vision tower is given of the prompt's images, by digest."""
        self.prefix_peer = message.prefix_peer
        """Names who may hold a prefix that is not cached here, until it was asked."""
        self.tries_prefix_peer = False
        """Whether the peer is tried though it looks slower than computing: decided once."""
        self.reads_disk: bool | None = None
        """Whether it takes blocks from disk or computes them, once that was weighed."""
        self.asks_store: bool | None = None
        """Whether the store is to be asked, once that was weighed; False when it was."""
        self.pulled: PulledKV | None = None
        """The part of the KV that came from a peer, until it is computed anew."""
        self.draft_feature = b""
        """Holds what a peer's drafter reads of the last prompt token."""
        self.block_hashes: dict[int, list[bytes]] = {}
        """Hashes, by block size, of the full blocks of `all_token_ids`, in order."""
        self.status = RequestStatus.WAITING
        self.row = -1
        """The worker row while running or waiting for KV with a row; -1 for none."""
        self.first_scheduled_at = 0.0

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_resumed_tokens(self) -> int:
        """Returns the end of the part of the prompt that is output of another node."""
        return self.spec.num_resumed_tokens

    @property
    def num_output_tokens(self) -> int:
        """Returns the number of output tokens, without those that came with the request."""
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def knows_first_token(self) -> bool:
        """Returns whether the tokens behind the prompt are known: its own, or those of its
        choices."""
        return self.num_output_tokens > 0 or bool(self.first_tokens)

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Returns whether the prompt's log probabilities are to come. They come with the prompt's
        computation, before the first token: the engine that computes it may take nothing from a
        cache.
        """
        return self.sampling.prompt_logprobs is not None and not self.knows_first_token

    @property
    def row_sampling(self) -> SamplingParams:
        """Returns the sampling parameters that workers get when the request enters a row."""
        if self.sampling.prompt_logprobs is None or self.needs_prompt_logprobs:
            return self.sampling
        return msgspec.structs.replace(self.sampling, prompt_logprobs=None)

    @property
    def is_finished(self) -> bool:
        return self.status.is_finished

    def append_output_token(self, token_id: int) -> None:
        self.all_token_ids.append(token_id)

    def sort_key(self, policy: SchedulingPolicy) -> tuple[int, float, int]:
        """Returns the key by which requests are sorted. The smaller runs first; the largest is the
        first victim of a preemption."""
        arrival_time = self.arrival_time if policy == "priority" else 0.0
        return (self.rank(policy), arrival_time, self.arrival_order)

    @property
    def is_idle_class(self) -> bool:
        """Returns whether it may only use what no other request does."""
        return self.spec.is_idle_class

    def rank(self, policy: SchedulingPolicy) -> int:
        """Returns what decides before any order: the priority, or in order of arrival whether it is
        of the idle class."""
        return self.spec.priority if policy == "priority" else int(self.is_idle_class)
