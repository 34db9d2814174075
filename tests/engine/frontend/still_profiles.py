"""Profiles of an engine that does nothing."""

from __future__ import annotations

from engine.contracts.errors import EngineDeadError
from engine.contracts.reports.profiles import Profile, ProfileOptions, ProfileRefused, RankTrace


class StillProfiles:
    """Runs one profile at a time, as `ProfileCalls` does."""

    def __init__(self) -> None:
        self.asked: list[ProfileOptions] = []
        self.dead_reason = ""
        self.running: Profile | None = None
        self.trace = RankTrace(0, "here", "/traces/p-rank0.pt.trace.json.gz")

    async def start(self, options: ProfileOptions) -> Profile:
        if self.dead_reason:
            raise EngineDeadError(self.dead_reason)
        if self.running is not None:
            raise ProfileRefused("profile p is running", "profile_running")
        self.asked.append(options)
        self.running = Profile(name="p", num_steps=options.num_steps or 7, seconds=9.0)
        return self.running

    async def stop(self) -> Profile:
        if self.running is None:
            raise ProfileRefused("no profile was started", "no_profile")
        self.running = None
        return Profile(name="p", num_steps=7, seconds=9.0, ended_by="call", traces=(self.trace,))
