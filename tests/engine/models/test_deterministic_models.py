"""In deterministic mode an answer of a model with experts, latents or states has the same bits
whatever else is in the batch, and however its prompt is cut into steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.config import (
    CacheConfig,
    Device,
    DeviceConfig,
    Dtype,
    EngineConfig,
    SchedulerConfig,
)
from engine.models.checkpoint import load_model_config
from tests.engine.models.engine_rank import EngineRank, Found
from tests.engine.models.parity_cases import VOCAB
from tests.engine.worker.drafts.drafters import KnowingDrafter

FAMILIES = [
    "mixtral",  # experts by their softmax
    "qwen2_moe",  # a shared expert with a gate, and a layer without experts
    "glm4_moe",  # sigmoid scores, groups, a bias for choosing
    "deepseek_v2",  # latents; queries directly
    "deepseek_v3_yarn",  # latents; queries from a latent of their own
    "gemma2",  # windows, bounds of scores and logits
    "gpt_oss",  # sinks, biases, a clamped gate
    "minimax_m3",  # blocks that an indexer chooses
    "deepseek_v4",  # windows beside rows of several tokens, residual streams, choice by ids
    "qwen3_next",  # states, experts, gated attention
    "granite_hybrid",  # states of Mamba 2
    "lfm2",  # states that are a convolution's inputs alone
    "minimax_text",  # lightning attention, a stream that goes on with norms
    "ring2_5",  # lightning attention that rotates
    "kimi_k3",  # mixtures of blocks of layers, latents of experts
    "kimi_linear",  # states that forget channel by channel, latents that do not rotate
]
LENGTH, NUM_TOKENS, NUM_TOP = 37, 8, 3
COMPANY: dict[Device, tuple[int, ...]] = {"cpu": (1, 6, 17), "cuda": (1, 2, 6, 17, 40, 63)}
"""Requests beside the one that is looked at."""
BUDGET: dict[Device, int] = {"cpu": 24, "cuda": 96}
"""Tokens of a step: alone the prompt of LENGTH tokens is cut elsewhere than in company."""


devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def config_of(family: str, device: Device, checkpoints: Path) -> EngineConfig:
    # Rounding to halves would hide most differences; kernels are asked in what they are made for.
    dtype: Dtype = "float32" if device == "cpu" else "bfloat16"
    return EngineConfig(
        engine_id=f"deterministic-{family}",
        epoch=1,
        model=load_model_config(checkpoints / family, dtype=dtype),
        cache=CacheConfig(block_size=16, num_blocks=512, enable_prefix_caching=False),
        scheduler=SchedulerConfig(
            max_num_seqs=64, max_num_batched_tokens=BUDGET[device], enable_chunked_prefill=True
        ),
        device=DeviceConfig(device=device, deterministic=True),
    )


@devices
@pytest.mark.parametrize("family", FAMILIES)
def test_alone_and_in_any_company(family: str, device: Device, checkpoints: Path) -> None:
    config = config_of(family, device, checkpoints)
    engine = EngineRank(config, 0, "")
    generator = torch.Generator().manual_seed(11)

    def prompt(length: int) -> list[int]:
        return torch.randint(VOCAB, (length,), generator=generator).tolist()

    own = prompt(LENGTH)

    def among(count: int) -> Found:
        lengths = torch.randint(1, 30, (count,), generator=generator).tolist()
        others = {f"other-{i}": prompt(length) for i, length in enumerate(lengths)}
        before = dict(list(others.items())[: count // 2])
        asked = {**before, "own": own, **others}
        return engine.run(asked, NUM_TOKENS, NUM_TOP, NUM_TOP)["own"]

    alone = among(0)
    assert len(alone.tokens) == len(alone.logprobs) == NUM_TOKENS
    assert len(alone.prompt_logprobs) == LENGTH - 1
    for count in COMPANY[device]:
        assert among(count) == alone, f"beside {count} others"
    engine.close()


@devices
@pytest.mark.parametrize("family", FAMILIES)
def test_with_and_without_drafts(family: str, device: Device, checkpoints: Path) -> None:
    """Drafts are right and wrong in turns: what a wrong one left in the cache does no harm."""
    config = config_of(family, device, checkpoints)
    asked = {
        str(length): [(length * i * i + 7 * i) % VOCAB for i in range(length)]
        for length in (3, 15, 31, 40)
    }
    engine = EngineRank(config, 0, "")
    plain = engine.run(asked, 3 * NUM_TOKENS, NUM_TOP, NUM_TOP)
    engine.close()
    drafting = EngineRank(replace(config, decode_query_len=4), 0, "")
    answers = [[*prompt, *plain[name].tokens] for name, prompt in asked.items()]
    drafting.worker.runner.drafts.drafter = KnowingDrafter(answers, lies=0.3)
    assert drafting.run(asked, 3 * NUM_TOKENS, NUM_TOP, NUM_TOP) == plain
    drafts = drafting.stats.drafts
    assert drafts.num_draft_tokens > drafts.num_accepted_tokens > 0
    assert all(count > 0 for count in drafts.num_accepted_per_pos)
    drafting.close()
