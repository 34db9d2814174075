"""One rank of the engine: a device, its shard of the model, its share of the KV cache.

    1. `Worker(config, rank, rendezvous)` does nothing yet
    2. `init_device`            threads, device, groups of ranks
    3. `load_model`             weights of this rank
    4. `determine_num_blocks`   a profiling run says how large the cache may be
    5. `initialize_kv_cache`    with the least of all ranks' answers
    6. `capture_model`          on a GPU: kernels are compiled, CUDA graphs recorded; a kernel that
                                is compiled later is logged. The tokenizer of grammars is awaited
    7. `start_step`             once for each step, on all ranks alike; the next may be started
                                before its result is read
    8. `shutdown`

All ranks run the same code on the same messages and sample the same tokens; of several pipeline
stages only the last one samples, and steps are not recorded as graphs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack, closing

import torch

from engine.config import EngineConfig
from engine.contracts.errors import CannotStartError
from engine.contracts.group_step import GroupStep, Step
from engine.contracts.model_identity import identified
from engine.contracts.outputs import ExpertStats, GrammarStats, ModelRunnerOutput
from engine.explain.start_log import log_choices
from engine.kv_cache.capacity import blocks_that_fit, check_one_sequence_fits
from engine.models.drafts.factory import config_of_draft, create_draft
from engine.models.factory import create_model, create_tower
from engine.models.files.content_digests import FileDigests
from engine.models.files.passing_digests import PassingDigests
from engine.models.loader import load_weights
from engine.parallel.place import ParallelPlace, take_place
from engine.worker.async_output import AsyncOutput
from engine.worker.dummy_steps import step_without_rows
from engine.worker.experts.balancer import ExpertBalancer, create_balancer
from engine.worker.group_runner import GroupRunner
from engine.worker.kv_connector import create_kv_connector
from engine.worker.memory.budget import MemoryBudget
from engine.worker.memory.kv_cache import KVCache, describe_capacity
from engine.worker.memory.out_of_memory import (
    cure_of_full_cache,
    cure_of_graphs,
    cure_of_largest_step,
    cure_of_loading,
    device_memory_error,
    naming_out_of_memory,
)
from engine.worker.memory.profiler import MemoryProfiler
from engine.worker.model_runner import ModelRunner
from engine.worker.rows.adapters import create_adapters
from engine.worker.stage_runner import create_runner
from engine.worker.start.kernel_cache import KernelCache
from engine.worker.start.load_log import LoadLog
from engine.worker.start.prompt_times import measures_prompts, time_prompt_steps
from kv_transfer.base import KVCacheHandle
from kv_transfer.transports.nixl.environment import has_window
from tandem_kernels.compile_guard import CompileGuard
from tandem_kernels.device import enable_pdl

logger = logging.getLogger(__name__)

_CPU_SHARE_OF_FREE_MEMORY = 0.1
_CUDA_RESERVE_BYTES = 2 << 30
"""Room for what the profiling run does not show: the context, loaded kernels, graphs, NCCL."""
_TRANSFER_CONTEXT_BYTES = 600 << 20
"""Each transfer process has a context of its own on the GPU."""


_PRECOMPILE_LIMIT_S, _TOLD_WAIT_S = 120.0, 0.1


class MissingDeviceError(CannotStartError):
    """This host has fewer GPUs than ranks. Names both, and the cure."""


class MissedStepError(RuntimeError):
    """A step message was lost: this rank no longer has the state that the others have."""


class Worker:
    """`rendezvous` is the host:port at which the ranks of one engine meet, `address` this host's
    among them (as in `rendezvous` unless given). `gpu`: index of this rank's GPU among those that
    the process sees; counted from `first_gpu` unless given."""

    runner: ModelRunner
    load_log: LoadLog
    digests: tuple[FileDigests, ...]
    balancer: ExpertBalancer | None
    _device: torch.device
    _cache_memory: torch.Tensor
    _place: ParallelPlace

    def __init__(
        self,
        config: EngineConfig,
        rank: int,
        rendezvous: str,
        *,
        address: str = "",
        gpu: int | None = None,
    ) -> None:
        self.config = config
        self.rank = rank
        self.group = rank // config.parallel.group_size
        self._rendezvous = rendezvous
        self._address = address
        self._gpu = config.device.first_gpu + rank if gpu is None else gpu
        self._layout = config.kv_layout.of_rank(rank)
        self._last_step_id: int | None = None
        self.prompt_steps: list[tuple[int, float]] = []
        """Tokens and seconds of steps of prompts that were timed at the start."""
        self._connector = create_kv_connector(config, rank)
        self._closers = ExitStack()
        """Everything that has been started, to be ended in reverse order."""
        self._closers.callback(self._connector.shutdown)
        self.compile_guard = CompileGuard()
        self.host_s = 0.0
        """Seconds that `start_step` has taken, all steps together, without those in which a step
        with grammars waited for the tokens of the one before."""

    def init_device(self) -> None:
        """Meets the other ranks.

        Raises:
            MissingDeviceError: There is no such GPU.
            ConnectionError: Another rank is.
        """
        torch.set_num_threads(self.config.device.num_threads)
        self._device = _rank_device(self.config, self.rank, self._gpu)
        enable_pdl(self.config.device.allows("pdl"))
        self._place = take_place(
            self.config, self.rank, self._device, self._rendezvous, self._address
        )
        self._closers.callback(self._place.close)

    def load_model(self, report: Callable[[float], None]) -> None:
        """Loads the model; `report` is called with fractions in 0..1, of `load_log.total_bytes`.
        Raises `CheckpointError`, `DeviceMemoryError`.
        """
        config = self.config
        with naming_out_of_memory("loading the model", cure_of_loading(config), self._device):
            model = create_model(config, self._place, self._device)
            adapters = create_adapters(config, model, self._device)
            log = self.load_log = LoadLog(report)
            passing = PassingDigests() if config.parallel.num_ranks == 1 else None
            skipped = load_weights(model, config, log.report, log.start, digests=passing)
            self.digests = passing.complete() if passing is not None else ()
            log.finish(skipped, tells_skipped=self.rank == 0)
            self.balancer = create_balancer(config, self._place, model)
            draft = None
            if config.draft is not None:
                place = self._place.with_fixed_experts
                draft = create_draft(config, place, self._device, model)
                load_weights(draft, config_of_draft(config), lambda fraction: None)
            tower = create_tower(config, self._place, self._device)
            if tower is not None:
                load_weights(tower, config, lambda fraction: None, is_tower=True)
            parts = config, model, self._connector, self._device, draft, tower, adapters
            if config.parallel.data_parallel_size > 1:
                self.runner = GroupRunner(self._place, *parts)
            else:
                self.runner = create_runner(self._place.pp, self._layout, *parts)
        if self.rank == 0:
            log_choices(config, self._device)
        if self._device.type == "cuda":
            waited_s = KernelCache(config).wait(_PRECOMPILE_LIMIT_S)
            if waited_s >= _TOLD_WAIT_S:
                logger.info("waited %.1f s for kernels that are compiled ahead", waited_s)
        self._closers.callback(self.runner.sampler.grammars.close)
        if self._place.pp.is_last:
            self.runner.sampler.grammars.prepare()

    def determine_num_blocks(self) -> int:
        """Returns the number of blocks that this rank has room for.

        Raises:
            KVCacheMemoryError: Fewer than one sequence of `max_model_len` needs.
            DeviceMemoryError: The largest step does not fit beside the model.
        """
        cache = self.config.cache
        budget: MemoryBudget | None = None
        if cache.num_blocks is not None:
            num_blocks = cache.num_blocks
        elif cache.kv_cache_memory_bytes is not None:
            num_blocks = blocks_that_fit(self.config, cache.kv_cache_memory_bytes)
        elif self._device.type == "cpu":
            num_blocks = blocks_that_fit(self.config, self._part_of_host_memory())
        else:
            budget = self._memory_budget()
            logger.info("memory: %s", budget)
            num_blocks = blocks_that_fit(self.config, budget.kv_cache)
        check_one_sequence_fits(self.config, num_blocks, budget)
        return num_blocks

    def identify(self, model_hash: str) -> None:
        """Takes the identity of the model, by which peers and tiers know the cache."""
        self.config = identified(self.config, model_hash)
        self._layout = self.config.kv_layout.of_rank(self.rank)

    def initialize_kv_cache(self, num_blocks: int) -> KVCacheHandle:
        """Allocates the cache; transfer processes map it through the handle. Raises
        `DeviceMemoryError`."""
        config = self.config
        name = f"tandem-{config.engine_id}-kv-{self.rank}"
        cure = cure_of_full_cache(config)
        with naming_out_of_memory("allocating the KV cache", cure, self._device):
            kv_cache = KVCache(self._layout, num_blocks, self._device, name)
        logger.info("KV cache: %s", describe_capacity(config, num_blocks))
        self._closers.callback(kv_cache.close)
        self.runner.use_cache(kv_cache)
        self._cache_memory = kv_cache.memory
        return self._connector.register_kv_cache(self._layout, kv_cache.memory)

    def switch_role(self, config: EngineConfig) -> KVCacheHandle:
        """Becomes a rank of the engine of `config`, which differs in what it exchanges with peers.
        Rows are forgotten; weights, cache and graphs stay. Returns the new way to the cache. No
        step may be in flight."""
        self.config, self._last_step_id = config, None
        if self._device.type == "cuda":
            # Steps that sampled nothing may still be on their way, and mark layers for peers.
            torch.cuda.synchronize(self._device)
        self.runner.execute_model(step_without_rows(self.runner.states)).get_output()
        self._connector.replace(config, self.rank)
        return self._connector.register_kv_cache(self._layout, self._cache_memory)

    def capture_model(self, report: Callable[[str, float], None]) -> None:
        """Captures the graphs; `report` is called with what is done and fractions in 0..1. On the
        CPU there are none. Then nothing is left to do that could delay a step.

        Raises:
            DeviceMemoryError: Graphs do not fit beside the KV cache.
            GraphCaptureError: A step cannot be recorded.
        """
        if self._device.type == "cuda":
            self._capture_graphs(report)
        self.runner.sampler.grammars.wait_until_prepared()
        if self.balancer is not None:
            self.balancer.begin()

    def _capture_graphs(self, report: Callable[[str, float], None]) -> None:
        full = cure_of_full_cache(self.config)
        with naming_out_of_memory("running steps beside the KV cache", full, self._device):
            self.runner.warm_up(lambda fraction: report("compiling kernels", fraction))
        if not self.config.device.enforce_eager and self._place.pp.num_stages == 1:
            # Graphs hold collectives: they must end before the group does.
            self._closers.callback(self.runner.drop_graphs)
            doing = "recording CUDA graphs"
            with naming_out_of_memory(doing, cure_of_graphs(self.config), self._device):
                self.runner.capture_model(lambda fraction: report(doing, fraction))
        if measures_prompts(self.config):
            report("measuring prompts", 0.0)
            self.prompt_steps = time_prompt_steps(self.runner, self.config)
        self.compile_guard.start()
        self._closers.callback(self.compile_guard.stop)

    def execute_model(self, step: Step) -> ModelRunnerOutput:
        """Runs one step and waits for its tokens. Raises like `start_step`."""
        return self.start_step(step).get_output()

    def start_step(self, step: Step) -> AsyncOutput:
        """Starts one step; its tokens are awaited in the result.

        Raises:
            MissedStepError: The step before this one never arrived.
            RowError: The message does not fit this worker's rows.
            DeviceMemoryError: Another has taken what the step needs.
        """
        if self._last_step_id is not None and step.step_id != self._last_step_id + 1:
            raise MissedStepError(
                f"worker {self.rank} expected step {self._last_step_id + 1} and got "
                f"{step.step_id}; the engine must be restarted"
            )
        self._last_step_id = step.step_id
        grammars = self.runner.sampler.grammars
        started = time.perf_counter() - grammars.waited_s
        try:
            if self.balancer is not None:
                self.balancer.before_step(step.step_id)
            if isinstance(step, GroupStep):
                assert isinstance(self.runner, GroupRunner)
                return self.runner.run(step)
            return self.runner.execute_model(step)
        except torch.OutOfMemoryError as error:
            cure = cure_of_full_cache(self.config)
            raise device_memory_error("computing a step", cure, self._device) from error
        finally:
            self.host_s += time.perf_counter() - grammars.waited_s - started

    def load_adapter(self, digest: str, path: str) -> None:
        """Reads an adapter into host memory. May run beside steps, in another thread. Raises
        `AdapterError`."""
        self.runner.adapters.load(digest, path)

    def drop_adapter(self, digest: str) -> None:
        """Forgets an adapter. It comes in order with the steps."""
        self.runner.adapters.drop(digest)

    @property
    def device_name(self) -> str:
        """Returns the GPU's name; empty: there is none."""
        is_gpu = self._device.type == "cuda"
        return str(torch.cuda.get_device_name(self._device)) if is_gpu else ""

    @property
    def grammar_stats(self) -> GrammarStats:
        """Returns what grammars have cost this rank."""
        return self.runner.sampler.grammars.stats

    @property
    def expert_stats(self) -> ExpertStats | None:
        """Returns how evenly experts were chosen; None: they stay where they are."""
        return None if self.balancer is None else self.balancer.stats

    def shutdown(self) -> None:
        """Gives everything back. Idempotent."""
        self._closers.close()

    def _part_of_host_memory(self) -> int:
        """Returns this rank's bytes for the cache on the CPU: a node's ranks share one host."""
        memory = MemoryProfiler(self._device)
        free = memory.available() - memory.peak_growth(self._profile_run)
        ranks = self.config.parallel.num_ranks
        return int(max(0, free) * _CPU_SHARE_OF_FREE_MEMORY / ranks)

    def _memory_budget(self) -> MemoryBudget:
        memory = MemoryProfiler(self._device)
        memory.give_back()
        free, held = memory.available(), memory.in_use()
        cure = cure_of_largest_step(self.config)
        with naming_out_of_memory("running the largest step", cure, self._device):
            step = memory.peak_growth(self._profile_run)
        return MemoryBudget(
            total=memory.total(),
            share=self.config.cache.gpu_memory_utilization,
            free=free,
            held=held,
            step=step,
            reserve=_cuda_reserve(self.config) + int(step * self.runner.share_of_graphs),
        )

    def _profile_run(self) -> None:
        """Runs the largest step there can be, over a cache of one block."""
        with closing(KVCache(self._layout, 1, self._device)) as profile_cache:
            self.runner.use_cache(profile_cache)
            self.runner.dummy_run(self.config.scheduler.max_num_batched_tokens)


def _cuda_reserve(config: EngineConfig) -> int:
    """Returns what of a GPU's memory is for others than the profiling run shows."""
    transfer = config.kv_transfer
    if transfer is None:
        return _CUDA_RESERVE_BYTES
    windows = transfer.nixl_window_bytes if has_window(transfer) else 0
    return _CUDA_RESERVE_BYTES + transfer.num_processes * _TRANSFER_CONTEXT_BYTES + windows


def _rank_device(config: EngineConfig, rank: int, index: int) -> torch.device:
    if config.device.device == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if index >= count:
        raise MissingDeviceError(
            f"rank {rank} needs CUDA device {index}, but this host shows {count}; "
            "lower tensor_parallel_size or first_gpu, or use device cpu"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device
