"""The real scheduler over a real worker on the CPU, and requests for both."""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest

from engine.config import EngineConfig
from engine.contracts.adapter_commands import LoadAdapter
from engine.contracts.messages import EngineCoreOutputs, EngineCoreRequest
from engine.contracts.outputs import ModelRunnerOutput, TokenLogprobs
from engine.contracts.request import Request
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from engine.contracts.scheduler_output import SchedulerOutput
from engine.sched.scheduler import Scheduler
from engine.worker.worker import Worker
from kv_transfer.connectors.no_connector import NoConnectorScheduler

EOS = 3
KINDS = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "bad_words": ((5,), (6, 6), (7, 8), (1, 2, 3))},
    {
        "temperature": 0.0,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
        "allowed_token_ids": tuple(range(0, 200, 2)),
        "bad_words": tuple((first, 8) for first in range(0, 40, 2)),
        "logprobs": 3,
    },
    {"min_tokens": 10, "min_p": 0.02, "logit_bias": {5: 1.5}, "stop_token_ids": (8, 9, 10)},
    {"temperature": 0.0, "allowed_token_ids": (4, 5, 6, 7), "no_repeat_ngram_size": 2},
]
MAX_STEPS = 4000


class OneEngine:
    """`depth` steps may be scheduled before the first of them is answered. `worker`: not started;
    one rank in this thread unless given."""

    def __init__(self, config: EngineConfig, depth: int, worker: Worker | None = None) -> None:
        self.worker = worker or Worker(config, rank=0, rendezvous="")
        self.worker.init_device()
        self.worker.load_model(lambda fraction: None)
        num_blocks = self.worker.determine_num_blocks()
        self.worker.initialize_kv_cache(num_blocks)
        self.scheduler = Scheduler(config, num_blocks, NoConnectorScheduler())
        self._depth = depth
        self._in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[TokenLogprobs]] = {}
        self.ended: dict[str, str] = {}
        self.errors: dict[str, str] = {}
        self.counts: Counter[int] = Counter()
        """The number of times that requests got so many tokens from a step."""

    def add(self, message: EngineCoreRequest) -> None:
        for name in message.choice_ids or [message.request_id]:
            self.tokens[name] = []
            self.logprobs[name] = []
        self._note(self.scheduler.add_request(Request(message)))

    def abort(self, request_id: str) -> None:
        self._note(self.scheduler.abort_requests([request_id]))

    def step(self) -> bool:
        """Runs a step and returns whether there was anything to do."""
        step = self.scheduler.schedule()
        moved = self._move_adapters()
        if step is not None:
            self._in_flight.append((step, self.worker.execute_model(step)))
        if self._in_flight and (step is None or len(self._in_flight) >= self._depth):
            self._note(self.scheduler.update_from_output(*self._in_flight.popleft()))
            return True
        return step is not None or moved

    def _move_adapters(self) -> bool:
        """Does what the scheduler asks of host memory, and returns whether it asked for
        anything."""
        adapters = self.scheduler.adapters.ledger
        if not adapters.commands:
            return False
        for command in adapters.commands:
            if isinstance(command, LoadAdapter):
                self.worker.load_adapter(command.digest, command.path)
                adapters.replied(command.digest, "")
            else:
                self.worker.drop_adapter(command.digest)
        adapters.commands.clear()
        return True

    def finish(self) -> None:
        for _ in range(MAX_STEPS):
            if not self.step():
                return
        raise AssertionError(f"not done after {MAX_STEPS} steps")

    def _note(self, outputs: EngineCoreOutputs) -> None:
        for output in outputs.outputs:
            assert output.request_id not in self.ended
            self.tokens[output.request_id] += output.new_token_ids
            self.logprobs[output.request_id] += output.logprobs or []
            self.counts[len(output.new_token_ids)] += 1
            if output.finish_reason:
                self.ended[output.request_id] = output.finish_reason
                self.errors[output.request_id] = output.error


def workload(seed: int) -> list[EngineCoreRequest]:
    rng = random.Random(seed)
    shared = [rng.randrange(211) for _ in range(16)]
    requests = []
    for i in range(16):
        prompt = [rng.randrange(211) for _ in range(rng.choice([1, 7, 8, 9, 16]))]
        sampling = SamplingParams(
            seed=rng.randrange(2**64), max_tokens=rng.choice([1, 20, 40, 60]), **rng.choice(KINDS)
        )
        requests.append(
            EngineCoreRequest(
                request_id=f"request-{i}",
                spec=RequestSpec(shared + prompt if rng.random() < 0.5 else prompt, sampling),
                eos_token_ids=(EOS,),
                arrival_time=float(i),
            )
        )
    return requests


def run_traffic(
    engine: OneEngine,
    seed: int,
    alone: OneEngine,
    requests: list[EngineCoreRequest] | None = None,
) -> None:
    """Runs requests, those of `workload(seed)` unless given, together, four of which are aborted:
    what each gets is what it gets alone.
    """
    requests = workload(seed) if requests is None else requests
    rng = random.Random(seed)
    aborted = set(rng.sample([r.request_id for r in requests], 4))
    to_abort = sorted(aborted)
    for request in requests:
        engine.add(request)
        for _ in range(rng.randrange(4)):
            engine.step()
        if to_abort and to_abort[0] in engine.tokens and rng.random() < 0.5:
            engine.abort(to_abort.pop(0))
    for request_id in to_abort:
        engine.abort(request_id)
    engine.finish()

    stats = engine.scheduler.stats()
    assert stats.num_preemptions > 0
    assert stats.prefix_cache_hits > 0
    for request in requests:
        name = request.request_id
        expected = alone.tokens[name]
        if engine.ended[name] == "abort":
            assert name in aborted
            assert engine.tokens[name] == expected[: len(engine.tokens[name])]
        else:
            assert engine.tokens[name] == expected
            assert engine.ended[name] == alone.ended[name]
        _check_logprobs(engine.logprobs[name], alone.logprobs[name])
    check_empty(engine)


def _check_logprobs(found: list[TokenLogprobs], expected: list[TokenLogprobs]) -> None:
    for one, other in zip(found, expected, strict=False):
        assert one.token_ids == other.token_ids
        assert one.rank == other.rank
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def check_empty(engine: OneEngine) -> None:
    """Workers hear of an end with the next step, so one more request clears all but itself."""
    last = SamplingParams(temperature=0.0, max_tokens=2)
    engine.add(EngineCoreRequest(request_id="last", spec=RequestSpec([1], last)))
    engine.finish()
    assert engine.scheduler.check_empty() == []
    assert engine.scheduler.schedule() is None
    runner = engine.worker.runner
    assert runner.sampler.penalties.num_used_entries == 0
    assert runner.sampler.grammars.num_held == 0
    assert int(runner.states.is_live_np.sum()) == 1
    engine.worker.shutdown()
