"""Steps an engine in virtual time: parts of prompts, and one token of each running sequence.

1. idle       nothing to do
2. stepping   one step with parts of prompts in it, in the order of `fill`; running sequences get a
              token in the same step
3. decoding   no prompt waits: steps alike until the first sequence ends. They are counted at once,
              so a long answer costs no more than a short one
-  cut        something comes while decoding: it ends with the step that is under way
-  held       sequences of the idle class sit out steps that compute prompts of others within an
              objective, and one now and then by which it is known what others take

A sequence that joins waits for the next step; the time until its token is the gap that its client
sees. One whose KV comes from a peer in the last `lead_s` of a step misses the next one too, which
is decided by then; a prompt that was computed here goes on in it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.contracts.steps.step_launches import StepParts
from engine.sched.rows.step_slack import StepSlack
from planner.simulation.jobs import Job
from planner.simulation.step_filling import InOrderOfArrival, StepFilling
from planner.simulation.step_times import Part, StepTimes
from planner.simulation.virtual_time import VirtualTime


@dataclass(slots=True, eq=False, kw_only=True)
class SimEngine:
    """Runs jobs. `begin` is called when a prompt is about to be computed and sets its
    `num_left`; `first` and `end` are called for first and last tokens, `gaps` with the time between
    tokens, `began` when prompts have ended and what follows them has begun.

    Attributes:
        speed: Divides all times; 1 for an ordinary node.
        lead_s: How long before the end of a step the next one is decided.
        one_prompt: A step computes one prompt whole.
        fill: Says which prompts a step computes.
        slack: Says how much of a step prompts may have beside running sequences.
        busy_s, prompt_s: Seconds of steps, and of those with prompts in them.
        sequence_s: Sequences times seconds.
    """

    timeline: VirtualTime
    times: StepTimes
    begin: Callable[[Job], None]
    first: Callable[[Job], None]
    end: Callable[[Job], None]
    gaps: Callable[[Job | None, float, float], None]
    began: Callable[[], None]
    max_batched_tokens: int = 8192
    speed: float = 1.0
    lead_s: float = 0.0
    one_prompt: bool = False
    fill: StepFilling = field(default_factory=InOrderOfArrival)
    slack: StepSlack = field(default_factory=lambda: StepSlack(0.0))
    waiting: deque[Job] = field(default_factory=deque)
    computing: list[Job] = field(default_factory=list)
    busy_s: float = 0.0
    prompt_s: float = 0.0
    sequence_s: float = 0.0
    _joining: list[Job] = field(default_factory=list)
    _held: list[tuple[int, Job]] = field(default_factory=list)
    """Sequences that sit out, with the steps that each has left."""
    _holds_idle: bool = False
    _joined: list[Job] = field(default_factory=list)
    """Sequences in their first step."""
    _running: list[tuple[int, int, Job]] = field(default_factory=list)
    _serials: itertools.count[int] = field(default_factory=itertools.count)
    _num_kv: float = 0.0
    _num_steps: int = 0
    _run: tuple[float, float, float, int] | None = None
    """The steps under way: begin, time of the first, growth from step to step, number."""
    _parts: list[tuple[Job, Part]] = field(default_factory=list)
    _version: int = 0
    _telling: bool = False
    """The steps are over and their results are being passed on; what comes now waits for the
    rest."""

    @property
    def num_running(self) -> int:
        return len(self._running) + len(self._joining) + len(self._held)

    @property
    def num_waiting_tokens(self) -> int:
        """Returns the prompt tokens that are still to be computed."""
        return sum(job.num_left for jobs in (self.computing, self.waiting) for job in jobs)

    @property
    def is_idle(self) -> bool:
        there = self.waiting or self.computing or self._joining or self._held
        return self._run is None and not there

    def add_prompt(self, job: Job) -> None:
        """Takes a prompt of which `num_left` tokens are not cached, as far as is known now."""
        job.came_at = self.timeline.now
        self.waiting.append(job)
        self._came()

    def join(self, job: Job) -> None:
        """Takes a sequence whose prompt and first token are there, to bring the rest."""
        self._joining.append(job)
        self._came()

    def _came(self) -> None:
        if self._telling:
            return
        if self._run is None:
            self._next()
        elif not self._parts:
            self._cut()

    def _cut(self) -> None:
        """Ends the steps under way with the one that is being computed."""
        assert self._run is not None
        began, first_s, growth_s, count = self._run
        done = min(count, max(1, steps_until(self.timeline.now - began, first_s, growth_s)))
        if done < count:
            self._schedule(began, first_s, growth_s, done)

    def _next(self) -> None:
        """Begins the next steps."""
        self._settle_idle()
        late = [job for job in self._joining if self._is_late(job)]
        self._joined = [job for job in self._joining if job not in late]
        self._joining = late
        for job in self._joined:
            self._run_on(job, job.request.num_output - 1)
        self._fill_step()
        count = len(self._running)
        if self._parts:
            parts = [part for _, part in self._parts]
            step_s = self.times.step_s(parts, count, self._num_kv) / self.speed
            self._schedule(self.timeline.now, step_s, 0.0, 1)
        elif count:
            step_s = self.times.decode_s(count, self._num_kv) / self.speed
            growth_s = self.times.decode_s(count, self._num_kv + count) / self.speed - step_s
            is_one = self._joined or late or self._held
            left = 1 if is_one else self._running[0][0] - self._num_steps
            self._schedule(self.timeline.now, step_s, growth_s, left)

    def _run_on(self, job: Job, num_left: int) -> None:
        job.last_step = self._num_steps + num_left
        heapq.heappush(self._running, (job.last_step, next(self._serials), job))
        self._num_kv += job.num_held - num_left

    def _settle_idle(self) -> None:
        """Has sequences of the idle class sit out, or go on."""
        running = [job for _, _, job in self._running]
        num_idle = _num_idle(running)
        others = _num_idle(self.computing) < len(self.computing)
        self._holds_idle = self.slack.holds_idle(others, len(running), num_idle)
        if not self._holds_idle:
            held, self._held = self._held, []
            for num_left, job in held:
                self._run_on(job, num_left)
        elif num_idle:
            for last, _, job in self._running:
                if job.is_idle_class:
                    num_left = last - self._num_steps
                    self._held.append((num_left, job))
                    self._num_kv -= job.num_held - num_left
            self._running = [one for one in self._running if not one[2].is_idle_class]
            heapq.heapify(self._running)

    def _is_late(self, job: Job) -> bool:
        """Returns whether a sequence came when the step that begins now was decided. Nothing was
        decided where nothing runs."""
        if self._holds_idle and job.is_idle_class:
            return True
        from_peer = bool(job.placement.prefills)
        is_recent = self.timeline.now - job.first_at < self.lead_s
        return from_peer and is_recent and bool(self._running)

    def _fill_step(self) -> None:
        if self.one_prompt:
            if self.waiting:
                job = self.waiting[0]
                self._begin(job)
                self._add_part(job, job.num_left)
            return
        budget = self.max_batched_tokens - len(self._running)
        num_idle = _num_idle([job for _, _, job in self._running])
        decodes = StepParts(len(self._running))
        budget = self.slack.limit(budget, decodes, num_idle)
        there = [*self.computing, *self.waiting]
        if self._holds_idle:
            there = [job for job in there if not job.is_idle_class]
        if budget <= 0 or not there:
            return
        jobs, room = self.fill.begin_step(self.timeline.now, there, budget)
        room.prompts_left = self.slack.most_prompts(decodes)
        begun = set(map(id, self.computing))
        for job in jobs:
            if room.is_full or not room.part(job.num_before, job.num_left):
                break
            if id(job) not in begun:
                self._begin(job)
            count = room.part(job.num_before, job.num_left)
            room.take(job.num_before, count)
            self._add_part(job, count)

    def _begin(self, job: Job) -> None:
        self.waiting.remove(job)
        job.started_at = self.timeline.now
        self.computing.append(job)
        self.begin(job)

    def _add_part(self, job: Job, count: int) -> None:
        self._parts.append((job, Part(count, job.num_before)))

    def _schedule(self, began: float, first_s: float, growth_s: float, count: int) -> None:
        self._run = began, first_s, growth_s, count
        self._version += 1
        version = self._version

        def done() -> None:
            if version == self._version:
                self._done()

        self.timeline.at(began + steps_s(count, first_s, growth_s), done)

    def _done(self) -> None:
        assert self._run is not None
        _, first_s, growth_s, count = self._run
        took_s, self._run = steps_s(count, first_s, growth_s), None
        num_new = sum(part.num_new for _, part in self._parts)
        num_idle = _num_idle([job for _, _, job in self._running])
        self.slack.observe(took_s / count, len(self._running), num_new, num_idle)
        self._count(took_s, count)
        ended = []
        while self._running and self._running[0][0] <= self._num_steps:
            ended.append(heapq.heappop(self._running)[2])
        finished = self._finish_parts()
        self._telling = True
        for job in ended:
            self._num_kv -= job.num_held
            self.end(job)
        for job in finished:
            self.first(job)
        self._telling = False
        self._next()
        if finished:
            self.began()

    def _count(self, took_s: float, count: int) -> None:
        num = len(self._running)
        self.busy_s += took_s
        self.sequence_s += took_s * num
        self.prompt_s += took_s if self._parts else 0.0
        self._num_steps += count
        self._num_kv += num * count
        for job in self._joined:
            self.gaps(job, self.timeline.now - job.first_at, 1)
        rest = num * count - len(self._joined)
        if rest:
            self.gaps(None, took_s / count, rest)
        self._joined = []

    def _finish_parts(self) -> list[Job]:
        for job, part in self._parts:
            job.num_left -= part.num_new
        self._parts = []
        finished = [job for job in self.computing if job.num_left == 0]
        self.computing = [job for job in self.computing if job.num_left > 0]
        for job in finished:
            job.first_at = self.timeline.now
        return finished


def _num_idle(jobs: Sequence[Job]) -> int:
    return sum([job.is_idle_class for job in jobs])


def steps_s(count: int, first_s: float, growth_s: float) -> float:
    """Returns the time of this many steps, each longer than the one before by `growth_s`."""
    return count * first_s + growth_s * count * (count - 1) / 2


def steps_until(elapsed_s: float, first_s: float, growth_s: float) -> int:
    """Returns the number of the step that is under way after `elapsed_s`, from 1 on."""
    if growth_s <= 0:
        return math.floor(elapsed_s / first_s) + 1
    half = first_s - growth_s / 2
    root = math.sqrt(half * half + 2 * growth_s * elapsed_s)
    return math.floor((root - half) / growth_s) + 1
