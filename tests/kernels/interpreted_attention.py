"""Kernels of attention, linear attention and their caches in Triton's interpreter, as
`interpreted_layers`."""

from __future__ import annotations

from dataclasses import replace

import delta_checks
import fp8_checks
import fp8_latent_checks as fp8_latents
import kernel_checks as check
import kernel_oracle as oracle
import mamba_checks
import pending_checks
import pytest
import torch
from interpreted_fixtures import (  # noqa: F401
    dtypes,
    remembers,
    rounds_to_e4m3,
    rows_by_themselves,
    seeded,
)

from tandem_kernels import ops
from tandem_kernels.attention import (
    prefill_attention,
    prefill_parts,
    ragged_attention,
    rope_and_cache,
)
from tandem_kernels.attention.latent_decode import LatentDecodeTuning, latent_decode
from tandem_kernels.attention.value_form import ValueForm

SMALL = delta_checks.Sizes(key_heads=1, value_heads=2, key_dim=16, value_dim=40)


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


@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("block_size", [16, 128])
def test_contexts_in_parts(
    monkeypatch: pytest.MonkeyPatch, block_size: int, softcap: float
) -> None:
    """Some are too short for parts; a part may lie behind what its first rows see."""
    cut: list[int] = []

    def num_parts(*args: object) -> int:
        cut.append(prefill_parts.num_parts(*args))  # type: ignore[arg-type]
        return cut[-1]

    monkeypatch.setattr(prefill_attention, "num_parts", num_parts)
    shape = {"num_kv_heads": 1, "group": 2, "head_dim": 16, "block_size": block_size}
    for contexts, queries, parts in (
        ([1700, 30], [6, 2], 3),
        ([1029], [7], 2),
        ([1024, 600], [5, 3], 2),
    ):
        batch = oracle.paged_batch(contexts, queries, **shape)  # type: ignore[arg-type]
        batch.softcap = softcap
        check.paged_attention(ops.paged_attention.kernel, batch)
        assert cut.pop() >= parts
        check.attention_with_sinks(ops.paged_attention.kernel, contexts, queries, **shape)


@pytest.mark.parametrize("fixed_order", [False, True])
@pytest.mark.parametrize("window", [1, 16, 50])
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


@pytest.mark.parametrize("block_size", [16, 128])
def test_decodes_through_a_small_window(block_size: int) -> None:
    """One that begins within a tile, one that has not begun, and one of a prompt beside them."""
    shape = {"num_kv_heads": 2, "group": 3, "head_dim": 16, "block_size": block_size}
    lengths = [5, 400, 0, 129, 128, 60], [1, 1, 1, 1, 1, 9]
    check.attention_with_sinks(ops.paged_attention.kernel, *lengths, **shape, window=128)


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


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        (([5, 200, 33, 0, 70, 20], [1, 1, 1, 1, 7, 20]), {}),
        (([5, 70, 33], [1, 1, 1]), {"window": 16, "group": 1, "page_padding": 32}),
        (([5, 70, 200], [1, 1, 90]), {"window": 50, "group": 8, "page_padding": 32}),
    ],
    ids=str,
)
def test_values_narrower_than_keys(
    lengths: tuple[list[int], list[int]], options: dict[str, int]
) -> None:
    shape = {"num_kv_heads": 2, "group": 3, "head_dim": 24, "value_dim": 16, "block_size": 16}
    check.attention_with_sinks(ops.paged_attention.kernel, *lengths, **{**shape, **options})
    fp8_checks.paged_attention(ops.paged_attention.kernel, *lengths, **{**shape, **options})


@dtypes
def test_values_of_a_form(dtype: torch.dtype) -> None:
    for values in (ValueForm(normed=True), ValueForm(scale=0.7), ValueForm(normed=True, scale=2.0)):
        check.written_values(ops.rope_and_cache.kernel, values, dtype)


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


@dtypes
def test_sinks_behind_a_complete_softmax(dtype: torch.dtype) -> None:
    check.add_sinks(ops.add_sinks.kernel, (37, 3, 24), dtype)


