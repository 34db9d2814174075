"""The Triton column on a CUDA device, against float64; fresh outputs start as NaN."""

from __future__ import annotations

from collections.abc import Iterator

import fp8_linear_checks
import int4_checks as int4
import kernel_checks as check
import kernel_oracle as oracle
import pytest
import torch

from tandem_kernels import ops
from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.reference.gumbel import gumbel_noise, hash_bits

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
HALVES = [torch.float16, BF16]
halves = pytest.mark.parametrize("dtype", HALVES, ids=str)
head_dims = pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
block_sizes = pytest.mark.parametrize("block_size", [16, 32, 48, 64, 128, 256])


@pytest.fixture(autouse=True)
def _poisoned_and_fresh() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.cuda.synchronize()
    torch.use_deterministic_algorithms(False)


@halves
@pytest.mark.parametrize("rows", [1, 7, 256, 2049])
@pytest.mark.parametrize("width", [64, 896, 1000, 4096, 8192])
def test_norms_and_activation(dtype: torch.dtype, rows: int, width: int) -> None:
    check.rms_norm(ops.rms_norm, rows, width, dtype, "cuda")
    check.fused_add_rms_norm(ops.fused_add_rms_norm, rows, width, dtype, "cuda")
    check.silu_and_mul(ops.silu_and_mul, rows, width, dtype, "cuda")
    check.gelu_tanh_and_mul(ops.gelu_tanh_and_mul, rows, width, dtype, "cuda")


@halves
@pytest.mark.parametrize("rows", [1, 5, 16, 33, 64])
@pytest.mark.parametrize("shape", [(6144, 4096), (128, 256), (4096, 14336), (4608, 3584)])
def test_products_of_few_rows(dtype: torch.dtype, rows: int, shape: tuple[int, int]) -> None:
    columns = ops.small_m_gemm, ops.small_m_gate_up
    check.small_m_gemm(*columns, (rows, *shape), dtype, "cuda")


@halves
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 9, 16])
@pytest.mark.parametrize("shape", [(5120, 2880), (2880, 4096), (128, 2880), (37, 272)])
def test_few_rows_of_any_size(dtype: torch.dtype, rows: int, shape: tuple[int, int]) -> None:
    check.few_row_gemm(ops.few_row_gemm, (rows, *shape), dtype, "cuda")


@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize(("dtype", "rows"), [(BF16, 1), (BF16, 2049), (torch.float16, 33)])
def test_rows_of_fp8(dtype: torch.dtype, rows: int, group: int) -> None:
    columns = ops.rms_norm_fp8, ops.silu_and_mul_fp8
    for width in (896, 4096, 14336):
        fp8_linear_checks.quantised_rows(ops.quantise_fp8, rows, width, group, dtype, "cuda")
        fp8_linear_checks.fp8_norm_and_activation(columns, width, dtype, "cuda")
        fp8_linear_checks.unscaled_products((ops.scale_product, *columns), width, dtype, "cuda")


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("rows", [1, 33, 65, 2049])
@pytest.mark.parametrize("shape", [(256, 384), (4096, 14336), (1536, 2304)])
def test_fp8_products(rows: int, shape: tuple[int, int], blocks: bool) -> None:
    """Rows that are no multiple of anything, and inner dimensions of 3 and of 18 blocks."""
    fp8_linear_checks.fp8_product(ops.fp8_product, (rows, *shape), "cuda")
    columns = ops.fp8_gemm, ops.fp8_gate_up
    fp8_linear_checks.fp8_gemm(columns, (rows, *shape), blocks=blocks, device="cuda")


@halves
@pytest.mark.parametrize("rows", [1, 63, 1024, 3001])
@pytest.mark.parametrize("shape", [(128, 256), (14336, 4096), (9472, 3584), (4864, 896)])
def test_fused_gate_up_of_many_rows(dtype: torch.dtype, rows: int, shape: tuple[int, int]) -> None:
    check.fused_gate_up(ops.fused_gate_up, (rows, *shape), dtype, "cuda")


