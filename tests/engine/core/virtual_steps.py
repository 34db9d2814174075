#!/usr/bin/env python3
"""Shows how long requests wait that join a decoding batch, with steps that go out early and late.

The engine core, its scheduler and `StepPace` are those of an engine; workers are made up, in
virtual time: a device whose steps take what a profile says (`planner/profiles`), give or take some
percent, a host that needs time to start each, and messages that need time on their way. Requests
join at random moments, as those do whose KV has come: what is left to compute is one token. Their
KV may have come before, behind which the core awaits their first token.

    python tests/engine/core/virtual_steps.py        some seconds
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from bench.record import write_result
from engine.config import EngineConfig, SchedulerConfig
from engine.contracts.adapter_commands import DropAdapter, LoadAdapter
from engine.contracts.group_step import Step, StepResult
from engine.contracts.messages import EngineCoreRequest
from engine.contracts.outputs import GrammarStats, ModelRunnerOutput
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from engine.contracts.scheduler_output import SchedulerOutput
from engine.core.core import EngineCore
from engine.core.step_pace import StepPace
from engine.executor.abstract import Executor, KVCaches, PollSource, ReportProgress
from engine.executor.worker_messages import AdapterLoaded, BeginProfile, EndProfile, ProfileReply
from engine.sched.scheduler import Scheduler
from engine.speed.profile import load_profile
from planner.simulation.step_times import MeasuredTimes, Part
from tests.engine.sched.llama_steps import make_config

PROFILE = Path(__file__).parents[3] / "planner" / "profiles" / "h200-llama-3.1-8b.json"
CONTEXT = 1000
"""Tokens of context that each row is taken to have."""
_BLOCK = 16
_VOCAB = 128_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Says what takes time beside the device's own work, in seconds. Each is drawn evenly between
    its two bounds, and times of steps are off by `jitter` (a part, standard deviation).

    Attributes:
        host_s: The worker's host starts a step.
        path_s: A message goes from the core to the worker, or back.
        speed: Divides what steps take.
    """

    host_s: tuple[float, float] = (0.0008, 0.0015)
    path_s: tuple[float, float] = (0.0001, 0.0004)
    jitter: float = 0.01
    speed: float = 1.0


@dataclass(slots=True)
class _Row:
    epoch: int
    tokens: list[int]
    num_left: int


