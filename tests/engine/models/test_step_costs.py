"""The cost of a step against what torch counts: FLOPs of real steps, bytes of real weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from engine.config import CacheConfig, EngineConfig, ParallelConfig
from engine.contracts.steps.step_work import ModelCost, StepWork
from engine.models.checkpoint import load_model_config
from engine.models.factory import create_model
from engine.models.loader import load_weights
from engine.models.registry import spec_of
from engine.models.specs.dense import DenseSpec
from engine.models.step_costs import cost_of
from engine.parallel.place import ParallelPlace
from tests.engine.models.paged_model import BLOCK_SIZE, PagedModel, PagedSequence

PROMPT, BEHIND = 48, 16
VOCAB_MULTIPLE = 64
"""Outputs of the head are padded to it."""


class Counted:
    """A tiny checkpoint of a family, its cost, and its model."""

    def __init__(self, folder: Path) -> None:
        self.config = EngineConfig(
            engine_id="cost",
            epoch=1,
            model=load_model_config(folder),
            cache=CacheConfig(block_size=BLOCK_SIZE),
        )
        self.model = create_model(
            self.config, ParallelPlace(range(self.config.model.num_layers)), torch.device("cpu")
        )
        load_weights(self.model, self.config, lambda fraction: None)
        self.paged = PagedModel(self.config, self.model)
        cost = cost_of(self.config)
        assert cost is not None
        self.cost: ModelCost = cost

    def flops(self, sequence: PagedSequence, count: int) -> int:
        """Returns what torch counts of a step in which every token is sampled from, without what
        pads the head's outputs."""
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            self.paged._step([sequence], [count])
        model = self.config.model
        padding = 2 * model.spec["hidden_size"] * (-model.vocab_size % VOCAB_MULTIPLE) * count
        return int(counter.get_total_flops()) - padding


@pytest.fixture(scope="module")
def counted(checkpoints: Path) -> dict[str, Counted]:
    return {name: Counted(checkpoints / name) for name in NAMES}


EXACT = ("llama", "llama_one_kv_head", "gemma3", "mixtral", "qwen3_moe_sharded", "gpt_oss")
NEARLY = {"qwen2_moe": 0.01, "qwen3_next": 0.03, "deepseek_v3_yarn": 0.1, "deepseek_v32": 0.1}
NEARLY["minimax_m3"] = 0.1
"""Families and the part by which torch counts something else. The gate of a shared expert and the
states of linear attention are products by element, which it does not count; in plain torch latent
attention takes the form of decodes for prompts, too, which computes more."""
NAMES = (*EXACT, *NEARLY)


def all_pairs(work: StepWork, prompts: int, decodes: int) -> StepWork:
    """Returns the work of the CPU's kernels, which compute the pairs that a mask hides, too."""
    work.num_sampled = work.num_tokens
    for place in range(len(work.windows)):
        work.pairs_of_prompts[place] = prompts
        work.pairs_of_decodes[place] = decodes
    return work


@pytest.mark.parametrize("name", NAMES)
def test_flops_of_a_prompt_and_of_a_chunk_are_what_torch_counts(
    name: str, counted: dict[str, Counted]
) -> None:
    one = counted[name]
    sequence = PagedSequence(list(range(1, PROMPT + BEHIND + 1)))
    for end, count in ((PROMPT, PROMPT), (PROMPT + BEHIND, BEHIND)):
        found = one.flops(sequence, count)
        work = StepWork(one.cost.windows)
        work.add_chunk(end, count, samples=True)
        if None not in work.windows or (len(work.windows) > 1 and end > count):
            continue  # Behind a window, kernels leave out a part of what a mask hides.
        expected = one.cost.flops(all_pairs(work, end * count, 0))
        assert found == pytest.approx(expected, rel=NEARLY.get(name, 0), abs=0)


