"""Tests which part of a token's way makes a gap long, on made-up steps and messages."""

from __future__ import annotations

import pytest

from bench.serving.clusters.processes import lateness_figures
from bench.serving.figures.token_times import TokenWays, token_figures
from bench.serving.openai_stream import Outcome
from engine.contracts.steps.step_log import StepRecord
from engine.frontend.output_delivery import Delivered
from engine.frontend.step_history import HistoryReport

STEP_S = 0.010
NUM_STEPS = 8
USUAL = Delivered(0.0002, 0.0004, 0.0007)
"""Times since the end of a step."""


def report(slow: int = -1, way: Delivered = USUAL) -> HistoryReport:
    """Steps end every 10 ms from 0.01 on; the outputs of one of them go another way."""
    ends = [STEP_S * (number + 1) for number in range(NUM_STEPS)]
    steps = [
        StepRecord(number, end - 1.5 * STEP_S, end, 0.0, 4, 4, 0, 0)
        for number, end in enumerate(ends)
    ]
    ways = [way if number == slow else USUAL for number in range(NUM_STEPS)]
    deliveries = [
        Delivered(*(end + part for part in one)) for end, one in zip(ends, ways, strict=True)
    ]
    return HistoryReport(9.0, steps, [], deliveries)


def answer(late: int = -1, by_s: float = 0.0, second_s: float = STEP_S) -> Outcome:
    """Has a token of each step a millisecond behind it; one is late. The first one comes from
    elsewhere."""
    chunks = [
        STEP_S * (number + 1) + 0.001 + (by_s if number == late else 0.0)
        for number in range(NUM_STEPS)
    ]
    return Outcome(0.0, sent=0.0, end=1.0, chunks=[chunks[0] - second_s, *chunks])


@pytest.mark.parametrize(
    ("way", "part"),
    [
        (Delivered(0.0042, 0.0044, 0.0047), "engine_core"),
        (Delivered(0.0002, 0.0044, 0.0047), "to_node_server"),
        (Delivered(0.0002, 0.0004, 0.0047), "node_server"),
        (USUAL, "router_and_client"),
    ],
)
def test_a_late_token_is_put_down_to_the_part_that_took_longer(way: Delivered, part: str) -> None:
    figures = token_figures([answer(late=3, by_s=0.004)], report(3, way), STEP_S)
    found = {name: share for name, share in figures["long_gaps"].items() if share}
    assert found == {part: pytest.approx(1 / 8)}
    assert figures["delivery_ms"]["max"] == pytest.approx(5.0)
    assert figures["delivery_parts_ms"][part]["max"] > 4


def test_long_steps_and_gaps_behind_first_tokens_are_apart() -> None:
    told = report()
    told.steps[4:] = [
        step._replace(ended_at=step.ended_at + STEP_S, issued_at=step.issued_at + STEP_S)
        for step in told.steps[4:]
    ]
    told.deliveries[4:] = [
        Delivered(*(moment + STEP_S for moment in one)) for one in told.deliveries[4:]
    ]
    one = answer(second_s=0.02)
    one.chunks[5:] = [chunk + STEP_S for chunk in one.chunks[5:]]
    figures = token_figures([one], told, STEP_S)
    found = {name: share for name, share in figures["long_gaps"].items() if share}
    assert found == {"behind_first": pytest.approx(1 / 8), "steps": pytest.approx(1 / 8)}
    assert figures["gaps_behind_first_ms"]["max"] == pytest.approx(20)
    assert figures["other_gaps_ms"]["n"] == 7


def test_a_token_is_of_the_last_step_whose_message_was_sent_before_it() -> None:
    ways = TokenWays(report(2, Delivered(0.008, 0.0082, 0.0085)))
    way = ways.of(0.0375)
    assert way is not None
    assert way.engine_core == pytest.approx(0.0002)
    assert ways.of(0.005) is None
    assert TokenWays(HistoryReport(9.0, report().steps, [])).of(0.05) is None


def test_the_share_of_moments_at_which_a_loop_was_late_is_of_the_load_alone() -> None:
    before = {"0.0005": 90.0, "0.001": 90.0, "0.002": 95.0, "0.005": 100.0, "+Inf": 100.0}
    after = {"0.0005": 90.0, "0.001": 180.0, "0.002": 190.0, "0.005": 199.0, "+Inf": 200.0}
    figures = lateness_figures(before, after)
    assert figures["over_0.5_ms"] == 1.0
    assert figures["over_1_ms"] == pytest.approx(0.1)
    assert figures["over_5_ms"] == pytest.approx(0.01)
    assert figures["p50"] == pytest.approx(0.78, abs=0.01)
    assert lateness_figures({}, {"0.0005": 0.0})["over_1_ms"] is None
