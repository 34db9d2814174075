"""Pauses of a process that keeps dying, in a time that the test sets."""

from __future__ import annotations

from kv_transfer.control.restart_pauses import RestartPauses


class Process:
    """Lives for as long as the test says, behind its pause."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pauses = RestartPauses(lambda: self.now)
        self.pause_s = 0.0
        self.pauses.begin()

    def live(self, seconds: float) -> float:
        self.now += self.pause_s + seconds
        self.pause_s = self.pauses.next_s()
        self.pauses.begin()
        return self.pause_s


def test_short_lives_end_in_the_longest_pause_however_often() -> None:
    process = Process()
    pauses = [process.live(1.5) for _ in range(2000)]
    assert pauses[:9] == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert set(pauses[9:]) == {30.0}


def test_a_long_life_ends_them() -> None:
    process = Process()
    for _ in range(9):
        process.live(1.5)
    assert [process.live(12.0), process.live(1.5)] == [0.0, 0.5]
