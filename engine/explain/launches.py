"""Records which kernels a model asks for, without a GPU and without memory: tensors are of the meta
device and have no numbers, so methods, backends and policies choose as they do on the GPU that
`tandem_kernels.device.as_on` names, and what they would launch is written down instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from engine.layers.attention.whole_prompts import flash_attention
from tandem_kernels import ops
from tandem_kernels.attention.block_choice import BlockChoice
from tandem_kernels.attention.index_pages import IndexPages
from tandem_kernels.attention.kv_pages import PagedKV, sizes_of
from tandem_kernels.attention.ragged_batch import RaggedBatch
from tandem_kernels.attention.token_rows import TokenRowForm
from tandem_kernels.reference.fp8 import BLOCK

OnKernel = Callable[[ops.Op[..., Any], tuple[Any, ...], dict[str, Any]], Any]
LIBRARY = "library"
"""Stands for a GEMM of torch: cuBLAS on a GPU."""
ATTENTION = "torch attention"
"""Stands for `scaled_dot_product_attention` where torch chooses who computes it."""
_GEMMS = {
    F.linear, torch.mm, torch.addmm, Tensor.addmm_, torch.bmm, torch.baddbmm, Tensor.bmm,
    Tensor.__matmul__, Tensor.matmul,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Launch:
    """One operation of a pass.

    Attributes:
        name: Of the operation in `tandem_kernels.ops`; or `LIBRARY`, `ATTENTION`,
            "FlashAttention 3", "cuDNN".
        module: Of its kernels in `tandem_kernels`; empty: a library's.
        part: The module of the model whose weights it reads, like "self_attn.qkv_proj"; or "".
        arguments: As it was given them.
    """

    name: str
    module: str
    part: str
    arguments: tuple[Any, ...]

    @property
    def num_rows(self) -> int:
        """Returns the rows of what it is given: tokens, or requests of the head."""
        return len(self.arguments[0])

    @property
    def is_gated(self) -> bool:
        """Returns whether it is a GEMM with an activation, of two weight rows for each output."""
        return self.name.endswith("gate_up")


class Launches:
    """The launches of a pass, by layer; those in front of the first are of layer -1, and those
    behind the last of layer `num_layers`.

    Args:
        on_kernel: Called with each operation and its arguments in place of its reference, and
            returns what that does; None: nothing is.
    """

    def __init__(self, on_kernel: OnKernel | None = None) -> None:
        self._on_kernel = on_kernel
        self.by_layer: dict[int, list[Launch]] = {}
        self.layer = -1
        self.part = ""
        """The module that computes, for what reads no parameter."""
        self._parts: dict[int, str] = {}
        self._turned: dict[int, tuple[Tensor, Tensor]] = {}
        """Transposed weights and the weights, by the identity of the first."""
        self._depth = 0

    def know(self, model: nn.Module, layers: Iterable[nn.Module]) -> None:
        """Names parts by the parameters of `model`, and counts its `layers` as they end."""
        for index, layer in enumerate(layers):
            layer.register_forward_hook(partial(self._end, index))
        for name, parameter in model.named_parameters():
            path = name.split(".")[:-1]
            numbers = [index for index, word in enumerate(path) if word.isdecimal()]
            self._parts[id(parameter)] = ".".join(path[numbers[0] + 1 if numbers else 0 :])

    def _end(self, index: int, *args: Any) -> None:
        self.layer = index + 1

    def add(self, name: str, module: str, arguments: tuple[Any, ...]) -> None:
        """Writes one down, unless it is part of another."""
        if self._depth > 0:
            return
        given = tuple(
            self._turned[id(one)][1] if id(one) in self._turned else one for one in arguments
        )
        part = next((self._parts[id(one)] for one in given if id(one) in self._parts), self.part)
        self.by_layer.setdefault(self.layer, []).append(Launch(name, module, part, given))

    def turn(self, weight: Tensor, turned: Tensor) -> None:
        """A weight is read transposed."""
        if id(weight) in self._parts:
            self._turned[id(turned)] = turned, weight

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Counts what is asked for inside as part of the launch before."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    @contextmanager
    def recording(self, *, has_flash: bool) -> Iterator[None]:
        """Records what is asked for inside. `has_flash`: FlashAttention 3 counts as installed,
        wherever this runs; else it does not."""
        with ExitStack() as stack:
            stack.enter_context(ops.standing_in(self._stand_in))
            stack.enter_context(_Library(self))
            stack.enter_context(flash_attention.standing_in(self._flash if has_flash else None))
            yield

    def _stand_in(self, op: ops.Op[..., Any]) -> Callable[..., Any]:
        name, meaning = op.reference.__name__, op.reference
        on_kernel = None
        if self._on_kernel is not None:
            # The launcher has the name of the reference, which will be another.
            assert op.kernel is not None
            on_kernel = self._on_kernel

        def record(*args: Any, **kwargs: Any) -> Any:
            self.add(name, op.kernel_module, args)
            is_inside = self._depth > 0
            with self.inside():
                if on_kernel is not None and not is_inside:
                    return on_kernel(op, args, kwargs)
                shape = _RESULTS.get(name)
                return meaning(*args, **kwargs) if shape is None else shape(*args, **kwargs)

        return record

    def _flash(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, _, v = args[:3]
        self.add("FlashAttention 3", "", args)
        sums = q.new_empty((q.shape[1], len(q)), dtype=torch.float32)
        return q.new_empty((*q.shape[:2], v.shape[-1])), sums, sums, sums


class _Library(TorchFunctionMode):
    """Records what torch's libraries are asked for."""

    def __init__(self, launches: Launches) -> None:
        super().__init__()
        self._launches = launches

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        if func is Tensor.t:
            turned = func(*args)
            self._launches.turn(args[0], turned)
            return turned
        if func is Tensor.data_ptr:
            # Of a meta tensor only the offset is known; memory itself is aligned.
            return args[0].storage_offset() * args[0].element_size()
        if func in _GEMMS:
            has_sum = func in (torch.addmm, torch.baddbmm, Tensor.addmm_)
            self._launches.add(LIBRARY, "", args[1:] if has_sum else args)
            with self._launches.inside():
                if func is torch.mm and "out_dtype" in given:
                    return func(*args).to(given["out_dtype"])
                return func(*args, **given)
        if func is F.scaled_dot_product_attention:
            # Only `cudnn_prefill` leaves torch no choice.
            name = ATTENTION if torch._C._get_flash_sdp_enabled() else "cuDNN"
            self._launches.add(name, "", args)
            return torch.empty_like(args[0])
        return func(*args, **given)


