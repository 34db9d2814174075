"""One rank of the engine: a device, its shard of the model, its share of the KV cache.

    1. `Worker(config, rank, rendezvous)` does nothing yet
    2. `init_device`            threads, device, tensor-parallel group
    3. `load_model`             weights of this rank
    4. `determine_num_blocks`   a profiling run says how large the cache may be
    5. `initialize_kv_cache`    with the least of all ranks' answers
    6. `capture_model`          on a GPU: kernels are compiled, CUDA graphs recorded; a kernel that
                                is compiled later is logged
    7. `start_step`             once for each step, on all ranks alike; the next may be started
                                before its result is read
    8. `shutdown`

All ranks run the same code on the same messages and sample the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing

import torch

from engine.config import EngineConfig
from engine.distributed import TensorParallelGroup
from engine.models.loader import load_weights
from engine.models.registry import create_model
from engine.outputs import ModelRunnerOutput
from engine.sched.output import SchedulerOutput
from engine.worker.async_output import AsyncOutput
from engine.worker.kv_cache import (
    KVCache,
    blocks_that_fit,
    check_one_sequence_fits,
    kv_cache_spec,
)
from engine.worker.kv_connector import create_kv_connector
from engine.worker.memory import MemoryProfiler
from engine.worker.model_runner import ModelRunner
from kv_transfer.base import KVCacheHandle
from tandem_kernels.compile_guard import CompileGuard
from tandem_kernels.device import chain_launches

_CPU_SHARE_OF_FREE_MEMORY = 0.1
_CUDA_RESERVE_BYTES = 2 << 30
"""For what the profiling run does not show: the context, loaded kernels, graphs, NCCL."""
_TRANSFER_CONTEXT_BYTES = 600 << 20
"""Each transfer process has a context of its own on the GPU."""


class MissedStepError(RuntimeError):
    """A step message was lost: this rank no longer has the state that the others have."""


class Worker:
    """`rendezvous` is the host:port at which the ranks of one engine meet, `address` this host's
    among them (as in `rendezvous` unless given). `gpu`: index of this rank's GPU among those that
    the process sees; counted from `first_gpu` unless given."""

    runner: ModelRunner
    _device: torch.device
    _tp: TensorParallelGroup

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
        self._rendezvous = rendezvous
        self._address = address
        self._gpu = config.device.first_gpu + rank if gpu is None else gpu
        self._last_step_id: int | None = None
        self._connector = create_kv_connector(config, rank)
        self._closers = ExitStack()
        """What has been started, to be ended in reverse order."""
        self._closers.callback(self._connector.shutdown)
        self.compile_guard = CompileGuard()

    def init_device(self) -> None:
        """Meets the other ranks.

        Raises:
            RuntimeError: The device is missing.
            ConnectionError: Another rank is.
        """
        torch.set_num_threads(self.config.device.num_threads)
        self._device = _rank_device(self.config, self.rank, self._gpu)
        chain_launches(self.config.device.allows("chained-launches"))
        self._tp = TensorParallelGroup(
            self.rank,
            self.config.parallel.tensor_parallel_size,
            self._device,
            self._rendezvous,
            address=self._address,
        )
        self._closers.callback(self._tp.close)

    def load_model(self, report: Callable[[float], None]) -> None:
        """`report` hears fractions in 0..1. Raises `CheckpointError`."""
        model = create_model(self.config, self._tp, self._device)
        load_weights(model, self.config, report)
        self.runner = ModelRunner(self.config, model, self._connector, self._device)

    def determine_num_blocks(self) -> int:
        """Blocks that this rank has room for.

        Raises:
            KVCacheMemoryError: Fewer than one sequence of `max_model_len` needs.
        """
        num_blocks = self.config.cache.num_blocks
        if num_blocks is None:
            num_blocks = blocks_that_fit(self.config, self._kv_cache_budget())
        check_one_sequence_fits(self.config, num_blocks)
        return num_blocks

    def initialize_kv_cache(self, num_blocks: int) -> KVCacheHandle:
        """Allocates the cache; transfer processes map it through the handle."""
        name = f"tandem-{self.config.engine_id}-kv-{self.rank}"
        kv_cache = KVCache(kv_cache_spec(self.config), num_blocks, self._device, name)
        self._closers.callback(kv_cache.close)
        self.runner.kv_caches = kv_cache.layers
        handle = self._connector.register_kv_caches(kv_cache.layers)
        return handle if handle is not None else kv_cache.handle(self.rank)

    def capture_model(self, report: Callable[[str, float], None]) -> None:
        """`report` hears what is done and fractions in 0..1. Nothing to do on the CPU."""
        if self._device.type == "cpu":
            return
        self.runner.warm_up(lambda fraction: report("compiling kernels", fraction))
        if not self.config.device.enforce_eager:
            # Graphs hold collectives: they must end before the group does.
            self._closers.callback(self.runner.drop_graphs)
            self.runner.capture_model(lambda fraction: report("recording CUDA graphs", fraction))
        self.compile_guard.start()
        self._closers.callback(self.compile_guard.stop)

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Runs one step and waits for its tokens. Raises like `start_step`."""
        return self.start_step(step).get_output()

    def start_step(self, step: SchedulerOutput) -> AsyncOutput:
        """Starts one step; its tokens are awaited in the result.

        Raises:
            MissedStepError: The step before this one never arrived.
            RowError: The message does not fit this worker's rows.
        """
        if self._last_step_id is not None and step.step_id != self._last_step_id + 1:
            raise MissedStepError(
                f"worker {self.rank} expected step {self._last_step_id + 1} and got "
                f"{step.step_id}; the engine must be restarted"
            )
        self._last_step_id = step.step_id
        return self.runner.execute_model(step)

    def shutdown(self) -> None:
        """Gives everything back. Idempotent."""
        self._closers.close()

    def _kv_cache_budget(self) -> int:
        """Bytes for this rank's cache."""
        cache = self.config.cache
        if cache.kv_cache_memory_bytes is not None:
            return cache.kv_cache_memory_bytes
        memory = MemoryProfiler(self._device)
        free = memory.available()
        free_at_peak = free - memory.peak_growth(self._profile_run)
        if self._device.type == "cpu":
            # All ranks of a node share one host.
            ranks = self.config.parallel.tensor_parallel_size
            return int(max(0, free_at_peak) * _CPU_SHARE_OF_FREE_MEMORY / ranks)
        # Others may share the GPU: what they hold is theirs, so our share is counted from our own
        # use. It must be free as well.
        reserve = _cuda_reserve(self.config)
        own = memory.in_use() + free - free_at_peak + reserve
        share = memory.total() * cache.gpu_memory_utilization - own
        return int(max(0, min(share, free_at_peak - reserve)))

    def _profile_run(self) -> None:
        """The largest step there can be, over a cache of one block."""
        spec = kv_cache_spec(self.config)
        with closing(KVCache(spec, 1, self._device)) as profile_cache:
            self.runner.kv_caches = profile_cache.layers
            self.runner.dummy_run(self.config.scheduler.max_num_batched_tokens)


def _cuda_reserve(config: EngineConfig) -> int:
    processes = config.kv_transfer.num_processes if config.kv_transfer is not None else 0
    return _CUDA_RESERVE_BYTES + processes * _TRANSFER_CONTEXT_BYTES


def _rank_device(config: EngineConfig, rank: int, index: int) -> torch.device:
    if config.device.device == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if index >= count:
        raise RuntimeError(
            f"rank {rank} needs CUDA device {index}, but this host shows {count}; "
            "lower tensor_parallel_size or first_gpu, or use device cpu"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device
