"""Explains which kernels compute a step of a model on a device, which need not be present.

1. the model is built of meta tensors, as on that device
2. one pass over a batch asks for its kernels, which are recorded (`launches`)
3. layers that ask for the same are one row of the answer, with tiles and reasons
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from engine.batch.input_batch import BatchOrder, InputBatch
from engine.config import EngineConfig
from engine.contracts.steps.step_launches import GraphKey, StepLaunches
from engine.explain.launches import LIBRARY, Launch, Launches
from engine.explain.reasons import reason
from engine.layers.attention.backend import AttentionBackend
from engine.layers.gemm_policy import GemmPolicy
from engine.models.base import CausalLM, ForwardInputs
from engine.models.factory import create_model
from engine.models.recorded_steps import launches_of
from engine.parallel.distributed import ParallelGroup
from engine.parallel.place import ParallelPlace
from engine.worker.attention_of_model import attention_of, group_inputs
from engine.worker.memory.kv_cache import layer_views
from engine.worker.sampled_rows import attends_ends, keeps_sampled_rows
from engine.worker.step_halves import parts_of
from kv_transfer.layout import own_groups
from tandem_kernels.device import GpuFacts, as_on
from tandem_kernels.tunings.table import asked_choices

_TELL_AT_START = ("engine.models.factory", "engine.layers.attention.selection")
"""Loggers that say once what an engine does, which must not be said of an explanation."""
_NUM_BLOCKS = 8
NOWHERE = torch.device("meta")
"""The device of tensors that have shapes, types and strides, and no numbers."""
_TELLING = ("attention.", "experts.", "gemm.", "linear_attention.")
"""Rooms of kernels between which a device, a model or a batch chooses."""
_SMALL = (
    "add_sinks",
    "cache_rows",
    "causal_conv",
    "close_rows",
    "gated_group_norm",
    "gated_rms_norm",
    "gated_square_sums",
    "gather_",
    "index_rope_and_cache",
    "index_rows",
    "keep_open_tokens",
    "latent_rope_and_cache",
    "merge_attention",
    "pairs_add_rms_norm",
    "quantise_",
    "rms_norm_",
    "rope_and_cache",
    "route_tokens",
    "scale_product",
    "shared_rope_and_cache",
    "silu_and_mul_",
    "sum_pairs",
)
"""Operations of those rooms that are the same whatever is chosen."""


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """One choice.

    Attributes:
        part: Of the model.
        operation: In `tandem_kernels.ops`; or a library's.
        module: Where its kernels are, in `tandem_kernels`; empty: a library's.
        tables: Rows of tables of tunings that were asked (`tandem_kernels.tunings`).
    """

    part: str
    kernel: str
    tile: str
    why: str
    operation: str
    module: str
    tables: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Explanation:
    """The choices for a step.

    Attributes:
        step: What it computes.
        backend: Who attends.
        graph: Which CUDA graph it is, and why.
        choices: By the layers that choose alike: their numbers, and what they choose.
        names: What is no layer, by the number that it has among them.
        thresholds: The table from which `GemmPolicy` has the numbers of rows; empty: none is asked.
    """

    step: str
    backend: str
    graph: str
    choices: tuple[tuple[tuple[int, ...], tuple[KernelChoice, ...]], ...]
    names: dict[int, str]
    thresholds: str = ""


class _OneOf(ParallelGroup):
    """The first of `size` ranks, without the others: for shares of layers and for policies."""

    def __init__(self, size: int) -> None:
        super().__init__(0, 1)
        self.size = size

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat([x] * self.size, dim=-1)

    def gather_rows(self, x: Tensor) -> Tensor:
        return torch.cat([x] * self.size)


@dataclass(frozen=True, slots=True)
class Batch:
    """A step: `num_decodes` requests with `context` tokens each, and prompts of these lengths,
    behind `cached` tokens each. `num_logits`: of how many tokens logits are asked for; None: of one
    in each request. `graph`: the step is recorded as this one, whatever requests it has."""

    num_decodes: int = 0
    context: int = 1024
    prompts: tuple[int, ...] = ()
    cached: int = 0
    num_logits: int | None = None
    graph: GraphKey | None = None

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + sum(self.prompts)

    def __str__(self) -> str:
        parts = []
        if self.num_decodes:
            number = "1 decode" if self.num_decodes == 1 else f"{self.num_decodes} decodes"
            parts.append(f"{number} of {self.context} tokens")
        if self.prompts:
            behind = f" behind {self.cached}" if self.cached else ""
            parts.append(f"prompts of {', '.join(map(str, self.prompts))} tokens{behind}")
        return " and ".join(parts)


def explain(
    config: EngineConfig, gpu: GpuFacts | None, batches: Sequence[Batch], *, has_flash: bool = True
) -> list[Explanation]:
    """Returns what the first rank of an engine does in these steps: one explanation of each, or
    two of a step that is cut (`step_halves`). Nothing is launched, and no weights are read.

    Args:
        gpu: Of each rank; None: the engine is on CPU.
        has_flash: FlashAttention 3 is installed there.

    Raises:
        CannotStartError: The engine could not start either; says why.
    """
    launches = Launches()
    with asked_model(config, gpu, launches, has_flash) as run:
        dtype = getattr(torch, config.model.dtype)
        size = config.parallel.tensor_parallel_size
        with asked_choices() as asked:
            policy = GemmPolicy.choose(config.device, NOWHERE, size, dtype)
        thresholds = "" if gpu is None else ", ".join(map(str, asked))
        steps = _steps_of(config, gpu)
        given = config, gpu, policy, steps
        explained = []
        for batch in batches:
            attention = run(_as_recorded(steps, batch))
            halves = _halves(steps, batch, attention)
            if not halves:
                explained.append(_explained(*given, attention, batch, launches, thresholds))
            for half, place in zip(halves, ("first", "second"), strict=False):
                attention = run(_as_recorded(steps, half))
                found = _explained(*given, attention, half, launches, thresholds)
                explained.append(replace(found, graph=f"{found.graph}, the {place} of two"))
        return explained


@contextmanager
def asked_model(
    config: EngineConfig, gpu: GpuFacts | None, launches: Launches, has_flash: bool
) -> Iterator[Callable[[Batch], AttentionBackend]]:
    """Makes the model of meta tensors, as on `gpu`, and gives the pass of a batch through it, which
    is written into `launches` and returns who attends."""
    with ExitStack() as stack:
        stack.enter_context(_quiet())
        stack.enter_context(as_on(gpu))
        stack.enter_context(NOWHERE)
        stack.enter_context(torch.inference_mode())
        stack.enter_context(launches.recording(has_flash=has_flash and gpu is not None))
        parallel = config.parallel
        place = ParallelPlace(range(config.model.num_layers), _OneOf(parallel.tensor_parallel_size))
        model = create_model(config, place, NOWHERE)
        launches.know(model, model.get_submodule("layers").children())
        recorded_tokens = _steps_of(config, gpu).most_prompt_tokens

        def run(batch: Batch) -> AttentionBackend:
            launches.by_layer, launches.layer = {}, 0
            attention = attention_of(config, NOWHERE, recorded_tokens)
            _run(config, model, attention, batch, recorded_tokens)
            return attention

        yield run


def _steps_of(config: EngineConfig, gpu: GpuFacts | None) -> StepLaunches:
    """Returns which steps of an engine are CUDA graphs."""
    return StepLaunches(none="a CPU has no graphs") if gpu is None else launches_of(config)


@contextmanager
def _quiet() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in _TELL_AT_START]
    before = [one.disabled for one in loggers]
    for one in loggers:
        one.disabled = True
    try:
        yield
    finally:
        for one, was in zip(loggers, before, strict=True):
            one.disabled = was


def _explained(
    config: EngineConfig,
    gpu: GpuFacts | None,
    policy: GemmPolicy,
    steps: StepLaunches,
    attention: AttentionBackend,
    batch: Batch,
    launches: Launches,
    thresholds: str,
) -> Explanation:
    rows = {
        layer: tuple(_row(one, policy, gpu) for one in found if is_telling(one.name, one.module))
        for layer, found in launches.by_layer.items()
    }
    name = type(attention).__name__
    if dense := getattr(attention, "dense", None):
        name += f": {dense.name} for prompts from {dense.min_tokens} tokens on, else paged"
    graph = _graph(steps, batch, attention)
    names = {-1: "embedding", config.model.num_layers: "head"}
    return Explanation(str(batch), name, graph, alike(rows), names, thresholds)


def alike(
    rows: dict[int, tuple[KernelChoice, ...]],
) -> tuple[tuple[tuple[int, ...], tuple[KernelChoice, ...]], ...]:
    """Returns the layers that choose alike, with what they choose."""
    kinds: dict[tuple[KernelChoice, ...], list[int]] = {}
    for layer, found in rows.items():
        kinds.setdefault(found, []).append(layer)
    return tuple((tuple(layers), found) for found, layers in kinds.items())


def is_telling(name: str, module: str) -> bool:
    """Returns whether an operation is a choice: a library's, whose module is empty, or one that
    differs by device, model or batch."""
    return not name.startswith(_SMALL) and (not module or module.startswith(_TELLING))


def _row(launch: Launch, policy: GemmPolicy, gpu: GpuFacts | None) -> KernelChoice:
    part = launch.part or launch.module.partition(".")[0] or "attention"
    if gpu is None:
        kernel = "torch" if launch.name == LIBRARY else f"reference {launch.name}"
        return KernelChoice(part, kernel, "", "a CPU computes by torch", launch.name, launch.module)
    from engine.explain.tiles import describe

    with asked_choices() as asked:
        kernel, tile = describe(launch)
        why = reason(launch, policy)
    tables = tuple(dict.fromkeys(map(str, asked)))
    return KernelChoice(part, kernel, tile, why, launch.name, launch.module, tables)


def _graph(steps: StepLaunches, batch: Batch, attention: AttentionBackend) -> str:
    order = order_of(batch)
    found = steps.find(order.parts())
    if isinstance(found, str):
        return f"none: {found}"
    if found.decodes:
        return f"of {found.num_reqs} decodes"
    if not attention.graph_ok(order):
        return "none: the attention backend attends this step apart"
    return f"of {found.num_tokens} tokens with prompts of {found.num_reqs} requests"


def _halves(steps: StepLaunches, batch: Batch, attention: AttentionBackend) -> tuple[Batch, ...]:
    """Returns the two that a step is run as; none: it is run as a whole."""

    def find(part: BatchOrder) -> GraphKey | None:
        key = steps.find(part.parts())
        if isinstance(key, str) or not (key.decodes or attention.graph_ok(part)):
            return None
        return key

    parts = parts_of(order_of(batch), find, steps, lambda _: True)
    halves = replace(batch, prompts=()), replace(batch, num_decodes=0)
    return halves if len(parts) == len(halves) else ()


def _as_recorded(steps: StepLaunches, batch: Batch) -> Batch:
    """Returns the step that runs: decodes alone have the rows of their graph, which may be more."""
    found = steps.find(order_of(batch).parts())
    if isinstance(found, str) or not found.decodes:
        return batch
    return replace(batch, num_decodes=found.num_reqs)


def order_of(batch: Batch) -> BatchOrder:
    """Returns how a batch lies in a step."""
    if batch.graph is not None:
        return BatchOrder.of_graph(batch.graph)
    decodes = batch.num_decodes
    queries = np.array([1] * decodes + [*batch.prompts], dtype=np.int32)
    whole = [batch.cached + length for length in batch.prompts]
    contexts = np.array([batch.context] * decodes + whole, dtype=np.int32)
    rows = np.arange(len(queries), dtype=np.int32)
    return BatchOrder(rows, queries, contexts, decodes, len(queries))


def _run(
    config: EngineConfig,
    model: CausalLM,
    attention: AttentionBackend,
    batch: Batch,
    recorded_tokens: int,
) -> None:
    """Passes a batch through the model, as `engine.worker.model_runner` does."""
    order, layout, most = order_of(batch), config.kv_layout, config.decode_query_len
    count, num_tokens = len(order.rows), batch.num_tokens
    num_logits = count if batch.num_logits is None else batch.num_logits
    most_tokens, groups = config.model.max_model_len, own_groups(layout.groups)

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    seen = InputBatch(
        order,
        num_tokens,
        zeros(count),
        zeros(count + 1),
        zeros(num_tokens),
        zeros(num_tokens, dtype=torch.int64),
        zeros(num_tokens, dtype=torch.int64),
        zeros(count),
        zeros(count, 1),
    )
    by_group = [
        replace(
            seen,
            window=group.window,
            block_tables=zeros(count, -(-most_tokens // group.block_size)),
        )
        for group in groups
    ]
    pages = torch.empty(layout.num_slots * _NUM_BLOCKS * layout.page_bytes, dtype=torch.uint8)

    keeps = keeps_sampled_rows(config, model) and num_logits < num_tokens
    ends = keeps and batch.num_logits is None and attends_ends(seen, recorded_tokens)
    hidden = model(
        ForwardInputs(
            seen.input_ids,
            seen.positions,
            group_inputs(
                layout.groups,
                by_group,
                attention,
                num_taken=zeros(count) if most > 1 else None,
                most=most,
                keeps_ends=ends,
            ),
            layer_views(pages, layout),
            attention,
            lambda layer: None,
            kept=zeros(num_logits, dtype=torch.int64) if keeps else None,
        )
    )
    model.compute_logits(hidden[:num_logits])