@pytest.mark.parametrize(
    ("shape", "group_size", "dtype"),
    [
        ((6144, 4096), 128, torch.bfloat16),
        ((4096, 14336), 128, torch.bfloat16),
        ((200, 1408), 64, torch.bfloat16),
        ((4608, 3584), 32, torch.float16),
    ],
)
def test_4_bit_weights(shape: tuple[int, int], group_size: int, dtype: torch.dtype) -> None:
    int4.int4_dequantise(ops.int4_dequantise, shape, group_size, dtype, "cuda")
    for rows in (1, 5, 16, 17, 64, 200):
        columns = ops.int4_gemm, ops.int4_gate_up
        int4.int4_gemm(*columns, (rows, *shape), group_size, dtype, "cuda")


@halves
def test_4_bit_weights_in_one_order(dtype: torch.dtype) -> None:
    int4.int4_in_fixed_order(ops.int4_gemm, (300, 4096, 4096), dtype, "cuda")
    for shape in ((1, 4096, 14336), (33, 6144, 4096)):
        int4.int4_gemm_again(ops.int4_gemm, shape, "cuda")


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(3, 128, 64), (70, 150, 100), (300, 4096, 4096)])
def test_products_that_do_not_depend_on_the_batch(
    dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    check.invariant_gemm(ops.invariant_gemm, shape, dtype, "cuda")


@halves
@pytest.mark.parametrize("block_size", [16, 128])
def test_attention_in_fixed_order(dtype: torch.dtype, block_size: int) -> None:
    check.attention_in_fixed_order(ops.paged_attention, dtype, block_size, "cuda")


@halves
@pytest.mark.parametrize("window", [1, 128, 200, 5000])
@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_attention_through_a_window(dtype: torch.dtype, window: int, block_size: int) -> None:
    shape = {"num_kv_heads": 2, "group": 4, "head_dim": 128, "dtype": dtype, "window": window}
    padded = {**shape, "block_size": block_size, "page_padding": 1024}
    _attention([1, 127, 128, 129, 1000, 0], [1] * 6, **padded)
    _attention([6000], [1], **padded)
    _attention([300, 700, 2500], [1, 129, 2400], **padded)


@halves
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_attention_with_bounded_scores(
    dtype: torch.dtype, window: int | None, head_dim: int
) -> None:
    shape = {"num_kv_heads": 2, "group": 2, "head_dim": head_dim, "dtype": dtype, "block_size": 64}
    lengths = [1, 127, 128, 1000, 2500], [1, 1, 1, 129, 2400]
    batch = oracle.paged_batch(*lengths, **shape, window=window, device="cuda")  # type: ignore[arg-type]
    batch.softcap = 0.7
    check.paged_attention(ops.paged_attention, batch)


@halves
@pytest.mark.parametrize("fixed_order", [False, True])
@pytest.mark.parametrize("window", [None, 128, 1024])
@pytest.mark.parametrize(("num_kv_heads", "group"), [(8, 8), (4, 8), (2, 3)])
def test_attention_with_sinks(
    dtype: torch.dtype, num_kv_heads: int, group: int, window: int | None, fixed_order: bool
) -> None:
    shape = {
        "num_kv_heads": num_kv_heads, "group": group, "head_dim": 64, "dtype": dtype,
        "window": window, "block_size": 64, "fixed_order": fixed_order, "device": "cuda",
    }  # fmt: skip
    op = ops.paged_attention
    for lengths in (
        ([1, 127, 128, 129, 1000, 0, 9000], [1] * 7),
        ([5000], [1]),
        ([300, 0, 700, 2500], [1, 1, 129, 2400]),
    ):
        check.attention_with_sinks(op, *lengths, **shape)  # type: ignore[arg-type]


@halves
@pytest.mark.parametrize("num_heads", [8, 16, 64, 128])
def test_latent_attention(dtype: torch.dtype, num_heads: int) -> None:
    sizes = num_heads, 512, 64
    check.latent_rope_and_cache(ops.latent_rope_and_cache, sizes, dtype, "cuda")
    for lengths in (
        ([1, 127, 0, 129, 1000], [1] * 5),
        ([1500], [1]),
        ([300, 700, 1500], [1, 129, 1400]),
    ):
        for fixed in (False, True):
            check.latent_attention(
                ops.latent_attention, lengths, sizes, dtype, fixed_order=fixed, device="cuda"
            )


@halves
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("query_len", "num_heads"), [(1, 16), (2, 8), (3, 16), (1, 40)])
@pytest.mark.parametrize("block_size", [16, 64])
def test_latent_decode(
    dtype: torch.dtype, query_len: int, num_heads: int, block_size: int, turned: bool
) -> None:
    """Contexts in parts and whole, tiles within a block and across blocks, drafts."""
    from tandem_kernels.attention.latent_decode import LatentDecodeTuning, latent_decode

    tuning = LatentDecodeTuning(16, 64, 4, 3, 1, turned=True) if turned else None
    for seq_lens in ([1500], [3, 64, 65, 1000, 128, 127] * 40):
        check.latent_decode(
            latent_decode, seq_lens, query_len, (num_heads, 512, 64), dtype,
            block_size=block_size, device="cuda", tuning=tuning,
        )  # fmt: skip


