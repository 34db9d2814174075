"""A small model whose layers are cached in three ways; only tests know it.

    layer     0      1        2        3        4
    keeps     k, v   k, v     latent,  k, v     k, v
                              place
    sees      all    window   all      window   all
    KV heads  2      4        1 whole  4        2

A latent layer scores queries against one vector a token, which also is the value, and a few more
numbers that every rank has whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import msgspec
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from engine.config import EngineConfig, KVLayers, ModelConfig, ParallelConfig
from engine.head_sizes import HeadSizes
from engine.layers.attention.block import AttentionBlock, AttentionOptions
from engine.layers.attention.layer import AttentionInputs
from engine.layers.linear import RowParallelLinear
from engine.layers.norm import RMSNorm
from engine.layers.residual import ResidualStream
from engine.layers.rotary import cos_sin_cache
from engine.layers.shard import CheckpointWeight, Shard
from engine.layers.vocabulary.embedding import LMHead, VocabParallelEmbedding
from engine.models import factory
from engine.models.base import CausalLM, ForwardInputs
from engine.models.registry import MODELS
from engine.models.specs.base import ModelSpec
from engine.parallel.place import ParallelPlace
from engine.rope import Rotary
from kv_transfer.layout import DTYPE_BYTES
from kv_transfer.planes import Plane
from tandem_kernels.attention.kv_pages import KVPages

ARCHITECTURE = "GroupedForTests"
KINDS = ("full", "window", "latent", "window", "full")
KV_HEADS = {"full": 2, "window": 4}
NUM_HEADS, HEAD_DIM, HIDDEN, VOCAB = 4, 8, 32, 97
LATENT, PLACE = 12, 4
ROPE_THETA, EPS = 1000.0, 1e-5
MAX_LEN = 256


class GroupedSpec(ModelSpec, frozen=True, kw_only=True):
    window: int

    @classmethod
    def from_config(cls, file: Any, max_model_len: int) -> NoReturn:
        raise NotImplementedError

    @classmethod
    def head_dim_of(cls, file: Any) -> NoReturn:
        raise NotImplementedError

    def check_parallel(self, model: ModelConfig, parallel: ParallelConfig) -> None:
        assert NUM_HEADS % parallel.tensor_parallel_size == 0

    def hash_facts(self, model: ModelConfig) -> tuple[Any, ...]:
        return ()

    def kv_layers(self, model: ModelConfig) -> tuple[KVLayers, ...]:
        number_bytes = DTYPE_BYTES[model.dtype]

        def of(kind: str) -> tuple[int, ...]:
            return tuple(index for index, other in enumerate(KINDS) if other == kind)

        def heads(kind: str) -> tuple[Plane, ...]:
            row = HEAD_DIM * number_bytes
            return Plane("k", KV_HEADS[kind], row), Plane("v", KV_HEADS[kind], row)

        latent = (
            Plane("latent", 1, LATENT * number_bytes, replicated=True),
            Plane("place", 1, PLACE * number_bytes, replicated=True),
        )
        return (
            KVLayers(layers=of("full"), planes=heads("full")),
            KVLayers(layers=of("window"), planes=heads("window"), window=self.window),
            KVLayers(layers=of("latent"), planes=latent),
        )


class LatentBlock(nn.Module):
    """Adds attention over latent vectors to the residual stream."""

    def __init__(self, shard: Shard, block_size: int) -> None:
        super().__init__()
        self.first_head, self.num_heads = shard.part(NUM_HEADS)
        self.block_size = block_size
        self.q_weight = shard.parameter(self.num_heads * (LATENT + PLACE), HIDDEN)
        self.down_weight = shard.parameter(LATENT + PLACE, HIDDEN)
        self.o_proj = RowParallelLinear(NUM_HEADS * LATENT, HIDDEN, shard)

    def forward(
        self, x: Tensor, stream: ResidualStream, kv_cache: KVPages, inputs: AttentionInputs
    ) -> None:
        """Attends; `kv_cache` has a plane of latents and one of places, of one head each."""
        planes = kv_cache.k[:, 0], kv_cache.v[:, 0]
        new = F.linear(x, self.down_weight).split((LATENT, PLACE), dim=1)
        written = inputs.slot_mapping >= 0
        slots = inputs.slot_mapping[written]
        for plane, rows in zip(planes, new, strict=True):
            plane[slots // self.block_size, slots % self.block_size] = rows[written]
        queries = F.linear(x, self.q_weight).unflatten(1, (self.num_heads, LATENT + PLACE))
        out = torch.zeros(len(x), self.num_heads * LATENT)
        bounds = inputs.metadata.query_start_loc.tolist()
        for r, seq_len in enumerate(inputs.metadata.seq_lens.tolist()):
            start, end = bounds[r], bounds[r + 1]
            if start == end or seq_len == 0:
                continue
            blocks = inputs.metadata.block_tables[r, : -(-seq_len // self.block_size)].long()
            keys = torch.cat([plane[blocks].flatten(0, 1)[:seq_len] for plane in planes], dim=1)
            out[start:end] = attend_latent(queries[start:end], keys).flatten(1)
        self.o_proj.add_to(stream, out)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        width = LATENT + PLACE
        yield CheckpointWeight(
            f"{prefix}.q.weight", self.q_weight, (NUM_HEADS * width, HIDDEN), 0,
            self.first_head * width,
        )  # fmt: skip
        yield CheckpointWeight(f"{prefix}.down.weight", self.down_weight, (width, HIDDEN))
        yield from self.o_proj.checkpoint_weights(f"{prefix}.o_proj")


def attend_latent(queries: Tensor, keys: Tensor) -> Tensor:
    """Attends with [T, H, LATENT + PLACE] over [L, LATENT + PLACE] -> [T, H, LATENT]; the queries
    are last.
    """
    scores = torch.einsum("thd,ld->thl", queries, keys) * (LATENT + PLACE) ** -0.5
    seen = torch.ones(len(queries), len(keys), dtype=torch.bool).tril(len(keys) - len(queries))
    return scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1) @ keys[:, :LATENT]


class GroupedLM(CausalLM):
    """Embedding, layers that only attend, head."""

    cos_sin_cache: Tensor

    def __init__(self, config: EngineConfig, spec: GroupedSpec, shard: Shard) -> None:
        super().__init__()
        groups = config.kv_layout.groups
        self.group_of = {layer: i for i, group in enumerate(groups) for layer in group.layers}
        self.embed = VocabParallelEmbedding(VOCAB, HIDDEN, shard)
        self.norms = nn.ModuleList(RMSNorm(HIDDEN, EPS, shard) for _ in KINDS)
        self.blocks = nn.ModuleList(
            LatentBlock(shard, groups[self.group_of[layer]].block_size)
            if kind == "latent"
            else AttentionBlock(
                HIDDEN, HeadSizes.alike(NUM_HEADS, KV_HEADS[kind], HEAD_DIM), shard,
                AttentionOptions(),
            )
            for layer, kind in enumerate(KINDS)
        )  # fmt: skip
        self.norm = RMSNorm(HIDDEN, EPS, shard)
        self.lm_head = LMHead(VOCAB, HIDDEN, shard)
        rotary = cos_sin_cache(HEAD_DIM, MAX_LEN, Rotary(theta=ROPE_THETA, dim=HEAD_DIM))
        self.register_buffer("cos_sin_cache", rotary, persistent=False)

    def forward(self, step: ForwardInputs) -> Tensor:
        inputs = [
            AttentionInputs(
                step.positions, self.cos_sin_cache, group.slot_mapping, group.metadata, step.backend
            )
            for group in step.groups
        ]
        stream = ResidualStream(self.embed(step.input_ids))
        for layer, kv_cache in enumerate(step.kv_caches):
            norm, block = self.norms[layer], self.blocks[layer]
            assert isinstance(norm, RMSNorm)
            block(stream.normed(norm), stream, kv_cache, inputs[self.group_of[layer]])
            step.on_layer(layer)
        return stream.normed(self.norm)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden)
        return logits

    def checkpoint_weights(self) -> Iterator[CheckpointWeight]:
        yield from self.embed.checkpoint_weights("embed")
        for layer, (norm, block) in enumerate(zip(self.norms, self.blocks, strict=True)):
            assert isinstance(norm, RMSNorm)
            yield from norm.checkpoint_weights(f"{layer}.norm")
            if isinstance(block, AttentionBlock):
                yield from block.checkpoint_weights(f"{layer}.attn", is_fused=False)
            elif isinstance(block, LatentBlock):
                yield from block.checkpoint_weights(f"{layer}.attn")
        yield from self.norm.checkpoint_weights("norm")
        yield from self.lm_head.checkpoint_weights("lm_head")


@contextmanager
def registered() -> Iterator[None]:
    """Has this process build the model where a checkpoint names its architecture."""
    with (
        patch.dict(MODELS, {ARCHITECTURE: GroupedSpec}),
        patch.object(factory, "Decoder", GroupedLM),
    ):
        yield


def model_config(folder: Path, window: int) -> ModelConfig:
    """Returns the config of a checkpoint that `write_weights` has written to `folder`."""
    spec = GroupedSpec(window=window)
    config = ModelConfig(
        path=str(folder),
        served_model_name="grouped",
        architecture=ARCHITECTURE,
        vocab_size=VOCAB,
        num_layers=len(KINDS),
        num_heads=NUM_HEADS,
        num_kv_heads=KV_HEADS["full"],
        head_dim=HEAD_DIM,
        max_model_len=MAX_LEN,
        eos_token_ids=(0,),
        dtype="float32",
        load_format="safetensors",
        model_hash="grouped",
        spec=msgspec.to_builtins(spec),
    )
    return replace(config, kv_layers=spec.kv_layers(config))


def write_weights(folder: Path) -> dict[str, Tensor]:
    """Writes random weights, large enough that attention decides on tokens."""
    shard = Shard(ParallelPlace(range(len(KINDS))), torch.float32, torch.device("cpu"))
    config = EngineConfig(engine_id="weights", epoch=1, model=model_config(folder, 1))
    generator = torch.Generator().manual_seed(7)
    weights = {}
    for weight in GroupedLM(config, GroupedSpec(window=1), shard).checkpoint_weights():
        values = torch.randn(weight.shape, generator=generator)
        is_norm = len(weight.shape) == 1
        weights[weight.name] = 1 + 0.1 * values if is_norm else values * weight.shape[-1] ** -0.5
    save_file(weights, str(folder / "model.safetensors"))
    return weights
