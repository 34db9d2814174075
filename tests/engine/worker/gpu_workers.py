"""Workers on a CUDA device with a small model, and what is asked of them in several files."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import get_args

import msgspec
import torch
from safetensors.torch import save_file

from engine.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    SchedulerConfig,
)
from engine.contracts.messages import EngineCoreRequest
from engine.contracts.outputs import TokenLogprobs
from engine.contracts.request import Request
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from engine.contracts.scheduler_output import SchedulerOutput
from engine.fast_paths import FastPath
from engine.models.factory import create_model
from engine.sched.scheduler import Scheduler
from engine.worker.async_output import AsyncOutput
from engine.worker.worker import Worker
from kv_transfer.connectors.no_connector import NoConnectorScheduler
from tests.engine.tiny_model import place_alone, tiny_model

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(seed=5, temperature=0.9, top_p=0.95, ignore_eos=True)
FILTERED = SamplingParams(
    seed=8, temperature=1.2, top_k=12, min_p=0.02, ignore_eos=True, prompt_logprobs=3
)
PENALISED = SamplingParams(
    seed=6,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    min_tokens=8,
    logit_bias={3: 2.0},
    logprobs=3,
    ignore_eos=True,
    allowed_token_ids=tuple(range(0, 200, 3)),
    bad_words=((6,), (3, 3), (3, 9), (9, 12, 15)),
)
KINDS = [GREEDY, SEEDED, FILTERED, PENALISED]
ROWS = 6
ALL_FAST_PATHS: tuple[FastPath, ...] = get_args(FastPath)

MODEL = tiny_model(
    served_model_name="small",
    hidden_size=256,
    intermediate_size=512,
    num_layers=3,
    num_heads=8,
    head_dim=64,
    load_format="safetensors",
    model_hash="small",
)


def write_small_weights(folder: Path) -> None:
    config = small_config(folder, "cpu")
    model = create_model(config, place_alone(config.model), torch.device("cpu"))
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for weight in model.checkpoint_weights():
        noise = torch.randn(weight.shape, generator=generator)
        tensors[weight.name] = 1.0 + 0.1 * noise if len(weight.shape) == 1 else 0.1 * noise
    save_file(tensors, folder / "model.safetensors")


def small_config(folder: Path, device: str = "cuda", **changes: object) -> EngineConfig:
    dtype = changes.pop("dtype", "float32")
    depth = changes.pop("async_scheduling", False)
    num_blocks = changes.pop("num_blocks", 64)
    return EngineConfig(
        engine_id=f"gpu-{os.getpid()}",
        epoch=1,
        model=replace(MODEL, path=str(folder), dtype=dtype),
        cache=CacheConfig(block_size=8, num_blocks=num_blocks, enable_prefix_caching=False),
        scheduler=SchedulerConfig(
            max_num_seqs=ROWS, max_num_batched_tokens=160, async_scheduling=depth
        ),
        device=DeviceConfig(device=device, **changes),
    )


@contextmanager
def started(config: EngineConfig) -> Iterator[Worker]:
    worker = Worker(config, rank=0, rendezvous="")
    try:
        worker.init_device()
        worker.load_model(lambda fraction: None)
        worker.initialize_kv_cache(worker.determine_num_blocks())
        worker.capture_model(lambda stage, fraction: None)
        yield worker
    finally:
        worker.shutdown()


def conversation(driver, make_prompt) -> dict[str, list[int]]:
    """Prompts, chunks and decodes of all kinds of sampling; rows come and go."""
    lengths = {"a": 5, "b": 40, "c": 8, "d": 1}
    for row, (name, length) in enumerate(lengths.items()):
        driver.add(name, ROWS - 1 - row, make_prompt(length, length), KINDS[row], eos=(7,))
    driver.step({"a": 5, "b": 17})
    driver.step({"c": 3, "b": 1})
    driver.step({"c": 5, "b": 21})
    driver.step({"b": 1})
    driver.run(9)
    driver.remove("b")
    driver.add("e", 0, make_prompt(23, 9), SEEDED, eos=(7,))
    driver.step({"e": 23})
    driver.run(9)
    driver.remove("d")
    driver.remove("c")
    driver.run(9)
    return dict(driver.tokens)


class SchedulerAndWorker:
    """Up to `depth` steps are on their way; results are read when no more fits."""

    def __init__(
        self,
        config: EngineConfig,
        start_step: Callable[[SchedulerOutput], AsyncOutput],
        depth: int,
    ) -> None:
        self.scheduler = Scheduler(config, config.cache.num_blocks or 0, NoConnectorScheduler())
        self._start_step = start_step
        self._depth = depth
        self._in_flight: deque = deque()
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[TokenLogprobs]] = {}

    def run(self, requests: list[EngineCoreRequest]) -> None:
        for request in requests:
            self.tokens[request.request_id] = []
            self.logprobs[request.request_id] = []
            self.scheduler.add_request(Request(request))
        while self.scheduler.has_unfinished_requests() or self._in_flight:
            while len(self._in_flight) < self._depth:
                step = self.scheduler.schedule()
                if step is None:
                    break
                self._in_flight.append((step, self._start_step(step)))
            if self._in_flight:
                step, output = self._in_flight.popleft()
                for ended in self.scheduler.update_from_output(step, output.get_output()).outputs:
                    self.tokens[ended.request_id] += ended.new_token_ids
                    self.logprobs[ended.request_id] += ended.logprobs or []


def mixed_requests(make_prompt) -> list[EngineCoreRequest]:
    """Makes all kinds of sampling; too many and too long for a small cache."""
    return [
        EngineCoreRequest(
            request_id=str(i),
            spec=RequestSpec(
                make_prompt(3 + 7 * i % 50, i),
                msgspec.structs.replace(KINDS[i % 4], max_tokens=10 + 3 * i % 30),
            ),
        )
        for i in range(14)
    ]