@halves
@pytest.mark.parametrize("num_heads", [8, 16, 40])
def test_expansion_of_cached_latents(dtype: torch.dtype, num_heads: int) -> None:
    check.gather_latents(ops.gather_latents, (num_heads, 512, 64), dtype, "cuda")
    check.merge_attention(ops.merge_attention, (700, num_heads, 128), dtype, "cuda")


@halves
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_copies_of_contexts(dtype: torch.dtype, head_dim: int) -> None:
    check.gather_context(ops.gather_context, head_dim, dtype, "cuda")


@halves
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(4, 192, 128), (2, 128, 128), (2, 64, 32)])
def test_ragged_attention(dtype: torch.dtype, sizes: tuple[int, int, int], causal: bool) -> None:
    lengths = [40, 1, 129, 600], [1100, 1, 129, 601 if causal else 0]
    check.ragged_attention(
        ops.ragged_attention, lengths, sizes, dtype, causal=causal, device="cuda"
    )


@pytest.mark.parametrize("name", check.ROUTERS)
@pytest.mark.parametrize("num_experts", [16, 64, 128, 256])
def test_routers(name: str, num_experts: int) -> None:
    check.route_tokens(ops.route_tokens, name, num_experts, "cuda")


def test_routers_of_ranks_with_some_experts() -> None:
    check.route_to_own_experts(ops.route_tokens, "cuda")


def test_kernels_that_let_the_next_one_begin_late() -> None:
    check.route_tokens(ops.route_tokens, "gpt_oss", 128, "cuda")
    check.rms_norm(ops.rms_norm, 3, 2880, torch.bfloat16, "cuda")
    check.fused_add_rms_norm(ops.fused_add_rms_norm, 3, 2880, torch.bfloat16, "cuda")


@pytest.mark.parametrize("block_size", [64, 128])
def test_decodes_through_a_small_window(block_size: int) -> None:
    shape = {"num_kv_heads": 8, "group": 8, "head_dim": 64, "dtype": torch.bfloat16}
    lengths = [1, 127, 128, 129, 1000, 0, 9000], [1] * 7
    more = {"window": 128, "block_size": block_size, "device": "cuda"}
    check.attention_with_sinks(ops.paged_attention, *lengths, **shape, **more)  # type: ignore[arg-type]


@halves
@pytest.mark.parametrize("num_tokens", [1, 4, 16, 33, 300])
@pytest.mark.parametrize("sizes", [(8, 128, 2048, 768), (2, 8, 1024, 1792), (6, 60, 256, 200)])
def test_experts(dtype: torch.dtype, num_tokens: int, sizes: tuple[int, int, int, int]) -> None:
    check.fused_experts(ops.fused_experts, (num_tokens, *sizes), dtype, "cuda")


@halves
@pytest.mark.parametrize("num_tokens", [1, 16, 70, 2100])
@pytest.mark.parametrize("sizes", [(4, 32, 2880, 2880), (4, 128, 2880, 1440), (4, 32, 320, 360)])
def test_experts_with_biases_and_a_clamped_gate(
    dtype: torch.dtype, num_tokens: int, sizes: tuple[int, int, int, int]
) -> None:
    check.fused_experts(ops.fused_experts, (num_tokens, *sizes), dtype, "cuda", clamped=True)


@halves
@head_dims
@pytest.mark.parametrize(("num_kv_heads", "group"), [(1, 16), (2, 7), (8, 4), (12, 1)])
@pytest.mark.parametrize("num_tokens", [1, 33, 600])
def test_rope_and_cache(
    dtype: torch.dtype, head_dim: int, num_kv_heads: int, group: int, num_tokens: int
) -> None:
    for head_norm in (False, True):
        check.rope_and_cache(
            ops.rope_and_cache,
            dtype,
            head_dim=head_dim,
            num_kv_heads=num_kv_heads,
            group=group,
            num_tokens=num_tokens,
            block_size=64,
            head_norm=head_norm,
            keep_k=head_norm,
            device="cuda",
        )