@dataclass(slots=True)
class VirtualDevice(Executor):
    """Workers in virtual time. The next token is a hash of those before it."""

    times: MeasuredTimes
    machine: Machine
    rng: random.Random
    now: float = 0.0
    idle_s: float = 0.0
    """Seconds for which the device waited for a step that was there to be decided."""
    busy_s: float = 0.0
    num_steps: int = 0
    _rows: dict[int, _Row] = field(default_factory=dict)
    _decoding: set[int] = field(default_factory=set)
    _sent: deque[tuple[float, ModelRunnerOutput, float, float | None]] = field(
        default_factory=deque
    )
    _host_free_at: float = 0.0
    _device_free_at: float = 0.0
    _started_s: float = 0.0
    _host_s: float = 0.0
    _ahead_s: float | None = None

    # What an executor does ---------------------------------------------------------------------

    def initialize(self, report: ReportProgress) -> KVCaches:
        return KVCaches(20_000, [])

    def execute_model(self, step: Step) -> None:
        assert isinstance(step, SchedulerOutput)
        machine, rng = self.machine, self.rng
        taken_at = max(self.now + rng.uniform(*machine.path_s), self._host_free_at)
        host_s = rng.uniform(*machine.host_s)
        self._host_free_at = taken_at + host_s
        self._started_s += host_s
        output, parts, num_rows = self._compute(step)
        seconds = self._seconds(parts, num_rows)
        began_at = max(self._host_free_at, self._device_free_at)
        ahead_s = self._device_free_at - taken_at if self.num_steps else None
        if self.num_steps:
            self.idle_s += began_at - self._device_free_at
        self._device_free_at = began_at + seconds
        self.busy_s += seconds
        self.num_steps += 1
        comes_at = self._device_free_at + rng.uniform(*machine.path_s)
        self._sent.append((comes_at, output, self._started_s, ahead_s))

    def collect(self) -> Sequence[StepResult]:
        found = []
        while self._sent and self._sent[0][0] <= self.now:
            _, output, self._host_s, self._ahead_s = self._sent.popleft()
            found.append(output)
        return found

    @property
    def next_result_at(self) -> float:
        """Returns when the oldest step in flight has its result with the core."""
        return self._sent[0][0] if self._sent else float("inf")

    @property
    def host_s(self) -> float:
        return self._host_s

    @property
    def ahead_s(self) -> float | None:
        return self._ahead_s

    @property
    def grammar_stats(self) -> GrammarStats:
        return GrammarStats()

    @property
    def poll_sources(self) -> list[PollSource]:
        return []

    @property
    def deadline(self) -> float | None:
        return None

    @property
    def worker_pids(self) -> list[int]:
        return []

    def profile(self, command: BeginProfile | EndProfile) -> None:
        raise NotImplementedError

    def take_profile_replies(self) -> list[ProfileReply]:
        return []

    def adapter(self, command: LoadAdapter | DropAdapter) -> None:
        raise NotImplementedError

    def take_adapter_replies(self) -> list[AdapterLoaded]:
        return []

    def shutdown(self) -> None:
        """Nothing is held."""

    # What a device computes --------------------------------------------------------------------

    def _seconds(self, parts: list[Part], num_rows: int) -> float:
        num_kv = num_rows * CONTEXT
        if any(part.num_new > 1 for part in parts):
            seconds = self.times.step_s(parts, num_rows, num_kv)
        else:
            seconds = self.times.decode_s(num_rows + len(parts), num_kv)
        noise = max(0.5, self.rng.gauss(1.0, self.machine.jitter))
        return seconds * noise / self.machine.speed

    def _compute(self, step: SchedulerOutput) -> tuple[ModelRunnerOutput, list[Part], int]:
        for row in step.finished_rows:
            self._rows.pop(row, None)
            self._decoding.discard(row)
        for new in step.new_reqs:
            prompt = memoryview(new.prefill_token_ids).cast("i").tolist()
            self._rows[new.row] = _Row(new.epoch, prompt, len(prompt) - new.num_computed_tokens)
        self._decoding -= set(step.decode_remove)
        self._decoding |= set(step.decode_add)
        parts, sampling = [], sorted(self._decoding)
        for index, count in step.prefill_chunks:
            row = self._rows[index]
            parts.append(Part(count, len(row.tokens) - row.num_left))
            row.num_left -= count
            if not row.num_left:
                sampling.append(index)
        rows = [self._rows[index] for index in sampling]
        tokens = []
        for row in rows:
            tokens.append(hash(tuple(row.tokens[-8:])) % _VOCAB)
            row.tokens.append(tokens[-1])
        epochs = [row.epoch for row in rows]
        output = ModelRunnerOutput(step.step_id, sampling, epochs, tokens)
        return output, parts, len(self._decoding)


# Runs --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Requests come `rate` times a second, with `num_prompt` tokens to compute, and get
    `num_output` tokens; `num_steady` run from the beginning to the end. `kv_before_s`: their KV is
    here for so long, and the core knows."""

    name: str
    paced: bool = True
    num_steady: int = 100
    rate: float = 25.0
    num_prompt: int = 1
    num_output: int = 150
    seconds: float = 8.0
    kv_before_s: float = 0.0
    machine: Machine = Machine()
    seed: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Holds what a run gave. `join_steps`: time from a request's coming to its first token, over a
    step's usual time. `idle`: the part of the time for which the device waited."""

    name: str
    paced: bool
    step_ms: float
    join_steps_mean: float
    join_steps_p99: float
    join_steps_max: float
    idle: float
    steps_per_s: float
    held: float
    lead_ms: float


def config_of(case: Case) -> EngineConfig:
    config = make_config(256, _BLOCK)
    scheduler = SchedulerConfig(
        max_num_seqs=256, max_num_batched_tokens=8192, async_scheduling=True
    )
    return replace(config, scheduler=replace(scheduler, prompt_order="arrival"))


