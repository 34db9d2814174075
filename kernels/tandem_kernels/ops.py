"""The one dispatch table: every operation by the device of its tensors.

CPU tensors run the plain-torch reference, CUDA tensors the Triton kernel of the same name and
signature. Triton is imported when the first CUDA tensor arrives, never before.

What a kernel takes of its tensors is stated at its reference (`reference.layouts`), and checked
where the reference runs. A kernel is launched unchecked, as checks cost a launch's time on the
host, but inside `checked_kernels`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import update_wrapper
from importlib import import_module
from typing import Any, ClassVar, Generic, ParamSpec, TypeVar, cast

from torch import Tensor

from tandem_kernels.reference import (
    attention,
    batch,
    block_mix,
    block_sparse,
    delta_rule,
    elementwise,
    experts,
    fp4,
    fp8,
    fp8_linear,
    gemm,
    index,
    int4,
    int8,
    latent,
    lora,
    mamba,
    ngrams,
    norms,
    quantised_experts,
    ragged,
    sampling,
    sparse_latent,
    streams,
    token_rows,
)
from tandem_kernels.reference.layouts import layouts_of

P = ParamSpec("P")
R = TypeVar("R")


class Op(Generic[P, R]):
    """One operation; its first argument is a positional tensor and decides the device."""

    all: ClassVar[list[Op[..., Any]]] = []

    def __init__(self, reference: Callable[P, R], kernel_module: str) -> None:
        self.reference = reference
        self.layouts = layouts_of(reference)
        self.kernel_module = kernel_module
        self._kernel: Callable[P, R] | None = None
        update_wrapper(self, reference)
        Op.all.append(self)

    @property
    def kernel(self) -> Callable[P, R]:
        """Returns the operation of the Triton column; imports triton."""
        if self._kernel is None:
            module = import_module(f"tandem_kernels.{self.kernel_module}")
            self._kernel = cast("Callable[P, R]", getattr(module, self.reference.__name__))
        return self._kernel

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if cast(Tensor, args[0]).is_cuda:
            return self.kernel(*args, **kwargs)
        self.layouts.check(args, kwargs)
        return self.reference(*args, **kwargs)


def standing_in(
    make: Callable[[Op[..., Any]], Callable[..., Any]],
) -> AbstractContextManager[None]:
    """Puts `make(op)` in the place of every operation's reference inside the context: so a model
    shows which operations it asks for where none of them can be launched."""
    return _replaced("reference", make)


def checked_kernels() -> AbstractContextManager[None]:
    """Checks inside the context what kernels are launched with, too, which takes the host longer
    than a launch."""
    return _replaced("_kernel", _checked)


@contextmanager
def _replaced(name: str, make: Callable[[Op[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Gives every operation `make(op)` as its attribute `name` inside the context."""
    before = [getattr(op, name) for op in Op.all]
    try:
        for op in Op.all:
            setattr(op, name, make(op))
        yield
    finally:
        for op, own in zip(Op.all, before, strict=True):
            setattr(op, name, own)


def _checked(op: Op[P, R]) -> Callable[P, R]:
    kernel = op.kernel

    def launch(*args: P.args, **kwargs: P.kwargs) -> R:
        op.layouts.check(args, kwargs, looks_at_devices=True)
        return kernel(*args, **kwargs)

    return launch


