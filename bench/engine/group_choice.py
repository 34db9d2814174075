#!/usr/bin/env python3
"""Measures what the choice of a data-parallel group is worth: the engine's own schedulers, one for
each group, in virtual time and without a model.

    by transfer        the group that a random id means
    least load         fewest tokens to compute, then fewest requests, then most free blocks
    load and prefix    `engine.sched.groups.group_choice`

Groups step together: a step takes as long as its fullest group. Prompts and pauses have the shape
of published traces (`bench.workload`), a quarter as long. `prompts` is a prefill node, `whole` an
engine that computes answers too.

    python -m bench.engine.group_choice                   about four minutes
    python -m bench.engine.group_choice --only agent --groups 2
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

from bench.engine.scheduler import Workers, make_config
from bench.record import write_result
from bench.workload import PRESETS, Session, sessions
from engine.config import EngineConfig
from engine.contracts.group_step import GroupOutput, GroupStep
from engine.contracts.messages import EngineCoreRequest
from engine.contracts.outputs import ModelRunnerOutput
from engine.contracts.request import Request
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from engine.sched.groups.group_scheduler import GroupScheduler
from engine.sched.scheduler import Scheduler
from kv_transfer.no_connector import NoConnectorScheduler

_SCALE, _TIME_SCALE = 0.25, 0.25
_BLOCK_SIZE = 32
_NUM_BLOCKS = 6000
"""A group has so many: some two hundred prompts."""
_BUDGET = 2048
_BASE_S, _TOKEN_S, _ROW_S = 0.008, 0.025 / 1024, 0.00005
"""Seconds of a step: of any, of a token of a prompt, and of a row that decodes."""
_LOAD = 0.75
"""Requests come as fast as so much of what groups could compute if nothing was cached."""
_VOCAB = 100_000
_NO_STEP = ModelRunnerOutput(-1, [], [], [])


@dataclass(frozen=True, slots=True)
class Arrival:
    """One turn; `tokens` are its prompt."""

    at_s: float
    tokens: list[int]
    num_output: int


@dataclass(frozen=True, slots=True)
class Figures:
    """One run. `balance`: the mean group's share of the time in which groups compute; 1 is best.
    Seconds are those until the first token."""

    workload: str
    kind: str
    groups: int
    policy: str
    requests: int
    cached_share: float
    balance: float
    mean_s: float
    p99_s: float
    span_s: float


Choice = Callable[[GroupScheduler, random.Random], int]


def by_transfer(scheduler: GroupScheduler, rng: random.Random) -> int:
    return rng.randrange(len(scheduler.groups))


def least_load(scheduler: GroupScheduler, rng: random.Random) -> int:
    def load(index: int) -> tuple[int, int, int]:
        stats = scheduler.groups[index].stats()
        num_requests = stats.num_running + stats.num_waiting
        return stats.num_waiting_tokens, num_requests, -stats.num_free_blocks

    return min(range(len(scheduler.groups)), key=load)


def load_and_prefix(scheduler: GroupScheduler, rng: random.Random) -> int:
    """Leaves the choice to the scheduler."""
    return -1


POLICIES: dict[str, Choice] = {
    "by transfer": by_transfer,
    "least load": least_load,
    "load and prefix": load_and_prefix,
}


def arrivals(workload: str, count: int, groups: int, seed: int) -> list[Arrival]:
    """Returns turns in order of arrival, at the load that all runs have."""
    preset = PRESETS[workload].scaled(_SCALE, _TIME_SCALE, None)
    opening = _tokens(random.Random(0), preset.shared_tokens)
    found: list[Arrival] = []
    for number, session in enumerate(sessions(preset, 1.0, 2.0 * count, seed)):
        found += _turns(session, opening, random.Random(f"{seed} {number}"))
    found = sorted(found, key=lambda turn: turn.at_s)[:count]
    work_s = sum(len(turn.tokens) for turn in found) * (_TOKEN_S + _BASE_S / _BUDGET)
    speed = work_s / (_LOAD * groups * found[-1].at_s)
    return [replace(turn, at_s=turn.at_s * speed) for turn in found]


def _turns(session: Session, opening: list[int], rng: random.Random) -> Iterator[Arrival]:
    at_s, tokens = session.start_s, opening[: session.shared_tokens]
    for turn in session.turns:
        at_s += turn.pause_s
        tokens = tokens + _tokens(rng, turn.new_tokens)
        yield Arrival(at_s, tokens, turn.output_tokens)
        tokens = tokens + _tokens(rng, turn.output_tokens)


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(_VOCAB) for _ in range(count)]


def _config() -> EngineConfig:
    config = make_config(128, _BLOCK_SIZE)
    return replace(
        config,
        model=replace(config.model, max_model_len=64_000),
        scheduler=replace(config.scheduler, max_num_batched_tokens=_BUDGET),
    )


class Node:
    """Plays one node: `run` gives the seconds until each first token."""

    def __init__(self, groups: int, choice: Choice, *, is_whole: bool) -> None:
        config = _config()
        self._scheduler = GroupScheduler(
            [Scheduler(config, _NUM_BLOCKS, NoConnectorScheduler()) for _ in range(groups)]
        )
        self._workers = [Workers(random.Random(0)) for _ in range(groups)]
        self._choice, self._rng = choice, random.Random(1)
        self._is_whole = is_whole
        self._now = 0.0
        self.own_s = self.all_s = 0.0
        """Seconds in which groups computed, on average, and those that steps took."""

    def run(self, turns: list[Arrival]) -> list[float]:
        waiting, first_token_s = dict[str, float](), list[float]()
        index = 0
        while index < len(turns) or self._scheduler.has_unfinished_requests():
            while index < len(turns) and turns[index].at_s <= self._now:
                self._add(f"{index}", turns[index])
                waiting[f"{index}"] = turns[index].at_s
                index += 1
            step = self._scheduler.schedule()
            if step is None:
                self._now = max(self._now, turns[index].at_s) if index < len(turns) else self._now
                continue
            for name in self._run(step):
                if name in waiting:
                    first_token_s.append(self._now - waiting.pop(name))
        return first_token_s

    def _add(self, name: str, turn: Arrival) -> None:
        sampling = SamplingParams(
            max_tokens=turn.num_output if self._is_whole else 1, ignore_eos=True
        )
        request = Request(
            EngineCoreRequest(request_id=name, spec=RequestSpec(turn.tokens, sampling))
        )
        request.group = self._choice(self._scheduler, self._rng)
        refused = self._scheduler.add_request(request).outputs
        assert not refused, refused[0].error

    def _run(self, step: GroupStep) -> list[str]:
        """Runs a step. Returns who got a token."""
        outputs, seconds = list[ModelRunnerOutput](), list[float]()
        for own, worker in zip(step.steps, self._workers, strict=True):
            outputs.append(_NO_STEP if own is None else worker.execute(own))
            num_new = 0 if own is None else sum(count for _, count in own.prefill_chunks)
            num_rows = len(outputs[-1].rows)
            seconds.append(num_new * _TOKEN_S + num_rows * _ROW_S)
        self.own_s += statistics.mean(seconds)
        self.all_s += max(seconds)
        self._now += _BASE_S + max(seconds)
        results = self._scheduler.update_from_output(step, GroupOutput(step.step_id, outputs))
        return [result.request_id for result in results.outputs if result.new_token_ids]

    @property
    def cached_share(self) -> float:
        stats = self._scheduler.stats()
        return stats.prefix_cache_hits / max(1, stats.prefix_cache_queries)

    @property
    def now(self) -> float:
        return self._now


def measure(workload: str, groups: int, policy: str, kind: str, count: int) -> Figures:
    turns = arrivals(workload, count, groups, seed=3)
    node = Node(groups, POLICIES[policy], is_whole=kind == "whole")
    seconds = sorted(node.run(turns))
    return Figures(
        workload=workload,
        kind=kind,
        groups=groups,
        policy=policy,
        requests=len(seconds),
        cached_share=round(node.cached_share, 4),
        balance=round(node.own_s / node.all_s, 4),
        mean_s=round(statistics.mean(seconds), 4),
        p99_s=round(seconds[int(0.99 * (len(seconds) - 1))], 4),
        span_s=round(node.now, 1),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="conversation,agent,hot-prefix,no-share")
    parser.add_argument("--groups", default="2,4")
    parser.add_argument("--kinds", default="prompts,whole")
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--save", action="store_true", help="write bench/results")
    arguments = parser.parse_args()
    found: list[Figures] = []
    for workload in arguments.only.split(","):
        for kind in arguments.kinds.split(","):
            for groups in map(int, arguments.groups.split(",")):
                for policy in POLICIES:
                    found.append(measure(workload, groups, policy, kind, arguments.requests))
                    print(found[-1], flush=True)
    if arguments.save:
        write_result("group_choice", [asdict(one) for one in found])


if __name__ == "__main__":
    main()
