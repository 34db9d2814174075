"""The engine core drives its workers through this interface, wherever they run.

    1. `initialize`      loads the model, sizes and allocates the KV cache on every rank
    2. `execute_model`   hands a step to all ranks and returns at once
    3. one of `poll_sources` becomes readable; `collect` takes the results that are there
    4. `shutdown`

Several steps may be between 2 and 3; their results come in the order of the steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import zmq

from engine.config import EngineConfig
from engine.contracts.adapter_commands import DropAdapter, LoadAdapter
from engine.contracts.errors import EngineDeadError
from engine.contracts.group_step import Step, StepResult
from engine.contracts.outputs import ExpertStats, GrammarStats
from engine.executor.worker_messages import AdapterLoaded, BeginProfile, EndProfile, ProfileReply
from host.process_host import ProcessHost
from kv_transfer.base import KVCacheHandle


class ReportProgress(Protocol):
    """Records what is done, how much of it in 0..1, and of how many bytes where bytes are
    counted."""

    def __call__(self, stage: str, fraction: float, total_bytes: int = 0) -> None: ...


PollSource = zmq.Socket[bytes] | int


@dataclass(frozen=True, slots=True)
class KVCaches:
    """`num_blocks` of each rank, `handles[rank]`, and `hosts[rank]` where the handle is valid;
    no hosts: all here. `device_name`: of rank 0's GPU, if it has one. `prompt_steps`: tokens and
    seconds of steps of prompts that were measured, if any were. `model_hash`: the identity of what
    was loaded."""

    num_blocks: int
    handles: list[KVCacheHandle]
    hosts: Sequence[ProcessHost] = ()
    device_name: str = ""
    prompt_steps: Sequence[tuple[int, float]] = ()
    model_hash: str = ""


class Executor(ABC):
    """All ranks of one engine. Any method may raise `EngineDeadError`."""

    @abstractmethod
    def initialize(self, report: ReportProgress) -> KVCaches:
        """Returns when every rank can execute steps."""

    def switch_role(self, config: EngineConfig) -> KVCaches:
        """Returns the caches as transfer processes of the new role map them, once every rank has
        forgotten its rows. No step may be in flight. Raises `EngineDeadError` where it cannot."""
        raise EngineDeadError("workers that run so do not change their role")

    @abstractmethod
    def execute_model(self, step: Step) -> None:
        """Hands out `step`. Its result comes through `collect`."""

    @abstractmethod
    def collect(self) -> Sequence[StepResult]:
        """Results that have arrived. Raises when a rank has died or hangs."""

    @abstractmethod
    def profile(self, command: BeginProfile | EndProfile) -> None:
        """Tells all ranks. They answer through `take_profile_replies`, which has news when one of
        `poll_sources` was readable and `collect` was called."""

    @abstractmethod
    def take_profile_replies(self) -> list[ProfileReply]:
        """Returns what ranks have answered since the last call."""

    @abstractmethod
    def adapter(self, command: LoadAdapter | DropAdapter) -> None:
        """Tells all ranks, in order with the steps. They answer a LoadAdapter through
        `take_adapter_replies`, as with profiles."""

    @abstractmethod
    def take_adapter_replies(self) -> list[AdapterLoaded]:
        """Returns what ranks have answered since the last call."""

    @property
    @abstractmethod
    def poll_sources(self) -> list[PollSource]:
        """Returns the file descriptors that become readable when `collect` has news."""

    @property
    @abstractmethod
    def deadline(self) -> float | None:
        """Returns the CLOCK_MONOTONIC seconds at which `collect` must be called even if nothing was
        readable; None while nothing is in flight.
        """

    @property
    @abstractmethod
    def host_s(self) -> float:
        """Seconds that the host of rank 0 took to start steps, all that have ended together. On a
        GPU the device must never wait for it."""

    @property
    def ahead_s(self) -> float | None:
        """Seconds for which the last step that has ended lay with rank 0 while its device computed
        the one before: below 0, the device had to wait. None where a host computes itself, and for
        the first step."""
        return None

    @property
    @abstractmethod
    def grammar_stats(self) -> GrammarStats:
        """Returns what grammars have cost rank 0."""

    @property
    def expert_stats(self) -> ExpertStats | None:
        """Returns how evenly experts were chosen; None: nothing balances them."""
        return None

    @property
    def late_kernels(self) -> tuple[int, Sequence[str]]:
        """Returns how many kernels ranks have compiled while they served, and the last of them,
        each with all that its compilation depends on."""
        return 0, ()

    @property
    def num_dropped_messages(self) -> int:
        """Messages that no worker can have sent."""
        return 0

    @property
    @abstractmethod
    def worker_pids(self) -> list[int]:
        """Processes that the executor started, by rank."""

    @abstractmethod
    def shutdown(self) -> None:
        """Ends all ranks. Idempotent, also in the middle of `initialize`."""
