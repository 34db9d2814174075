"""One tensor-parallel rank of a whole engine, scheduler and worker, without the processes between.

    python -m tests.engine.models.engine_rank FOLDER OUT RANK SIZE RENDEZVOUS...

Every rank runs the same scheduler on the tokens that its own worker sampled, so ranks that
disagree in one token part ways and it shows. Writes OUT/greedy-RANK.json: "family/mode/request"
to tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from engine.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from engine.messages import EngineCoreRequest
from engine.models.checkpoint import load_model_config
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.sched.scheduler import Scheduler
from engine.worker.worker import Worker
from tests.engine.models.parity_cases import NUM_GREEDY, prompts

MODES = {"whole": 1024, "chunked": 24}
"""Mode to tokens in one step at most."""
WITH_CACHED_PREFIX = {"3": 64, "4": 32}
"""Request to tokens that it takes from the prefix cache. Request i is prompt i of `prompts()`; a
request that warms the cache runs before all of them."""


class EngineRank:
    """`run` adds requests and steps until all have ended."""

    def __init__(self, config: EngineConfig, rank: int, rendezvous: str) -> None:
        self._worker = Worker(config, rank, rendezvous)
        self._worker.init_device()
        self._worker.load_model(lambda fraction: None)
        num_blocks = self._worker.determine_num_blocks()
        self._worker.initialize_kv_cache(num_blocks)
        self._scheduler = Scheduler(config, num_blocks, None)
        self.num_cached: dict[str, int] = {}

    def run(self, asked: dict[str, list[int]], max_tokens: int) -> dict[str, list[int]]:
        for request_id, prompt in asked.items():
            sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
            message = EngineCoreRequest(
                request_id=request_id, prompt_token_ids=prompt, sampling=sampling
            )
            self._scheduler.add_request(Request(message))
        tokens: dict[str, list[int]] = {request_id: [] for request_id in asked}
        while self._scheduler.has_unfinished_requests():
            step = self._scheduler.schedule()
            assert step is not None
            result = self._worker.execute_model(step)
            for output in self._scheduler.update_from_output(step, result).outputs:
                tokens[output.request_id] += output.new_token_ids
                if output.num_cached_tokens is not None:
                    self.num_cached[output.request_id] = output.num_cached_tokens
        return tokens

    def close(self) -> None:
        self._scheduler.check_empty()
        self._worker.shutdown()


def greedy(folder: Path, mode: str, rank: int, size: int, rendezvous: str) -> dict[str, list[int]]:
    """Request to NUM_GREEDY tokens."""
    config = EngineConfig(
        engine_id=f"parity-{folder.name}-{mode}-{size}",
        epoch=1,
        model=load_model_config(folder),
        cache=CacheConfig(block_size=16, num_blocks=80),
        parallel=ParallelConfig(tensor_parallel_size=size),
        scheduler=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=MODES[mode],
            enable_chunked_prefill=mode == "chunked",
        ),
    )
    engine = EngineRank(config, rank, rendezvous)
    engine.run({"warm": prompts()[3]}, max_tokens=1)
    asked = {str(index): prompt for index, prompt in enumerate(prompts())}
    tokens = engine.run(asked, NUM_GREEDY)
    for request_id in asked:
        assert engine.num_cached[request_id] == WITH_CACHED_PREFIX.get(request_id, 0)
    engine.close()
    return tokens


def greedy_all(folder: Path, rank: int, size: int, rendezvous: list[str]) -> dict[str, list[int]]:
    """Every family in every mode, each with an address of its own."""
    addresses = iter(rendezvous)
    return {
        f"{checkpoint.name}/{mode}/{request_id}": tokens
        for checkpoint in sorted(folder.iterdir())
        for mode in MODES
        for request_id, tokens in greedy(checkpoint, mode, rank, size, next(addresses)).items()
    }


def main(folder: str, out: str, rank: str, size: str, *rendezvous: str) -> None:
    tokens = greedy_all(Path(folder), int(rank), int(size), list(rendezvous))
    (Path(out) / f"greedy-{rank}.json").write_text(json.dumps(tokens))


if __name__ == "__main__":
    main(*sys.argv[1:])
