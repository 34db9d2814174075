"""Rates, backoff and choice of the paths on which KV comes, in a time that the tests set."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest

from decode_node.disagg.kv_paths import KV_AVOIDED, KV_LATE, KV_SLOW, KVPaths
from decode_node.disagg.prompt_kv import LocalSpeed
from kv_transfer.errors import KV_DAMAGED, KV_LOST, KV_STALLED, KV_TRANSFER
from kv_transfer.metadata import TransferStats

A, B = "a:1", "b:1"
MB = 1_000_000


def seen(rate: float, *, is_all: bool = True) -> TransferStats:
    return TransferStats(num_bytes=MB, path_bytes_per_s=rate, path_was_full=is_all)


@dataclass
class Node:
    """A decode node's paths, and a clock."""

    now: float = 1000.0
    paths: KVPaths = field(init=False)
    num_changes: int = 0

    def __post_init__(self) -> None:
        self.paths = KVPaths(lambda: self.now)
        self.paths.on_change = self._changed

    def _changed(self) -> None:
        self.num_changes += 1

    def pull(self, rate: float = 0.0, *, is_all: bool = True, address: str = A) -> None:
        self.paths.began(address, "one", MB)
        self.paths.arrived(address, "one", seen(rate, is_all=is_all))

    def fail(self, code: str = KV_STALLED, name: str = "one") -> None:
        self.paths.began(A, name, MB)
        self.now += 0.01
        self.paths.failed(A, name, code)

    def objection(self, num_bytes: int = MB, local_s: float = math.inf) -> str:
        return self.paths.objection(A, num_bytes, local_s)


@pytest.fixture
def node() -> Node:
    return Node()


# Failures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [KV_LATE, KV_STALLED, KV_DAMAGED, KV_LOST])
def test_a_path_that_fails_is_avoided_for_a_second_and_then_tried_by_one(
    node: Node, code: str
) -> None:
    node.fail(code)
    assert node.objection() == KV_AVOIDED
    assert node.paths.objection(B, MB, math.inf) == "", "another prefill node"
    node.now += 1.0
    assert node.objection() == "", "the one that tries"
    assert node.objection() == KV_AVOIDED, "the others"


def test_what_is_not_the_fault_of_the_path_changes_nothing(node: Node) -> None:
    for code in (KV_TRANSFER, "unreachable", "resource_exhausted", "ended"):
        node.fail(code)
    assert node.objection() == ""


def test_each_failure_doubles_the_time_up_to_a_minute_and_success_ends_it(node: Node) -> None:
    waits = []
    for _ in range(9):
        node.fail()
        failed_at = node.now
        while node.objection() == KV_AVOIDED:
            node.now += 0.5
        waits.append(node.now - failed_at)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    node.pull()
    assert node.objection() == node.objection() == ""
    node.fail()
    node.now += 1.0
    assert node.objection() == "", "it begins anew"


def test_a_path_may_fail_for_days(node: Node) -> None:
    for _ in range(1100):
        node.fail()
        assert node.objection() == KV_AVOIDED
        node.now += 60.0
        assert node.objection() == "", "the one that tries"


def test_pulls_that_were_under_way_together_fail_once(node: Node) -> None:
    for name in "abcdefg":
        node.paths.began(A, name, MB)
    node.now += 5.0
    for name in "abcdefg":
        node.paths.failed(A, name, KV_STALLED)
    node.now += 1.0
    assert node.objection() == ""


def test_one_that_tries_and_ends_for_another_reason_leaves_the_next_to_others(node: Node) -> None:
    node.fail()
    node.now += 1.0
    assert node.objection() == ""
    node.paths.began(A, "gone", MB)
    node.paths.ended(A, "gone")
    assert node.objection() == KV_AVOIDED
    node.now += 1.0
    assert node.objection() == ""


def test_changes_are_reported_at_once(node: Node) -> None:
    node.pull(MB)
    assert node.num_changes == 0
    node.fail()
    assert node.num_changes == 1
    (path,) = node.paths.report()
    assert (path.prefill_node, path.avoided_s) == (A, 1.0)
    node.pull()
    assert node.num_changes == 2
    (path,) = node.paths.report()
    assert path.avoided_s == 0


# Rates ------------------------------------------------------------------------------------------


def test_a_path_without_a_measurement_is_used(node: Node) -> None:
    node.pull(0.0)
    assert node.objection(100 * MB, local_s=0.001) == ""
    assert list(node.paths.report()) == []