@dataclass(slots=True)
class Run:
    """One engine core and its virtual device. `tokens`: of each request, in order."""

    case: Case
    tokens: dict[str, list[int]] = field(default_factory=dict)
    device: VirtualDevice = field(init=False)
    core: EngineCore = field(init=False)
    _events: list[tuple[float, int, str]] = field(default_factory=list)
    _came_at: dict[str, float] = field(default_factory=dict)
    _with_kv: set[str] = field(default_factory=set)
    joins_s: list[float] = field(default_factory=list)
    num_held: int = 0
    """Steps that were held back."""

    def __post_init__(self) -> None:
        case = self.case
        rng = random.Random(case.seed)
        times = MeasuredTimes(load_profile(PROFILE))
        self.device = VirtualDevice(times, case.machine, random.Random(case.seed))
        device = self.device
        self.core = EngineCore(config_of(case), device, lambda *_: None, clock=lambda: device.now)
        if not case.paced:
            self.core.pace = None
        elif case.kv_before_s:
            scheduler = self.core.scheduler
            assert isinstance(scheduler, Scheduler)
            self.core.pace = StepPace(
                lambda: scheduler.last_shape, lambda: False, lambda: bool(self._with_kv)
            )
        serial = itertools.count()
        self._events = [(0.0, next(serial), f"steady-{i}") for i in range(case.num_steady)]
        at_s = 0.5
        while case.rate and (at_s := at_s + rng.expovariate(case.rate)) < case.seconds:
            name = f"joiner-{len(self._events)}"
            self._events.append((at_s, next(serial), name))
            if case.kv_before_s:
                self._events.append((at_s - case.kv_before_s, next(serial), f"kv-{name}"))
        heapq.heapify(self._events)

    def run(self) -> None:
        device, core = self.device, self.core
        while device.now < self.case.seconds:
            held_until = float("inf")
            if core.next_step_at is not None:
                held_until = core.next_step_at
            comes_at = self._events[0][0] if self._events else float("inf")
            device.now = max(device.now, min(held_until, comes_at, device.next_result_at))
            while self._events and self._events[0][0] <= device.now:
                self._take(heapq.heappop(self._events)[2])
            for output in core.step().outputs:
                self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                came_at = self._came_at.pop(output.request_id, None)
                if came_at is not None and output.request_id.startswith("joiner"):
                    self.joins_s.append(device.now - came_at)

    def _take(self, name: str) -> None:
        pace = self.core.pace
        if name.startswith("kv-"):
            self._with_kv.add(name.removeprefix("kv-"))
            if pace is not None:
                pace.kv_came(self.device.now)
        else:
            self._with_kv.discard(name)
            self._add(name)

    def _add(self, name: str) -> None:
        case, number = self.case, int(name.rpartition("-")[2])
        is_steady = name.startswith("steady")
        prompt = [1 + number] * (1 if is_steady else case.num_prompt)
        count = 2000 if is_steady else case.num_output
        spec = RequestSpec(prompt, SamplingParams(max_tokens=count, ignore_eos=True))
        self._came_at[name] = self.device.now
        self.core.handle(EngineCoreRequest(request_id=name, spec=spec))

    def result(self) -> Result:
        device, pace = self.device, self.core.pace
        joins = sorted(self.joins_s)
        step_s = device.busy_s / device.num_steps
        return Result(
            name=self.case.name,
            paced=self.case.paced,
            step_ms=1e3 * step_s,
            join_steps_mean=statistics.fmean(joins) / step_s if joins else 0.0,
            join_steps_p99=joins[int(0.99 * len(joins))] / step_s if joins else 0.0,
            join_steps_max=joins[-1] / step_s if joins else 0.0,
            idle=device.idle_s / device.now,
            steps_per_s=device.num_steps / device.now,
            held=pace.num_held / device.num_steps if pace is not None else 0.0,
            lead_ms=1e3 * pace.lead_s if pace is not None else 0.0,
        )


def run(case: Case) -> Run:
    done = Run(case)
    done.run()
    return done


CASES: dict[str, Callable[[str], Case]] = {
    "decode, 100 rows": lambda name: Case(name=name),
    "decode, 16 rows": lambda name: Case(name=name, num_steady=16, rate=5),
    "the same, KV 0.9 ms before": lambda name: Case(
        name=name, num_steady=16, rate=5, kv_before_s=0.0009
    ),
    "steps that differ by 10 %": lambda name: Case(name=name, machine=Machine(jitter=0.1)),
    "a slow host": lambda name: Case(name=name, machine=Machine(host_s=(0.002, 0.006))),
    "steps of 1 ms": lambda name: Case(name=name, machine=Machine(speed=8)),
    "nobody joins": lambda name: Case(name=name, rate=0),
    "prompts of 500": lambda name: Case(name=name, num_steady=30, num_prompt=500, rate=8),
}


def main() -> None:
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    print("case | paced | step ms | join, steps: mean p99 max | idle % | steps/s | held | lead ms")
    results = []
    for name, make in CASES.items():
        for paced in (False, True):
            found = run(replace(make(name), paced=paced)).result()
            results.append(asdict(found))
            print(
                f"{name:26s} | {paced!s:5s} | {found.step_ms:5.2f} | {found.join_steps_mean:.2f} "
                f"{found.join_steps_p99:.2f} {found.join_steps_max:.2f} | {100 * found.idle:.2f} | "
                f"{found.steps_per_s:.1f} | {found.held:.2f} | {found.lead_ms:.1f}"
            )
    print(write_result("step_pace", results))


if __name__ == "__main__":
    main()
