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
from engine.worker.cudagraph_utils import LONGEST_PROMPT_TOKENS


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


_RECORDED_TOKENS = LONGEST_PROMPT_TOKENS[-1]
"""Tokens of a step that may be recorded: there decodes of long contexts are slow, and attention of
so few tokens takes little."""


def attends_ends(batch: InputBatch) -> bool:
    """Returns whether a step that keeps sampled rows attends for these alone in the last layer."""
    return batch.num_tokens > _RECORDED_TOKENS and batch.order.decode_query_len == 1
