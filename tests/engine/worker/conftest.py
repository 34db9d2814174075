"""A tiny random Llama, and a driver that writes step messages by hand."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from engine.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from engine.contracts.outputs import ModelRunnerOutput, TokenLogprobs
from engine.contracts.sampling_params import SamplingParams
from engine.contracts.scheduler_output import NewRequestData, SchedulerOutput
from engine.models.factory import create_model
from engine.models.loader import load_weights
from engine.worker.kv_connector import KVConnector
from engine.worker.memory.kv_cache import KVCache
from engine.worker.model_runner import ModelRunner
from kv_transfer.connectors.no_connector import NoConnectorWorker
from kv_transfer.metadata import KVConnectorMetadata
from tests.engine.tiny_model import place_alone, tiny_model
from tests.engine.worker.gpu_workers import write_small_weights
from tests.engine.worker.one_engine import OneEngine, check_empty, workload

BLOCK_SIZE = 8
MAX_LEN = 96
ROWS = 6
NUM_BLOCKS = 64
VOCAB = 211
GREEDY = SamplingParams(temperature=0.0, max_tokens=64)

TINY = tiny_model(vocab_size=VOCAB, num_layers=3, max_model_len=MAX_LEN, load_format="safetensors")


def tiny_config(folder: Path, tp_size: int = 1, **cache: Any) -> EngineConfig:
    return EngineConfig(
        engine_id=f"tiny-{os.getpid()}",
        epoch=1,
        model=replace(TINY, path=str(folder)),
        cache=replace(CacheConfig(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS), **cache),
        parallel=ParallelConfig(tensor_parallel_size=tp_size),
        scheduler=SchedulerConfig(max_num_seqs=ROWS, max_num_batched_tokens=160),
    )


class StepDriver:
    """Plays the scheduler: blocks are given out in falling order, so none lies where a slip in a
    block table would still find it. `tokens[name]` are a request's known tokens."""

    def __init__(self, execute: Callable[[SchedulerOutput], ModelRunnerOutput]) -> None:
        self._execute = execute
        self._free_blocks = list(range(NUM_BLOCKS))
        self._step_id = 0
        self._epochs = [0] * ROWS
        self._pending = SchedulerOutput(step_id=0)
        self.rows: dict[str, int] = {}
        self.epochs: dict[str, int] = {}
        self.tokens: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.blocks: dict[str, list[int]] = {}
        self.decoding: set[str] = set()
        self.last = ModelRunnerOutput(0, [], [], [])

    def add(
        self,
        name: str,
        row: int,
        tokens: list[int],
        sampling: SamplingParams = GREEDY,
        *,
        prompt_len: int | None = None,
        computed: int = 0,
        blocks: list[int] | None = None,
        eos: tuple[int, ...] = (),
        sibling_seeds: tuple[int, ...] = (),
    ) -> None:
        """Adds a request, which enters with the next step. `blocks` hold `computed` tokens
        already.
        """
        self._epochs[row] += 1
        self.rows[name], self.epochs[name] = row, self._epochs[row]
        self.tokens[name], self.computed[name] = list(tokens), computed
        self.blocks[name] = list(blocks or [])
        self._grow(name, computed + 1)
        self._pending.new_reqs.append(
            NewRequestData(
                row=row,
                epoch=self._epochs[row],
                prompt_len=len(tokens) if prompt_len is None else prompt_len,
                prefill_token_ids=np.array(tokens, "<i4").tobytes(),
                num_computed_tokens=computed,
                block_ids=list(self.blocks[name]),
                max_len=MAX_LEN,
                sampling=sampling,
                eos_token_ids=eos,
                sibling_seeds=sibling_seeds,
            )
        )

    def fork(
        self, name: str, row: int, parent: str, first_token: int, sampling: SamplingParams
    ) -> None:
        """Adds an answer to the prompt of `parent`, which has computed it: full blocks are shared,
        and the last one is copied if it is partial."""
        num_tokens = self.computed[parent]
        blocks = self.blocks[parent][: -(-num_tokens // BLOCK_SIZE)]
        if num_tokens % BLOCK_SIZE:
            self._pending.block_copies.append((blocks[-1], self._free_blocks.pop()))
            blocks[-1] = self._pending.block_copies[-1][1]
        tokens = [*self.tokens[parent][:num_tokens], first_token]
        self.add(
            name, row, tokens, sampling, prompt_len=num_tokens, computed=num_tokens, blocks=blocks
        )

    def remove(self, name: str, keep_blocks: bool = False) -> list[int]:
        """Removes a finished or preempted request with the next step. Returns its blocks."""
        self._pending.finished_rows.append(self.rows.pop(name))
        self.decoding.discard(name)
        blocks = self.blocks.pop(name)
        if not keep_blocks:
            self._free_blocks.extend(blocks)
        return blocks

    def pause(self, name: str) -> None:
        """Leaves the decode set with the next step, and stays in its row."""
        self._pending.decode_remove.append(self.rows[name])
        self.decoding.remove(name)

    def step(
        self, chunks: dict[str, int] | None = None, kv: KVConnectorMetadata | None = None
    ) -> dict[str, int]:
        """Computes `chunks` and one token of each decoding request; returns sampled tokens.
        Requests that are completely computed start to decode with this step."""
        chunks = chunks or {}
        for name, row in self.rows.items():
            left = len(self.tokens[name]) - self.computed[name]
            if name not in chunks and name not in self.decoding and left == 1:
                self._pending.decode_add.append(row)
                self.decoding.add(name)
        computing = {**chunks, **dict.fromkeys(self.decoding, 1)}
        for name, count in computing.items():
            self._append_blocks(name, self.computed[name] + count)
        return self._run(computing, list(chunks.items()), kv)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def _run(
        self,
        computing: dict[str, int],
        chunks: list[tuple[str, int]],
        kv: KVConnectorMetadata | None,
    ) -> dict[str, int]:
        self._step_id += 1
        pending, self._pending = self._pending, SchedulerOutput(step_id=0)
        pending.step_id, pending.kv = self._step_id, kv
        pending.prefill_chunks = [(self.rows[name], count) for name, count in chunks]
        self.last = output = self._execute(pending)
        assert output.step_id == self._step_id
        owners = {(row, self.epochs[name]): name for name, row in self.rows.items()}
        result = zip(output.rows, output.epochs, output.token_ids, strict=True)
        sampled = {owners[row, epoch]: token for row, epoch, token in result}
        for name, count in computing.items():
            self.computed[name] += count
            completes = self.computed[name] == len(self.tokens[name])
            assert (name in sampled) == completes
            if completes:
                self.tokens[name].append(sampled[name])
        return sampled

    def _append_blocks(self, name: str, num_tokens: int) -> None:
        grown = self._grow(name, num_tokens)
        if grown:
            self._pending.new_block_ids.append((self.rows[name], grown))

    def _grow(self, name: str, num_tokens: int) -> list[int]:
        missing = -(-num_tokens // BLOCK_SIZE) - len(self.blocks[name])
        grown = [self._free_blocks.pop() for _ in range(missing)]
        self.blocks[name].extend(grown)
        return grown


def write_weights(folder: Path) -> None:
    """Writes random weights, large enough that greedy tokens vary from position to position."""
    model = create_model(tiny_config(folder), place_alone(TINY), torch.device("cpu"))
    generator = torch.Generator().manual_seed(20)
    tensors = {}
    for weight in model.checkpoint_weights():
        noise = torch.randn(weight.shape, generator=generator)
        tensors[weight.name] = 1.0 + 0.1 * noise if len(weight.shape) == 1 else 0.3 * noise
    save_file(tensors, folder / "model.safetensors")


def generated_and_scored(
    driver: StepDriver, prompt: list[int], chunks: list[int]
) -> tuple[list[TokenLogprobs], list[TokenLogprobs]]:
    """Returns log probabilities of output, and those of the same tokens as the end of a prompt."""
    num_output = sum(chunks) - len(prompt)
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=2, max_tokens=64)
    driver.add("writer", 3, prompt, sampling)
    driver.step({"writer": len(prompt)})
    generated = [driver.last.logprobs_by_row()[3][0]]
    for _ in range(num_output - 1):
        driver.step()
        generated.append(driver.last.logprobs_by_row()[3][0])
    text = driver.tokens["writer"][: sum(chunks)]
    driver.add("beside", 0, prompt[:9])
    scoring = SamplingParams(temperature=0.0, prompt_logprobs=2, max_tokens=64)
    driver.add("reader", 1, text, scoring)
    scored: list[TokenLogprobs] = []
    for index, chunk in enumerate(chunks):
        driver.step({"beside": 9, "reader": chunk} if index == 0 else {"reader": chunk})
        for part in driver.last.prompt_logprobs:
            assert (part.row, part.epoch) == (1, driver.epochs["reader"])
            assert part.logprobs.first_position == 1 + len(scored)
            scored += part.logprobs.unpack()
    assert len(scored) == len(text) - 1
    driver.step()
    assert driver.last.prompt_logprobs == []
    return generated, scored[len(prompt) - 1 :]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the weights of the tiny model."""
    folder = tmp_path_factory.mktemp("tiny")
    write_weights(folder)
    return folder


@pytest.fixture(scope="session")
def small_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the weights of the model of `gpu_workers`."""
    folder = tmp_path_factory.mktemp("small")
    write_small_weights(folder)
    return folder


@pytest.fixture(scope="session")
def ended_alone(checkpoint: Path) -> Callable[[int], OneEngine]:
    """Returns an engine that had one request of `workload(seed)` after another."""

    @cache
    def run(seed: int) -> OneEngine:
        alone = OneEngine(tiny_config(checkpoint, enable_prefix_caching=False), depth=1)
        for request in workload(seed):
            alone.add(request)
            alone.finish()
        assert set(alone.ended.values()) == {"stop", "length"}
        check_empty(alone)
        return alone

    return run


@pytest.fixture
def make_config(checkpoint: Path) -> Callable[..., EngineConfig]:
    """Takes `tp_size` and fields of `CacheConfig`."""
    return partial(tiny_config, checkpoint)


@pytest.fixture
def make_driver() -> type[StepDriver]:
    return StepDriver


@pytest.fixture
def make_scores() -> Callable[..., tuple[list[TokenLogprobs], list[TokenLogprobs]]]:
    return generated_and_scored


@pytest.fixture
def make_prompt() -> Callable[[int, int], list[int]]:
    """Makes token ids from (length, seed)."""

    def make(length: int, seed: int) -> list[int]:
        prompt: list[int] = np.random.default_rng(seed).integers(0, VOCAB, length).tolist()
        return prompt

    return make


@pytest.fixture
def make_runner(checkpoint: Path) -> Iterator[Callable[..., ModelRunner]]:
    """Runners over caches of their own; takes a connector and fields of `DeviceConfig`."""
    with ExitStack() as closers:

        def make(connector: KVConnector | None = None, **device: Any) -> ModelRunner:
            config, cpu = tiny_config(checkpoint), torch.device("cpu")
            config = replace(config, device=replace(config.device, **device))
            model = create_model(config, place_alone(config.model), cpu)
            load_weights(model, config, lambda fraction: None)
            runner = ModelRunner(config, model, connector or KVConnector(NoConnectorWorker(0)), cpu)
            kv_cache = closers.enter_context(closing(KVCache(config.kv_layout, NUM_BLOCKS, cpu)))
            runner.kv_caches, runner.kv_pages = kv_cache.layers, kv_cache.pages
            return runner

        yield make


@pytest.fixture
def runner(make_runner: Callable[..., ModelRunner]) -> ModelRunner:
    return make_runner()


@pytest.fixture
def driver(runner: ModelRunner) -> StepDriver:
    return StepDriver(lambda step: runner.execute_model(step).get_output())