def test_a_prompt_is_computed_here_where_its_kv_takes_longer(node: Node) -> None:
    node.pull(2 * MB)
    assert node.objection(20 * MB, local_s=9.0) == KV_SLOW
    assert node.objection(20 * MB, local_s=11.0) == ""
    assert node.objection(20 * MB) == "", "nobody knows how long it takes here"


def test_what_others_pull_comes_first_or_beside(node: Node) -> None:
    node.pull(2 * MB)
    node.paths.began(A, "long", 40 * MB)
    assert node.objection(20 * MB, local_s=15.0) == KV_SLOW, "20 s: half of the path"
    assert node.objection(MB, local_s=1.5) == "", "1 s: a long pull is not waited for"
    node.now += 19.0
    assert node.objection(20 * MB, local_s=12.0) == "", "nearly all of it has come"
    node.paths.ended(A, "long")
    assert node.objection(20 * MB, local_s=10.1) == ""


def test_hidden_transfers_say_what_a_path_gives_at_least(node: Node) -> None:
    """Nothing is held against a path by what came no faster than it was computed."""

    def reported() -> list[float]:
        return [path.bytes_per_s for path in node.paths.report()]

    node.pull(2 * MB, is_all=False)
    assert reported() == []
    assert node.objection(1000 * MB, local_s=0.1) == ""
    node.pull(2 * MB)
    assert reported() == [2 * MB]
    assert node.objection(1000 * MB, local_s=0.1) == KV_SLOW
    node.pull(MB, is_all=False)
    assert reported() == [2 * MB]
    node.pull(4 * MB)
    assert reported() == [3 * MB]
    node.pull(5 * MB, is_all=False)
    assert reported() == [], "it gives more than was thought"
    assert node.objection(1000 * MB, local_s=0.1) == ""


def test_belief_in_a_slow_path_halves_every_ten_seconds(node: Node) -> None:
    node.pull(MB)
    assert node.objection(8 * MB, local_s=2.0) == KV_SLOW
    node.now += 19.0
    assert node.objection(8 * MB, local_s=2.0) == KV_SLOW
    node.now += 2.0
    assert node.objection(8 * MB, local_s=2.0) == ""
    node.pull(MB)
    assert node.objection(8 * MB, local_s=2.0) == KV_SLOW


def test_one_request_at_a_time_tries_a_path_that_looked_slow(node: Node) -> None:
    node.pull(MB)
    node.now += 21.0
    assert node.objection(8 * MB, local_s=2.0) == "", "the one that tries"
    assert node.objection(8 * MB, local_s=2.0) == KV_SLOW, "the others"
    assert node.objection(MB, local_s=2.0) == "", "loses nothing, whatever the path gives"
    node.paths.began(A, "gone", 8 * MB)
    node.paths.ended(A, "gone")
    node.now += 9.0
    assert node.objection(8 * MB, local_s=2.0) == KV_SLOW
    node.now += 1.0
    assert node.objection(8 * MB, local_s=2.0) == "", "the first one has measured nothing"
    node.pull(100 * MB)
    assert node.objection(8 * MB, local_s=2.0) == node.objection(8 * MB, local_s=2.0) == ""


def test_an_old_measurement_says_nothing(node: Node) -> None:
    node.pull(MB)
    node.now += 365 * 86400.0
    assert node.objection(8 * MB, local_s=1e-6) == ""


def test_kv_that_is_late_says_how_much_the_path_gives_at_most(node: Node) -> None:
    node.paths.began(A, "late", 20 * MB)
    node.paths.failed(A, "late", KV_LATE, waited_s=4.0)
    (path,) = node.paths.report()
    assert path.bytes_per_s == 5 * MB
    node.now += 1.0
    assert node.objection(20 * MB, local_s=3.0) == KV_SLOW


def test_paths_that_nobody_uses_are_forgotten(node: Node) -> None:
    node.pull(MB)
    node.now += 3601.0
    assert list(node.paths.report()) == []
    for index in range(300):
        node.pull(MB, address=f"10.0.0.{index}:1")
    assert len(list(node.paths.report())) == 256


# Here or there ----------------------------------------------------------------------------------


def test_prompts_take_here_as_long_as_steps_say_and_before_any_as_elsewhere() -> None:
    speed = LocalSpeed()
    assert math.isinf(speed.seconds(1000, 0.0))
    speed.note_remote(2000, 0.5)
    assert speed.seconds(4000, 0.0) == pytest.approx(1.3)
    assert speed.seconds(4000, 8000.0) == pytest.approx(0.65)
