"""One rank of `bench.pipeline_parallel` on CPU: a scheduler and a worker, which compute prompts.

    python -m bench.pipeline_rank JSON

Every rank schedules the same steps by itself: those of one prompt need no result. Prints, for each
prompt, CLOCK_MONOTONIC seconds before its first step and behind its last one, as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta

import msgspec
from torch.distributed import TCPStore

from engine.config import EngineConfig
from engine.contracts.messages import EngineCoreRequest
from engine.contracts.outputs import ModelRunnerOutput
from engine.contracts.request import Request
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from engine.contracts.scheduler_output import SchedulerOutput
from engine.models.step_costs import cost_of
from engine.sched.prompts.even_chunks import EvenChunks
from engine.sched.scheduler import Scheduler
from engine.worker.worker import Worker
from kv_transfer.no_connector import NoConnectorScheduler


class RankConfig(msgspec.Struct):
    """Tells a rank all that it needs; at `meeting` ranks wait for each other before each prompt."""

    engine: EngineConfig
    rank: int
    address: str
    rendezvous: str
    meeting: str
    prompts: list[int]


class Rank:
    """Computes prompts as the others do."""

    def __init__(self, config: RankConfig) -> None:
        engine = config.engine
        self._config = config
        self._worker = Worker(engine, config.rank, config.rendezvous, address=config.address)
        self._worker.init_device()
        self._worker.load_model(lambda fraction: None)
        num_blocks = self._worker.determine_num_blocks()
        self._worker.initialize_kv_cache(num_blocks)
        self._worker.capture_model(lambda stage, fraction: None)
        self._scheduler = Scheduler(engine, num_blocks, NoConnectorScheduler())
        cost = cost_of(engine)
        if engine.parallel.pipeline_parallel_size > 1 and cost is not None:
            budget = engine.scheduler.max_num_batched_tokens
            self._scheduler.shrink_chunks(EvenChunks(cost, budget))

    def compute(self, name: str, num_tokens: int) -> tuple[float, float]:
        """Returns when it began and when it ended. The answer has one token."""
        vocabulary = self._config.engine.model.vocab_size
        prompt = [1 + (7 * i) % (vocabulary - 1) for i in range(num_tokens)]
        sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        spec = RequestSpec(prompt, sampling)
        self._scheduler.add_request(Request(EngineCoreRequest(request_id=name, spec=spec)))
        done: list[tuple[SchedulerOutput, ModelRunnerOutput]] = []
        began = time.monotonic()
        while (step := self._scheduler.schedule()) is not None:
            done.append((step, self._worker.execute_model(step)))
        ended = time.monotonic()
        for step, output in done:
            # Only ranks that sample know the token, and only its number matters here.
            output.token_ids = [0] * len(output.rows)
            self._scheduler.update_from_output(step, output)
        return began, ended

    def close(self) -> None:
        self._worker.shutdown()


def main(text: str) -> None:
    config = msgspec.json.decode(text, type=RankConfig)
    host, _, port = config.meeting.rpartition(":")
    ranks = config.engine.parallel.num_ranks
    store = TCPStore(host, int(port), ranks, is_master=config.rank == 0)
    rank = Rank(config)
    times = []
    for number, length in enumerate(config.prompts):
        store.set(f"{number}/{config.rank}", "here")
        store.wait([f"{number}/{other}" for other in range(ranks)], timedelta(minutes=10))
        times.append(rank.compute(str(number), length))
    print(json.dumps(times), flush=True)
    store.set(f"end/{config.rank}", "here")
    store.wait([f"end/{other}" for other in range(ranks)], timedelta(minutes=10))
    rank.close()


if __name__ == "__main__":
    main(sys.argv[1])
