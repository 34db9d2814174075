"""Tests that models over an FP8 cache equal transformers over one: logits, greedy tokens of one
node and of two, behind cached prefixes and after preemptions; and that both stay near plain ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from engine.config import CacheConfig, Device, DeviceConfig, EngineConfig
from engine.kv_scales import KVScaleTable
from engine.models.checkpoint import load_model_config
from engine.models.factory import create_model
from engine.models.loader import load_weights
from engine.parallel.distributed import ParallelGroup
from engine.parallel.place import ParallelPlace
from kv_transfer.config import KVRole, KVTransferConfig
from kv_transfer.metadata import KVTransferParams
from tandem_kernels.attention.index_pages import IndexedKV, IndexedLatents
from tests.engine.kv_fp8.quantised_reference import QuantisedReference, scale_table
from tests.engine.kv_groups.grouped_node import GroupedNode, engine_config, hand_over, run_until
from tests.engine.models.paged_model import BLOCK_SIZE, PagedModel
from tests.engine.models.parity_cases import prompts
from tests.engine.models.reference_models import (
    FAMILIES,
    reference,
    reference_logits,
    save_checkpoint,
)

MODELS = [
    "llama", "gemma2", "gemma3", "qwen3_tied", "gpt_oss", "qwen3_next", "deepseek_v2",
    "deepseek_v3_yarn", "gemma4", "deepseek_v32", "minimax_m3", "mimo_v2", "laguna", "step3p7",
    "gemma4_shared", "beam", "exaone4", "mistral4",
]  # fmt: skip
"""Plain, soft bounds and windows, KV groups of windows and all tokens, norms of heads, sinks,
layers with states, which are not quantised, latents, heads by layer, latents and heads beside index
keys, which are as without quantisation, values that are narrower than keys, query heads and gates
by layer, layers that attend to keys and values of others, and scores that grow with the position,
of heads and of latents."""
NUM_TOKENS = 24
LEAST_SCALES = {"mimo_v2": 0.043, "laguna": 0.043, "step3p7": 0.043, "gemma4_shared": 0.06}
"""One number in the middle of two would move a choice of experts with other scales, or more layers
than one."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("checkpoints")
    for name in MODELS:
        save_checkpoint(FAMILIES[name], folder / name)
    return folder


@cache
def table_of(folder: Path) -> KVScaleTable:
    model = load_model_config(folder)
    is_latent = any(plane.name == "latent" for kv in model.kv_layers for plane in kv.planes)
    is_one = is_latent or len(model.kinds_of_heads) > 1
    least = LEAST_SCALES.get(folder.name, 0.05)
    return scale_table(model.num_layers, 1 if is_one else model.num_kv_heads, least)


@cache
def quantised(folder: Path) -> QuantisedReference:
    return QuantisedReference(folder, table_of(folder))


def relative_error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    return float((ours - truth).norm() / truth.norm())


@pytest.mark.parametrize("family", MODELS)
def test_logits_equal_those_over_the_same_rounded_keys_and_values(
    family: str, checkpoints: Path
) -> None:
    """Rarely a key lies so near the middle of two numbers that the last bit of float32 decides: one
    step of one number. Rounding as such moves logits by ten times more, and by a fifth at most, or
    by two where it moves the choice of an indexer.
    """
    folder = checkpoints / family
    model = load_model_config(folder)
    cache = CacheConfig(block_size=BLOCK_SIZE, kv_scales=table_of(folder))
    config = EngineConfig(engine_id="fp8", epoch=1, model=model, cache=cache)
    created = create_model(
        config, ParallelPlace(range(model.num_layers), ParallelGroup(0, 1)), "cpu"
    )
    load_weights(created, config, lambda fraction: None)
    paged = PagedModel(config, created)
    groups = config.kv_layout.groups
    attended = {index for group in groups if not group.is_state for index in group.layers}
    for index, layer in enumerate(paged.kv_caches):
        match layer:
            case IndexedLatents(latents=plane) | IndexedKV(kv=plane):
                pass
            case plane:
                pass
        assert plane.dtype == (torch.float8_e4m3fn if index in attended else torch.uint8)
    plain = reference(folder)
    chunked, behind = paged.prefill_sharing(prompts(), 13)
    for found in (paged.prefill(prompts(), 1000), chunked):
        for prompt, ours in zip(prompts(), found, strict=True):
            assert relative_error(ours, quantised(folder).logits(prompt)) < 1e-3
            moved = relative_error(ours, reference_logits(plain, prompt))
            assert 0.01 < moved < (0.4 if family == "deepseek_v32" else 0.2)
    expected = quantised(folder).logits(prompts()[-1])[-len(behind) :]
    assert relative_error(behind, expected) < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("family", MODELS)
def test_greedy_tokens_on_a_gpu_equal_transformers(family: str, checkpoints: Path) -> None:
    """Every kernel computes in float32, in CUDA graphs."""
    folder = checkpoints / family
    with started(config_of(folder, scales=table_of(folder), device="cuda")) as (node,):
        for name, prompt in asked().items():
            node.add(name, prompt, NUM_TOKENS)
        run_until([node], lambda: node.ended.issuperset(asked()))
        for name, prompt in asked().items():
            answer = node.tokens[name]
            assert len(answer) == NUM_TOKENS
            assert quantised(folder).chosen_behind(prompt, answer) == answer


@contextmanager
def started(*configs: EngineConfig) -> Iterator[list[GroupedNode]]:
    with ExitStack() as stack:
        nodes = []
        for config in configs:
            nodes.append(GroupedNode.start(config))
            stack.callback(nodes[-1].shutdown)
        yield nodes


