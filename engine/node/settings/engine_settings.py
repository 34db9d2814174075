"""Settings of a node's engine: one definition gives the flag, the environment variable and the
helm value.

`PrefillNodeSettings` and `DecodeNodeSettings` extend this with what only they need. A flag wins
over the environment. A Python identifier `max_num_seqs` is the flag `--max-num-seqs` and the
variable `TANDEM_MAX_NUM_SEQS`.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Collection
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from edge.command_line import SettingsError as SettingsError
from edge.command_line import parse_settings
from edge.logs.settings import LogSettings
from edge.security.config import SecurityError
from edge.security.credentials import Credentials
from edge.tracing.errors import TracingError
from edge.tracing.settings import TraceSettings
from engine.config import (
    AttentionBackendName,
    CacheConfig,
    Device,
    DeviceConfig,
    EngineConfig,
    ExecutorBackend,
    LoadFormat,
    ModelConfig,
    ParallelConfig,
    PromptOrderName,
    QuantizationName,
    SchedulerConfig,
    SchedulingPolicy,
)
from engine.contracts.errors import CannotStartError
from engine.fast_paths import FastPath
from engine.kv_cache.capacity import check_given_size
from engine.layers.attention.whole_prompts.flash_limits import check_wanted
from engine.models.checkpoint import (
    check_parallel,
    is_here,
    load_model_config,
    resolve_model,
)
from engine.models.kv_scale_files import choose_kv_scales
from engine.models.registry import spec_of
from engine.node.settings.adapter_settings import AdapterSettings
from engine.node.settings.cache_settings import CacheSettings
from engine.node.settings.expert_settings import ExpertSettings, check_eplb
from engine.node.settings.image_settings import ImageSettings
from engine.node.settings.inspection_settings import InspectionSettings
from engine.node.settings.speculative_settings import SpeculativeSettings
from engine.node.settings.stage_checks import check_ranks, check_stages
from engine.node.settings.transfer_settings import TransferSettings
from kv_transfer.config import KVRole, KVTransferConfig

_GPU_DRIVER = Path("/proc/driver/nvidia/gpus")
_EPOCH_BITS = 63
"""Bits of an epoch: every language's signed integers hold what is on the wire."""


