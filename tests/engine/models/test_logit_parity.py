"""Prefill logits equal transformers' on the same weights: every family, one rank and two,
chunked and whole, with and without a cached prefix."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from engine.parallel.distributed import ParallelGroup
from tests.engine.models.parity_cases import prompts
from tests.engine.models.rank_process import CHUNK, compute, make_paged_model
from tests.engine.models.reference_models import (
    FAMILIES,
    expected_logits,
    reference,
    reference_logits,
    save_checkpoint,
)

LogitsByRank = dict[int, list[dict[str, torch.Tensor]]]


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("mode", ["whole", "chunked", "cached"])
@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_logits_equal_transformers(
    family: str, mode: str, tp_size: int, checkpoints: Path, logits_by_rank: LogitsByRank
) -> None:
    expected = expected_logits(checkpoints / family)
    for ours in logits_by_rank[tp_size]:
        if mode == "cached":
            part = ours[f"{family}/cached"]
            assert 0 < len(part) < len(expected[-1])
            torch.testing.assert_close(part, expected[-1][-len(part) :], rtol=1e-4, atol=2e-5)
            continue
        for index, logits in enumerate(expected):
            torch.testing.assert_close(
                ours[f"{family}/{mode}/{index}"], logits, rtol=1e-4, atol=2e-5
            )


@pytest.mark.parametrize("family", FAMILIES)
def test_all_ranks_have_the_same_bits(family: str, logits_by_rank: LogitsByRank) -> None:
    first, second = logits_by_rank[2]
    keys = [key for key in first if key.startswith(f"{family}/")]
    assert keys
    for key in keys:
        assert torch.equal(first[key], second[key])


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *product(["llama", "qwen2", "qwen3_tied", "qwen3_5_tied"], ["bfloat16", "float16"]),
        # In bfloat16 tokens close to two experts go to either.
        ("gpt_oss", "float16"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_half_precision_is_as_exact_as_transformers(
    family: str, dtype: str, device: str, tmp_path: Path
) -> None:
    """Compares with float32 on the same rounded weights; transformers in half precision is the
    yardstick for how much error is natural.
    """
    half = getattr(torch, dtype)
    save_checkpoint(FAMILIES[family], tmp_path, half)
    exact, theirs = reference(tmp_path), reference(tmp_path, half)
    paged = make_paged_model(tmp_path, ParallelGroup(0, 1), device=device)
    assert {cache.dtype for cache in paged.kv_caches} - {torch.uint8} == {half}
    for prompt, logits in zip(prompts(), paged.prefill(prompts(), CHUNK), strict=True):
        assert logits.dtype == torch.float32
        ours, truth = logits.cpu(), reference_logits(exact, prompt)
        natural = relative_error(reference_logits(theirs, prompt).float(), truth)
        assert relative_error(ours, truth) < 1.5 * natural
        assert natural < 0.1


def relative_error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    return float((ours - truth).norm() / truth.norm())


def test_float32_checkpoint_in_bfloat16(checkpoints: Path) -> None:
    model = make_paged_model(checkpoints / "llama", ParallelGroup(0, 1), "bfloat16")
    ours = compute(model)
    for index, expected in enumerate(expected_logits(checkpoints / "llama")):
        assert relative_error(ours[f"whole/{index}"], expected) < 0.03


def test_every_layer_is_announced_in_order(checkpoints: Path) -> None:
    model = make_paged_model(checkpoints / "llama", ParallelGroup(0, 1))
    model.prefill([prompts()[1]], 8)
    assert model.layers_seen == [0, 1, 2] * 2