@halves
@pytest.mark.parametrize(("head_dim", "group"), [(64, 8), (128, 4), (80, 7)])
def test_rope_and_cache_of_many_heads_at_once(
    dtype: torch.dtype, head_dim: int, group: int
) -> None:
    shape = {"head_dim": head_dim, "num_kv_heads": 8, "group": group, "block_size": 64}
    check.rope_and_cache(ops.rope_and_cache, dtype, num_tokens=600, device="cuda", **shape)


def _attention(seq_lens: list[int], query_lens: list[int], **shape: object) -> None:
    batch = oracle.paged_batch(seq_lens, query_lens, device="cuda", **shape)  # type: ignore[arg-type]
    check.paged_attention(ops.paged_attention, batch)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@head_dims
@pytest.mark.parametrize(("num_kv_heads", "group"), [(8, 1), (4, 2), (8, 4), (2, 7), (1, 16)])
def test_attention_by_shape(
    dtype: torch.dtype, head_dim: int, num_kv_heads: int, group: int
) -> None:
    shape = {"num_kv_heads": num_kv_heads, "group": group, "head_dim": head_dim, "dtype": dtype}
    _attention([1, 17, 64, 300, 1000], [1] * 5, block_size=64, **shape)
    _attention([33, 500, 129, 700, 5], [1, 1, 129, 77, 5], block_size=64, **shape)
    _attention([40, 2500, 1300], [1, 2400, 1200], block_size=128, **shape)


@pytest.mark.parametrize("group", range(1, 17))
def test_attention_by_group(group: int) -> None:
    """Tries every number of query heads that share keys."""
    shape = {"num_kv_heads": 2, "group": group, "head_dim": 128, "dtype": torch.bfloat16}
    _attention([1, 64, 777, 300, 129, 40], [1, 1, 1, 1, 129, 40], block_size=64, **shape)


@halves
@block_sizes
@pytest.mark.parametrize("head_dim", [80, 128])
def test_attention_by_block_size(dtype: torch.dtype, block_size: int, head_dim: int) -> None:
    shape = {"num_kv_heads": 8, "group": 4, "head_dim": head_dim, "dtype": dtype}
    _attention([1, 255, 256, 257, 2000], [1] * 5, block_size=block_size, **shape)
    _attention([300, 257, 256, 1500], [1, 257, 200, 333], block_size=block_size, **shape)


@halves
@pytest.mark.parametrize("seq_len", [1, 2, 63, 64, 65, 127, 1023, 4097, 32768])
def test_attention_by_length(dtype: torch.dtype, seq_len: int) -> None:
    shape = {"num_kv_heads": 8, "group": 4, "head_dim": 128, "dtype": dtype}
    _attention([seq_len], [1], block_size=64, **shape)
    _attention([seq_len] * 3, [1] * 3, block_size=64, **shape)
    _attention([seq_len], [min(seq_len, 2048)], block_size=64, **shape)
    _attention([seq_len] * 2, [min(seq_len, 3000)] * 2, block_size=128, **shape)
    if seq_len > 1:
        _attention([seq_len], [2], block_size=64, **shape)


@pytest.mark.parametrize("num_decodes", [1, 16, 64, 130, 256, 1000])
def test_many_decodes_with_padding(num_decodes: int) -> None:
    """Lengths from 0 to 4000, so that runs begin and end anywhere."""
    lengths = torch.randint(0, 4000 if num_decodes <= 64 else 600, (num_decodes,)).tolist()
    shape = {"num_kv_heads": 4, "group": 4, "head_dim": 64, "dtype": torch.bfloat16}
    _attention(lengths, [1] * num_decodes, block_size=32, **shape)