class EngineSettings(
    InspectionSettings,
    ImageSettings,
    AdapterSettings,
    SpeculativeSettings,
    ExpertSettings,
    CacheSettings,
    TransferSettings,
    TraceSettings,
    LogSettings,
):
    """The settings of the engine of either kind of node."""

    model_config = SettingsConfigDict(
        env_prefix="TANDEM_",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_show_env_vars=True,
        cli_avoid_json=True,
        extra="ignore",
        protected_namespaces=(),
    )

    model: str = Field(description="Folder of a Hugging Face checkpoint, or a name on the hub.")
    revision: str | None = Field(
        default=None,
        description="Branch, tag or commit of a model on the hub. A commit is the same on every "
        "host and at every restart; a branch may move in between. Default: its main branch.",
    )
    served_model_name: str | None = Field(
        default=None,
        description="Name that clients use, and that answers bear. Clients may use others, too, "
        "that follow it, separated by commas. Default: the checkpoint's folder name.",
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        default="auto",
        description="Type of weights, and of the KV cache unless --kv-cache-dtype says otherwise. "
        "auto: the type that the checkpoint names. Prefill and decode nodes must agree.",
    )
    load_format: LoadFormat = Field(
        default="safetensors",
        description="dummy: random weights, for measurements; a folder with config.json is enough.",
    )
    quantization: QuantizationName | None = Field(
        default=None,
        description="How weights are quantised. Default: as the checkpoint says. fp8 of a "
        "checkpoint that is not quantised: its linear layers are, as they are loaded. Prefill and "
        "decode nodes must agree.",
    )
    max_model_len: int | None = Field(
        default=None,
        ge=1,
        description="Most tokens of prompt and answer together. Default: the model's own limit.",
    )
    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    tensor_parallel_size: int = Field(
        default=1, ge=1, description="Workers that share each layer, one for each GPU."
    )
    pipeline_parallel_size: int = Field(
        default=1,
        ge=1,
        description="Stages of a prefill node, each of which has a range of the layers and "
        "--tensor-parallel-size workers. For long prompts over slow links.",
    )
    data_parallel_size: int = Field(
        default=1,
        ge=1,
        description="Groups of --tensor-parallel-size workers, each with requests, --max-num-seqs "
        "rows and a KV cache of its own. They compute steps together and share the experts.",
    )
    enable_expert_parallel: bool = Field(
        default=False,
        description="Each worker has some experts of each layer as a whole, in place of a slice of "
        "every expert.",
    )
    all_reduce: str = Field(
        default="auto",
        pattern=r"^(nccl|auto|\d+,\d+(,\d+)?)$",
        description="Who sums over the tensor-parallel workers of a host, on GPUs. auto: small "
        "messages go over memory that the workers share, as far as a measurement at the start "
        "finds that quicker, and NCCL sums the others; NCCL sums all where GPUs do not reach each "
        "other over NVLink. nccl: it sums all. Two numbers: the largest messages, in bytes, that "
        "are summed in one shot and in two; a third one: those whose residual stream and norm are "
        "in the same launch.",
    )
    distributed_executor_backend: ExecutorBackend = Field(
        default="mp",
        description="Where the workers run. mp: on this host. ray: on the hosts of a running Ray "
        "cluster that this host belongs to.",
    )
    ray_address: str | None = Field(
        default=None,
        description="host:port of the Ray cluster's head. Default: RAY_ADDRESS, else the cluster "
        "that runs on this host.",
    )
    ray_timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="With ray: seconds within which all workers' hosts must have joined.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where to compute. auto: cuda where there is a GPU, else cpu."
    )
    num_threads: int = Field(
        default=1,
        ge=1,
        description="Threads of each worker on CPU. More threads than cores, over all workers of "
        "the machine, make everything many times slower.",
    )
    first_gpu: int = Field(
        default=0,
        ge=0,
        description="GPU of the first worker, counted from 0; the other workers take the GPUs "
        "after it. Two nodes may share one: give each a part of it with --gpu-memory-utilization.",
    )
    enforce_eager: bool = Field(
        default=False,
        description="On a GPU: launch kernels one by one, without CUDA graphs. Starts sooner, "
        "decodes slower.",
    )
    cudagraph_capture_sizes: tuple[int, ...] = Field(
        default=(),
        description="Batch sizes that get a CUDA graph. Default: to suit --max-num-seqs.",
    )
    attention_backend: AttentionBackendName = Field(
        default="auto",
        description="Attention kernels on a GPU. triton: our own for everything. auto: for "
        "uncached prompts FlashAttention 3, where it is installed, or cuDNN, where that is "
        "faster; else our own. flash-attn: FlashAttention 3 for everything; it must be installed.",
    )
    deterministic: bool = Field(
        default=False,
        description="Make a request's tokens and KV, to the last bit, independent of what else "
        "runs at the same time and of how its prompt is cut into steps. Slower; not with "
        "attention_backend flash-attn.",
    )
    disabled_fast_paths: tuple[FastPath, ...] = Field(
        default=(),
        description="Fast paths on a GPU to turn off, should one be suspected of a fault. "
        "few-row-gemm: our own kernel for linear layers and routers of few rows whose sizes "
        "small-m-gemm does not take. few-row-qkv: for such sizes, one kernel computes queries, "
        "keys and values of up to eight rows, of up to four also their norm, rotates them and "
        "writes the cache. fp8-gemm: FP8 weights of linear layers stay so; without it they are "
        "dequantised as they are loaded, and take twice the memory. fused-gate-up: one kernel of "
        "our own computes gate and up projection of many rows and their activation. fused-qkv: one "
        "kernel of our own computes queries, keys and values of many rows, rotates them and writes "
        "the cache. fused-router: norm, router and experts of few rows are three launches instead "
        "of five. int4-gemm: 4-bit weights stay packed; without it they are dequantised as they "
        "are loaded, and take four times the memory. int8-gemm: INT8 weights of linear layers and "
        "experts stay so; without it they are dequantised as they are loaded, and take twice the "
        "memory. late-steps: the next step goes out shortly before the one in front ends while a "
        "request may come that it could take along. lora-gemm: adapters of up to 16 rows are "
        "computed in the launch of their layer, where its weights are not quantised. pdl: small "
        "kernels overlap, by programmatic dependent launch. prompt-graphs: CUDA graphs of steps "
        "with prompts. residual-gemm: GEMMs of many rows add to the residual stream "
        "themselves. sampled-rows: behind its attention, the last layer computes of a prompt only "
        "the token behind which the next one is chosen. side-stream: shared experts run beside the "
        "others, adapters of few rows beside their layer. small-m-gemm: our own kernels for few "
        "rows; of up to 64 rows, one kernel computes queries, keys and values, rotates them and "
        "writes the cache.",
    )
    async_scheduling: bool | None = Field(
        default=None,
        description="Schedule the next step during the current one. Default: on a GPU, not on CPU.",
    )
    max_num_seqs: int = Field(default=256, ge=1, description="Most requests that run at once.")
    max_num_batched_tokens: int = Field(
        default=2048, ge=1, description="Most tokens computed in one step."
    )
    enable_chunked_prefill: bool = Field(
        default=True,
        description="Split long prompts over steps. Off: prompts longer than one step are refused.",
    )
    long_prefill_token_threshold: int = Field(
        default=0, ge=0, description="Most tokens of one prompt in a step. 0: no limit."
    )
    itl_objective_ms: float = Field(
        default=0.0,
        ge=0,
        description="Milliseconds between tokens that prompts leave to the answers that run beside "
        "them: parts of prompts are cut so that a step takes no longer, as far as measured steps "
        "tell. A decode node then tells routers how much room its steps have, and they send it "
        "prompts that it has computed sooner than the prefill nodes. 0: no bound, and prompts are "
        "sent to prefill nodes.",
    )
    scheduling_policy: SchedulingPolicy = Field(
        default="fcfs",
        description="fcfs: in order of arrival. priority: requests of smaller `priority` first.",
    )
    prompt_order: PromptOrderName = Field(
        default="shortest",
        description="shortest: prompts with the least to compute first, but each in its turn "
        "once it has waited for long; those that fill a step run one after the other. arrival: in "
        "order of arrival, steps filled to max_num_batched_tokens.",
    )
    full_step_tokens: int = Field(
        default=0,
        ge=0,
        description="Tokens of prompts that fill a step: sharing it with more gains nothing. 0: "
        "measured at the start on a GPU, else 2048.",
    )
    max_waiting_requests: int = Field(
        default=1024, ge=1, description="Most requests in the queue; more are refused."
    )
    frozen_after_s: float = Field(
        default=3.0,
        gt=1,
        description="Seconds without a sign of life after which a process of the engine counts as "
        "frozen: the node refuses requests until it wakes; a process that only moves KV is "
        "restarted.",
    )
    stuck_after_s: float = Field(
        default=120.0,
        gt=0,
        description="Seconds after which an engine that has work but completes no step, or is "
        "frozen, is given up: the node exits with an error, to be restarted. Must exceed the "
        "longest step.",
    )
    drain_timeout_s: float = Field(
        default=120.0, ge=0, description="Seconds for running requests to end after SIGTERM."
    )
    check: bool = Field(
        default=False,
        description="Print the settings and exit, without serving. Exit code 2 if they are wrong, "
        "or do not fit --model, if that is a folder here.",
    )

    @classmethod
    def from_args(cls, program: str, args: list[str] | None = None) -> Self:
        """Returns settings from flags and environment. Prints help or the error, and then exits.

        `args` None stands for the process's own.
        """
        return parse_settings(cls, program, args)

    def print_checked(
        self, kv_role: KVRole, check_model: Callable[[EngineConfig], object] | None = None
    ) -> int:
        """Does what `--check` asks and returns the exit code. Of the checkpoint it reads what is
        not weights, and only where --model is a folder of this machine; `check_model` is called
        then, and raises what the node would. Files of credentials are read. Secrets are masked."""
        try:
            Credentials(self.security_config())
            self._kv_transfer_config(kv_role, is_check=True)
            parallel = self._parallel_config()
            check_ranks(parallel, kv_role)
            check_eplb(parallel, deterministic=self.deterministic)
            self.check_tiers(self.enable_prefix_caching)
            self.check_trace_file()
            if is_here(self.model):
                config = self.to_engine_config(kv_role, is_check=True)
                if check_model is not None:
                    check_model(config)
        except (SettingsError, SecurityError, TracingError) as error:
            print(f"wrong settings: {error}", file=sys.stderr)
            return 2
        except CannotStartError as error:
            print(f"cannot start: {error}", file=sys.stderr)
            return 2
        print(self.model_dump_json(indent=2))
        return 0

    def to_engine_config(self, kv_role: KVRole | None, *, is_check: bool = False) -> EngineConfig:
        """Finds and reads the checkpoint. Raises `CannotStartError`. May download.
        `is_check`: the node may run elsewhere, so nothing of this host is looked up."""
        check_eplb(self._parallel_config(), deterministic=self.deterministic)
        folder = resolve_model(self.model, load_format=self.load_format, revision=self.revision)
        model = load_model_config(
            folder,
            dtype=self.dtype,
            served_model_name=self.served_model_name,
            max_model_len=self.max_model_len,
            load_format=self.load_format,
            quantization=self.quantization,
            hashes_later=True,
        )
        check_parallel(model, self._parallel_config())
        transfer = self._kv_transfer_config(kv_role, is_check=is_check) if kv_role else None
        return self._engine_config(model, transfer, is_check=is_check)

    def _engine_config(
        self, model: ModelConfig, transfer: KVTransferConfig | None, *, is_check: bool
    ) -> EngineConfig:
        kv_role = transfer.kv_role if transfer else None
        device = self._device_config()
        config = EngineConfig(
            engine_id=f"{kv_role or 'engine'}-{secrets.token_hex(6)}",
            epoch=secrets.randbits(_EPOCH_BITS) | 1,
            model=model,
            cache=CacheConfig(
                **self._named_as_in(CacheConfig, but=("kv_scales",)),
                kv_scales=choose_kv_scales(model, self.kv_cache_dtype, self.kv_cache_scales),
            ),
            parallel=self._parallel_config(),
            scheduler=SchedulerConfig(
                **self._named_as_in(SchedulerConfig, but=("policy", "async_scheduling")),
                policy=self.scheduling_policy,
                async_scheduling=(
                    device.device == "cuda"
                    if self.async_scheduling is None
                    else self.async_scheduling
                ),
            ),
            device=device,
            kv_transfer=transfer,
            inspection=self.inspection_config(),
            images=self.image_config(model, kv_role),
        )
        config = self.with_drafts(config, is_check=is_check)
        self.check_tiers(config.cache.enable_prefix_caching)
        self.check_host_tier(config)
        check_stages(config)
        check_wanted(config, spec_of(model).rare_attention)
        check_given_size(config)
        return self.with_lora(config)

    def _named_as_in(self, config: type[Any], but: Collection[str] = ()) -> dict[str, Any]:
        """Returns our values for all fields of a dataclass, by name, `but` for those that the
        caller fills. Raises AttributeError for a field that is no setting: it would silently keep
        its default."""
        names = (field.name for field in fields(config) if field.name not in but)
        return {name: getattr(self, name) for name in names}

    def _kv_transfer_config(self, kv_role: KVRole, *, is_check: bool) -> KVTransferConfig:
        num_ranks = self._parallel_config().num_ranks
        return self.kv_transfer_config(
            kv_role, self.host, num_ranks, self.frozen_after_s, is_check=is_check
        )

    def _parallel_config(self) -> ParallelConfig:
        if self.distributed_executor_backend == "ray" and self.first_gpu:
            raise SettingsError(
                "with ray as --distributed-executor-backend Ray hands out the GPUs: leave "
                "--first-gpu, and give `ray start` the GPUs to use in CUDA_VISIBLE_DEVICES"
            )
        named = self._named_as_in(ParallelConfig, but=("eplb",))
        return ParallelConfig(**named, eplb=self.eplb)

    def _device_config(self) -> DeviceConfig:
        device = detect_device() if self.device == "auto" else self.device
        return DeviceConfig(**self._named_as_in(DeviceConfig, but=("device",)), device=device)


def detect_device() -> Device:
    """Returns cuda where the GPU driver lists a GPU, else cpu. Asks no library, so that it works
    without torch."""
    return "cuda" if _GPU_DRIVER.is_dir() and any(_GPU_DRIVER.iterdir()) else "cpu"
