"""Triton kernels in Triton's interpreter; collected only with TRITON_INTERPRET set.

The interpreter computes bfloat16 wrongly and takes milliseconds a program: small shapes,
float32 and float16.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import delta_checks
import fp8_checks
import fp8_latent_checks as fp8_latents
import fp8_linear_checks
import int4_checks as int4
import kernel_checks as check
import kernel_oracle as oracle
import lora_checks
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from interpreted_fixtures import looks_for_builtins_once, rows_by_themselves  # noqa: F401
from triton.runtime import interpreter

from tandem_kernels import ops
from tandem_kernels.attention import paged_attention, rope_and_cache
from tandem_kernels.attention.latent_decode import LatentDecodeTuning, latent_decode
from tandem_kernels.gemm import few_row_gemm
from tandem_kernels.gemm.few_row_gemm import FewRowTuning
from tandem_kernels.gemm.fp8_gemm import Fp8Tuning, fp8_small_m
from tandem_kernels.reference.gumbel import gumbel_noise, hash_bits
from tandem_kernels.sampler import gumbel

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    assert triton.knobs.runtime.interpret
    torch.manual_seed(11)


@pytest.fixture
def _casts_to_e4m3(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the interpreter cast to e4m3 as GPUs do: by itself it loses the carry where a number
    is rounded up to a power of two."""
    convert = interpreter._convert_float

    def exact(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        if target != tl.float8e4nv or source != tl.float32:
            return convert(data, source, target, rounding)
        numbers = torch.from_numpy(data.copy()).to(torch.float8_e4m3fn)
        return numbers.view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", exact)


@dtypes
def test_norms_and_activation(dtype: torch.dtype) -> None:
    check.rms_norm(ops.rms_norm.kernel, 3, 80, dtype)
    check.fused_add_rms_norm(ops.fused_add_rms_norm.kernel, 3, 96, dtype)
    check.silu_and_mul(ops.silu_and_mul.kernel, 3, 1100, dtype)
    check.gelu_tanh_and_mul(ops.gelu_tanh_and_mul.kernel, 3, 1100, dtype)


def test_products_of_few_rows() -> None:
    columns = ops.small_m_gemm.kernel, ops.small_m_gate_up.kernel
    check.small_m_gemm(*columns, (3, 128, 768), torch.float16)


@pytest.mark.parametrize(
    ("shape", "tuning"),
    [((1, 3, 1040), None), ((3, 10, 272), FewRowTuning(4, 128, 4)), ((6, 40, 272), None)],
)
def test_few_rows_of_any_size(
    shape: tuple[int, int, int], tuning: FewRowTuning | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tuning is not None:
        monkeypatch.setattr(few_row_gemm, "few_row_tuning", lambda *sizes: tuning)
    check.few_row_gemm(ops.few_row_gemm.kernel, shape, torch.float16)


def test_fused_gate_up_of_many_rows() -> None:
    check.fused_gate_up(ops.fused_gate_up.kernel, (150, 256, 128), torch.float16)


@pytest.mark.parametrize(
    ("shape", "group_size"),
    [((3, 48, 2048), 128), ((20, 40, 320), 64), ((2, 72, 608), 32)],
    ids=["split", "swapped", "uneven"],
)
def test_products_with_4_bit_weights(shape: tuple[int, int, int], group_size: int) -> None:
    int4.int4_dequantise(ops.int4_dequantise.kernel, shape[1:], group_size, torch.float16)
    columns = ops.int4_gemm.kernel, ops.int4_gate_up.kernel
    int4.int4_gemm(*columns, shape, group_size, torch.float16)


@pytest.mark.usefixtures("rows_by_themselves")
def test_products_with_4_bit_weights_that_do_not_depend_on_the_batch() -> None:
    int4.int4_in_fixed_order(ops.int4_gemm.kernel, (70, 96, 256), torch.float16)


@dtypes
@pytest.mark.usefixtures("rows_by_themselves")
def test_products_that_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    check.invariant_gemm(ops.invariant_gemm.kernel, (70, 150, 100), dtype)


@dtypes
@pytest.mark.parametrize("head_norm", [False, True])
def test_rope_and_cache(dtype: torch.dtype, head_norm: bool) -> None:
    check.rope_and_cache(
        ops.rope_and_cache.kernel,
        dtype,
        head_dim=24,
        num_kv_heads=3,
        group=3,
        head_norm=head_norm,
        keep_k=head_norm,
    )


@pytest.mark.usefixtures("wide_rope")
def test_rope_and_cache_of_many_heads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of the query's than a program has, and fewer of the keys'."""
    monkeypatch.setattr(rope_and_cache, "MANY_TOKENS", 6)
    launched = []
    monkeypatch.setattr(
        rope_and_cache.triton, "cdiv",
        lambda size, part: launched.append(part) or -(-size // part),
    )  # fmt: skip
    op = ops.rope_and_cache.kernel
    check.rope_and_cache(op, torch.float16, head_dim=16, num_kv_heads=10, group=4)
    assert launched == [32, 32]


@pytest.mark.parametrize(
    ("num_kv_heads", "group", "head_dim", "block_size", "dtype"),
    [
        (2, 3, 16, 16, torch.float32),
        (1, 1, 24, 64, torch.float32),
        (1, 16, 16, 16, torch.float32),
        (2, 4, 16, 128, torch.float16),
    ],
)
def test_paged_attention(
    num_kv_heads: int, group: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    batch = oracle.paged_batch(
        [5, 200, 33, 0, 70, 20],
        [1, 1, 1, 1, 7, 20],
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
    )
    check.paged_attention(ops.paged_attention.kernel, batch)


@pytest.mark.parametrize(("window", "fixed_order"), [(1, False), (16, False), (50, True)])
def test_paged_attention_through_a_window(window: int, fixed_order: bool) -> None:
    batch = oracle.paged_batch(
        [5, 200, 0, 70, 120],
        [1, 1, 1, 7, 90],
        num_kv_heads=2,
        group=3,
        head_dim=16,
        block_size=16,
        window=window,
        page_padding=32,
    )
    batch.metadata = replace(batch.metadata, fixed_order=fixed_order)
    check.paged_attention(ops.paged_attention.kernel, batch)


@pytest.mark.usefixtures("wide_windows")
@pytest.mark.parametrize("block_size", [16, 128])
def test_decodes_through_a_window_in_few_tiles(
    block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that begins within a tile, one that has not begun, and one of a prompt beside them."""
    tiles = []
    attend = paged_attention.prefill_attention
    monkeypatch.setattr(
        paged_attention, "prefill_attention",
        lambda *args, **options: tiles.append(args[5]) or attend(*args, **options),
    )  # fmt: skip
    shape = {"num_kv_heads": 2, "group": 3, "head_dim": 16, "block_size": block_size}
    lengths = [5, 400, 0, 129, 128, 60], [1, 1, 1, 1, 1, 9]
    check.attention_with_sinks(ops.paged_attention.kernel, *lengths, **shape, window=128)
    assert [tuning and tuning.tile for tuning in tiles] == 2 * [128, None]


def test_decodes_through_a_large_window() -> None:
    """It is cut into parts, as whole contexts are."""
    lengths = [5, 300, 0, 257, 520, 700]
    shape = {"num_kv_heads": 2, "group": 3, "head_dim": 16, "window": 300}
    for block_size, page_padding in ((16, 32), (128, 0)):
        more = {"block_size": block_size, "page_padding": page_padding}
        batch = oracle.paged_batch(lengths, [1] * 6, **shape, **more)  # type: ignore[arg-type]
        check.paged_attention(ops.paged_attention.kernel, batch)


@pytest.mark.parametrize(
    ("window", "fixed_order"), [(None, False), (None, True), (16, False), (300, False), (50, True)]
)
def test_paged_attention_with_sinks(window: int | None, fixed_order: bool) -> None:
    lengths = [5, 400, 0, 33, 70, 120], [1, 1, 1, 1, 7, 90]
    shape = {"num_kv_heads": 2, "group": 3, "head_dim": 16, "block_size": 16, "window": window}
    kernel = ops.paged_attention.kernel
    check.attention_with_sinks(kernel, *lengths, fixed_order=fixed_order, **shape)


@pytest.mark.parametrize("window", [None, 40])
def test_paged_attention_with_bounded_scores(window: int | None) -> None:
    batch = oracle.paged_batch(
        [5, 200, 33, 70],
        [1, 1, 1, 20],
        num_kv_heads=2,
        group=2,
        head_dim=16,
        block_size=16,
        window=window,
    )
    batch.softcap = 0.7
    check.paged_attention(ops.paged_attention.kernel, batch)


@dtypes
@pytest.mark.parametrize("keep_k", [False, True])
def test_write_into_an_fp8_cache(dtype: torch.dtype, keep_k: bool) -> None:
    op = ops.rope_and_cache.kernel
    fp8_checks.rope_and_cache(op, dtype, head_dim=24, num_kv_heads=3, group=3, keep_k=keep_k)


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, torch.float32),
        ({"head_dim": 24, "block_size": 64}, torch.float16),
        ({"softcap": 0.7, "block_size": 128}, torch.float32),
        ({"has_sinks": True, "window": 50, "page_padding": 32}, torch.float32),
        ({"has_sinks": True, "window": 300}, torch.float16),
        ({"fixed_order": True}, torch.float32),
    ],
    ids=str,
)
def test_attention_over_an_fp8_cache(options: dict[str, object], dtype: torch.dtype) -> None:
    shape = {"num_kv_heads": 2, "group": 3, "head_dim": 16, "block_size": 16, **options}
    lengths = [5, 400, 33, 0, 70, 20], [1, 1, 1, 1, 7, 20]
    fp8_checks.paged_attention(ops.paged_attention.kernel, *lengths, dtype=dtype, **shape)


