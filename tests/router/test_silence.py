"""Tests which silence means that a node hangs."""

from __future__ import annotations

from typing import Any

import pytest

from router.nodes.address import NodeRole
from router.placement.policy import Placement
from router.relay.attempts.event_loop_stalls import EventLoopStalls
from router.relay.attempts.exchange import Exchange
from router.relay.attempts.silence_watch import SilenceWatch
from tests.router.factories import Fleet, address, report

CHECK_S = 0.25


class Case:
    """One exchange with node `a`, at time 0 of a clock that a test moves."""

    def __init__(self, **state: Any) -> None:
        fleet = Fleet()
        self.registry, self.clock = fleet.registry, fleet.clock
        self.registry.set_members([address("a")])
        self.registry.apply_report(address("a"), report())
        self.watch = SilenceWatch(registry=self.registry, stall_s=5.0)
        (node,) = self.registry.nodes(NodeRole.DECODE)
        self.exchange = Exchange(Placement(node), self.watch.exchanges)
        self.exchange.waiting_since = self.exchange.progress_at = self.clock.now
        self.exchange.asked_at = self.clock.now
        for name, value in state.items():
            setattr(self.exchange, name, value)
        self.sequence = 1
        self.given_up = False
        self.exchange.give_up = self._give_up  # type: ignore[method-assign]
        list(self.watch.check())

    def _give_up(self, why: str) -> None:
        self.given_up = True

    def after(self, seconds: float, *, reports: bool, signs: bool = False) -> bool:
        """Lets the router run for so long; returns whether it has given up the exchange. `signs`:
        of life, as often as they can come."""
        until = self.clock.now + seconds
        while self.clock.now < until:
            if signs:
                self.exchange.waiting_since = self.clock.now
            self._step(min(CHECK_S, until - self.clock.now), reports=reports)
        return self.given_up

    def stand_still(self, seconds: float, *, reports: bool = False) -> bool:
        """Stops the router for so long; `reports` has one come when it goes on."""
        self._step(CHECK_S + seconds, reports=reports)
        return self.given_up

    def _step(self, seconds: float, *, reports: bool) -> None:
        self.clock.now += seconds
        if reports:
            self.sequence += 1
            self.registry.apply_report(address("a"), report(sequence=self.sequence))
        list(self.watch.check())


@pytest.mark.parametrize(
    ("state", "seconds", "reports", "hung"),
    [
        ({}, 4.9, False, False),
        ({}, 5.1, False, True),
        ({}, 600.0, True, False),
        ({"status": 200, "is_journaled": True}, 2.4, False, False),
        ({"status": 200, "is_journaled": True}, 2.6, False, True),
        ({"status": 200, "is_journaled": True}, 4.9, True, False),
        ({"status": 200, "is_journaled": True}, 5.1, True, True),
        ({"status": 200}, 9.9, False, False),
        ({"status": 200}, 10.1, False, True),
        ({"status": 200}, 600.0, True, False),
        ({"status": 200, "is_journaled": True, "waiting_since": None}, 600.0, False, False),
    ],
)
def test_silence(state: dict[str, Any], seconds: float, reports: bool, hung: bool) -> None:
    assert Case(**state).after(seconds, reports=reports) is hung


@pytest.mark.parametrize("state", [{}, {"status": 200, "is_journaled": True}, {"status": 200}])
def test_signs_of_life_are_no_progress(state: dict[str, Any]) -> None:
    """A prompt may take minutes, also in the midst of an answer that was preempted; no longer."""
    case = Case(**state)
    assert not case.after(599.0, reports=True, signs=True)
    case.exchange.progress_at = case.clock.now
    assert not case.after(599.0, reports=True, signs=True)
    assert case.after(2.0, reports=True, signs=True)


def test_an_answer_that_trickles_has_an_end() -> None:
    """A token each 599 s would be progress for ever; a node that lies can send one so."""
    case = Case(status=200, is_journaled=True)
    case.watch.answer_s = 3000.0
    for _ in range(5):
        assert not case.after(599.0, reports=True, signs=True)
        case.exchange.progress_at = case.clock.now
    assert case.after(6.0, reports=True, signs=True)


def test_of_a_node_that_left_the_list_nothing_is_known() -> None:
    case = Case()
    case.registry.set_members([])
    assert not case.after(60.0, reports=False)


JOURNALED = {"status": 200, "is_journaled": True}


@pytest.mark.parametrize(
    ("state", "limit_s", "reports"),
    [
        ({}, 5.0, False),
        (JOURNALED, 2.5, False),
        (JOURNALED, 5.0, True),
        ({"status": 200}, 10.0, False),
    ],
)
@pytest.mark.parametrize("still_s", [0.1, 1.0, 8.0])
def test_time_in_which_the_router_itself_stood_still_does_not_count(
    state: dict[str, Any], limit_s: float, reports: bool, still_s: float
) -> None:
    """However often it does so, and however shortly."""
    case = Case(**state)
    for _ in range(4):
        case.after(limit_s / 4 - 2 * CHECK_S, reports=reports)
        assert not case.stand_still(still_s, reports=reports)
    assert not case.after(3 * CHECK_S, reports=reports)
    assert case.after(2 * CHECK_S, reports=reports)


def test_reports_of_a_long_prompt_have_not_stopped_when_the_router_did() -> None:
    case = Case()
    assert not case.after(60.0, reports=True)
    for _ in range(20):
        assert not case.stand_still(3.0)
        assert not case.after(1.0, reports=True)


def test_an_answer_that_begins_after_a_standstill_has_its_whole_time() -> None:
    case = Case(**JOURNALED)
    case.clock.now += 8.0
    case.exchange.waiting_since = case.exchange.progress_at = case.clock.now
    assert not case.after(2.5, reports=False)
    assert case.after(0.5, reports=False)


def test_standstills_are_forgotten_with_the_waits_that_they_were_in() -> None:
    standstills = EventLoopStalls(pause_s=1.0)
    for second in range(0, 4000, 2):
        standstills.record(float(second))
    assert standstills.running_time(3500.0, 3998.0) == 498 - 249
    assert standstills.running_time(3500.5, 3998.0) == 3998 - 3500.5 - 249
    assert standstills.running_time(0.0, 3998.0) == 3998 - 300, "of 10 minutes"


def test_many_exchanges_are_looked_at_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at 10,000 took the loop for 8 ms, four times a second."""
    case, given_up = Case(), list[Exchange]()
    monkeypatch.setattr(Exchange, "give_up", lambda one, why: given_up.append(one))
    for _ in range(2000):
        one = Exchange(case.exchange.placement, case.watch.exchanges)
        one.asked_at = one.progress_at = one.waiting_since = case.clock.now
        one.is_journaled = True
    assert len(list(case.watch.check())) == 7
    while not given_up:
        case.clock.now += CHECK_S
        checking = case.watch.check()
        next(checking)
    assert 200 < len(given_up) < 256
    case.watch.exchanges.clear()
    list(checking)
    assert len(given_up) < 256, "the others have ended meanwhile"