def _expert_outputs(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Returns [T, H], or [T * k, H] of pairs that are not summed."""
    experts = next(one for one in args if isinstance(one, Tensor) and one.dtype == torch.int32
                   and one.dim() == 2 and len(one) == len(x))  # fmt: skip
    summed = kwargs.get("summed", True)
    flags = [one for one in args if isinstance(one, bool)]
    if "summed" not in kwargs and len(flags) > 1:
        summed = flags[1]
    return torch.empty_like(x) if summed else x.new_empty((experts.numel(), x.shape[1]))


def _products(x: Tensor, weight: Tensor, *args: Any) -> Tensor:
    return x.new_empty((len(x), len(weight)))


def _beside(x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """Returns outputs of pairs, [T * k, H], and of the shared expert."""
    return x.new_empty((args[3].numel(), x.shape[1])), torch.empty_like(x)


def _routed(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Returns the weights and numbers of what was chosen, [T, k]."""
    logits, top_k = args[1], args[7]
    weights = logits.new_empty((len(logits), top_k), dtype=torch.float32)
    return weights, weights.to(torch.int32)


def _gathered_context(
    kv_cache: PagedKV, tables: Tensor, first: Tensor, bounds: Tensor, num_keys: int,
    dtype: torch.dtype, *rest: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    sizes = sizes_of(kv_cache)
    keys, values = (
        tables.new_empty((num_keys, sizes.num_kv_heads, width), dtype=dtype)
        for width in (sizes.key_dim, sizes.value_dim)
    )
    return keys, values


def _gathered_latents(
    kv_cache: Tensor, tables: Tensor, first: Tensor, bounds: Tensor, keys: Tensor, *rest: Any
) -> Tensor:
    return keys.new_empty((len(keys), kv_cache.shape[-1] - keys.shape[2]))


def _ragged(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:2], v.shape[-1])), q.new_empty((q.shape[1], len(q)))


