"""A pass that is asked for some tokens gives their hidden states as a whole pass does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.models.base import ForwardInputs
from engine.parallel.distributed import ParallelGroup
from tests.engine.models.parity_cases import prompts
from tests.engine.models.rank_process import CHUNK, make_paged_model
from tests.engine.models.reference_models import FAMILIES, save_checkpoint

_GATES_LAST = ["linear_attention", "full_attention", "linear_attention", "full_attention"]


@pytest.mark.parametrize(
    ("family", "keeps"),
    [
        ("llama", True),
        ("gemma2", True),
        ("olmo2", True),
        ("qwen3_moe_sharded", True),
        ("gpt_oss", True),
        ("qwen3_next", True),
        ("qwen3_5_tied", False),
        ("deepseek_v2", False),
    ],
)
def test_hidden_states_are_those_of_a_whole_pass(family: str, keeps: bool, tmp_path: Path) -> None:
    """Norms in front of and behind blocks, windows, experts, sinks, gates, layers with a state."""
    made = FAMILIES[family]
    if family == "qwen3_next":
        made = replace(made, changes=made.changes | {"layer_types": _GATES_LAST})
    save_checkpoint(made, tmp_path)
    paged = make_paged_model(tmp_path, ParallelGroup(0, 1))
    model = paged._model
    assert model.keeps_rows is keeps
    if not keeps:
        return
    forward, compared = model.forward, []

    def both(step: ForwardInputs) -> torch.Tensor:
        before = [cache.clone() for cache in step.kv_caches]
        whole = forward(step)
        for cache, old in zip(step.kv_caches, before, strict=True):
            cache.copy_(old)
        kept = torch.arange(len(whole) - 1, -1, -3).int()
        torch.testing.assert_close(forward(replace(step, kept=kept)), whole[kept.long()])
        compared.append(len(kept))
        return whole

    model.forward = both
    paged.prefill(prompts(), CHUNK)
    assert max(compared) > 1
