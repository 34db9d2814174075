"""Weighs the paths of KV that decode nodes report, as the router does."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from router.nodes.address import NodeRole
from router.nodes.node import Node
from router.nodes.report import KVPathReport, NodeReport
from router.placement.estimates.kv_paths import kv_waits_s
from router.placement.prefill_outcome import PrefillOutcome
from router.placement.tandem_policy import TandemPolicy
from tandem_pb import node_pb2
from tests.router.factories import Fleet, request

MB = 1_000_000


class Pair:
    """A decode node whose prompts have 1000 bytes of KV a token, and two prefill nodes."""

    def __init__(self, **paths: KVPathReport) -> None:
        self.fleet = Fleet()
        self.slow = self.fleet.add("slow", NodeRole.PREFILL, prefill_tokens_per_s=1000.0)
        self.clean = self.fleet.add("clean", NodeRole.PREFILL, prefill_tokens_per_s=1000.0)
        self.decode = self.fleet.add(
            "decode",
            kv_paths={f"{name}:80": path for name, path in paths.items()},
            kv_bytes_per_token=1000.0,
        )

    def wait_s(self, node: Node, ttft_s: float = 0.5, num_prompt: int = 1000) -> float:
        return kv_waits_s(self.decode, {node: ttft_s}, num_prompt)[node]


def test_kv_counts_as_far_as_it_is_not_hidden_behind_the_prompt() -> None:
    pair = Pair(slow=KVPathReport(bytes_per_s=MB), clean=KVPathReport(bytes_per_s=1000 * MB))
    assert pair.wait_s(pair.slow) == pytest.approx(0.5)
    assert pair.wait_s(pair.slow, ttft_s=2.0) == 0.0
    assert pair.wait_s(pair.clean) == 0.0


def test_a_path_that_nobody_measured_costs_nothing() -> None:
    pair = Pair(slow=KVPathReport(backlog_bytes=9 * MB))
    assert pair.wait_s(pair.slow) == pair.wait_s(pair.clean) == 0.0
    assert kv_waits_s(Fleet().add("old"), {pair.slow: 1.0}, 1000) == {pair.slow: 0.0}


def test_what_others_pull_counts_as_one_prompt_of_this_size_each() -> None:
    path = KVPathReport(bytes_per_s=MB, backlog_bytes=9 * MB, num_pulls=2)
    pair = Pair(slow=path)
    assert pair.wait_s(pair.slow, ttft_s=0.0) == pytest.approx(3.0)
    assert pair.wait_s(pair.slow, ttft_s=0.0, num_prompt=20_000) == pytest.approx(29.0)


def test_prompts_since_the_last_report_count_too() -> None:
    pair = Pair(slow=KVPathReport(bytes_per_s=MB))
    pair.decode.work.note_pull(pair.slow, 1000)
    pair.decode.work.note_pull(pair.slow, 500)
    assert pair.wait_s(pair.slow, ttft_s=0.0) == pytest.approx(2.5)
    assert pair.decode.report is not None
    pair.decode.apply(pair.decode.report, 1001.0)
    assert pair.wait_s(pair.slow, ttft_s=0.0) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "bad", [KVPathReport(bytes_per_s=MB / 10), KVPathReport(avoided_s=3.0)], ids=["slow", "avoided"]
)
def test_prompts_go_where_their_kv_comes_from_sooner(bad: KVPathReport) -> None:
    pair = Pair(slow=bad)
    policy = TandemPolicy(pair.fleet.registry, random.Random(0))
    first = Counter(
        policy.place(request(num_prompt_tokens=1000)).prefills[0].address.target for _ in range(16)
    )
    assert first == {"clean:80": 16}


def test_a_path_at_fault_ejects_no_node() -> None:
    pair = Pair()
    policy = TandemPolicy(pair.fleet.registry, random.Random(0))
    asked = request(num_prompt_tokens=1000)
    placement = policy.place(asked)
    for code in ("kv_avoided", "kv_slow", "kv_late", "kv_stalled", "kv_damaged", "kv_lost"):
        outcome = PrefillOutcome(failures=(("slow:80", code),))
        policy.observe(asked, placement, outcome)
    assert pair.slow.health.consecutive_failures == 0


def test_reports_are_read_with_care() -> None:
    load = node_pb2.NodeLoad(
        kv_bytes_per_token=float("inf"),
        kv_paths=[
            node_pb2.KVPath(prefill_node="a:1", bytes_per_s=float("nan"), avoided_s=-1.0),
            node_pb2.KVPath(prefill_node="b:1", bytes_per_s=5.0, backlog_bytes=7, num_pulls=2),
        ],
    )
    report = NodeReport.from_message(load)
    assert report.kv_bytes_per_token == 0.0
    assert report.kv_paths == {
        "a:1": KVPathReport(),
        "b:1": KVPathReport(bytes_per_s=5.0, backlog_bytes=7, num_pulls=2),
    }
