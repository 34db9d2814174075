"""Tests which silence means that a node hangs."""

from __future__ import annotations

from typing import Any

import pytest

from router.nodes.address import NodeRole
from router.placement.policy import Placement
from router.relay.exchange import Exchange
from router.relay.silence_watch import SilenceWatch
from tests.router.factories import Fleet, address, report


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
        self.exchange.waiting_since = self.clock.now
        for name, value in state.items():
            setattr(self.exchange, name, value)
        self.given_up = False
        self.exchange.give_up = self._give_up  # type: ignore[method-assign]

    def _give_up(self, why: str) -> None:
        self.given_up = True

    def after(self, seconds: float, *, reports: bool) -> bool:
        self.clock.now += seconds
        if reports:
            self.registry.apply_report(address("a"), report(sequence=2))
        self.watch.check(self.clock.now)
        return self.given_up


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


def test_of_a_node_that_left_the_list_nothing_is_known() -> None:
    case = Case()
    case.registry.set_members([])
    assert not case.after(60.0, reports=False)


def test_time_in_which_the_router_itself_stood_still_does_not_count() -> None:
    case = Case(status=200, is_journaled=True)
    case.watch._stood_still_until = case.clock.now + 8.0
    assert not case.after(12.0, reports=True)
    assert case.after(1.5, reports=False)
