"""A tiny random Llama, engines around it, and what must be gone after them."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Any

from engine.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from engine.contracts.messages import EngineCoreRequest
from engine.contracts.outputs import SchedulerStats
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from engine.core.core import EngineCore
from engine.executor.uniproc_executor import UniprocExecutor
from engine.frontend.async_llm import AsyncLLM
from engine.frontend.input_processor import GenerationRequest
from tests.awaited import until as until
from tests.engine.tiny_model import tiny_model

VOCAB = 211
MAX_LEN = 96
NUM_BLOCKS = 96
MAX_NUM_SEQS = 12
TIMEOUT_S = 60

SIZES = {"vocab_size": VOCAB, "max_model_len": MAX_LEN}
TINY = tiny_model(**SIZES)


def tiny_config(tp_size: int = 1, *, async_scheduling: bool = False, **model: Any) -> EngineConfig:
    return EngineConfig(
        engine_id=f"tiny-{secrets.token_hex(4)}",
        epoch=secrets.randbits(63),
        model=tiny_model(**{**SIZES, **model}),
        cache=CacheConfig(block_size=8, num_blocks=NUM_BLOCKS),
        parallel=ParallelConfig(tensor_parallel_size=tp_size),
        scheduler=SchedulerConfig(
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=64,
            async_scheduling=async_scheduling,
        ),
    )


def make_request(request_id: str, seed: int, **sampling: Any) -> GenerationRequest:
    """Prompts differ in length and content by `seed`; odd seeds are sampled, even ones greedy."""
    prompt = [1 + (seed * 31 + i * 7) % (VOCAB - 1) for i in range(1 + seed * 5 % 40)]
    settings: dict[str, Any] = {
        "max_tokens": 8 + seed % 24,
        "temperature": 0.8 * (seed % 2),
        "seed": seed,
        "ignore_eos": True,
    }
    return GenerationRequest(
        request_id, RequestSpec(prompt, SamplingParams(**{**settings, **sampling}))
    )


class Oracle:
    """The same engine in this process, one request at a time."""

    def __init__(self) -> None:
        executor = UniprocExecutor(tiny_config())
        self._executor = executor
        self._core = EngineCore(tiny_config(), executor, lambda stage, fraction, total=0: None)
        self._known: dict[int, list[int]] = {}

    def tokens(self, seed: int) -> list[int]:
        """Returns the tokens of `make_request(..., seed)`."""
        if seed not in self._known:
            request = make_request(f"oracle-{seed}", seed)
            self._core.handle(EngineCoreRequest(request_id=request.request_id, spec=request.spec))
            found: list[int] = []
            self._core.step()
            while not self._core.is_idle:
                for output in self._core.step().outputs:
                    found += output.new_token_ids
            self._core.check_empty()
            self._known[seed] = found
        return self._known[seed]

    def close(self) -> None:
        self._core.shutdown()
        self._executor.shutdown()
        self._executor.shutdown()


async def until_empty(llm: AsyncLLM) -> None:
    """Waits until no block is held (the cache could not be reset otherwise), no row, no request."""
    deadline = time.monotonic() + TIMEOUT_S
    while not await llm.reset_prefix_cache():
        assert time.monotonic() < deadline, f"blocks are still held: {llm.stats}"
        await asyncio.sleep(0.01)
    await until(lambda: _is_empty(llm.stats), f"an empty engine, it has {llm.stats}")


def _is_empty(stats: SchedulerStats) -> bool:
    return (
        stats.num_total_blocks == NUM_BLOCKS
        and stats.num_free_blocks == NUM_BLOCKS
        and stats.num_free_rows == MAX_NUM_SEQS
        and not (stats.num_running or stats.num_waiting or stats.num_waiting_tokens)
        and not stats.num_delayed_frees
    )