def config_of(
    folder: Path,
    role: KVRole | None = None,
    *,
    scales: KVScaleTable | None = None,
    transports: str = "stream",
    block_size: int = 16,
    tp_size: int = 1,
    num_blocks: int = 160,
    device: Device = "cpu",
) -> EngineConfig:
    kv = None if role is None else KVTransferConfig(kv_role=role, transports=transports)
    config = engine_config(
        load_model_config(folder),
        block_size=block_size,
        num_blocks=num_blocks,
        tp_size=tp_size,
        kv_transfer=kv,
    )
    cache = replace(config.cache, kv_scales=scales)
    return replace(config, cache=cache, device=DeviceConfig(device=device))


def asked() -> dict[str, list[int]]:
    return {str(index): prompt for index, prompt in enumerate(prompts())}


def pair(
    folder: Path, scales: KVScaleTable | None, transports: str, tp_size: int, sizes: tuple[int, int]
) -> tuple[EngineConfig, EngineConfig]:
    """Returns a prefill node with `tp_size` ranks, and a decode node; `sizes` are of blocks."""
    given = {"scales": scales, "transports": transports}
    return (
        config_of(folder, "kv_producer", block_size=sizes[0], tp_size=tp_size, **given),  # type: ignore[arg-type]
        config_of(folder, "kv_consumer", block_size=sizes[1], **given),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("family", "transports", "tp_size", "sizes"),
    [
        ("gemma3", "stream", 2, (16, 32)),
        ("gpt_oss", "cuda_ipc,stream", 1, (32, 16)),
        ("qwen3_next", "stream", 1, (16, 16)),
        ("deepseek_v3_yarn", "stream", 1, (16, 32)),
    ],
)
def test_two_nodes_equal_transformers(
    family: str, transports: str, tp_size: int, sizes: tuple[int, int], checkpoints: Path
) -> None:
    folder = checkpoints / family
    with started(*pair(folder, table_of(folder), transports, tp_size, sizes)) as nodes:
        hand_over(*nodes, asked(), quantised(folder))
        assert nodes[1].core.stats().prompt_tokens_computed == 0


class OneNode:
    """Answers as one node with both parts does."""

    def __init__(self, node: GroupedNode) -> None:
        self._node = node

    def tokens(self, prompt: list[int], count: int, guess: Sequence[int] = ()) -> list[int]:
        name = str(len(self._node.tokens))
        self._node.add(name, prompt, count)
        run_until([self._node], lambda: name in self._node.ended)
        return self._node.tokens[name]


def test_in_half_precision_two_nodes_equal_one_and_move_half_the_bytes(checkpoints: Path) -> None:
    """In deterministic mode: else rounding in bfloat16 depends on what shares a step."""
    folder = checkpoints / "llama"
    model, moved = load_model_config(folder, dtype="bfloat16"), []
    for scales in (None, table_of(folder)):
        configs = *pair(folder, scales, "stream", 1, (16, 16)), config_of(folder, scales=scales)
        in_half = [
            replace(config, model=model, device=DeviceConfig(deterministic=True))
            for config in configs
        ]
        with started(*in_half) as (prefill, decode, alone):
            hand_over(prefill, decode, asked(), OneNode(alone))
            assert all(result.ok for result in decode.results)
            moved.append(sum(result.stats.num_bytes for result in decode.results))
    blocks = sum(-(-len(prompt) // 16) for prompt in prompts())
    assert moved[1] == 2 * model.num_layers * model.num_kv_heads * model.head_dim * 16 * blocks
    assert moved[0] == 2 * moved[1]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_one_node_preempts_and_finds_prefixes(device: Device, checkpoints: Path) -> None:
    """Blocks are too few for all requests at once; asked again, prompts are found in the cache."""
    folder = checkpoints / "llama"
    config = config_of(folder, scales=table_of(folder), num_blocks=14, device=device)
    with started(config) as (node,):
        for turn in ("first", "second"):
            names = {f"{turn} {name}": prompt for name, prompt in asked().items()}
            for name, prompt in names.items():
                node.add(name, prompt, NUM_TOKENS)
            run_until([node], lambda names=names: node.ended.issuperset(names))
            for name, prompt in names.items():
                tokens, lead = quantised(folder).greedy(prompt, NUM_TOKENS)
                assert lead > 1e-4
                assert node.tokens[name] == tokens
        stats = node.core.stats()
        assert stats.num_preemptions > 0
        assert stats.prefix_cache_hits > 0
        node.check_empty()


@pytest.mark.parametrize(
    ("theirs", "field", "has"),
    [(None, "groups[0].dtype", "float32"), (KVScaleTable(), "groups[0].scales", "1.0")],
    ids=["unquantised", "other scales"],
)
def test_nodes_whose_caches_differ_refuse_each_other(
    theirs: KVScaleTable | None, field: str, has: str, checkpoints: Path
) -> None:
    folder = checkpoints / "llama"
    prefill, _ = pair(folder, theirs, "stream", 1, (16, 16))
    _, decode = pair(folder, table_of(folder), "stream", 1, (16, 16))
    transfer_id = "ab" * 16
    with started(prefill, decode) as (holder, puller):
        pull = KVTransferParams(
            do_remote_prefill=True, transfer_id=transfer_id, peer=holder.core.connector.peer_info
        )
        puller.add("asked", prompts()[2], 4, pull)
        run_until([holder, puller], lambda: puller.results)
        (result,) = puller.results
    assert not result.ok and not result.retryable
    ours = table_of(folder).digest if has == "1.0" else "float8_e4m3fn"
    both = f"this node has {ours!r}, the peer has {has!r}"
    assert f"{field}: {both}" in result.reason
