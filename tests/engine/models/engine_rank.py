"""One tensor-parallel rank of a whole engine, scheduler and worker, without the processes between.

    python -m tests.engine.models.engine_rank FOLDER OUT RANK SIZE RENDEZVOUS...

Every rank runs the same scheduler on the tokens that its own worker sampled, so ranks that
disagree in one token part ways and it shows. Writes OUT/greedy-RANK.json: "family/mode/request"
to tokens and log probabilities.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engine.config import (
    CacheConfig,
    Device,
    DeviceConfig,
    EngineConfig,
    ParallelConfig,
    SchedulerConfig,
)
from engine.contracts.messages import EngineCoreRequest
from engine.contracts.outputs import SchedulerStats
from engine.contracts.request import Request
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from engine.models.checkpoint import load_model_config
from engine.sched.scheduler import Scheduler
from engine.worker.worker import Worker
from kv_transfer.connectors.no_connector import NoConnectorScheduler
from tests.engine.models.parity_cases import (
    NUM_CROSSING,
    NUM_GREEDY,
    REPLICATED_VARIANTS,
    prompts,
)

MODES = {"whole": 1024, "chunked": 24}
"""Mode to tokens in one step at most."""
MODES_OF_SIZE = {1: ("whole", "chunked"), 2: ("chunked",)}
"""Modes by tensor-parallel size: how prompts are cut is the scheduler's matter, which is
the same.
"""
IN_FULL = "chunked", 1
"""Mode and size whose answers are of NUM_GREEDY tokens, and of NUM_CROSSING elsewhere: decodes come
to the same code, whoever filled the cache, and by the first token read all of it."""
WITH_CACHED_PREFIX = {"3": 64, "4": 32}
"""Request to tokens that it takes from the prefix cache. Request i is prompt i of `prompts()`; a
request that warms the cache runs before all of them."""


WITH_KEPT_STATE = {"3": 64}
"""The same where layers keep states: behind the last full block of each prompt that may be cut
there."""
NUM_TOP = 3
"""Log probabilities of the prompts are asked for in a run of their own."""


@dataclass
class Found:
    """Holds the answer of one request. `logprobs`, `prompt_logprobs`: (token ids, log
    probabilities, rank) of each token, of the prompt all but the first.
    """

    tokens: list[int] = field(default_factory=list)
    prompt_logprobs: list[tuple[list[int], list[float], int]] = field(default_factory=list)
    logprobs: list[tuple[list[int], list[float], int]] = field(default_factory=list)


class EngineRank:
    """`run` adds requests and steps until all have ended."""

    def __init__(self, config: EngineConfig, rank: int, rendezvous: str) -> None:
        self.worker = Worker(config, rank, rendezvous)
        self.worker.init_device()
        self.worker.load_model(lambda fraction: None)
        num_blocks = self.worker.determine_num_blocks()
        self.worker.initialize_kv_cache(num_blocks)
        self.worker.capture_model(lambda stage, fraction: None)
        self._scheduler = Scheduler(config, num_blocks, NoConnectorScheduler())
        self.num_cached: dict[str, int] = {}

    @property
    def stats(self) -> SchedulerStats:
        return self._scheduler.stats()

    def run(
        self,
        asked: dict[str, list[int]],
        max_tokens: int,
        prompt_logprobs: int | None = None,
        logprobs: int | None = None,
    ) -> dict[str, Found]:
        for request_id, prompt in asked.items():
            sampling = SamplingParams(
                temperature=0.0,
                max_tokens=max_tokens,
                ignore_eos=True,
                prompt_logprobs=prompt_logprobs,
                logprobs=logprobs,
            )
            message = EngineCoreRequest(request_id=request_id, spec=RequestSpec(prompt, sampling))
            self._scheduler.add_request(Request(message))
        found = {request_id: Found() for request_id in asked}
        while self._scheduler.has_unfinished_requests():
            step = self._scheduler.schedule()
            assert step is not None
            result = self.worker.execute_model(step)
            for output in self._scheduler.update_from_output(step, result).outputs:
                of_request = found[output.request_id]
                of_request.tokens += output.new_token_ids
                of_request.logprobs += [
                    (token.token_ids, token.logprobs, token.rank) for token in output.logprobs or ()
                ]
                if (part := output.prompt_logprobs) is not None:
                    assert part.first_position == 1 + len(of_request.prompt_logprobs)
                    assert not of_request.tokens
                    of_request.prompt_logprobs += [
                        (token.token_ids, token.logprobs, token.rank) for token in part.unpack()
                    ]
                if output.num_cached_tokens is not None:
                    self.num_cached[output.request_id] = output.num_cached_tokens
        return found

    def close(self) -> None:
        self._scheduler.check_empty()
        self.worker.shutdown()


def greedy(
    folder: Path,
    mode: str,
    rank: int,
    size: int,
    rendezvous: str,
    device: Device = "cpu",
    num_tokens: int = NUM_GREEDY,
) -> dict[str, Found]:
    """Maps each request to `num_tokens` tokens and to log probabilities of its prompt."""
    config = EngineConfig(
        engine_id=f"parity-{folder.name}-{mode}-{size}",
        epoch=1,
        model=load_model_config(folder),
        cache=CacheConfig(block_size=16, num_blocks=160),
        parallel=ParallelConfig(tensor_parallel_size=size),
        scheduler=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=MODES[mode],
            enable_chunked_prefill=mode == "chunked",
        ),
        device=DeviceConfig(device=device),
    )
    engine = EngineRank(config, rank, rendezvous)
    engine.run({"warm": prompts()[3]}, max_tokens=1)
    asked = {str(index): prompt for index, prompt in enumerate(prompts())}
    found = engine.run(asked, num_tokens)
    groups = config.kv_layout.groups
    has_states = any(group.is_state for group in groups)
    # Blocks of rows that stand for several tokens are longer than these prompts.
    has_rows = any(group.compress_ratio > 1 for group in groups)
    cached = {} if has_rows else WITH_CACHED_PREFIX
    if has_states:
        cached = WITH_KEPT_STATE if mode == "chunked" else {}
    for request_id in asked:
        assert engine.num_cached[request_id] == cached.get(request_id, 0)
    # The cache knows all of these prompts now, and must not be asked.
    for request_id, scored in engine.run(asked, 1, NUM_TOP).items():
        assert engine.num_cached[request_id] == 0
        assert scored.tokens == found[request_id].tokens[:1]
        found[request_id].prompt_logprobs = scored.prompt_logprobs
    engine.close()
    return found


def greedy_all(folder: Path, rank: int, size: int, rendezvous: list[str]) -> dict[str, Any]:
    """Runs every family in every mode of its size, each with an address of its own."""
    addresses, answers = iter(rendezvous), {}
    for checkpoint in sorted(folder.iterdir()):
        for mode in modes_of(checkpoint.name, size):
            place, count = (rank, size, next(addresses)), num_tokens(mode, size)
            found = greedy(checkpoint, mode, *place, num_tokens=count)
            answers |= {f"{checkpoint.name}/{mode}/{i}": asdict(one) for i, one in found.items()}
    return answers


def num_tokens(mode: str, size: int) -> int:
    """Returns the tokens of each answer in a mode on so many ranks."""
    return NUM_GREEDY if (mode, size) == IN_FULL else NUM_CROSSING


def modes_of(family: str, size: int) -> tuple[str, ...]:
    """Returns the modes in which a family runs on so many ranks."""
    if family in REPLICATED_VARIANTS:
        return ("chunked",) if size == 1 else ()
    return MODES_OF_SIZE[size]


def main(folder: str, out: str, rank: str, size: str, *rendezvous: str) -> None:
    found = greedy_all(Path(folder), int(rank), int(size), list(rendezvous))
    (Path(out) / f"greedy-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