@pytest.mark.parametrize("name", check.ROUTERS)
def test_routers(name: str) -> None:
    check.route_tokens(ops.route_tokens.kernel, name, 24)


def test_routers_of_ranks_with_some_experts() -> None:
    check.route_to_own_experts(ops.route_tokens.kernel)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((2, 2, 8, 32, 32), torch.float32),
        ((9, 2, 4, 40, 24), torch.float32),
        ((140, 2, 3, 16, 32), torch.float16),
    ],
    ids=["by pair", "by expert", "sorted"],
)
def test_experts(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    check.fused_experts(ops.fused_experts.kernel, shape, dtype)
    check.fused_experts(ops.fused_experts.kernel, shape, dtype, clamped=True)


def test_write_into_the_latent_cache() -> None:
    check.latent_rope_and_cache(ops.latent_rope_and_cache.kernel, (3, 24, 8), torch.float32)


@pytest.mark.parametrize("fixed_order", [False, True])
@pytest.mark.parametrize("num_heads", [3, 20])
@pytest.mark.parametrize(
    "lengths", [([5, 90, 0], [1, 1, 1]), ([5, 70, 33, 20], [1, 1, 7, 20])], ids=["decodes", "mixed"]
)
def test_latent_attention(
    lengths: tuple[list[int], list[int]], num_heads: int, fixed_order: bool
) -> None:
    sizes = num_heads, 24, 8
    kernel = ops.latent_attention.kernel
    check.latent_attention(kernel, lengths, sizes, torch.float32, fixed_order=fixed_order)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("rows", "tile", "programs"), [(16, 16, 1), (16, 32, 8), (64, 16, 8)])
