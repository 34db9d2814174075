"""Kernels of a step's tables, of sampling and of drafts in Triton's interpreter, as
`interpreted_layers`."""

from __future__ import annotations

import kernel_checks as check
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from checksum_checks import hashes_are_the_librarys
from interpreted_fixtures import (  # noqa: F401
    dtypes,
    follows_addresses,
    remembers,
    rounds_to_e4m3,
    rows_by_themselves,
    seeded,
)

from tandem_kernels import ops
from tandem_kernels.batch import batch_prep
from tandem_kernels.reference.gumbel import gumbel_noise, hash_bits
from tandem_kernels.sampler import gumbel


@triton.jit
def _copy_kernel(given: tl.tensor, out: tl.tensor, BLOCK: tl.constexpr) -> None:
    lane = tl.arange(0, BLOCK)
    tl.store(out + lane, tl.load(given + lane))


def test_no_kernel_leaves_its_tensors() -> None:
    whole, part = torch.ones(16), torch.zeros(15)
    _copy_kernel[(1,)](whole, torch.zeros(16), BLOCK=16)
    for tensors in ((whole, part), (part, whole)):
        with pytest.raises(Exception, match="leaves the memory"):
            _copy_kernel[(1,)](*tensors, BLOCK=16)


@pytest.mark.usefixtures("follows_addresses")
@pytest.mark.parametrize("seed", range(3))
def test_batch_tables(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if seed == 1:  # of tables that are longer than what a program copies
        monkeypatch.setattr(batch_prep, "CHUNK", 4)
    check.prepare_inputs(ops.prepare_inputs.kernel, [1, 9, 3, 1], 1, seed)
    check.post_update(ops.post_update.kernel, [1, 9, 3, 1], seed, 1 + seed % 4)
    check.write_drafts(ops.write_drafts.kernel, 4, seed)
    pieces = [(0, 7), (3, 0), (100, 2500)]
    check.write_pieces(ops.write_pieces.kernel, pieces, 2700, seed)
    check.copy_blocks(ops.copy_blocks.kernel, [24, 4100, 34][seed], seed)


@pytest.mark.usefixtures("follows_addresses")
def test_hashes_are_the_librarys() -> None:
    """One stripe more or less than a block, parts of several programs, none of a whole warp."""
    hashes_are_the_librarys([248, 256, 1016, 1024, 1032, 1088, 33 * 1024, 32 * 1024, 17 * 1024 + 8])


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


@pytest.mark.parametrize("num_places", [0, 1, 200])
def test_pick_parameters(num_places: int) -> None:
    check.pick_parameters(ops.pick_parameters.kernel, num_places)


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
