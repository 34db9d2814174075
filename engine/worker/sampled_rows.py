"""Which runners compute, behind the attention of the last layer, sampled tokens alone.

What a layer adds to a token's stream is read by the same token in later layers, and by others
through its keys and values there. Behind the last layer's attention there are none: of a prompt
only the token is read from which the next one is chosen, and of a chunk that leaves a rest none.
Of 32 layers of Llama-3.1-8B that is 2.8 % of what a prompt's linear layers compute. In long steps
they alone are attended as well, like decodes.
"""

from __future__ import annotations

from engine.batch.input_batch import InputBatch
from engine.config import EngineConfig
from engine.models.base import CausalLM


def keeps_sampled_rows(config: EngineConfig, model: CausalLM) -> bool:
    """Returns whether steps leave the others out. Not where something counts on all rows: drafters
    that read hidden states, adapters by token, and groups that agree on their rows."""
    return (
        config.device.allows("sampled-rows")
        and model.keeps_rows
        and config.draft is None
        and config.lora is None
        and config.parallel.data_parallel_size == 1
    )


_FEW_TOKENS = 2048
"""Attention of so few tokens takes little."""


def attends_ends(batch: InputBatch, recorded_tokens: int) -> bool:
    """Returns whether a step that keeps sampled rows attends for these alone in the last layer. Not
    where it may be recorded, with up to `recorded_tokens` tokens: there decodes of long contexts
    are slow."""
    few = max(_FEW_TOKENS, recorded_tokens)
    return batch.num_tokens > few and batch.order.decode_query_len == 1
