"""A prompt of DeepSeek-V4 that is as long as its context goes from a prefill to a decode node.

Chunks attend to nothing here, which would take an hour at a million tokens on CPUs; all else is
done: rows are closed, kept, sent and chosen among. So an answer follows from what its steps read of
the KV, which must be the same on the node that has computed it and on the one that pulled it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models.checkpoint import load_model_config
from kv_transfer.config import KVRole, KVTransferConfig
from tandem_kernels import ops
from tests.engine.kv_groups.grouped_node import GroupedNode, engine_config, hand_over, run_until
from tests.engine.models.family import Family
from tests.engine.models.parity_cases import VOCAB
from tests.engine.models.reference_models import save_checkpoint
from tests.engine.models.test_deepseek_v4 import LONG

LENGTH = 66_000
"""Is beyond what 16 bits count. A million takes minutes."""
CHUNK = 4096
SMALL = Family(
    LONG.model,
    LONG.config,
    LONG.changes
    | {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16,
        "q_lora_rank": 8, "o_lora_rank": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 8, "hc_sinkhorn_iters": 2, "index_n_heads": 2,
        "index_head_dim": 16, "max_position_embeddings": 1 << 20,
        "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
    },
)  # fmt: skip


@pytest.fixture(autouse=True)
def chunks_attend_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    attend, choose = ops.window_rows_attention, ops.index_topk

    def attended(q: torch.Tensor, pages: Any, metadata: Any, *rest: Any) -> torch.Tensor:
        if metadata.max_query_len > 1:
            return torch.zeros_like(q)
        return attend(q, pages, metadata, *rest)

    def chosen(q: torch.Tensor, weights: Any, pages: Any, metadata: Any, *rest: Any) -> Any:
        return None if metadata.max_query_len > 1 else choose(q, weights, pages, metadata, *rest)

    monkeypatch.setattr(ops, "window_rows_attention", attended)
    monkeypatch.setattr(ops, "index_topk", chosen)


def attend_sharply(path: Path) -> None:
    """Makes scores far apart, and what is attended to count: else no single row of thousands would
    change an answer."""
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if ".attn." in name and (name.endswith("norm.weight") or ".wo_b." in name):
            tensor *= 4
    save_file(tensors, path)


class Alone:
    """Knows what a node answers that has computed the prompt itself."""

    def __init__(self, node: GroupedNode) -> None:
        self._node = node

    def tokens(self, prompt: list[int], count: int, guess: Sequence[int] = ()) -> list[int]:
        if "alone" not in self._node.tokens:
            self._node.add("alone", prompt, count)
            run_until([self._node], lambda: "alone" in self._node.ended)
        return self._node.tokens["alone"]


def test_a_prompt_as_long_as_the_context_is_handed_over(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    save_checkpoint(SMALL, tmp_path)
    attend_sharply(tmp_path / "model.safetensors")
    model = load_model_config(tmp_path, max_model_len=LENGTH + 128)
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(VOCAB, (LENGTH,), generator=generator).tolist()
    roles: tuple[KVRole | None, ...] = ("kv_producer", "kv_consumer", None)
    with ExitStack() as stack:
        nodes = []
        for role, size in zip(roles, (64, 32, 16), strict=True):
            config = engine_config(
                model, block_size=size, num_blocks=600 + LENGTH // 20, chunk=CHUNK,
                kv_transfer=role and KVTransferConfig(kv_role=role, transports="stream"),
            )  # fmt: skip
            nodes.append(GroupedNode.start(config))
            stack.callback(nodes[-1].shutdown)
        hand_over(nodes[0], nodes[1], {"long": prompt}, Alone(nodes[2]))
        assert nodes[1].core.stats().prompt_tokens_computed == 0
        assert nodes[1].results[0].stats.num_bytes > LENGTH * 16
