"""One profile over all ranks: who may start it, when it ends, and what callers are told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.contracts.messages import ProfileAnswer
from engine.contracts.reports.profiles import ProfileOptions, RankTrace
from engine.core import profile_session
from engine.core.profile_session import ProfileSession
from engine.executor.worker_messages import BeginProfile, EndProfile, ProfileBegun, ProfileEnded
from engine.inspection_config import InspectionConfig
from tests.engine.core.tiny_engine import tiny_config


class Ranks:
    """An executor of ranks that answer when the test says so."""

    def __init__(self) -> None:
        self.commands: list[BeginProfile | EndProfile] = []
        self.replies: list[Any] = []

    def profile(self, command: BeginProfile | EndProfile) -> None:
        self.commands.append(command)

    def take_profile_replies(self) -> list[Any]:
        replies, self.replies = self.replies, []
        return replies


class Scene:
    """A session of two ranks."""

    def __init__(self, folder: str | None = "/traces") -> None:
        self.ranks = Ranks()
        self.answers: list[ProfileAnswer] = []
        inspection = InspectionConfig(
            torch_profiler_dir=folder, torch_profiler_max_steps=50, torch_profiler_max_s=30.0
        )
        config = replace(tiny_config(2), inspection=inspection)
        self.session = ProfileSession(config, self.ranks, self.answers.append)  # type: ignore[arg-type]

    def reply(self, *replies: Any) -> None:
        self.ranks.replies += replies
        self.session.check()

    def begin(self, call_id: int = 1, **options: Any) -> None:
        self.session.start(call_id, ProfileOptions(**options))
        self.reply(ProfileBegun(0), ProfileBegun(1))

    def end_ranks(self, *, is_complete: bool = False) -> None:
        traces = [RankTrace(rank, f"host{rank}", f"/traces/{rank}") for rank in (1, 0)]
        self.reply(*(ProfileEnded(trace, is_complete) for trace in traces))

    def take_answers(self) -> list[ProfileAnswer]:
        answers, self.answers[:] = list(self.answers), []
        return answers


def test_a_profile_is_started_and_stopped_on_all_ranks() -> None:
    scene = Scene()
    scene.session.start(1, ProfileOptions(num_steps=5, with_stack=True))
    (command,) = scene.ranks.commands
    assert isinstance(command, BeginProfile)
    assert (command.num_steps, command.with_stack, command.record_shapes) == (5, True, False)
    scene.reply(ProfileBegun(1))
    assert scene.answers == []
    scene.reply(ProfileBegun(0))
    (started,) = scene.take_answers()
    assert started.call_id == 1 and started.profile is not None
    assert (started.profile.num_steps, started.profile.seconds) == (5, 30.0)
    scene.session.stop(2)
    assert isinstance(scene.ranks.commands[1], EndProfile)
    assert scene.answers == []
    scene.end_ranks()
    (ended,) = scene.take_answers()
    assert ended.call_id == 2 and ended.profile is not None
    assert ended.profile.ended_by == "call"
    assert [trace.host for trace in ended.profile.traces] == ["host0", "host1"]
    scene.session.stop(3)
    (again,) = scene.take_answers()
    assert again.profile == ended.profile
    scene.begin(4)
    (second,) = scene.take_answers()
    assert second.profile is not None and second.profile.name != started.profile.name


@pytest.mark.parametrize("state", ["starting", "running", "stopping"])
def test_a_second_start_is_refused(state: str) -> None:
    scene = Scene()
    scene.session.start(1, ProfileOptions())
    if state != "starting":
        scene.reply(ProfileBegun(0), ProfileBegun(1))
    if state == "stopping":
        scene.session.stop(2)
    scene.take_answers()
    scene.session.start(3, ProfileOptions())
    (refused,) = scene.take_answers()
    assert (refused.call_id, refused.code) == (3, "profile_running")
    assert state in refused.refusal
    assert sum(isinstance(command, BeginProfile) for command in scene.ranks.commands) == 1


def test_it_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(profile_session.time, "monotonic", lambda: now[0])
    scene = Scene()
    scene.begin(seconds=4.0)
    assert scene.session.deadline == 104.0
    now[0] = 103.9
    scene.session.check()
    assert len(scene.ranks.commands) == 1
    now[0] = 104.0
    scene.session.check()
    scene.session.check()
    assert [type(command) for command in scene.ranks.commands] == [BeginProfile, EndProfile]
    scene.end_ranks()
    scene.take_answers()
    scene.session.stop(2)
    (told,) = scene.take_answers()
    assert told.profile is not None and told.profile.ended_by == "seconds"


@pytest.mark.parametrize("early", [False, True], ids=["after all began", "before rank 1 began"])
def test_workers_end_it_after_its_steps(early: bool) -> None:
    scene = Scene()
    ended = ProfileEnded(RankTrace(0, "host0", "/traces/0"), True)
    scene.session.start(1, ProfileOptions(num_steps=1))
    if early:
        scene.reply(ProfileBegun(0), ended)
        scene.reply(ProfileBegun(1))
    else:
        scene.reply(ProfileBegun(0), ProfileBegun(1))
        scene.reply(ended)
    scene.session.stop(2)
    scene.reply(ProfileEnded(RankTrace(1, "host1", "/traces/1"), True))
    started, stopped = scene.take_answers()
    assert (started.call_id, stopped.call_id) == (1, 2)
    assert stopped.profile is not None and stopped.profile.ended_by == "steps"
    assert len(stopped.profile.traces) == 2
    assert not any(isinstance(command, EndProfile) for command in scene.ranks.commands)


def test_a_rank_that_cannot_begin_ends_it_for_all() -> None:
    scene = Scene()
    scene.session.start(1, ProfileOptions())
    scene.session.stop(2)
    scene.reply(ProfileBegun(0), ProfileBegun(1, "PermissionError: /traces"))
    assert isinstance(scene.ranks.commands[-1], EndProfile)
    scene.reply(ProfileEnded(RankTrace(0, "host0", "/traces/0"), False))
    answers = scene.take_answers()
    assert [(one.call_id, one.code) for one in answers] == [
        (1, "profile_failed"),
        (2, "profile_failed"),
    ]
    assert "rank 1: PermissionError" in answers[0].refusal
    scene.begin(3)
    (started,) = scene.take_answers()
    assert started.profile is not None


def test_what_is_refused_says_which_setting_helps() -> None:
    scene = Scene(folder=None)
    scene.session.start(1, ProfileOptions())
    scene.session.stop(2)
    started, stopped = scene.take_answers()
    assert started.code == "profiler_not_configured"
    assert "--torch-profiler-dir" in started.refusal
    assert stopped.code == "no_profile"
    scene = Scene()
    for options in ({"num_steps": 51}, {"num_steps": 0}, {"seconds": 30.1}, {"seconds": -1.0}):
        scene.session.start(1, ProfileOptions(**options))
        (refused,) = scene.take_answers()
        assert refused.code == "invalid_value" and next(iter(options)) in refused.refusal
    assert scene.ranks.commands == []
