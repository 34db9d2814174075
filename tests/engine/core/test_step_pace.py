"""A step goes out shortly before the one in front ends, while a request may come that it takes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

from engine.contracts.messages import EngineCoreRequest
from engine.contracts.outputs import ModelRunnerOutput
from engine.contracts.scheduler_output import SchedulerOutput
from engine.core.core import EngineCore
from engine.core.step_pace import StepForecast, StepPace
from engine.executor.abstract import KVCaches, ReportProgress
from engine.executor.uniproc_executor import UniprocExecutor
from engine.sched.rows.in_flight import StepShape
from engine.speed.profile import load_profile
from planner.simulation.step_times import MeasuredTimes, Part
from tests.engine.core.tiny_engine import make_request, tiny_config
from tests.engine.core.virtual_steps import PROFILE, Case, Machine, VirtualDevice, run

STEP_S = 0.010
AHEAD_S = 0.0095
"""A step that goes out at once, 0.5 ms behind the one in front, lies there for so long."""
HOST_S = 0.001
DECODES = StepShape(8, 0.0)


@dataclass
class Engine:
    """A pace, stepped by hand: one step after the other, each of 10 ms."""

    shape: StepShape = DECODES
    may_join: bool = True
    lacks_token: bool = False
    now: float = 100.0
    host_s: float = 0.0
    pace: StepPace = field(init=False)

    def __post_init__(self) -> None:
        self.pace = StepPace(lambda: self.shape, lambda: self.may_join, lambda: self.lacks_token)
        self.issue()

    def issue(self) -> None:
        self.pace.issued(self.now, self.now)

    def end(self, seconds: float = STEP_S, ahead_s: float | None = AHEAD_S) -> None:
        """Ends the oldest step, `seconds` after the one before."""
        self.now += seconds
        self.host_s += HOST_S
        self.pace.ended(self.now, self.host_s, ahead_s)

    def early_steps(self, count: int, seconds: float = STEP_S) -> None:
        """Lets steps go out at once: two are in flight whenever one ends."""
        for _ in range(count):
            self.issue()
            self.end(seconds, seconds - 0.0005)

    @property
    def wait_s(self) -> float:
        """Returns for how long the next step is held back."""
        return self.pace.issue_at(self.now) - self.now


@pytest.fixture
def learned() -> Engine:
    """Returns an engine with one step in flight that has just begun, and that knows its steps."""
    engine = Engine()
    engine.early_steps(30)
    return engine


def test_steps_go_out_at_once_until_enough_is_known() -> None:
    engine = Engine()
    waits = []
    for _ in range(30):
        waits.append(engine.wait_s)
        engine.early_steps(1)
    assert not any(waits[:16])
    assert engine.wait_s > 0


def test_the_next_step_waits_until_its_lead_before_the_end(learned: Engine) -> None:
    """The lead is 0.5 ms on the way, 1 ms of the worker's host, and 0.2 to spare."""
    assert learned.pace.lead_s == pytest.approx(0.0017)
    assert learned.wait_s == pytest.approx(STEP_S - 0.0017)


def test_no_step_is_held_back_behind_two(learned: Engine) -> None:
    learned.issue()
    assert learned.wait_s == 0


def test_nothing_is_held_back_where_nobody_may_come(learned: Engine) -> None:
    learned.may_join = False
    assert learned.wait_s == 0
    learned.pace.request_came(learned.now)
    assert learned.wait_s > 0, "another may follow"
    learned.early_steps(101)
    assert learned.wait_s == 0


def test_behind_prompts_a_shorter_one_may_come() -> None:
    engine = Engine(StepShape(1, 2048.0), may_join=False)
    engine.early_steps(30, 0.045)
    assert engine.wait_s == pytest.approx(0.045 - 0.0017)


def test_what_is_nearly_due_goes_out(learned: Engine) -> None:
    learned.now += STEP_S - 0.0017 - 0.00009
    assert learned.wait_s == 0


def test_a_step_that_is_mostly_lead_goes_out_at_once() -> None:
    engine = Engine()
    engine.early_steps(30, 0.002)
    assert engine.pace.lead_s == pytest.approx(0.0017)
    assert engine.wait_s == 0


