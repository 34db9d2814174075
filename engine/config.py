"""Frozen configuration of one engine. Torch-free; crosses processes as JSON.

`ModelConfig` holds what the architecture is, read once from `config.json`
(`engine.models.checkpoint`); the rest says how the engine runs it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from engine.eplb_config import EplbConfig
from engine.fast_paths import FastPath
from engine.head_sizes import HeadSizes
from engine.images.image_config import ImageConfig
from engine.images.vision_spec import VisionSpec
from engine.inspection_config import InspectionConfig
from engine.kv_scales import KVScaleTable
from engine.lora import LoRAConfig
from engine.quantization import Quantization
from kv_transfer.config import KVTransferConfig
from kv_transfer.group_sizes import in_fp8, share_page_size, with_draft_layers
from kv_transfer.layout import STATE_SPAN, KVGroup, KVLayout, attention_group
from kv_transfer.planes import Plane
from kv_transfer.stages import stage_starts

Dtype = Literal["float32", "float16", "bfloat16"]
Device = Literal["cpu", "cuda"]
QuantizationName = Literal[
    "auto-round", "awq", "compressed-tensors", "fp8", "gptq", "modelopt", "mxfp4", "mxfp8", "quark"
]
LoadFormat = Literal["safetensors", "dummy"]
SchedulingPolicy = Literal["fcfs", "priority"]
PromptOrderName = Literal["arrival", "shortest"]
KVCacheDtype = Literal["auto", "bfloat16", "fp8", "fp8_e4m3"]
AttentionBackendName = Literal["auto", "triton", "flash-attn"]
ExecutorBackend = Literal["mp", "ray"]
DrafterName = Literal["ngram", "draft_model", "eagle", "eagle3", "medusa", "mtp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayers:
    """Layers that cache alike: what the model says of its KV cache, without sizes of blocks.

    Attributes:
        layers: Their numbers, ascending.
        planes: What a layer keeps of each token.
        window: A token sees itself and the `window - 1` before it; None: all before it.
        is_state: A layer keeps one state of all tokens so far instead. Such groups come behind
            those that keep rows of tokens.
        compress_ratio, window_align: See `KVGroup`. A layer may be in several groups.
        dtype: Of numbers in the planes; None: the model's.
        narrow_planes: Instead of `planes` in an FP8 cache, if not every number becomes a byte.
    """

    layers: tuple[int, ...]
    planes: tuple[Plane, ...]
    window: int | None = None
    is_state: bool = False
    compress_ratio: int = 1
    window_align: int = 1
    dtype: Dtype | None = None
    narrow_planes: tuple[Plane, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer, as far as the engine around it must know it.

    Attributes:
        path: Folder of the checkpoint.
        served_model_name: The name clients use, and that answers bear.
        served_aliases: Other names that clients may use.
        architecture: A name of `engine.models.registry.MODELS`.
        wrapper: The name in `engine.models.config.wrappers` whose text part this is; "": none.
        spec: What only the architecture itself reads, as `engine.models.registry.spec_of` gives
            it; but for `hidden_size`, to which `engine.parallel.place` times sums over ranks.
        max_model_len: Prompt plus output tokens at most.
        eos_token_ids: From generation_config.json, else config.json, and from the tokenizer.
        model_hash: Equal exactly for nodes that compute the same KV; see
            `engine.contracts.model_identity`.
        num_heads, num_kv_heads, head_dim: Of all layers, unless `layer_heads` says otherwise.
        layer_heads: Heads of each layer, where layers differ or values are narrower than keys;
            empty: they are alike.
        kv_layers: One entry a group of layers; empty: all layers keep keys and values of
            `num_kv_heads` heads, and see all tokens.
        quantization: How weights are quantised; None: they are plain.
        vision: The tower that sees images; None: there is none that is here.
        vision_fault: What of its tower is not here; empty: nothing.
    """

    path: str
    served_model_name: str
    architecture: str
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    dtype: Dtype
    load_format: LoadFormat
    model_hash: str
    spec: dict[str, Any]
    layer_heads: tuple[HeadSizes, ...] = ()
    kv_layers: tuple[KVLayers, ...] = ()
    quantization: Quantization | None = None
    served_aliases: tuple[str, ...] = ()
    wrapper: str = ""
    vision: VisionSpec | None = None
    vision_fault: str = ""

    @property
    def served_names(self) -> tuple[str, ...]:
        return (self.served_model_name, *self.served_aliases)

    def heads_of(self, layer: int) -> HeadSizes:
        """Returns the heads of a layer's attention."""
        if self.layer_heads:
            return self.layer_heads[layer]
        return HeadSizes.alike(self.num_heads, self.num_kv_heads, self.head_dim)

    @property
    def kinds_of_heads(self) -> tuple[HeadSizes, ...]:
        """Returns the heads that layers have, each kind once."""
        return tuple(dict.fromkeys(self.layer_heads)) or (self.heads_of(0),)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """KV cache. `num_blocks` None: sized from free memory after a profiling run.

    `kv_cache_memory_bytes` limits one rank's cache; None takes `gpu_memory_utilization` of what the
    device has (GPU) or a tenth of free memory (CPU), but never more than all rows could use.

    `kv_scales`: keys and values are kept in FP8, with these scales; None: in the model's dtype.
    """

    block_size: int = 16
    enable_prefix_caching: bool = True
    num_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_scales: KVScaleTable | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """The ranks of one engine, numbered group by group, and in each stage by stage.

    Attributes:
        tensor_parallel_size: Ranks that share each layer.
        data_parallel_size: Groups of this many ranks, each with requests, rows and blocks of its
            own. They compute their steps together, as they share the experts.
        enable_expert_parallel: Each rank has some experts as a whole, in place of a slice of
            every one.
        eplb: Experts have copies and move between ranks, by observed load; None: they stay.
        pipeline_parallel_size: Stages, each of which has a range of the layers.
        all_reduce: Who sums over the tensor-parallel ranks of a host, on GPUs. `auto`: small
            messages go over memory that ranks share, as far as a measurement at the start finds
            that quicker; `nccl`; or limits as `parallel.peer_reducer.ReduceLimits` reads them.
        distributed_executor_backend: `mp`: all ranks on this host. `ray`: on the hosts of a Ray
            cluster.
        ray_address: host:port of the cluster's head; None: RAY_ADDRESS, else this host's cluster.
        ray_timeout_s: The hosts of all ranks must be there after this time.
    """

    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    eplb: EplbConfig | None = None
    pipeline_parallel_size: int = 1
    all_reduce: str = "auto"
    distributed_executor_backend: ExecutorBackend = "mp"
    ray_address: str | None = None
    ray_timeout_s: float = 600.0

    @property
    def num_ranks(self) -> int:
        """Returns the ranks of all groups, which are numbered group by group."""
        return self.data_parallel_size * self.group_size

    @property
    def group_size(self) -> int:
        """Returns the ranks of a data-parallel group: those of all its stages."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def answers(self, rank: int) -> bool:
        """Returns whether a rank's results are read: those of the first one of the last stage,
        which samples, in each group."""
        return rank % self.group_size == self.group_size - self.tensor_parallel_size


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of a step.

    Attributes:
        max_num_seqs: Running requests at most.
        max_num_batched_tokens: Tokens computed in one step at most.
        enable_chunked_prefill: Prompts may be split over steps. Off: a prompt longer than the
            budget is refused.
        long_prefill_token_threshold: A prompt takes at most this much of one step; 0: no limit.
        itl_objective_ms: Prompts beside running answers make steps no longer than that; 0: they
            fill the budget.
        policy: Order of waiting requests and of victims of preemption.
        prompt_order: Order of prompts under one priority; see `engine.sched.prompts.prompt_order`.
            Without chunked prefill it is that of arrival.
        full_step_tokens: A step of prompts is full with this many tokens; 0: as measured.
        async_scheduling: Decide the next step while workers compute one. Without, the scheduler
            waits for each result.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    itl_objective_ms: float = 0.0
    policy: SchedulingPolicy = "fcfs"
    prompt_order: PromptOrderName = "arrival"
    full_step_tokens: int = 0
    async_scheduling: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """Says where workers compute.

    Attributes:
        num_threads: torch threads of each worker; more than cores / processes is slower.
        first_gpu: Rank r computes on GPU `first_gpu + r` of those that the process may see.
        enforce_eager: Launch every kernel by itself instead of CUDA graphs.
        cudagraph_capture_sizes: Batches that get a graph; empty: chosen for `max_num_seqs`.
        attention_backend: On a GPU. `triton`: always our own kernels; `auto`: another's where it
            is faster; `flash-attn`: FlashAttention 3 for everything, which must be installed.
        deterministic: What a request gets does not depend on what else runs. Slower.
        disabled_fast_paths: What to do without, on a GPU; see `FastPath`.
    """

    device: Device = "cpu"
    num_threads: int = 1
    first_gpu: int = 0
    enforce_eager: bool = False
    cudagraph_capture_sizes: tuple[int, ...] = ()
    attention_backend: AttentionBackendName = "auto"
    deterministic: bool = False
    disabled_fast_paths: tuple[FastPath, ...] = ()

    def allows(self, path: FastPath) -> bool:
        return path not in self.disabled_fast_paths


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModel:
    """A drafter's weights, as far as the engine around it must know them.

    Attributes:
        model: Its layers. They are numbered behind those of the model that it drafts for.
            `model_hash` tells drafters apart; `spec` is that of the layers.
        vocab_size: Tokens that it can draft.
        feature_size: Numbers that a token's draft reads of the token before; 0: none.
        taps: The layers of the other model in front of which features are taken; none: behind
            the last norm.
        options: What only the drafter itself reads.
    """

    model: ModelConfig
    vocab_size: int
    feature_size: int = 0
    taps: tuple[int, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        """Returns how many of its layers have keys and values in the cache."""
        return self.model.num_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Says who guesses the next tokens of rows, and how many of them.

    Attributes:
        method: `ngram`: what followed the last tokens where prompt or answer had them before.
            Others have weights: see `engine.models.drafts`.
        num_speculative_tokens: Drafts of each row and step.
        prompt_lookup_max: As many last tokens are looked up first.
        prompt_lookup_min: Fewer than these are not looked up.
        draft: The drafter's weights; None: it has none.
        adaptive: Each step has as many drafts as pay, up to that number.
    """

    method: DrafterName
    num_speculative_tokens: int
    prompt_lookup_max: int
    prompt_lookup_min: int
    draft: DraftModel | None = None
    adaptive: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything that one engine is.

    Attributes:
        engine_id: Names its sockets and appears in logs.
        decode_query_len: Tokens that a decoding row computes in one step: its last one, and
            drafts of those behind it.
        speculative: Who drafts them; None: nothing.
        lora: Room for adapters; None: there are none.
    """

    engine_id: str
    epoch: int
    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    kv_transfer: KVTransferConfig | None = None
    decode_query_len: int = 1
    speculative: SpeculativeConfig | None = None
    lora: LoRAConfig | None = None
    inspection: InspectionConfig = field(default_factory=InspectionConfig)
    images: ImageConfig = field(default_factory=ImageConfig)

    @property
    def draft(self) -> DraftModel | None:
        """Returns the drafter's weights, if it has any."""
        return None if self.speculative is None else self.speculative.draft

    @property
    def is_adaptive(self) -> bool:
        """Returns whether steps differ in the tokens that a decode computes."""
        return (
            self.decode_query_len > 1
            and self.speculative is not None
            and (self.speculative.adaptive)
        )

    @property
    def is_producer(self) -> bool:
        """Returns whether peers pull its KV."""
        return self.kv_transfer is not None and self.kv_transfer.kv_role == "kv_producer"

    def name_of_group(self, group: int) -> str:
        """Returns what peers know a data-parallel group by: each exchanges KV by itself."""
        return self.engine_id if group == 0 else f"{self.engine_id}-{group}"

    @property
    def draft_hash(self) -> str:
        """Returns what tells drafters apart that have KV of their own; "": there is none."""
        draft = self.draft
        return "" if draft is None or draft.num_layers == 0 else draft.model.model_hash

    @property
    def num_ahead(self) -> int:
        """Returns how many tokens behind those of a step a drafter writes KV for: drafts of the
        next one."""
        has_layers = self.draft is not None and self.draft.num_layers > 0
        return self.decode_query_len - 1 if has_layers else 0

    @property
    def kv_layout(self) -> KVLayout:
        """Returns the layout that peers compare and that divides one pool of blocks."""
        model, tp_size = self.model, self.parallel.tensor_parallel_size
        groups = kv_groups(model, self.cache)
        if (draft := self.draft) is not None:
            groups = with_draft_layers(groups, kv_groups(draft.model, self.cache))
        starts = stage_starts(model.num_layers, self.parallel.pipeline_parallel_size)
        return KVLayout(
            groups=share_page_size(groups, tp_size, shares_blocks=not starts),
            tp_size=tp_size,
            stage_starts=starts,
            model_hash=model.model_hash,
            num_draft_layers=0 if draft is None else draft.num_layers,
            draft_hash=self.draft_hash,
        )


def kv_groups(model: ModelConfig, cache: CacheConfig) -> list[KVGroup]:
    """Returns the groups of the model's layers; blocks hold rows, or a state."""
    scales = None if cache.kv_scales is None else cache.kv_scales.digest
    if not model.kv_layers:
        group = attention_group(
            layers=range(model.num_layers),
            heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=model.dtype,
            block_size=cache.block_size,
        )
        return [group if scales is None else in_fp8(group, scales)]
    return [_group_of(kv, model, cache.block_size, scales) for kv in model.kv_layers]


def _group_of(kv: KVLayers, model: ModelConfig, block_size: int, scales: str | None) -> KVGroup:
    group = KVGroup(
        layers=kv.layers,
        planes=kv.planes,
        block_size=STATE_SPAN if kv.is_state else block_size * kv.compress_ratio,
        dtype=kv.dtype or model.dtype,
        window=kv.window,
        compress_ratio=kv.compress_ratio,
        window_align=kv.window_align,
    )
    return group if scales is None else in_fp8(group, scales, kv.narrow_planes)