def test_blocks_beyond_32_bit_offsets() -> None:
    """Element offsets inside the cache exceed 2^31."""
    block_elements = 2 * 8 * 64 * 128
    num_blocks = 2**31 // block_elements + 40
    kv_cache = torch.full(
        (num_blocks, 2, 8, 64, 128), torch.nan, dtype=torch.bfloat16, device="cuda"
    )
    blocks = torch.arange(num_blocks - 8, num_blocks, dtype=torch.int32, device="cuda")
    kv_cache[blocks.long()] = torch.randn(8, 2, 8, 64, 128, device="cuda").bfloat16()
    pages = kv_cache[blocks.long()].permute(1, 2, 0, 3, 4).reshape(2, 8, 512, 128)
    batch = oracle.PagedBatch(
        torch.randn(1 + 100, 32, 128, device="cuda").bfloat16(),
        kv_cache,
        AttentionMetadata(
            blocks.expand(2, -1).contiguous(),
            oracle.cumulative([1, 100]).cuda(),
            torch.tensor([500, 512], dtype=torch.int32, device="cuda"),
            num_decodes=1,
            max_query_len=100,
            max_seq_len=512,
        ),
        [pages[0, :, :500], pages[0]],
        [pages[1, :, :500], pages[1]],
        128**-0.5,
    )
    check.paged_attention(ops.paged_attention, batch)


def test_layers_of_one_allocation() -> None:
    """A layer's cache may be a strided view: [N, L, 2, H, B, D] with the layers inside."""
    whole = torch.full((12, 3, 2, 2, 16, 64), torch.nan, dtype=torch.bfloat16, device="cuda")
    batch = oracle.paged_batch(
        [40, 70],
        [1, 30],
        num_kv_heads=2,
        group=4,
        head_dim=64,
        block_size=16,
        dtype=torch.bfloat16,
        device="cuda",
    )
    view = whole[:, 1]
    view[: batch.kv_cache.shape[0]] = batch.kv_cache
    batch.kv_cache = view
    check.paged_attention(ops.paged_attention, batch)


@pytest.mark.parametrize("seed", range(4))
def test_batch_tables(seed: int) -> None:
    check.prepare_inputs(ops.prepare_inputs, [1, 9, 3, 1], 1, seed, "cuda")
    check.post_update(ops.post_update, [1, 9, 3, 1], seed, 1 + seed % 4, "cuda")
    check.write_drafts(ops.write_drafts, 4, seed, "cuda")
    pieces = [(0, 7), (3, 0), (100, 60000)]
    check.apply_staged_writes(ops.apply_staged_writes, pieces, 70000, seed, "cuda")


@pytest.mark.parametrize(("length", "num_tokens"), [(40, 2), (5000, 9), (100_000, 30)])
@pytest.mark.parametrize("lengths", [(1, 1), (2, 4), (3, 3)])
def test_lookup_ngrams(length: int, num_tokens: int, lengths: tuple[int, int]) -> None:
    check.lookup_ngrams(ops.lookup_ngrams, length, num_tokens, lengths, "cuda")


@pytest.mark.parametrize("page_bytes", [64, 98, 36864, 524288])
@pytest.mark.parametrize("num_copies", [0, 1, 7])
def test_copy_blocks(page_bytes: int, num_copies: int) -> None:
    check.copy_blocks(ops.copy_blocks, page_bytes, num_copies, "cuda")


def test_staged_writes_read_pinned_host_memory() -> None:
    base = torch.zeros(3, 5000, dtype=torch.int32, device="cuda")
    values = torch.arange(4000, dtype=torch.int32).pin_memory()
    row_ids = torch.tensor([2], dtype=torch.int32).pin_memory()
    starts = torch.tensor([17], dtype=torch.int32).pin_memory()
    cu_lens = torch.tensor([0, 4000], dtype=torch.int32).pin_memory()
    ops.apply_staged_writes(base, row_ids, starts, cu_lens, values)
    assert torch.equal(base[2, 17:4017].cpu(), values)
    assert int(base.count_nonzero()) == 3999


@pytest.mark.parametrize("rows", [1, 17, 256])
@pytest.mark.parametrize("vocab_size", [50, 657, 32000, 128256])
def test_sample(rows: int, vocab_size: int) -> None:
    check.sample(ops.sample, torch.randn(rows, vocab_size, device="cuda") * 3)
    rounded = (torch.randn(rows, vocab_size, device="cuda") * 3).bfloat16().float()
    check.sample(ops.sample, rounded)