embedding = Op(elementwise.embedding, "elementwise.embedding")
rms_norm = Op(elementwise.rms_norm, "elementwise.rms_norm")
add_normed = Op(norms.add_normed, "elementwise.add_normed")
fused_add_rms_norm = Op(elementwise.fused_add_rms_norm, "elementwise.rms_norm")
small_m_gemm = Op(gemm.small_m_gemm, "gemm.small_m_gemm")
invariant_gemm = Op(gemm.invariant_gemm, "gemm.invariant_gemm")
small_m_gate_up = Op(gemm.small_m_gate_up, "gemm.small_m_gemm")
few_row_gemm = Op(gemm.few_row_gemm, "gemm.few_row_gemm")
head_gemm = Op(gemm.head_gemm, "gemm.head_gemm")
small_m_qkv = Op(gemm.small_m_qkv, "gemm.small_m_qkv")
few_row_qkv = Op(gemm.few_row_qkv, "gemm.few_row_qkv")
fused_gate_up = Op(gemm.fused_gate_up, "gemm.fused_gate_up")
fused_qkv = Op(gemm.fused_qkv, "gemm.fused_qkv")
int4_gemm = Op(int4.int4_gemm, "gemm.int4_gemm")
int4_gate_up = Op(int4.int4_gate_up, "gemm.int4_gemm")
int4_dequantise = Op(int4.int4_dequantise, "gemm.int4_dequantise")
fp4_gemm = Op(fp4.fp4_gemm, "gemm.fp4_gemm")
fp4_gate_up = Op(fp4.fp4_gate_up, "gemm.fp4_gemm")
fp4_dequantise = Op(fp4.fp4_dequantise, "gemm.fp4_dequantise")
quantise_fp8 = Op(fp8.quantise_fp8, "gemm.fp8_activations")
rms_norm_fp8 = Op(fp8_linear.rms_norm_fp8, "gemm.fp8_activations")
silu_and_mul_fp8 = Op(fp8_linear.silu_and_mul_fp8, "gemm.fp8_activations")
fp8_gemm = Op(fp8_linear.fp8_gemm, "gemm.fp8_gemm")
fp8_group_gemm = Op(fp8_linear.fp8_group_gemm, "gemm.fp8_gemm")
fp8_dequantise = Op(fp8_linear.fp8_dequantise, "gemm.fp8_dequantise")
fp8_product = Op(fp8_linear.fp8_product, "gemm.fp8_library")
scale_product = Op(fp8_linear.scale_product, "gemm.fp8_activations")
fp8_gate_up = Op(fp8_linear.fp8_gate_up, "gemm.fp8_gemm")
quantise_int8 = Op(int8.quantise_int8, "gemm.fp8_activations")
rms_norm_int8 = Op(int8.rms_norm_int8, "gemm.fp8_activations")
silu_and_mul_int8 = Op(int8.silu_and_mul_int8, "gemm.fp8_activations")
int8_gemm = Op(int8.int8_gemm, "gemm.int8_gemm")
int8_gate_up = Op(int8.int8_gate_up, "gemm.int8_gemm")
int8_dequantise = Op(int8.int8_dequantise, "gemm.int8_weights")
int8_weight_gemm = Op(int8.int8_weight_gemm, "gemm.int8_weights")
int8_weight_gate_up = Op(int8.int8_weight_gate_up, "gemm.int8_weights")
int8_experts = Op(int8.int8_experts, "experts.int8_experts")
int4_experts = Op(int4.int4_experts, "experts.int4_experts")
silu_and_mul = Op(elementwise.silu_and_mul, "elementwise.silu_and_mul")
gelu_tanh_and_mul = Op(elementwise.gelu_tanh_and_mul, "elementwise.silu_and_mul")
bounded_gate_and_mul = Op(elementwise.bounded_gate_and_mul, "elementwise.silu_and_mul")
relu_squared = Op(elementwise.relu_squared, "elementwise.relu_squared")
sigmoid_and_mul = Op(elementwise.sigmoid_and_mul, "elementwise.sigmoid_and_mul")
row_gate = Op(gemm.row_gate, "elementwise.row_gate")
softplus_and_mul = Op(elementwise.softplus_and_mul, "elementwise.sigmoid_and_mul")
causal_conv = Op(delta_rule.causal_conv, "linear_attention.causal_conv")
few_row_conv = Op(delta_rule.few_row_conv, "linear_attention.few_row_conv")
gated_delta_rule = Op(delta_rule.gated_delta_rule, "linear_attention.delta_rule")
gated_rms_norm = Op(delta_rule.gated_rms_norm, "linear_attention.gated_rms_norm")
mamba_scan = Op(mamba.mamba_scan, "linear_attention.mamba_scan")
gated_square_sums = Op(mamba.gated_square_sums, "linear_attention.gated_group_norm")
gated_group_norm = Op(mamba.gated_group_norm, "linear_attention.gated_group_norm")
route_tokens = Op(experts.route_tokens, "experts.route_tokens")
normed_router = Op(experts.normed_router, "experts.normed_router")
sum_pairs = Op(experts.sum_pairs, "experts.expert_sums")
pairs_add_rms_norm = Op(experts.pairs_add_rms_norm, "experts.expert_sums")
fused_experts = Op(experts.fused_experts, "experts.fused_experts")
experts_beside = Op(experts.experts_beside, "experts.fused_experts")
fp8_experts = Op(quantised_experts.fp8_experts, "experts.fp8.experts")
fp4_experts = Op(quantised_experts.fp4_experts, "experts.fp4.experts")
fp4_routed_experts = Op(quantised_experts.fp4_routed_experts, "experts.fp4.routed")
rope_and_cache = Op(elementwise.rope_and_cache, "attention.rope_and_cache")
latent_rope_and_cache = Op(latent.latent_rope_and_cache, "attention.latent_rope_and_cache")
gather_latents = Op(latent.gather_latents, "attention.latent_gather")
latent_attention = Op(latent.latent_attention, "attention.latent_attention")
index_rope_and_cache = Op(index.index_rope_and_cache, "attention.index_rope_and_cache")
index_topk = Op(index.index_topk, "attention.index_topk")
sparse_latent_attention = Op(
    sparse_latent.sparse_latent_attention, "attention.sparse_latent_attention"
)
shared_rope_and_cache = Op(token_rows.shared_rope_and_cache, "attention.shared_rope_and_cache")
close_rows = Op(token_rows.close_rows, "attention.close_rows")
keep_open_tokens = Op(token_rows.keep_open_tokens, "attention.row_cache")
cache_rows = Op(token_rows.cache_rows, "attention.row_cache")
closed_slots = Op(token_rows.closed_slots, "batch.closed_slots")
placed_ids = Op(token_rows.placed_ids, "batch.closed_slots")
index_rows = Op(token_rows.index_rows, "attention.index_rows")
window_rows_attention = Op(token_rows.window_rows_attention, "attention.window_rows_attention")
window_rows_fp8 = Op(token_rows.window_rows_fp8, "attention.window_rows_attention")
read_streams = Op(streams.read_streams, "elementwise.streams")
write_streams = Op(streams.write_streams, "elementwise.streams")
mix_streams = Op(streams.mix_streams, "elementwise.enter_streams")
norm_streams = Op(streams.norm_streams, "elementwise.enter_streams")
share_streams = Op(streams.share_streams, "elementwise.enter_streams")
mix_blocks = Op(block_mix.mix_blocks, "elementwise.block_mix")
join_streams = Op(streams.join_streams, "elementwise.streams")
choose_blocks = Op(block_sparse.choose_blocks, "attention.block_scores")
block_sparse_attention = Op(block_sparse.block_sparse_attention, "attention.block_sparse_attention")
ragged_attention = Op(ragged.ragged_attention, "attention.ragged_attention")
chosen_bits = Op(ragged.chosen_bits, "attention.chosen_bits")
merge_attention = Op(ragged.merge_attention, "attention.merge_attention")
add_sinks = Op(ragged.add_sinks, "attention.attention_sink")
gather_context = Op(attention.gather_context, "attention.context_gather")
paged_attention = Op(attention.paged_attention, "attention.paged_attention")
prepare_inputs = Op(batch.prepare_inputs, "batch.batch_prep")
post_update = Op(batch.post_update, "batch.batch_prep")
write_drafts = Op(batch.write_drafts, "batch.batch_prep")
lookup_ngrams = Op(ngrams.lookup_ngrams, "batch.ngrams")
lora_slots_of_tokens = Op(lora.lora_slots_of_tokens, "lora.lora_slots")
lora_shrink = Op(lora.lora_shrink, "lora.lora_shrink")
lora_expand = Op(lora.lora_expand, "lora.lora_expand")
lora_expand_few = Op(lora.lora_expand_few, "lora.lora_expand_few")
lora_gemm = Op(lora.lora_gemm, "lora.lora_gemm")
lora_gate_up = Op(lora.lora_gate_up, "lora.lora_gemm")
lora_expand_gated = Op(lora.lora_expand_gated, "lora.lora_expand_few")
write_pieces = Op(batch.write_pieces, "batch.word_pieces")
copy_blocks = Op(batch.copy_blocks, "batch.block_copies")
add_sparse = Op(sampling.add_sparse, "sampler.penalties")
count_tokens = Op(sampling.count_tokens, "sampler.penalties")
apply_penalties = Op(sampling.apply_penalties, "sampler.penalties")
mask_logits = Op(sampling.mask_logits, "sampler.token_masks")
pick_parameters = Op(sampling.pick_parameters, "sampler.parameters")
sample = Op(sampling.sample, "sampler.sampling")
sample_part = Op(sampling.sample_part, "sampler.sampling")
best_of_parts = Op(sampling.best_of_parts, "sampler.sampling")
topk_logprobs = Op(sampling.topk_logprobs, "sampler.logprobs")
