"""The one profile that an engine may have at a time, over all its ranks.

    IDLE ──start──▶ STARTING ──all ranks have begun──▶ RUNNING ──asked to stop, or time is up──▶ ┐
     ▲                 │                                  │                                      │
     │        a rank could not: all are asked to end       └──── a rank has had all its steps ──▶ ┤
     │                 ▼                                                                         ▼
     └──────────── all ranks that had begun have written their files ◀──────────────────── STOPPING

It ends by itself after its steps, which workers count, and its seconds, which this counts: a client
that has started it need not live. The end of the engine is its end.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from enum import Enum

from engine.config import EngineConfig
from engine.contracts.messages import ProfileAnswer
from engine.contracts.reports.profiles import (
    Profile,
    ProfileOptions,
    ProfileRefused,
    RankTrace,
    RefusalCode,
)
from engine.executor.abstract import Executor
from engine.executor.worker_messages import (
    BeginProfile,
    EndProfile,
    ProfileBegun,
    ProfileEnded,
    ProfileReply,
)

logger = logging.getLogger(__name__)


class _State(Enum):
    IDLE = "idle"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"


class ProfileSession:
    """Starts and stops profiles. `answer` sends the answer of a call. Nothing here waits."""

    def __init__(
        self, config: EngineConfig, executor: Executor, answer: Callable[[ProfileAnswer], None]
    ) -> None:
        self._config = config
        self._limits = config.inspection
        self._num_ranks = config.parallel.num_ranks
        self._executor = executor
        self._answer = answer
        self._state = _State.IDLE
        self._number = 0
        self._profile: Profile | None = None
        """The one that runs, or the last one."""
        self._starter = 0
        """The call that has started it."""
        self._stoppers: list[int] = []
        """Calls that wait for its files."""
        self._ended_by = ""
        self._errors: dict[int, str] = {}
        """Why ranks could not begin; empty: they have."""
        self._traces: dict[int, RankTrace] = {}
        self._deadline = math.inf

    @property
    def deadline(self) -> float:
        """Returns the CLOCK_MONOTONIC seconds at which `check` must be called."""
        return self._deadline

    def start(self, call_id: int, options: ProfileOptions) -> None:
        """Starts a profile on all ranks, or refuses."""
        try:
            profile = self._plan(options)
        except ProfileRefused as refusal:
            self._refuse(call_id, refusal.message, refusal.code)
            return
        logger.info("profile %s starts", profile.name)
        self._profile, self._state, self._starter = profile, _State.STARTING, call_id
        self._ended_by = ""
        self._errors, self._traces = {}, {}
        self._executor.profile(
            BeginProfile(profile.name, profile.num_steps, options.with_stack, options.record_shapes)
        )

    def stop(self, call_id: int) -> None:
        """Ends the profile; of one that has ended already, it tells the files."""
        if self._profile is None:
            self._refuse(call_id, "no profile was started since this node has", "no_profile")
            return
        self._stoppers.append(call_id)
        if self._state is _State.RUNNING:
            self._end("call")
        elif self._state is _State.IDLE:
            self._tell_stoppers()

    def check(self) -> None:
        """Takes what ranks have answered, and ends a profile whose time is up."""
        if self._state is _State.IDLE:
            return
        for reply in self._executor.take_profile_replies():
            self._take(reply)
        if time.monotonic() >= self._deadline:
            self._end("seconds")

    def _plan(self, options: ProfileOptions) -> Profile:
        limits = self._limits
        if limits.torch_profiler_dir is None:
            raise ProfileRefused(
                "this node writes no profiles: start it with --torch-profiler-dir",
                "profiler_not_configured",
            )
        if self._state is not _State.IDLE and self._profile is not None:
            raise ProfileRefused(
                f"profile {self._profile.name} is {self._state.value}; stop it, or wait for its "
                f"end",
                "profile_running",
            )
        steps, seconds = limits.torch_profiler_max_steps, limits.torch_profiler_max_s
        for name, value, most in (
            ("num_steps", options.num_steps, steps),
            ("seconds", options.seconds, seconds),
        ):
            if value is not None and not 0 < value <= most:
                raise ProfileRefused(
                    f"{name} must be above 0 and at most {most:g}, which "
                    f"--torch-profiler-max-{'s' if name == 'seconds' else 'steps'} sets",
                    "invalid_value",
                )
        self._number += 1
        return Profile(
            name=f"{self._config.engine_id}-{self._number}",
            num_steps=options.num_steps or steps,
            seconds=options.seconds or seconds,
        )

    def _take(self, reply: ProfileReply) -> None:
        if isinstance(reply, ProfileBegun):
            self._errors[reply.rank] = reply.error
            if len(self._errors) == self._num_ranks:
                self._begun()
        elif isinstance(reply, ProfileEnded):
            self._traces[reply.trace.rank] = reply.trace
            if reply.is_complete:
                self._ended_by = "steps"
            if self._state is not _State.STARTING:
                self._state, self._deadline = _State.STOPPING, math.inf
        self._finish_if_over()

    def _begun(self) -> None:
        profile = self._profile
        assert profile is not None
        if any(self._errors.values()):
            self._end("failure")
        else:
            self._state = _State.RUNNING
            self._deadline = time.monotonic() + profile.seconds
            self._answer(ProfileAnswer(call_id=self._starter, profile=profile))
            if self._traces:
                self._state, self._deadline = _State.STOPPING, math.inf
            elif self._stoppers:
                self._end("call")

    def _end(self, ended_by: str) -> None:
        self._state, self._ended_by, self._deadline = _State.STOPPING, ended_by, math.inf
        self._executor.profile(EndProfile())

    def _finish_if_over(self) -> None:
        """Ends it once every rank that had begun has written its file."""
        begun = {rank for rank, error in self._errors.items() if not error}
        if self._state is not _State.STOPPING or not begun <= self._traces.keys():
            return
        assert self._profile is not None
        self._state = _State.IDLE
        failures = [
            f"rank {rank}: {error}" for rank, error in sorted(self._errors.items()) if error
        ]
        traces = tuple(trace for _, trace in sorted(self._traces.items()))
        name = self._profile.name
        self._profile = Profile(
            name=name,
            num_steps=self._profile.num_steps,
            seconds=self._profile.seconds,
            ended_by=self._ended_by,
            traces=traces,
        )
        if failures:
            self._profile = None
            message = f"profile {name} could not start: {'; '.join(failures)}"
            for call_id in (self._starter, *self._stoppers):
                self._refuse(call_id, message, "profile_failed")
            self._stoppers.clear()
        else:
            logger.info("profile %s has ended by %s", name, self._ended_by)
            self._tell_stoppers()

    def _tell_stoppers(self) -> None:
        for call_id in self._stoppers:
            self._answer(ProfileAnswer(call_id=call_id, profile=self._profile))
        self._stoppers.clear()

    def _refuse(self, call_id: int, message: str, code: RefusalCode) -> None:
        logger.warning("a profile is refused: %s", message)
        self._answer(ProfileAnswer(call_id=call_id, refusal=message, code=code))
