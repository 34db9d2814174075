"""Samplers, log probabilities and masks on a CUDA device."""

from __future__ import annotations

import kernel_checks as check
import pytest
import torch
from gpu_fixtures import poisoned_and_fresh  # noqa: F401

from tandem_kernels import ops
from tandem_kernels.reference.gumbel import gumbel_noise, hash_bits

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("num_places", [0, 1, 200])
def test_pick_parameters(num_places: int) -> None:
    check.pick_parameters(ops.pick_parameters, num_places, "cuda")


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
    for num_drafts in (0, 3):
        check.apply_penalties(ops.apply_penalties, rows, 128256, num_drafts, "cuda")
    check.sparse_additions(ops.add_sparse, ops.count_tokens, "cuda")


@pytest.mark.parametrize("vocab_size", [300, 4096, 128256, 151936])
def test_mask_logits(vocab_size: int) -> None:
    check.mask_logits(ops.mask_logits, 64, vocab_size, "cuda")
