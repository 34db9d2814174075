"""Decodes whose contexts are cut into parts, in Triton's interpreter, as `interpreted_layers`."""

from __future__ import annotations

import kernel_checks as check
import kernel_oracle as oracle
import pytest
import torch
import triton
import triton.language as tl
from interpreted_fixtures import remembers, rows_by_themselves, seeded  # noqa: F401

from tandem_kernels import ops
from tandem_kernels.attention import decode_attention, decode_join, decode_line, decode_merge


def test_heads_that_are_merged_by_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_merge, "_COLUMNS", 16)
    monkeypatch.setattr(decode_merge, "_PARTS", 2)
    shape = {"num_kv_heads": 1, "group": 2, "head_dim": 24, "block_size": 16}
    check.paged_attention(ops.paged_attention.kernel, oracle.paged_batch([900, 0], [1, 1], **shape))


@pytest.mark.parametrize(
    ("contexts", "programs"),
    [
        ([200, 200, 200], 7),
        ([200, 200, 200], 12),
        ([200, 190, 180], 26),
        ([900, 20, 0, 130], 11),
        ([30] * 9, 5),
        ([0, 0], 3),
    ],
    ids=["in turn", "a head each", "even parts", "long and short", "many heads", "none"],
)
def test_the_last_program_of_a_head_joins_its_parts(
    monkeypatch: pytest.MonkeyPatch, contexts: list[int], programs: int
) -> None:
    monkeypatch.setattr(decode_attention, "FEW_UNITS", 0)
    monkeypatch.setattr(decode_attention, "num_programs", lambda *given: programs)
    monkeypatch.setattr(decode_join, "_MOST_NUMBERS", 2 * 4 * 32)
    shape = {"num_kv_heads": 2, "group": 3, "head_dim": 24, "block_size": 16}
    batch = oracle.paged_batch(contexts, [1] * len(contexts), **shape)
    for _ in range(2):
        check.paged_attention(ops.paged_attention.kernel, batch)
    check.attention_with_sinks(ops.paged_attention.kernel, contexts, [1] * len(contexts), **shape)


@triton.jit
def _runs_kernel(
    seq_lens: tl.tensor,
    found: tl.tensor,
    programs: tl.tensor,
    num_reqs: tl.tensor,
    REQS: tl.constexpr,
) -> None:
    lengths, ends, length = decode_line.line(seq_lens, num_reqs, 2, 16, REQS, 0)
    run, step, ends, length = decode_line.runs(lengths, ends, length, programs, 2, 16, 0, EVEN=True)
    tl.store(found, run)
    tl.store(found + 1, step)
    tl.store(found + 2, length)
    tl.store(found + 3, tl.max(ends, axis=0))


@pytest.mark.parametrize(
    ("tiles", "programs", "run", "step", "length"),
    [
        ([17] * 4, 24, 6, 6, 4 * 2 * 18),
        ([17, 5, 0], 8, 6, 6, 2 * (18 + 6)),
        ([16] * 4, 8, 16, 16, 4 * 2 * 16),
        ([16] * 4, 11, 12, 1, 4 * 2 * 16),
        ([17, 16, 3, 0], 8, 9, 1, 2 * 36),
        ([5] * 4, 3, 14, 1, 4 * 2 * 5),
    ],
    ids=["three parts", "long and short", "a head each", "uneven", "ragged", "several heads"],
)
def test_no_two_heads_share_a_run(
    tiles: list[int], programs: int, run: int, step: int, length: int
) -> None:
    """Heads follow each other without gaps where there are too few programs for that."""
    found = torch.zeros(4, dtype=torch.int32)
    lengths = torch.tensor([16 * count for count in tiles]).int()
    _runs_kernel[(1,)](lengths, found, programs, len(tiles), 4)
    assert found.tolist() == [run, step, length, length]


@pytest.mark.parametrize(
    ("seq_lens", "query_lens", "num_padded"),
    [
        ([300, 70, 40], [1, 1, 9], 4),
        ([60, 150], [1, 33], 33),
        ([40, 9], [40, 9], 2),
        ([5, 90], [1, 1], 3),
        ([7 + i for i in range(45)] + [30], [1] * 45 + [20], 2),
    ],
    ids=["few", "padding at the end of the tokens", "prompts alone", "decodes alone", "many"],
)
def test_decodes_that_a_recorded_step_hides(
    seq_lens: list[int], query_lens: list[int], num_padded: int
) -> None:
    shape = {"num_kv_heads": 2, "group": 3, "head_dim": 16, "block_size": 16}
    check.hidden_decodes(ops.paged_attention.kernel, seq_lens, query_lens, num_padded, **shape)
    latents = ops.latent_attention.kernel, (seq_lens, query_lens), num_padded
    check.hidden_decodes_of_latents(*latents, (3, 24, 8))