@pytest.mark.parametrize(("query_len", "num_heads"), [(1, 3), (3, 7)])
def test_latent_decode(
    query_len: int, num_heads: int, rows: int, tile: int, programs: int, turned: bool
) -> None:
    """Tiles within a block and across blocks, whole contexts and parts, drafts."""
    tuning = LatentDecodeTuning(rows, tile, 4, 1, programs, turned=turned)
    sizes = num_heads, 24, 8
    check.latent_decode(latent_decode, [5, 90, 33], query_len, sizes, torch.float32, tuning=tuning)


@pytest.mark.parametrize("turned", [False, True])
def test_latents_in_an_fp8_cache(turned: bool) -> None:
    sizes = 3, 24, 8
    fp8_latents.latent_rope_and_cache(ops.latent_rope_and_cache.kernel, sizes, torch.float32)
    fp8_latents.gather_latents(ops.gather_latents.kernel, sizes, torch.float32)
    lengths = [5, 70, 33, 20], [1, 1, 7, 20]
    fp8_latents.latent_attention(ops.latent_attention.kernel, lengths, sizes, torch.float32)
    tuning = LatentDecodeTuning(16, 32, 4, 1, 8, turned=turned)
    more = [5, 90, 33], 1, sizes, torch.float32
    fp8_latents.latent_decode(latent_decode, *more, tuning=tuning)


@dtypes
def test_expansion_of_cached_latents(dtype: torch.dtype) -> None:
    check.gather_latents(ops.gather_latents.kernel, (3, 24, 8), dtype)
    check.merge_attention(ops.merge_attention.kernel, (5, 3, 24), dtype)


def test_copies_of_contexts() -> None:
    check.gather_context(ops.gather_context.kernel, 24, torch.float32)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("sizes", "dtype"), [((2, 24, 12), torch.float32), ((1, 32, 32), torch.float16)], ids=str
)
def test_ragged_attention(sizes: tuple[int, int, int], dtype: torch.dtype, causal: bool) -> None:
    lengths = [40, 3, 64, 20], [140, 3, 64, 0 if not causal else 33]
    check.ragged_attention(ops.ragged_attention.kernel, lengths, sizes, dtype, causal=causal)


