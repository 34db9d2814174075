"""Routers remember the newest call about each adapter, in whatever order reports come."""

from __future__ import annotations

from dataclasses import replace

from edge.adapter_call import AdapterCall
from router.nodes.adapter_ledger import AdapterLedger

POET, OTHER = "a" * 64, "b" * 64
OLD = AdapterCall("poet", POET, "poet", 7, "demo")
NEW = AdapterCall("poet", OTHER, "poet-2", 9, "demo")
GONE = AdapterCall("poet", "", "", 8, "demo")


def test_a_ledger_is_the_same_in_whatever_order_it_hears() -> None:
    calls = [OLD, GONE, NEW, AdapterCall("poet", POET, "poet", 9), AdapterCall("bard", "", "", 1)]
    one, other = AdapterLedger(), AdapterLedger()
    assert one.learn("demo", calls)
    assert not one.learn("demo", calls)
    for call in reversed(calls):
        other.learn("demo", [call])
    assert dict(one.calls("demo")) == dict(other.calls("demo"))
    assert one.calls("demo")["poet"] == NEW
    many = [AdapterCall(f"n{i}", "", "", i) for i in range(3000)]
    one.learn("demo", many)
    assert len(one.calls("demo")) == 1025 and "n2999" in one.calls("demo")


def test_a_ledger_takes_no_names_without_end() -> None:
    """A node that invents names costs no memory, and pushes out none that are known."""
    ledger = AdapterLedger()
    ledger.learn("m", [AdapterCall("mine", "d", "p", 5)])
    for start in range(0, 40_000, 4000):
        names = [f"n{number}" for number in range(start, start + 4000)]
        ledger.learn("m", [AdapterCall(name, "d", "p", 9) for name in names])
        ledger.learn("m", [AdapterCall("x", "d", "p", 9, model=name) for name in names])
    models = ["m", *(f"n{number}" for number in range(40_000))]
    assert sum(len(calls) for _, calls in ledger.of_models(set(models))) <= 8192 + 1024
    assert ledger.calls("m")["mine"].version == 5
    assert ledger.learn("m", [AdapterCall("mine", "", "p", 6)])


def test_calls_are_given_from_the_one_that_was_seen_last() -> None:
    ledger = AdapterLedger()
    ledger.learn("demo", [OLD, replace(OLD, name="clerk")])
    both, number = ledger.since("demo", 0)
    assert {call.name for call in both} == {"poet", "clerk"}
    assert ledger.since("demo", number) == ([], number)
    ledger.learn("demo", [NEW, OLD])
    assert ledger.since("demo", number)[0] == [NEW]
    assert ledger.since("another", 0) == ([], 0)