@pytest.mark.parametrize("rows", [1, 17, 256])
def test_the_best_of_all_parts_is_what_whole_rows_draw(rows: int) -> None:
    kernels = ops.sample_part, ops.best_of_parts
    check.sample_parts(*kernels, torch.randn(rows, 32000, device="cuda") * 3, [16064, 15936])
    wide = torch.randn(rows, 2 * 32064, device="cuda")
    check.sample_parts(*kernels, wide[:, 7:32007], [31000, 1000])


def test_sample_among_equal_and_masked_logits() -> None:
    check.sample(ops.sample, (torch.randn(64, 3000, device="cuda") * 2).round())
    random = torch.rand(64, 3000, device="cuda")
    check.sample(ops.sample, torch.where(random < 0.9, -torch.inf, random * 9))
    check.sample(ops.sample, torch.where(random < 0.9, -3e38, random * 9))
    check.sample(ops.sample, torch.full((8, 3000), -torch.inf, device="cuda"))
    nothing = torch.full((8, 3000), torch.nan, device="cuda")
    tokens = ops.sample(nothing, *check.sampling_parameters(8, "cuda"))
    assert ((tokens >= 0) & (tokens < 3000)).all()


def test_token_does_not_depend_on_the_batch() -> None:
    logits = torch.randn(64, 32000, device="cuda") * 2
    columns = check.sampling_parameters(64, "cuda")
    together = ops.sample(logits, *columns)
    for row in range(0, 64, 7):
        alone = ops.sample(logits[row : row + 1], *(c[row : row + 1] for c in columns))
        assert alone.item() == together[row].item()


def test_plain_noise_picks_the_same_tokens_as_the_reference_noise() -> None:
    """Flat logits leave the choice to the noise alone: 4096 draws of 32000 tokens."""
    seeds = torch.arange(4096, device="cuda")
    ones, zeros = torch.ones(4096, device="cuda"), torch.zeros(4096, device="cuda")
    no_k = torch.zeros(4096, dtype=torch.int32, device="cuda")
    logits = torch.zeros(4096, 32000, device="cuda")
    tokens = ops.sample(logits, ones, no_k, ones, zeros, seeds, seeds * 3).cpu()
    smallest = torch.from_numpy(hash_bits(seeds.cpu(), seeds.cpu() * 3, 32000).argmin(-1))
    assert (tokens != smallest).sum() <= 4
    noise = gumbel_noise(seeds[:8].cpu(), seeds[:8].cpu() * 3, 32000)
    assert (noise.argmax(-1) == tokens[:8]).sum() >= 7


@pytest.mark.parametrize("rows", [1, 33])
def test_logprobs_and_penalties(rows: int) -> None:
    check.topk_logprobs(ops.topk_logprobs, torch.randn(rows, 128256, device="cuda") * 4, 20)
    check.topk_logprobs(ops.topk_logprobs, torch.randn(rows, 657, device="cuda").bfloat16(), 0)
    check.weigh_part(ops.weigh_part, torch.randn(rows + 3, 64128, device="cuda")[:, :64065])
    for num_drafts in (0, 3):
        check.apply_penalties(ops.apply_penalties, rows, 128256, num_drafts, "cuda")
    check.sparse_additions(ops.add_sparse, ops.count_tokens, "cuda")


@pytest.mark.parametrize("vocab_size", [300, 4096, 128256, 151936])
def test_mask_logits(vocab_size: int) -> None:
    check.mask_logits(ops.mask_logits, 64, vocab_size, "cuda")


def test_a_captured_decode_equals_the_eager_one_bit_for_bit() -> None:
    """Lengths change between replays; the grid and all addresses stay."""
    batch = oracle.paged_batch(
        [900, 1700, 30, 1],
        [1] * 4,
        num_kv_heads=8,
        group=4,
        head_dim=128,
        block_size=64,
        dtype=torch.bfloat16,
        device="cuda",
    )
    ops.paged_attention(batch.q, batch.kv_cache, batch.metadata, batch.scale)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = ops.paged_attention(batch.q, batch.kv_cache, batch.metadata, batch.scale)
    for lengths in ([900, 1700, 30, 1], [1, 1000, 0, 1], [64, 128, 17, 0]):
        batch.metadata.seq_lens.copy_(torch.tensor(lengths))
        graph.replay()
        eager = ops.paged_attention(batch.q, batch.kv_cache, batch.metadata, batch.scale)
        assert torch.equal(out, eager)
