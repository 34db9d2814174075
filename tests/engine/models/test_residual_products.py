"""Row layers that add to the residual stream themselves give what the norm would have added."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.distributed import TensorParallelGroup
from engine.layers.linear import RowParallelLinear
from engine.layers.shard import Shard
from tests.engine.models.parity_cases import prompts
from tests.engine.models.rank_process import CHUNK, make_paged_model
from tests.engine.models.reference_models import (
    FAMILIES,
    reference,
    reference_logits,
    save_checkpoint,
)

MANY = 20
"""Between the lengths of the prompts' chunks: some steps add, some do not."""


def test_logits_equal_transformers(tmp_path: Path) -> None:
    save_checkpoint(FAMILIES["llama"], tmp_path)
    paged = make_paged_model(tmp_path, TensorParallelGroup(0, 1))
    for layer in paged.row_layers():
        layer.residual_rows = MANY
    expected = reference(tmp_path)
    for logits, prompt in zip(paged.prefill(prompts(), CHUNK), prompts(), strict=True):
        torch.testing.assert_close(logits, reference_logits(expected, prompt), rtol=1e-4, atol=2e-5)


def test_few_rows_do_not_add() -> None:
    shard = Shard(TensorParallelGroup(0, 1), torch.float32, torch.device("cpu"), residual_rows=MANY)
    layer = RowParallelLinear(4, 8, shard)
    assert layer.adds_to(torch.empty(MANY, 8))
    assert not layer.adds_to(torch.empty(MANY - 1, 8))
    layer.residual_rows = 0
    assert not layer.adds_to(torch.empty(MANY, 8))
