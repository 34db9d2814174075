"""Expert parallelism: each rank reads and holds its own experts as a whole, in every format, and
2 and 4 ranks answer as one does, token for token."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cli.local_cluster.cluster import free_ports
from engine.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from engine.layers.feed_forward.expert_share import ExpertShare
from engine.layers.feed_forward.sparse_mlp import Experts
from engine.models.checkpoint import check_parallel, load_model_config
from engine.models.errors import CheckpointError
from engine.models.factory import create_model
from engine.models.loader import load_weights
from engine.parallel.place import ExpertRanks, ParallelPlace
from tandem_kernels import ops
from tests.engine.models.engine_rank import EngineRank
from tests.engine.models.parity_cases import prompts
from tests.engine.models.test_quantised_experts import MakePair, experts_of, meaning
from tests.engine.models.test_quantised_experts import gpt_oss as gpt_oss  # a fixture
from tests.engine.models.test_quantised_experts import kept as kept  # a fixture
from tests.engine.models.test_quantised_experts import make_pair as make_pair  # a fixture
from tests.engine.parallel.fake_group import FakeGroup

NUM_TOKENS = 16


def spread_experts(folder: Path, rank: int, size: int) -> tuple[list[Experts], int]:
    """Loads a rank; returns its layers' experts, and the bytes that it has read."""
    model = load_model_config(folder, dtype="float32")
    parallel = ParallelConfig(tensor_parallel_size=size, enable_expert_parallel=True)
    config = EngineConfig(engine_id="load", epoch=1, model=model, parallel=parallel)
    ranks = ExpertRanks(rank, size, are_whole=True)
    place = ParallelPlace(range(model.num_layers), FakeGroup(rank, size), ep=ranks)
    created, totals = create_model(config, place, "cpu"), list[int]()
    load_weights(created, config, lambda fraction: None, totals.append)
    return [m for m in created.modules() if isinstance(m, Experts)], totals[0]


def ranks_told(layer: Experts) -> int:
    """Returns how many ranks share the experts, as the kernels hear it."""
    told: list[int] = []

    def stand_in(_: ops.Op[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: told.append(arguments[-1])

    chosen = torch.zeros(1, 1, dtype=torch.int32)
    with ops.standing_in(stand_in):
        layer(torch.zeros(1, layer.sizes.hidden), chosen.float(), chosen)
    (ranks,) = told
    return ranks


def check_shares(folder: Path, plain: Path, size: int, dtype: torch.dtype) -> None:
    """All experts are somewhere, once, and mean what the plain ones do, biases included."""
    expected = experts_of(plain, 0, 1)
    ranks = [spread_experts(folder, rank, size)[0] for rank in range(size)]
    for of_ranks, whole in zip(zip(*ranks, strict=True), expected, strict=True):
        held = [expert for layer in of_ranks for expert in layer.sizes.held]
        assert held == list(range(whole.sizes.total))
        for layer in of_ranks:
            assert ranks_told(layer) == size and ranks_told(whole) == 1
            assert layer.w13.dtype == dtype and len(layer.w13) == layer.sizes.count
            for own, expert in enumerate(layer.sizes.held):
                for found, meant in zip(meaning(layer, own), meaning(whole, expert), strict=True):
                    assert torch.equal(found, meant)
                for ours, theirs in ((layer.b13, whole.b13), (layer.b2, whole.b2)):
                    assert (ours is None) == (theirs is None)
                    if ours is not None and theirs is not None:
                        assert torch.equal(ours[own], theirs[expert])


@pytest.mark.parametrize(
    ("family", "layout", "size"),
    [("mixtral", "blocks", 4), ("glm4_moe", "channels", 4), ("deepseek_v3_yarn", "tensors", 2)],
)
@pytest.mark.usefixtures("kept")
def test_ranks_hold_whole_experts_in_fp8(
    family: str, layout: str, size: int, make_pair: MakePair
) -> None:
    check_shares(*make_pair(family, layout), size, torch.float8_e4m3fn)


@pytest.mark.usefixtures("kept")
def test_ranks_hold_whole_experts_in_mxfp4(gpt_oss: tuple[Path, Path]) -> None:
    check_shares(*gpt_oss, 4, torch.int32)


def test_ranks_hold_whole_stacked_experts(gpt_oss: tuple[Path, Path]) -> None:
    check_shares(gpt_oss[1], gpt_oss[1], 4, torch.float32)


def test_a_rank_reads_its_own_experts_only(checkpoints: Path) -> None:
    folder = checkpoints / "mixtral"
    stored = load_file(folder / "model.safetensors")
    experts = sum(tensor.nbytes for name, tensor in stored.items() if ".experts." in name)
    read = [spread_experts(folder, rank, 2)[1] for rank in range(2)]
    whole = spread_experts(folder, 0, 1)[1]
    others = whole - experts
    assert 0 < others < experts
    assert all(experts // 2 < one < experts // 2 + others for one in read)


# Whole engines ---------------------------------------------------------------------------------


def answers_of(
    folder: Path, parallel: ParallelConfig, rank: int, rendezvous: str
) -> dict[str, list[int]]:
    """Returns greedy answers to three prompts, which steps cut."""
    config = EngineConfig(
        engine_id=f"experts-{folder.name}",
        epoch=1,
        model=load_model_config(folder),
        cache=CacheConfig(block_size=16, num_blocks=120),
        parallel=parallel,
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=48),
    )
    engine = EngineRank(config, rank, rendezvous)
    asked = {str(index): prompt for index, prompt in enumerate(prompts()[:3])}
    answers = {key: found.tokens for key, found in engine.run(asked, NUM_TOKENS).items()}
    engine.close()
    return answers


@pytest.mark.parametrize(
    ("family", "size"),
    [
        ("mixtral", 2), ("qwen2_moe", 2), ("deepseek_v3_yarn", 4), ("gpt_oss", 4),
        ("deepseek_v4", 2),
    ],
)  # fmt: skip
def test_ranks_answer_as_one_does(family: str, size: int, checkpoints: Path) -> None:
    """Biases, stacked tensors, experts of token ids, shared experts with and without a gate, groups
    of experts; 6 experts are not the same number on 4 ranks."""
    folder, rendezvous = checkpoints / family, f"127.0.0.1:{free_ports(1)[0]}"
    parallel = ParallelConfig(tensor_parallel_size=size, enable_expert_parallel=True)
    with ThreadPoolExecutor(size) as ranks:
        found = ranks.map(lambda rank: answers_of(folder, parallel, rank, rendezvous), range(size))
        answers = list(found)
    expected = answers_of(folder, ParallelConfig(), 0, "")
    assert all(len(answer) == NUM_TOKENS for answer in expected.values())
    assert answers == [expected] * size


# What cannot be --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "size", "word"),
    [("llama", 2, "has no experts"), ("mixtral", 8, "has 4 experts in a layer, which 8 ranks")],
)
def test_what_has_too_few_experts_is_refused(
    family: str, size: int, word: str, checkpoints: Path
) -> None:
    model = load_model_config(checkpoints / family)
    parallel = ParallelConfig(tensor_parallel_size=size, enable_expert_parallel=True)
    with pytest.raises(CheckpointError, match=word) as caught:
        check_parallel(model, parallel)
    assert "--enable-expert-parallel" in str(caught.value)


def test_experts_need_not_divide() -> None:
    share = [ExpertShare.of(8, ExpertRanks(rank, 3, are_whole=True)).held for rank in range(3)]
    assert share == [(0, 1, 2), (3, 4, 5), (6, 7)]