def test_a_device_that_had_to_wait_makes_the_lead_longer_at_once(learned: Engine) -> None:
    """The step was to lie there for 1.2 ms, and came 0.8 ms late."""
    held_s, lead_s = learned.wait_s, learned.pace.lead_s
    learned.now += held_s
    learned.issue()
    learned.end(lead_s)
    learned.end(STEP_S + 0.0008, ahead_s=-0.0008)
    assert learned.pace.lead_s == pytest.approx(0.0017 + 0.0008 + HOST_S + 0.0002)
    assert learned.pace.num_late == 1
    learned.issue()
    assert learned.wait_s == pytest.approx(STEP_S - learned.pace.lead_s), "its time is no rule"


def test_a_step_that_ends_sooner_than_expected_makes_the_lead_longer(learned: Engine) -> None:
    """Nothing is in flight after 6 of 10 ms. A lead of 4 ms more would have been enough."""
    assert learned.wait_s > 0
    learned.end(0.006)
    assert learned.wait_s == 0
    learned.issue()
    learned.end(0.0105, ahead_s=-0.0005)
    assert learned.pace.lead_s == pytest.approx(0.004 + 0.0005 + HOST_S + 0.0002)


def test_one_bad_step_is_forgotten(learned: Engine) -> None:
    learned.issue()
    learned.end(STEP_S, ahead_s=0.001)
    assert learned.wait_s == 0, "the lead would be longer than most of a step"
    learned.early_steps(64)
    assert learned.pace.lead_s == pytest.approx(0.0017)


def test_a_first_token_is_awaited_until_most_steps_would_be_late(learned: Engine) -> None:
    """One step needed 2 ms more than the others, and the lead is for that one."""
    learned.issue()
    learned.end(STEP_S, AHEAD_S - 0.002)
    usual_s, lead_s = 0.0015, learned.pace.lead_s
    assert lead_s == pytest.approx(0.0037)
    learned.now += STEP_S - lead_s - 0.001
    learned.pace.kv_came(learned.now)
    assert learned.wait_s == pytest.approx(0.001), "its first token is here"
    learned.lacks_token = True
    assert learned.wait_s == pytest.approx(0.001 + lead_s - usual_s)
    learned.now += learned.wait_s
    learned.issue()
    learned.end(usual_s)
    learned.end(STEP_S, AHEAD_S - STEP_S + usual_s)
    assert learned.pace.lead_s == pytest.approx(lead_s), "the wait was no loss"


def test_a_first_token_is_not_awaited_for_long(learned: Engine) -> None:
    learned.issue()
    learned.end(STEP_S, AHEAD_S - 0.002)
    learned.lacks_token = True
    learned.pace.kv_came(learned.now)
    learned.now += 0.0049
    assert learned.wait_s == pytest.approx(STEP_S - 0.0049 - 0.0015)
    learned.now += 0.0002
    assert learned.wait_s == pytest.approx(STEP_S - 0.0051 - learned.pace.lead_s)


def test_a_forecast_is_that_of_steps_alike() -> None:
    forecast = StepForecast()
    for seconds in (0.010, 0.011, 0.012, 0.030):
        assert forecast.seconds(StepShape(100, 0.0)) == 0
        forecast.observe(StepShape(100, 0.0), seconds)
    assert forecast.seconds(StepShape(110, 5.0)) == pytest.approx(0.0115), "the median"
    assert forecast.seconds(StepShape(10, 0.0)) == 0, "a small batch is quicker: unknown"


def test_a_forecast_of_prompts_is_the_quickest() -> None:
    forecast = StepForecast()
    for work, seconds in ((2048, 0.045), (300, 0.012), (2000, 0.046), (1000, 0.024)):
        forecast.observe(StepShape(1, float(work)), seconds)
    assert forecast.seconds(StepShape(1, 4096.0)) == pytest.approx(0.090)


# Whole engine cores in virtual time --------------------------------------------------------------