@pytest.mark.parametrize("seed", range(3))
def test_batch_tables(seed: int) -> None:
    check.prepare_inputs(ops.prepare_inputs.kernel, [1, 9, 3, 1], 1, seed)
    check.post_update(ops.post_update.kernel, [1, 9, 3, 1], seed, 1 + seed % 4)
    check.write_drafts(ops.write_drafts.kernel, 4, seed)
    pieces = [(0, 7), (3, 0), (100, 2500)]
    check.apply_staged_writes(ops.apply_staged_writes.kernel, pieces, 2700, seed)
    check.copy_blocks(ops.copy_blocks.kernel, [24, 4100, 34][seed], seed)


@pytest.mark.parametrize(("length", "num_tokens"), [(40, 2), (5000, 9)])
def test_lookup_ngrams(length: int, num_tokens: int) -> None:
    check.lookup_ngrams(ops.lookup_ngrams.kernel, length, num_tokens, (2, 4))


@triton.jit
def noise_kernel(seed, position, bits, noise, V: tl.constexpr):
    token = tl.arange(0, V)
    key = gumbel.row_key(tl.load(seed), tl.load(position))
    tl.store(bits + token, gumbel.hash_bits(key, token).to(tl.int64))
    tl.store(noise + token, -tl.log(gumbel.exponential(gumbel.uniform(key, token))))


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (-1, 7), (2**62 + 5, 2**33 + 1)])
def test_noise_has_the_bits_of_the_reference(seed: int, position: int) -> None:
    keys = torch.tensor([seed]), torch.tensor([position])
    bits, noise = torch.zeros(1024, dtype=torch.int64), torch.zeros(1024)
    noise_kernel[(1,)](*keys, bits, noise, V=1024)
    assert np.array_equal(bits.numpy(), hash_bits(*keys, 1024)[0])
    torch.testing.assert_close(noise, gumbel_noise(*keys, 1024)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("vocab_size", [50, 4200])
def test_sample(vocab_size: int) -> None:
    check.sample(ops.sample.kernel, torch.randn(12, vocab_size) * 3)


def test_the_best_of_all_parts_is_what_whole_rows_draw() -> None:
    kernels = ops.sample_part.kernel, ops.best_of_parts.kernel
    check.sample_parts(*kernels, torch.randn(16, 300) * 3, [128, 128, 44])


def test_sample_among_equal_and_masked_logits() -> None:
    check.sample(ops.sample.kernel, (torch.randn(12, 300) * 2).round())
    masked = torch.where(torch.rand(12, 300) < 0.9, -torch.inf, torch.randn(12, 300))
    check.sample(ops.sample.kernel, masked)
    check.sample(ops.sample.kernel, torch.full((4, 300), -torch.inf))
    check.sample(ops.sample.kernel, torch.where(torch.rand(8, 300) < 0.5, -3e38, torch.ones(1)))


@pytest.mark.parametrize("vocab_size", [50, 4200])
def test_mask_logits(vocab_size: int) -> None:
    check.mask_logits(ops.mask_logits.kernel, 6, vocab_size)


def test_logprobs_and_penalties() -> None:
    check.topk_logprobs(ops.topk_logprobs.kernel, torch.randn(3, 5000), 4)
    check.topk_logprobs(ops.topk_logprobs.kernel, torch.randn(3, 50).half(), 0)
    for num_drafts in (0, 3):
        check.apply_penalties(ops.apply_penalties.kernel, 5, 4200, num_drafts)
    check.sparse_additions(ops.add_sparse.kernel, ops.count_tokens.kernel)


@pytest.mark.usefixtures("_casts_to_e4m3")
@pytest.mark.parametrize("group", [0, 128])
def test_rows_of_fp8(group: int) -> None:
    fp8_linear_checks.quantised_rows(ops.quantise_fp8.kernel, 5, 384, group, torch.float32)
    columns = ops.rms_norm_fp8.kernel, ops.silu_and_mul_fp8.kernel
    fp8_linear_checks.fp8_norm_and_activation(columns, 256, torch.float32, "cpu")
    fp8_linear_checks.unscaled_products((ops.scale_product.kernel, *columns), 200, torch.float32)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(("rows", "splits", "swap"), [(3, 1, False), (3, 3, False), (20, 2, True)])
def test_fp8_products_of_few_rows(rows: int, splits: int, swap: bool, blocks: bool) -> None:

    def small(*given: Any, gated: bool = False) -> torch.Tensor:
        *operands, out_dtype = given
        x, _, weight, *_ = operands
        out = torch.empty(len(x), len(weight) // (2 if gated else 1), dtype=out_dtype)
        tuning = Fp8Tuning(64, 128, 1 if gated else splits, swap, num_warps=4, num_stages=3)
        return fp8_small_m(*operands, out, tuning, gated=gated)

    def gated(x: Any, x_scales: Any, weight: Any, w_scales: Any, out_dtype: Any) -> torch.Tensor:
        return small(x, x_scales, weight, w_scales, None, out_dtype, gated=True)

    fp8_linear_checks.fp8_gemm((small, gated), (rows, 256, 768), blocks=blocks)


SMALL = delta_checks.Sizes(key_heads=1, value_heads=2, key_dim=16, value_dim=40)


@dtypes
def test_convolution_of_linear_attention(dtype: torch.dtype) -> None:
    for batch in (delta_checks.DECODES, delta_checks.MIXED, delta_checks.BORDERS):
        for width in (3, 4):
            sizes = delta_checks.Sizes(kernel=width)
            delta_checks.causal_conv(ops.causal_conv.kernel, batch, sizes, dtype)


@dtypes
def test_delta_rule(dtype: torch.dtype) -> None:
    op = ops.gated_delta_rule.kernel
    delta_checks.gated_delta_rule(op, delta_checks.DECODES, delta_checks.Sizes(), dtype)
    for batch in (delta_checks.MIXED, delta_checks.BORDERS):
        delta_checks.gated_delta_rule(op, batch, SMALL, dtype)
    delta_checks.repeated_tokens(op, SMALL, dtype)
    short = delta_checks.Batch((1, 5), (3, 0), num_decodes=1)
    delta_checks.gated_delta_rule(op, short, SMALL, dtype, fixed_order=True)


def test_gates_of_linear_attention() -> None:
    delta_checks.gated_rms_norm(ops.gated_rms_norm.kernel, 3, 5, 24, torch.float16, "cpu")
    delta_checks.sigmoid_and_mul(ops.sigmoid_and_mul.kernel, 3, 1100, torch.float16, "cpu")


def test_adapters() -> None:
    lora_checks.slots_of_tokens(ops.lora_slots_of_tokens.kernel)
    columns = ops.lora_shrink.kernel, ops.lora_expand.kernel
    for num_tokens, inner, counts, rank in (
        (5, 1040, (72, 16, 16), 8),
        (70, 96, (48, 48), 16),
        (3, 64, (40,), 32),
    ):
        lora_checks.shrink_and_expand(*columns, num_tokens, inner, counts, rank, torch.float32)


def test_adapters_in_the_launch_of_their_layer() -> None:
    kernels = ops.lora_gemm.kernel, ops.lora_gate_up.kernel
    for num_tokens, inner, counts, rank, num_slots in (
        (5, 512, (64, 32, 32), 8, 3),
        (16, 512, (32, 32), 16, 9),
        (1, 1024, (32,), 64, 5),
        (18, 256, (32,), 16, 4),
    ):
        lora_checks.one_launch(*kernels, num_tokens, inner, counts, rank, num_slots, torch.float32)


def test_adapters_in_one_launch_when_the_last_program_begins_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One program at a time, in the other order: none may wait for one that has not begun."""
    builder = interpreter.interpreter_builder
    begin = builder.set_grid_idx
    monkeypatch.setattr(
        builder, "set_grid_idx", lambda x, y, z: begin(builder.grid_dim[0] - 1 - x, y, z)
    )
    kernels = ops.lora_gemm.kernel, ops.lora_gate_up.kernel
    lora_checks.one_launch(*kernels, 5, 512, (32, 32), 8, 3, torch.float32)


def test_adapters_of_few_tokens() -> None:
    few = ops.lora_shrink.kernel, ops.lora_expand_few.kernel, ops.lora_expand_gated.kernel
    for num_tokens, inner, counts, rank, num_slots in (
        (5, 1040, (72, 16, 16), 8, 3),
        (18, 96, (48, 48), 16, 9),
        (3, 2100, (40,), 32, 5),
        (2, 96, (80, 80), 256, 2),
    ):
        lora_checks.few_tokens(
            *few, num_tokens, inner, counts, rank, torch.float32, "cpu", num_slots, most_pieces=4
        )
