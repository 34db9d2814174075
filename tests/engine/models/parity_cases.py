"""Lists what is asked of every checkpoint. Apart from the reference, so that rank processes need
not import transformers.
"""

from __future__ import annotations

import torch

MAX_LEN = 192
VOCAB = 101
"""The size is not a multiple of 64: every shard of the vocabulary is padded."""
NUM_GREEDY = 64
NUM_CROSSING = 24
"""Tokens that are enough for decodes of these prompts to cross whatever they cross at all: borders
of blocks, of rows that stand for several tokens and of linear attention's (32), the longest window
(21), and the tokens that sparse layers choose (24)."""
_PREFIX = 40
REPLICATED_VARIANTS = frozenset(
    {
        "llama3_rope_tied_sharded", "llama3_rope_older_config", "llama_linear_rope",
        "phi3_part_rotates", "phi3_longrope_tied", "phi4_mini", "qwen3_yarn", "smollm3",
        "granite_tied",
        "ernie4_5", "seed_oss", "ministral3", "qwen3_moe_some_layers_tied", "glm4_moe_lite",
        "exaone4_without_windows", "dots1", "solar_open", "ernie4_5_moe", "hy_v3", "internlm3",
        "iquestcoder", "mimo", "sarvam_moe", "qwen3_moe_images", "glm4_moe_images", "glm4v_images",
        "mistral4", "sarvam_mla", "telechat3", "glm_moe_dsa", "glm_moe_dsa_shared",
        "kimi_k2", "gemma3_images", "mistral3_images", "qwen2_5_images", "qwen3_images_tied",
        "kimi_linear_published", "olmo_hybrid_rotates", "ling3_published",
    }
)  # fmt: skip
"""Families that differ from another in what every rank has whole, as rotary tables and settings of
routers: their logits are compared on two ranks, their greedy tokens on one."""


def prompts() -> list[list[int]]:
    """Lengths around block boundaries of 16; the last two begin with the same `_PREFIX` tokens."""
    generator = torch.Generator().manual_seed(7)

    def some(length: int) -> list[int]:
        return torch.randint(VOCAB, (length,), generator=generator).tolist()

    prefix = some(_PREFIX)
    return [some(1), some(16), some(33), [*prefix, *some(31)], [*prefix, *some(8)]]
