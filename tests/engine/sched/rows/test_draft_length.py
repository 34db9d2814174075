"""The choice of q, with planted costs and planted drafts; of several groups, too."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from engine.sched.rows import adaptive_drafts
from engine.sched.rows.adaptive_drafts import DraftPlan, SharedDrafts
from engine.sched.rows.draft_length import DraftLength

FLAT = {1: 4.41, 2: 4.4, 4: 4.5, 8: 4.6}
"""Milliseconds of steps with one row, by q."""
STEEP = {1: 16.75, 2: 21.0, 4: 32.0, 8: 60.0}
"""Those of 256 rows."""


class Planted:
    """Steps that cost what `costs` say, of `num_rows` rows whose drafts are right with probability
    `right`; `share` of them have any."""

    def __init__(self, costs: dict[int, float], right: float, share: float = 1.0) -> None:
        self.costs, self.right, self.share = costs, right, share
        self.rng = random.Random(0)
        self.seconds = 0.0
        self.num_tokens = 0

    def run(self, chooser: DraftLength, steps: int, num_rows: int = 8) -> list[int]:
        """Returns what was chosen."""
        chosen = []
        for _ in range(steps):
            length = chooser.choose(num_rows)
            seconds = self.costs[length] * self.rng.choice([0.97, 1.0, 1.0, 1.03])
            counts, tokens = [], []
            for _ in range(num_rows):
                has_drafts = length > 1 and self.rng.random() < self.share
                counts.append(length - 1 if has_drafts else 0)
                got = 1
                while got <= counts[-1] and self.rng.random() < self.right:
                    got += 1
                tokens.append(got)
            chooser.drafts_checked(counts, tokens)
            chooser.step_done(num_rows, length, seconds)
            self.seconds += seconds
            self.num_tokens += sum(tokens)
            chosen.append(length)
        return chosen


@pytest.mark.parametrize(
    ("costs", "right", "share", "best"),
    [
        (FLAT, 0.8, 1.0, 8),
        (FLAT, 0.05, 1.0, {2, 4}),
        (STEEP, 0.8, 1.0, {2, 4}),
        (STEEP, 0.8, 0.2, 1),
        (STEEP, 0.1, 1.0, 1),
    ],
)
def test_takes_what_gives_most_tokens_a_second(costs, right, share, best) -> None:
    steps = Planted(costs, right, share)
    chooser = DraftLength(8)
    steps.run(chooser, 60)
    chosen = steps.run(chooser, 300)
    wanted = best if isinstance(best, set) else {best}
    assert sum(length in wanted for length in chosen) > 0.97 * len(chosen)


def test_costs_little_where_drafts_never_help() -> None:
    """Two percent at most, trying and looking again included."""
    steps = Planted(STEEP, 0.0)
    chooser = DraftLength(8)
    steps.run(chooser, 20)  # What each length costs is found out once.
    before = steps.seconds, steps.num_tokens
    steps.run(chooser, 2000)
    speed = (steps.num_tokens - before[1]) / (steps.seconds - before[0])
    assert speed > 0.98 * 8 / STEEP[1]


def test_finds_drafts_that_become_right_again() -> None:
    steps = Planted(FLAT | {8: 9.0}, 0.0)
    chooser = DraftLength(8)
    steps.costs = {1: 4.0, 2: 4.6, 4: 5.0, 8: 9.0}
    assert steps.run(chooser, 200)[-1] == 1
    steps.right = 0.9
    assert steps.run(chooser, 1500)[-100:].count(4) > 50


def test_batches_of_other_sizes_have_costs_of_their_own() -> None:
    chooser = DraftLength(4)
    one, many = Planted(FLAT, 0.7), Planted({1: 1.0, 2: 2.0, 4: 4.0}, 0.7)
    one.run(chooser, 40, num_rows=1)
    many.run(chooser, 40, num_rows=200)
    assert one.run(chooser, 20, num_rows=1)[-1] == 4
    assert many.run(chooser, 20, num_rows=200)[-1] == 1


@pytest.mark.parametrize(("most", "lengths"), [(2, (1, 2)), (4, (1, 2, 4)), (6, (1, 2, 4, 6))])
def test_tries_powers_of_two_up_to_the_setting(most: int, lengths: tuple[int, ...]) -> None:
    assert DraftLength(most).lengths == lengths


def test_groups_share_one_choice_and_learn_from_whole_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No group is heard alone: steps last as long as the longest group's, from when they or, if
    that is later, the results before came; those with prompts in any group cost more than their
    decodes."""
    asked: list[int] = []
    learnt: list[tuple[int, int, float]] = []
    times = iter((1.0, 2.0, 2.5, 4.0, 7.0, 7.5))
    lengths = iter((2, 1, 4, 2))

    def choose(self: DraftLength, num_rows: int) -> int:
        asked.append(num_rows)
        return next(lengths)

    def step_done(self: DraftLength, num_rows: int, length: int, seconds: float) -> None:
        learnt.append((num_rows, length, seconds))

    monkeypatch.setattr(DraftLength, "choose", choose)
    monkeypatch.setattr(DraftLength, "step_done", step_done)
    monkeypatch.setattr(adaptive_drafts, "time", SimpleNamespace(monotonic=lambda: next(times)))
    shared = SharedDrafts(4)
    told = []
    for num_rows, only_decodes in ((3, False), (9, True), (5, True)):
        shared.begin_step()
        shared.begin_step()  # No group had a step.
        told.append(shared.next_step(1))
        assert shared.next_step(num_rows) == told[-1]
        assert shared.issued(num_rows, only_decodes=only_decodes) == told[-1]
    shared.step_done(1, 4, 0.5)
    for _ in told:
        shared.retired()
    assert told == [DraftPlan(4, 1), DraftPlan(2, 0), DraftPlan(1, 3)]
    assert asked == [0, 3, 9]
    assert learnt == [(9, 2, 3.0), (5, 1, 0.5)]