def test_who_joins_waits_for_the_rest_of_one_step_and_the_lead() -> None:
    case = Case(name="join", seconds=4.0)
    early, paced = run(replace(case, paced=False)), run(case)
    before, after = early.result(), paced.result()
    assert before.join_steps_p99 > 3
    assert after.join_steps_max < 2 + (after.lead_ms + 3) / after.step_ms
    assert after.join_steps_mean < 0.8 * before.join_steps_mean
    assert after.idle < 0.001
    assert after.steps_per_s > 0.995 * before.steps_per_s


@pytest.mark.parametrize(
    ("machine", "rate"),
    [
        (Machine(jitter=0.1), 25.0),
        (Machine(host_s=(0.002, 0.006)), 25.0),
        (Machine(speed=8), 25.0),
        (Machine(), 0.0),
    ],
    ids=["uneven steps", "slow host", "short steps", "nobody joins"],
)
def test_the_device_is_as_busy_as_with_steps_that_go_out_at_once(
    machine: Machine, rate: float
) -> None:
    case = Case(name="busy", seconds=1.5, machine=machine, rate=rate)
    early, paced = run(replace(case, paced=False)).result(), run(case).result()
    assert paced.idle < early.idle + 0.005
    assert paced.steps_per_s > 0.99 * early.steps_per_s


def test_who_is_awaited_joins_sooner_and_costs_nothing() -> None:
    case = Case(name="awaited", num_steady=16, rate=10, seconds=8.0)
    before, after = run(case).result(), run(replace(case, kv_before_s=0.0009)).result()
    assert after.join_steps_mean < before.join_steps_mean - 0.05
    assert after.idle < before.idle + 0.0005
    assert after.steps_per_s > 0.999 * before.steps_per_s


class CpuDevice(VirtualDevice):
    """Computes with the CPU engine's worker; its times are virtual."""

    worker: UniprocExecutor

    def initialize(self, report: ReportProgress) -> KVCaches:
        return self.worker.initialize(report)

    def _compute(self, step: SchedulerOutput) -> tuple[ModelRunnerOutput, list[Part], int]:
        made_up, parts, num_rows = super()._compute(step)
        self.worker.execute_model(step)
        (found,) = self.worker.collect()
        assert sorted(found.rows) == sorted(made_up.rows)
        return found, parts, num_rows


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    times = MeasuredTimes(load_profile(PROFILE))
    device = CpuDevice(times, Machine(speed=0.25), random.Random(1))
    device.worker = UniprocExecutor(tiny_config(async_scheduling=True))
    yield device
    device.worker.shutdown()


def test_tokens_do_not_depend_on_when_steps_go_out(device: CpuDevice) -> None:
    """Requests come at random moments; each gets the same tokens, whatever it shares steps with."""
    config, clock = tiny_config(async_scheduling=True), lambda: device.now
    core = EngineCore(config, device, lambda *_: None, clock=clock)
    rng = random.Random(3)
    arrivals = [(rng.uniform(0.0, 2.0), seed) for seed in range(40)]
    paced = _serve(core, device, arrivals)
    assert core.pace is not None
    assert core.pace.num_held > 20
    core.pace = None
    early = _serve(core, device, [(device.now + at_s, seed) for at_s, seed in arrivals])
    assert paced == early
    core.check_empty()
    core.shutdown()


def _serve(
    core: EngineCore, device: CpuDevice, arrivals: list[tuple[float, int]]
) -> dict[int, list[int]]:
    """Returns the tokens of each seed."""
    coming = sorted(arrivals, reverse=True)
    tokens: dict[int, list[int]] = {seed: [] for _, seed in arrivals}
    while coming or not core.is_idle:
        comes_at = coming[-1][0] if coming else float("inf")
        held_until = core.next_step_at or float("inf")
        device.now = max(device.now, min(comes_at, held_until, device.next_result_at))
        while coming and coming[-1][0] <= device.now:
            seed = coming.pop()[1]
            request = make_request(str(seed), seed)
            core.handle(EngineCoreRequest(request_id=request.request_id, spec=request.spec))
        for output in core.step().outputs:
            tokens[int(output.request_id)] += output.new_token_ids
    return tokens