@pytest.mark.parametrize("name", ["llama", "llama_one_kv_head", "mixtral", "qwen3_moe_sharded"])
def test_flops_of_a_decode_are_what_torch_counts(name: str, counted: dict[str, Counted]) -> None:
    one = counted[name]
    sequence = PagedSequence(list(range(1, BLOCK_SIZE * 2 + 1)))
    one.flops(sequence, BLOCK_SIZE * 2 - 1)
    found = one.flops(sequence, 1)
    work = StepWork(one.cost.windows)
    work.add_decodes([BLOCK_SIZE * 2], 1)
    assert (work.num_sampled, work.kind) == (1, "decode")
    assert found == one.cost.flops(work)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_that_the_model_has(name: str, counted: dict[str, Counted]) -> None:
    """All that is in memory, but the embedding and its padding, and convolutions, below 2 %."""
    one = counted[name]
    parameters = dict(one.model.named_parameters())
    held = sum(p.numel() * p.element_size() for p in parameters.values() if p.dim() > 1)
    vocab_size = one.config.model.vocab_size
    padding = -vocab_size % VOCAB_MULTIPLE
    rows = padding if one.config.model.spec["tie_word_embeddings"] else vocab_size + 2 * padding
    embedding = rows * one.cost.token_bytes
    experts = one.cost.experts
    of_experts = experts.bytes_each * experts.count if experts is not None else 0
    assert one.cost.weight_bytes + of_experts == pytest.approx(held - embedding, rel=0.02)


def test_ranks_share_what_can_be_shared(counted: dict[str, Counted]) -> None:
    for name in ("llama", "mixtral"):
        one = counted[name]
        split = cost_of(replace(one.config, parallel=ParallelConfig(tensor_parallel_size=2)))
        assert split is not None
        experts = one.cost.experts
        router = 0 if experts is None else 2 * one.config.model.num_layers * 64 * experts.count
        whole = one.cost.flops_per_token
        assert split.flops_per_token == (whole - router) / 2 + router
        assert split.attention[0].kv_bytes == one.cost.attention[0].kv_bytes / 2
        assert split.attention[0].flops_of_decodes == one.cost.attention[0].flops_of_decodes / 2


def test_a_sparse_layer_reads_all_index_keys_and_chosen_latents(
    counted: dict[str, Counted],
) -> None:
    """Contexts of 40 and 10 tokens have 18 and 10 latents read."""
    one = counted["deepseek_v32"]
    work = StepWork(one.cost.windows)
    work.add_decodes([40, 10], 1)
    latents, keys = 3 * 4 * (24 + 8), 3 * 4 * 16
    read = one.cost.bytes_read(work) - one.cost.bytes_read(StepWork(one.cost.windows))
    experts = one.cost.experts
    assert experts is not None
    fixed = experts.bytes_read(2) + 2 * one.cost.token_bytes
    assert read - fixed == pytest.approx((18 + 10) * latents + (40 + 10) * keys)


@pytest.mark.parametrize("context", [5, 18, 40, 300])
def test_a_prompt_that_chooses_takes_the_form_of_fewer_products(
    context: int, counted: dict[str, Counted]
) -> None:
    """Short contexts are expanded, of long ones each token reads the rows that it chose. All index
    keys are scored, by ranks together."""
    one = counted["deepseek_v32"]
    spec, layers = spec_of(one.config.model), one.config.model.num_layers
    assert isinstance(spec, DenseSpec) and spec.latent is not None
    indexer, sizes, heads = spec.indexer_of(0), spec.latent, one.config.model.num_heads
    assert indexer is not None
    expanded = sizes.nope + sizes.rope + sizes.value
    absorbed = 2 * sizes.kv_rank + sizes.rope
    work = StepWork(one.cost.windows)
    work.add_chunk(context, 1, samples=False)
    attended = heads * min(context * expanded, indexer.top_k * absorbed)
    scored = context * indexer.heads * indexer.dim
    expected = one.cost.flops_per_token + 2 * layers * (attended + scored)
    # A whole number of tokens stands for what the chosen rows cost.
    assert one.cost.flops(work) == pytest.approx(expected, abs=layers * heads * expanded)
    split = cost_of(replace(one.config, parallel=ParallelConfig(tensor_parallel_size=2)))
    assert split is not None
    of_prompts = split.flops(work) - split.flops_per_token
    assert of_prompts == pytest.approx((expected - one.cost.flops_per_token) / 2, rel=0.01)


def test_kv_is_counted_by_what_a_token_has(counted: dict[str, Counted]) -> None:
    one = counted["llama"]
    model = one.config.model
    of_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * 4
    work = StepWork(one.cost.windows)
    work.add_decodes([40, 60], 1)
    fixed = one.cost.weight_bytes + 2 * one.cost.token_bytes
    assert one.cost.bytes_read(work) == fixed + 100 * of_token
    assert one.cost.bytes_written(work) == 2 * of_token