def _bits(chosen: Tensor, batch: RaggedBatch, *rest: Any) -> Tensor:
    return chosen.new_empty((len(chosen), -(-batch.max_key_len // 64) * 2))


def _heads(x: Tensor, weight: Tensor, bias: Any, positions: Tensor, table: Tensor,
           kv_cache: Tensor, *rest: Any) -> Tensor:  # fmt: skip
    return x.new_empty((len(x), len(weight) // kv_cache.shape[-1], kv_cache.shape[-1]))


def _states_read(
    mixed: Tensor, gates: Tensor, a_log: Tensor, dt_bias: Tensor, states: Tensor,
    *rest: Any, **kwargs: Any,
) -> Tensor:  # fmt: skip
    return mixed.new_empty((len(mixed), states.shape[1], states.shape[3]))


def _states_scanned(
    mixed: Tensor, steps: Tensor, a_log: Tensor, dt_bias: Tensor, skip: Tensor, states: Tensor,
    *rest: Any, **kwargs: Any,
) -> Tensor:  # fmt: skip
    return mixed.new_empty((len(steps), states.shape[1], states.shape[3]))


def _attended(q: Tensor, kv_cache: PagedKV, *args: Any, **kwargs: Any) -> Tensor:
    return q.new_empty((*q.shape[:2], sizes_of(kv_cache).value_dim))


def _index_queries(
    q: Tensor, k: Tensor, k_norm: Any, head_weights: Tensor, positions: Tensor, table: Tensor,
    pages: IndexPages, *rest: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(q, dtype=pages.keys.dtype), head_weights


def _chosen(
    q: Tensor, head_weights: Tensor, pages: Any, metadata: Any, top_k: int, *rest: Any
) -> Tensor:
    return q.new_empty((len(q), top_k), dtype=torch.int32)


def _queries_for_rows(
    q: Tensor, keys: Tensor, head_weights: Tensor, positions: Tensor, table: Tensor,
    pages: IndexPages, *rest: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(q, dtype=pages.keys.dtype), head_weights


def _closed_rows(x: Tensor, rows: Any, form: TokenRowForm, *rest: Any) -> Tensor:
    return x.new_empty((len(x), form.dim))


def _chosen_blocks(q: Tensor, pages: Any, metadata: Any, choice: BlockChoice) -> Tensor:
    return q.new_empty((*q.shape[:2], choice.top_k), dtype=torch.int32)


def _like_first(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.empty_like(x)


def _quantised_heads(q: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    width = q[0].numel()
    scales = q.new_empty((width // BLOCK, len(q)), dtype=torch.float32)
    return q.new_empty((len(q), width), dtype=torch.float8_e4m3fn), scales


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


_RESULTS: dict[str, Callable[..., Any]] = {
    "paged_attention": _attended,
    "latent_attention": _like_first,
    "sparse_latent_attention": _like_first,
    "index_rope_and_cache": _index_queries,
    "index_topk": _chosen,
    "index_rows": _queries_for_rows,
    "close_rows": _closed_rows,
    "keep_open_tokens": _nothing,
    "cache_rows": _nothing,
    "shared_rope_and_cache": _nothing,
    "window_rows_attention": _like_first,
    "window_rows_fp8": _quantised_heads,
    "choose_blocks": _chosen_blocks,
    "block_sparse_attention": _attended,
    "rope_and_cache": _like_first,
    "latent_rope_and_cache": _nothing,
    "small_m_qkv": _heads,
    "few_row_qkv": _heads,
    "fused_qkv": _heads,
    "gather_context": _gathered_context,
    "gather_latents": _gathered_latents,
    "chosen_bits": _bits,
    "ragged_attention": _ragged,
    "merge_attention": _nothing,
    "add_sinks": _nothing,
    "fused_experts": _expert_outputs,
    "experts_beside": _beside,
    "fp8_experts": _expert_outputs,
    "int8_experts": _expert_outputs,
    "int4_experts": _expert_outputs,
    "fp4_experts": _expert_outputs,
    "fp4_routed_experts": _routed,
    "causal_conv": _like_first,
    "few_row_conv": _products,
    "gated_delta_rule": _states_read,
    "mamba_scan": _states_scanned,
}
"""Shapes of results whose meaning reads numbers, which meta tensors have not."""
