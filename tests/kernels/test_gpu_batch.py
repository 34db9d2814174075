"""Kernels of a step's tables, caches and copies of blocks, on a CUDA device."""

from __future__ import annotations

import kernel_checks as check
import pytest
import torch
from checksum_checks import hashes_are_the_librarys
from gpu_fixtures import halves, head_dims, poisoned_and_fresh  # noqa: F401

from tandem_kernels import ops
from tandem_kernels.batch.batch_tables import WordTables

pytestmark = pytest.mark.gpu


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


def test_hashes_are_the_librarys() -> None:
    hashes_are_the_librarys([8 << 20, 248, 1024, 1032, 5 << 20, 8192, 40_000, 12_345_672], "cuda")


@pytest.mark.parametrize("seed", range(4))
def test_batch_tables(seed: int) -> None:
    check.prepare_inputs(ops.prepare_inputs, [1, 9, 3, 1], 1, seed, "cuda")
    check.post_update(ops.post_update, [1, 9, 3, 1], seed, 1 + seed % 4, "cuda")
    check.write_drafts(ops.write_drafts, 4, seed, "cuda")
    pieces = [(0, 7), (3, 0), (100, 60000)]
    check.write_pieces(ops.write_pieces, pieces, 70000, seed, "cuda")


@pytest.mark.parametrize(("length", "num_tokens"), [(40, 2), (5000, 9), (100_000, 30)])
@pytest.mark.parametrize("lengths", [(1, 1), (2, 4), (3, 3)])
def test_lookup_ngrams(length: int, num_tokens: int, lengths: tuple[int, int]) -> None:
    check.lookup_ngrams(ops.lookup_ngrams, length, num_tokens, lengths, "cuda")


@pytest.mark.parametrize("page_bytes", [64, 98, 36864, 524288])
@pytest.mark.parametrize("num_copies", [0, 1, 7])
def test_copy_blocks(page_bytes: int, num_copies: int) -> None:
    check.copy_blocks(ops.copy_blocks, page_bytes, num_copies, "cuda")


def test_pieces_come_from_pinned_memory_of_the_host() -> None:
    table = torch.zeros(3, 5000, dtype=torch.int32, device="cuda")
    tables = WordTables.of([table])
    head = torch.tensor([0, 2 * 5000 + 17, 8, 4000]).view(torch.int32)
    packed = torch.cat([head, torch.arange(4000, dtype=torch.int32)]).pin_memory()
    ops.write_pieces(tables.addresses, tables.words, packed, 1, 4000)
    assert torch.equal(table[2, 17:4017].cpu(), packed[8:])
    assert int(table.count_nonzero()) == 3999
