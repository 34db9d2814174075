"""Prompts of every length from 1 to 700 have the logits of transformers, wherever their end lies
among blocks, windows and chunks, computed anew and behind cached prefixes.

All are prefixes of one prompt, and attention is causal: one pass of transformers over the longest
has the expected logits of all.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.models.checkpoint import load_model_config
from tests.engine.models.engine_rank import EngineRank
from tests.engine.models.parity_cases import VOCAB
from tests.engine.models.reference_models import (
    FAMILIES,
    reference,
    reference_logits,
    save_checkpoint,
)

LONGEST = 700
BLOCK, CHUNK = 16, 96
WINDOW = 5 * BLOCK
NUM_TOP = 3
WINDOWED = {
    "gemma2": {"sliding_window": WINDOW},  # windows in groups of their own, bounds of scores
    "gemma3": {"sliding_window": WINDOW + 5},  # a window that ends inside a block
    "gpt_oss": {"sliding_window": WINDOW - 1},  # sinks
    "deepseek_v3_yarn": {},  # latents, experts, a context behind its original length
    "qwen3_next": {},  # states
    "kimi_linear": {},  # states that forget channel by channel, beside latents
}
EDGES = sorted(
    {
        edge + offset
        for edge in (BLOCK, CHUNK, WINDOW, WINDOW + BLOCK, WINDOW + CHUNK, 2 * CHUNK, 512)
        for offset in (-1, 0, 1)
    }
    | {1, 2, LONGEST - 1, LONGEST}
)


@pytest.mark.parametrize("family", WINDOWED)
def test_every_length(family: str, tmp_path: Path) -> None:
    changes = {**WINDOWED[family], "max_position_embeddings": LONGEST + BLOCK}
    known = FAMILIES[family]
    save_checkpoint(replace(known, changes={**known.changes, **changes}), tmp_path)
    generator = torch.Generator().manual_seed(31)
    prompt = torch.randint(VOCAB, (LONGEST,), generator=generator).tolist()
    expected = reference_logits(reference(tmp_path), prompt).log_softmax(-1)
    every = (1 + torch.randperm(LONGEST, generator=generator)).tolist()
    check(tmp_path, [prompt[:length] for length in EDGES], expected, caches_prefixes=False)
    check(tmp_path, [prompt[:length] for length in every], expected, caches_prefixes=True)


def check(
    folder: Path, prompts: list[list[int]], expected: torch.Tensor, *, caches_prefixes: bool
) -> None:
    """Compares the log probabilities of each prompt's first token, several prompts at once."""
    engine = EngineRank(
        EngineConfig(
            engine_id=f"lengths-{folder.name}",
            epoch=1,
            model=load_model_config(folder),
            cache=CacheConfig(
                block_size=BLOCK, num_blocks=1024, enable_prefix_caching=caches_prefixes
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=16, max_num_batched_tokens=CHUNK, enable_chunked_prefill=True
            ),
        ),
        0,
        "",
    )
    asked = {str(len(prompt)): prompt for prompt in prompts}
    found = engine.run(asked, 1, logprobs=NUM_TOP)
    for length, prompt in asked.items():
        [(ids, values, _)] = found[length].logprobs
        at = expected[len(prompt) - 1]
        torch.testing.assert_close(
            torch.tensor(values), at[ids], rtol=1e-4, atol=3e-5, msg=lambda m, n=length: f"{n}: {m}"
        )
        best = at.topk(NUM_TOP).values
        torch.testing.assert_close(torch.tensor(values[1:]), best, rtol=1e-4, atol=3e-5)
    cached = [engine.num_cached[length] for length in asked]
    assert any(cached) == caches_prefixes
    engine.close()