def test_copies_of_contexts() -> None:
    check.gather_context(ops.gather_context.kernel, 24, torch.float32)
    check.gather_context(ops.gather_context.kernel, 24, torch.float32, value_dim=16)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("sizes", "dtype"), [((2, 24, 12), torch.float32), ((1, 48, 32), torch.float16)], ids=str
)
def test_ragged_attention(
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    causal: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In halves as where there is a copy engine."""
    monkeypatch.setattr(ragged_attention, "has_copy_engine", lambda device: True)
    lengths = [40, 3, 64, 20], [140, 3, 64, 0 if not causal else 33]
    check.ragged_attention(ops.ragged_attention.kernel, lengths, sizes, dtype, causal=causal)


@dtypes
def test_convolution_of_linear_attention(dtype: torch.dtype) -> None:
    for batch in (delta_checks.DECODES, delta_checks.MIXED, delta_checks.BORDERS):
        for width in (3, 4):
            sizes = delta_checks.Sizes(kernel=width)
            delta_checks.causal_conv(ops.causal_conv.kernel, batch, sizes, dtype)
    short, op = delta_checks.Batch((1, 5), (3, 0)), ops.causal_conv.kernel
    delta_checks.causal_conv(op, short, delta_checks.Sizes(), dtype, has_bias=True)
    delta_checks.causal_conv(op, short, delta_checks.Sizes(), dtype, activates=False)


@pytest.mark.parametrize(("rows", "width"), [(1, 4), (4, 2)])
def test_projections_with_their_convolution(rows: int, width: int) -> None:
    op = ops.few_row_conv.kernel
    delta_checks.few_row_conv(op, rows, width, torch.bfloat16, has_bias=rows > 1)


@dtypes
def test_delta_rule(dtype: torch.dtype) -> None:
    op = ops.gated_delta_rule.kernel
    delta_checks.gated_delta_rule(op, delta_checks.DECODES, delta_checks.Sizes(), dtype)
    for batch in (delta_checks.MIXED, delta_checks.BORDERS):
        delta_checks.gated_delta_rule(op, batch, SMALL, dtype)
    delta_checks.repeated_tokens(op, SMALL, dtype)
    delta_checks.keys_of_any_size(op, SMALL, dtype)
    short = delta_checks.Batch((1, 5), (3, 0), num_decodes=1)
    delta_checks.gated_delta_rule(op, short, SMALL, dtype, fixed_order=True)
    conv, sizes = ops.causal_conv.kernel, delta_checks.Sizes(value_heads=2, key_dim=4, value_dim=6)
    pending_checks.drafts(conv, op, sizes, dtype, most=3)


@dtypes
def test_delta_rule_with_a_decay_for_each_channel(dtype: torch.dtype) -> None:
    op = ops.gated_delta_rule.kernel
    sizes = delta_checks.Sizes(
        key_heads=2, value_heads=2, key_dim=24, value_dim=12, by_channel=True
    )
    delta_checks.gated_delta_rule(op, delta_checks.DECODES, sizes, dtype)
    batch = delta_checks.Batch((1, 70, 0, 3), (9, 31, 0, 0), num_decodes=1)
    delta_checks.gated_delta_rule(op, batch, sizes, dtype)
    small = delta_checks.Sizes(1, 1, 16, 8, by_channel=True)
    delta_checks.repeated_tokens(op, small, dtype)
    short = delta_checks.Batch((1, 5), (3, 0), num_decodes=1)
    delta_checks.gated_delta_rule(op, short, small, dtype, fixed_order=True)
    pending_checks.kda_drafts(
        ops.causal_conv.kernel, op, dtype, sizes=delta_checks.Sizes(2, 2, 4, 6), most=3
    )
    bounded = delta_checks.Sizes(1, 1, 16, 8, by_channel=True, decay_floor=-5.0)
    delta_checks.gated_delta_rule(op, batch, bounded, dtype)
    doubled = delta_checks.Sizes(1, 2, 8, 12, rate_scale=2.0)
    delta_checks.gated_delta_rule(op, batch, doubled, dtype)


@dtypes
def test_mamba_scan(dtype: torch.dtype) -> None:
    op, batch = ops.mamba_scan.kernel, delta_checks.Batch((1, 0, 130, 3), (9, 0, 2, 0), 2)
    sizes = mamba_checks.Sizes(heads=3, groups=1, size=24, head_dim=40)
    mamba_checks.mamba_scan(op, batch, sizes, dtype)
    short = delta_checks.Batch((1, 5), (3, 0), num_decodes=1)
    mamba_checks.mamba_scan(op, short, mamba_checks.Sizes(), dtype, fixed_order=True)
    conv = ops.causal_conv.kernel
    pending_checks.mamba_drafts(conv, op, dtype, most=3)
    norms = ops.gated_group_norm.kernel, ops.gated_square_sums.kernel
    mamba_checks.gated_group_norm(*norms, 3, (2, 24), dtype)
    mamba_checks.gated_group_norm(*norms, 2, (1, 1100), dtype)


def test_gates_of_linear_attention() -> None:
    for is_sigmoid in (False, True):
        given = 3, 5, 24, torch.float16, "cpu"
        delta_checks.gated_rms_norm(ops.gated_rms_norm.kernel, *given, is_sigmoid=is_sigmoid)
    gates = ops.sigmoid_and_mul.kernel, ops.softplus_and_mul.kernel
    delta_checks.gate_and_mul(*gates, 3, 1100, torch.float16, "cpu")
    delta_checks.row_gate(ops.row_gate.kernel, 3, 2100, torch.float16, "cpu")
