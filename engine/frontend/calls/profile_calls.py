"""The node server's side of profiles: asks the engine core, and waits for its answers."""

from __future__ import annotations

from engine.contracts.messages import ProfileAnswer, StartProfile, StopProfile
from engine.contracts.reports.profiles import Profile, ProfileOptions, ProfileRefused
from engine.frontend.calls.engine_calls import EngineCalls

_START_TIMEOUT_S = 120.0
STOP_LIMIT_S = 600.0
"""Ranks write files of hundreds of megabytes first."""


class ProfileCalls:
    """Starts and stops profiles, one call each."""

    def __init__(self, calls: EngineCalls) -> None:
        self._calls = calls

    async def start(self, options: ProfileOptions) -> Profile:
        """Returns the profile once it runs on every rank. Raises `ProfileRefused`,
        `EngineCallTimeout`, `EngineDeadError`."""
        return await self._profile(StartProfile(self._calls.next_id(), options), _START_TIMEOUT_S)

    async def stop(self) -> Profile:
        """Returns the last profile once all its files are written. Raises like `start`."""
        return await self._profile(StopProfile(self._calls.next_id()), STOP_LIMIT_S)

    async def _profile(self, call: StartProfile | StopProfile, timeout_s: float) -> Profile:
        answer = await self._calls.ask(call, ProfileAnswer, timeout_s)
        if answer.profile is None:
            raise ProfileRefused(answer.refusal, answer.code)
        return answer.profile
