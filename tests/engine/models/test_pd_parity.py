"""Tests that greedy tokens from a prefill and a decode node equal transformers', for families whose
KV is laid out in different ways: windows in groups of their own, reordered heads, latents, experts.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from engine.models.checkpoint import load_model_config
from engine.node.settings.speculative_settings import parse_speculative_config
from kv_transfer.config import KVTransferConfig
from tests.engine.kv_groups.grouped_node import GroupedNode, engine_config, hand_over
from tests.engine.models.parity_cases import prompts
from tests.engine.models.quantised_checkpoints import (
    FP8_BLOCKS,
    quantise_checkpoint,
    write_fp8_blocks,
)
from tests.engine.models.reference_models import GreedyAnswers, reference

NGRAMS = parse_speculative_config(
    '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}'
)
DRAFTED = frozenset(
    {"mimo_v2", "gemma4", "gemma4_experts", "gemma4_shared", "laguna", "ministral3", "mistral4"}
    | {"gemma3n", "step3p7", "glm_moe_dsa", "deepseek_v4"}
    | {"afmoe", "beam", "exaone4", "muse_glimmer"}
)
"""Families whose decode nodes draft."""


@pytest.mark.parametrize(
    ("family", "transports", "tp_size", "block_sizes"),
    [
        ("gemma3", "stream", 2, (16, 32)),
        ("mimo_v2", "stream", 2, (16, 64)),
        ("gemma4", "cuda_ipc,stream", 2, (16, 32)),
        ("gemma4_experts", "stream", 2, (16, 32)),
        ("gemma4_shared", "stream", 2, (32, 16)),
        ("gemma3n", "stream", 2, (16, 32)),
        ("step3p7", "stream", 2, (32, 16)),
        ("mistral4", "cuda_ipc,stream", 2, (16, 32)),
        ("laguna", "stream", 1, (32, 16)),
        ("afmoe", "stream", 2, (16, 32)),
        ("beam", "stream", 2, (32, 16)),
        ("exaone4", "stream", 1, (16, 64)),
        ("muse_glimmer", "stream", 2, (32, 16)),
        ("deepseek_v3_yarn", "stream", 2, (16, 64)),
        ("deepseek_v2", "cuda_ipc,stream", 1, (32, 16)),
        ("deepseek_v32", "stream", 2, (16, 64)),
        ("glm_moe_dsa", "cuda_ipc,stream", 1, (32, 16)),
        ("deepseek_v4", "cuda_ipc,stream", 2, (16, 32)),
        ("glm4_moe", "cuda_ipc,stream", 1, (16, 16)),
        ("ministral3", "stream", 1, (16, 32)),
        ("qwen3_5_moe_images", "cuda_ipc,stream", 1, (2, 16)),
    ],
)
def test_two_nodes_equal_transformers(
    family: str, transports: str, tp_size: int, block_sizes: tuple[int, int], checkpoints: Path
) -> None:
    """Prefill nodes may have more ranks, other blocks, and their experts on different ranks; decode
    nodes may guess by n-grams."""
    folder = checkpoints / family
    spreads = family == "deepseek_v3_yarn"
    check_two_nodes(
        folder, folder, transports, tp_size, block_sizes,
        spreads_experts=spreads, drafts=family in DRAFTED,
    )  # fmt: skip


def test_two_nodes_on_fp8_weights_equal_transformers_on_plain_ones(
    checkpoints: Path, tmp_path: Path
) -> None:
    quantised, plain = tmp_path / "quantised", tmp_path / "plain"
    writer = write_fp8_blocks((128, 128))
    quantise_checkpoint(checkpoints / "llama", quantised, plain, writer, FP8_BLOCKS)
    check_two_nodes(quantised, plain, "stream", 2, (16, 32))


def check_two_nodes(
    folder: Path,
    plain: Path,
    transports: str,
    tp_size: int,
    block_sizes: tuple[int, int],
    *,
    spreads_experts: bool = False,
    drafts: bool = False,
) -> None:
    """`plain` has the weights of `folder` as transformers reads them."""
    with ExitStack() as stack:
        nodes = []
        for role, block_size, ranks in (
            ("kv_producer", block_sizes[0], tp_size),
            ("kv_consumer", block_sizes[1], 1),
        ):
            kv = KVTransferConfig(kv_role=role, transports=transports, num_streams=2)  # type: ignore[arg-type]
            config = engine_config(
                load_model_config(folder),
                block_size=block_size,
                num_blocks=160,
                tp_size=ranks,
                kv_transfer=kv,
                spreads_experts=spreads_experts and ranks > 1,
            )
            if drafts and role == "kv_consumer":
                config = replace(config, decode_query_len=3, speculative=NGRAMS)
            nodes.append(GroupedNode.start(config))
            stack.callback(nodes[-1].shutdown)
        asked = {str(index): prompt for index, prompt in enumerate(prompts())}
        hand_over(*nodes, asked, GreedyAnswers(reference(plain)))
        stats = nodes[1].core.stats()
        assert stats.prompt_tokens_computed == 0
        assert (stats.drafts.num_draft_tokens > 0) == drafts
