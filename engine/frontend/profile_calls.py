"""The node server's side of profiles: asks the engine core, and waits for its answers."""

from __future__ import annotations

from engine.contracts.messages import ProfileAnswer, StartProfile, StopProfile
from engine.contracts.profiles import Profile, ProfileOptions, ProfileRefused
from engine.frontend.engine_calls import EngineCalls


class ProfileCalls(EngineCalls[ProfileAnswer]):
    """Starts and stops profiles, one call each."""

    async def start(self, options: ProfileOptions) -> Profile:
        """Returns the profile once it runs on every rank. Raises `ProfileRefused`,
        `EngineDeadError`."""
        return await self._profile(StartProfile(next(self._ids), options))

    async def stop(self) -> Profile:
        """Returns the last profile once all its files are written. Raises like `start`."""
        return await self._profile(StopProfile(next(self._ids)))

    async def _profile(self, call: StartProfile | StopProfile) -> Profile:
        answer = await self._ask(call)
        if answer.profile is None:
            raise ProfileRefused(answer.refusal, answer.code)
        return answer.profile
