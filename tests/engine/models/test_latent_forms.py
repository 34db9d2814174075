"""The expanded form of latent attention computes what the absorbed one does: layers, models, and
an engine behind its scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.batch.input_batch import BatchOrder
from engine.layers.attention import selection
from engine.layers.attention.latent.latent_forms import LatentForms
from engine.layers.attention.latent_backend import LatentBackend, LatentMetadata
from engine.layers.attention.layer import AttentionInputs
from engine.layers.attention.whole_prompts import flash_attention
from engine.layers.attention.whole_prompts.flash_attention import FlashRagged
from engine.models.checkpoint import load_model_config
from engine.models.registry import spec_of
from engine.models.specs.latent import LatentSpec
from engine.parallel.distributed import ParallelGroup
from tandem_kernels.reference.ragged import ragged_attention
from tests.engine.models.engine_rank import MODES, greedy
from tests.engine.models.parity_cases import NUM_GREEDY, prompts
from tests.engine.models.rank_process import CHUNK, WHOLE, make_paged_model
from tests.engine.models.reference_models import expected_logits
from tests.engine.models.test_greedy_parity import chosen_behind

FAMILIES = ["deepseek_v2", "deepseek_v3_yarn"]
TINY = LatentSpec(q_rank=0, kv_rank=24, nope=16, rope=8, value=12, scale=0.3)
DEEPSEEK = LatentSpec(q_rank=0, kv_rank=512, nope=128, rope=64, value=128, scale=0.1)
FREE = LatentSpec(q_rank=0, kv_rank=1, nope=0, rope=8, value=0, scale=0.3)
"""Sizes by which expansion costs nothing: each chunk is expanded."""
Chunks = list[tuple[int, int]]
"""Pairs (query, context)."""
STEPS: dict[str, tuple[int, Chunks]] = {
    "one prompt": (0, [(70, 70)]),
    "prompts": (0, [(70, 70), (33, 33), (16, 16), (40, 40)]),
    "chunks behind contexts": (0, [(50, 70), (33, 100), (16, 16), (40, 57)]),
    "after decodes and a short chunk": (2, [(1, 9), (1, 70), (3, 50), (40, 90), (33, 33)]),
    "between short ones": (1, [(1, 31), (40, 90), (2, 30), (33, 33), (5, 90)]),
    "after drafts": (2, [(3, 9), (3, 70), (40, 90)]),
}
"""Steps by the number of decodes and by all requests."""


class Batch:
    """A step, and a layer's queries and cache, which is NaN where nobody has written."""

    window = None

    def __init__(
        self,
        num_decodes: int,
        chunks: Chunks,
        sizes: LatentSpec,
        num_heads: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        block_size: int = 16,
    ) -> None:
        generator = torch.Generator().manual_seed(5)

        def randn(*shape: int, std: float = 1.0) -> Tensor:
            return (torch.randn(shape, generator=generator) * std).to(device, dtype)

        query_lens, seq_lens = (list(lengths) for lengths in zip(*chunks, strict=True))
        blocks_of = [-(-length // block_size) for length in seq_lens]
        free = iter(torch.randperm(sum(blocks_of) + 2, generator=generator).tolist())
        tables = torch.zeros(len(chunks), max(blocks_of) + 1, dtype=torch.int32)
        cache = torch.full((sum(blocks_of) + 2, block_size, sizes.kv_rank + sizes.rope), torch.nan)
        self.cache = cache.to(device, dtype)
        for r, length in enumerate(seq_lens):
            for b in range(blocks_of[r]):
                tables[r, b] = block = next(free)
                rows = min(block_size, length - b * block_size)
                self.cache[block, :rows] = randn(rows, cache.shape[2])
        self.block_tables = tables.to(device)
        self.query_start_loc = torch.tensor([0, *query_lens]).cumsum(0).int().to(device)
        self.seq_lens = torch.tensor(seq_lens).int().to(device)
        self.order = BatchOrder(
            rows=np.arange(len(chunks), dtype=np.int32),
            query_lens=np.array(query_lens, np.int32),
            seq_lens=np.array(seq_lens, np.int32),
            num_decodes=num_decodes,
            num_sampled=len(chunks),
            decode_query_len=query_lens[0] if num_decodes else 1,
        )
        head = sizes.nope + sizes.rope
        # As in a model: a part of a wider projection.
        self.heads = randn(sum(query_lens), num_heads * head + 24)[:, 24:].unflatten(1, (-1, head))
        kv_b = randn(num_heads, sizes.value + sizes.nope, sizes.kv_rank, std=sizes.kv_rank**-0.5)
        self.forms = LatentForms(kv_b, sizes.value, sizes.scale, False)

    def attended(self, backend: LatentBackend, chosen: Tensor | None = None) -> Tensor:
        positions = torch.zeros(len(self.heads), dtype=torch.int64)
        metadata = backend.metadata(self)
        inputs = AttentionInputs(positions, positions, positions, metadata, backend)
        return self.forms.attend(self.heads, self.cache, inputs, chosen)


def tiny_backend(pass_tokens: int) -> LatentBackend:
    return LatentBackend(shape=FREE, pass_tokens=pass_tokens, fewest_tokens=6, fewest_of_step=6)


@pytest.mark.parametrize("pass_tokens", [7, 60, 1000])
@pytest.mark.parametrize("name", STEPS)
def test_both_forms_are_equal(name: str, pass_tokens: int) -> None:
    batch = Batch(*STEPS[name], TINY, 3)
    backend = tiny_backend(pass_tokens)
    metadata = backend.metadata(batch)
    assert isinstance(metadata, LatentMetadata)
    has_cached = sum(seq - query for query, seq in STEPS[name][1][batch.order.num_decodes :]) > 0
    assert (len(metadata.passes) > 1) == (pass_tokens < 100 and has_cached)
    expected, found = batch.attended(LatentBackend()), batch.attended(backend)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pass_tokens", [7, 60, 1000])
@pytest.mark.parametrize("name", STEPS)
def test_both_forms_attend_to_the_same_chosen_tokens(name: str, pass_tokens: int) -> None:
    batch = Batch(*STEPS[name], TINY, 3)
    backend = replace(tiny_backend(pass_tokens), dense_tokens=10, masked_tokens=1000)
    metadata = backend.metadata(batch)
    assert isinstance(metadata, LatentMetadata) and metadata.choosing is not None
    lengths = zip(batch.order.query_lens.tolist(), batch.order.seq_lens.tolist(), strict=True)
    seen = [one for query, seq in lengths for one in range(seq - query + 1, seq + 1)]
    chosen = torch.full((len(seen), 10), -1, dtype=torch.int32)
    for row, length in zip(chosen, seen, strict=True):
        picked = torch.randperm(length)[:10].sort().values
        row[: len(picked)] = picked.int()
    expected = batch.attended(LatentBackend(), chosen)
    torch.testing.assert_close(batch.attended(backend, chosen), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pass_tokens", [30, 1000])
@pytest.mark.parametrize("family", [*FAMILIES, "deepseek_v32", "glm_moe_dsa_shared"])
def test_expanded_logits_equal_transformers(
    family: str, pass_tokens: int, checkpoints: Path
) -> None:
    """Whole prompts, chunks, and behind a cached prefix, to the tolerance of all models, also where
    an indexer chooses what is attended."""
    model = make_paged_model(checkpoints / family, ParallelGroup(0, 1))
    dense = spec_of(load_model_config(checkpoints / family)).dense_tokens
    model.backend = replace(tiny_backend(pass_tokens), dense_tokens=dense, masked_tokens=1000)
    expected = expected_logits(checkpoints / family)
    for chunk in (WHOLE, CHUNK, 40):
        for found, logits in zip(model.prefill(prompts(), chunk), expected, strict=True):
            torch.testing.assert_close(found, logits, rtol=1e-4, atol=2e-5)
    _, behind = model.prefill_sharing(prompts()[-2:], WHOLE)
    torch.testing.assert_close(behind, expected[-1][-len(behind) :], rtol=1e-4, atol=2e-5)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_of_an_engine_that_expands(
    family: str, mode: str, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks that the scheduler cut, beside decodes and behind the prefix cache."""
    expanded = []

    def backend(*choice: object) -> LatentBackend:
        def ragged(*arguments: object) -> tuple[Tensor, Tensor]:
            expanded.append(arguments)
            return ragged_attention(*arguments)  # type: ignore[arg-type]

        return LatentBackend(
            shape=FREE, ragged=ragged, pass_tokens=30, fewest_tokens=6, fewest_of_step=6
        )

    monkeypatch.setattr(selection, "_latent_backend", backend)
    found = greedy(checkpoints / family, mode, 0, 1, "")
    tokens = [found[str(index)].tokens for index in range(len(prompts()))]
    assert [len(answer) for answer in tokens] == [NUM_GREEDY] * len(tokens)
    assert chosen_behind(checkpoints / family, tuple(map(tuple, tokens))) == tokens
    assert any(arguments[3].causal for arguments in expanded)  # type: ignore[attr-defined]
    assert not all(arguments[3].causal for arguments in expanded)  # type: ignore[attr-defined]


def test_flash_way_equals_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in computes by the meaning of the library's arguments."""

    def forward(q: Tensor, k: Tensor, v: Tensor, **given: object) -> tuple[Tensor, Tensor, None]:
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1 and given["num_splits"] == 1
        for name in ("q", "k"):
            bounds = given[f"cu_seqlens_{name}"]
            assert isinstance(bounds, Tensor) and bounds.dtype == torch.int32
            assert int(bounds.diff().max()) == given[f"max_seqlen_{name}"]
        batch = SimpleNamespace(
            query_bounds=given["cu_seqlens_q"],
            key_bounds=given["cu_seqlens_k"],
            causal=given["is_causal"],
        )
        scale = given["softmax_scale"]
        return *ragged_attention(q, k, v, batch, scale), None  # type: ignore[arg-type]

    monkeypatch.setattr(flash_attention, "forward_kernel", lambda package: forward)
    batch = Batch(*STEPS["between short ones"], TINY, 3)
    flash = LatentBackend(
        shape=TINY,
        ragged=FlashRagged("stand-in"),
        pass_tokens=60,
        fewest_tokens=6,
        fewest_of_step=6,
    )
    flash.prepare(3, batch.cache[:, None, None], batch.cache.dtype, 100)
    assert torch.equal(batch.attended(flash), batch.attended(tiny_backend(60)))


def _kernels() -> list[Callable[[], LatentBackend | None]]:
    def flash() -> LatentBackend | None:
        package = FlashRagged.package(torch.bfloat16, 192, 128, torch.device("cuda"))
        return package and LatentBackend(shape=DEEPSEEK, ragged=FlashRagged(package))

    return [lambda: LatentBackend(shape=DEEPSEEK), flash]


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [8, 16, 128])
@pytest.mark.parametrize("make", _kernels(), ids=["Triton", "FlashAttention 3"])
def test_both_forms_are_as_exact_on_a_gpu(
    make: Callable[[], LatentBackend | None], num_heads: int
) -> None:
    """Against float32 of the same numbers, in several passes and in one."""
    backend = make()
    if backend is None:
        pytest.skip("no package with FlashAttention 3 is installed")
    chunks = [(1, 77), (1, 1300), (30, 900), (600, 600), (700, 2500), (300, 1000), (5, 900)]
    batch = Batch(
        2, chunks, DEEPSEEK, num_heads, dtype=torch.bfloat16, device="cuda", block_size=64
    )
    backend.prepare(num_heads, batch.cache[:, None, None], batch.cache.dtype, 4096)
    truth = Batch(2, chunks, DEEPSEEK, num_heads, device="cpu", block_size=64)
    truth.cache, truth.heads = batch.cache.float().cpu(), batch.heads.float().cpu()
    truth.forms = LatentForms(batch.forms.kv_b.float().cpu(), 128, DEEPSEEK.scale, False)
    expected = truth.attended(LatentBackend()).double()

    def error(of: LatentBackend) -> float:
        difference = batch.attended(of).double().cpu() - expected
        return float(difference.norm() / expected.norm())

    natural = error(LatentBackend())
    assert natural < 0.02
    for pass_tokens in (512, 16384):
        of_passes = LatentBackend(shape=DEEPSEEK, ragged=backend.ragged, pass_tokens=pass_tokens)
        assert len(of_passes.metadata(batch).passes) > 1 or pass_tokens == 16384  # type: ignore[attr-defined]
        assert error(of_passes) < 1.5 * natural
