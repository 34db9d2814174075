"""One tensor-parallel rank's model without an engine, and prompts that it computes in pieces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from bench.engine.models.shapes import shape_config
from engine.layers.attention.backend import AttentionBackend
from engine.layers.attention.block import AttentionBlock
from engine.layers.attention.layer import AttentionInputs
from engine.layers.attention.selection import choose_attention
from engine.layers.attention.uncached_prefill import UncachedPrefillBackend, split_metadata
from engine.layers.linear import RowParallelLinear
from engine.layers.mlp import GatedMLP
from engine.layers.residual import ResidualStream
from engine.models.base import ForwardInputs, GroupInputs
from engine.models.factory import create_model
from engine.models.llama import LlamaForCausalLM
from engine.models.llama_layer import LlamaDecoderLayer
from engine.models.loader import load_weights
from engine.parallel.distributed import ParallelGroup
from engine.parallel.place import ParallelPlace
from engine.worker.kv_cache import layer_views
from tandem_kernels.attention.attention_metadata import AttentionMetadata

MOST_TOKENS = 16_384


@dataclass(frozen=True, slots=True)
class Span:
    """`num_tokens` of prompt number `prompt`, behind `num_computed`."""

    prompt: int
    num_computed: int
    num_tokens: int


class ShardedModel:
    """The share of rank `group.rank`, with random weights, and a cache for `MOST_TOKENS`."""

    def __init__(self, shape: str, group: ParallelGroup, device: torch.device) -> None:
        config = shape_config(
            shape, device=device.type, max_model_len=MOST_TOKENS, tensor_parallel_size=group.size
        )
        if device.type == "cpu":
            config = replace(config, model=replace(config.model, dtype="float32"))
        self.device, self.config = device, config
        place = ParallelPlace(range(config.model.num_layers), group)
        self.model = cast(LlamaForCausalLM, create_model(config, place, device))
        load_weights(self.model, config, lambda fraction: None)
        layout = config.kv_layout.of_rank(group.rank)
        self.block_size = config.cache.block_size
        self.num_blocks = MOST_TOKENS // self.block_size
        memory = torch.zeros(self.num_blocks * layout.block_bytes, dtype=torch.uint8, device=device)
        self.kv_caches = layer_views(memory, layout)
        self.backend = choose_attention(config, device)
        self.layers = [cast(LlamaDecoderLayer, layer) for layer in self.model.layers]

    def row_layers(self) -> list[RowParallelLinear]:
        """Returns the layers whose outputs are summed over ranks."""
        return [layer for layer in self.model.modules() if isinstance(layer, RowParallelLinear)]

    def piece(self, spans: list[Span]) -> ForwardInputs:
        """Returns the tokens of `spans`, computed together. All prompts are of the same length, and
        have blocks of their own."""
        counts = torch.tensor([span.num_tokens for span in spans], device=self.device)
        positions = torch.cat(
            [
                torch.arange(span.num_tokens, device=self.device) + span.num_computed
                for span in spans
            ]
        )
        generator = torch.Generator("cpu").manual_seed(1)
        ids = torch.randint(
            1, self.config.model.vocab_size, (MOST_TOKENS,), generator=generator, dtype=torch.int32
        ).to(self.device)
        metadata = self._metadata(spans)
        requests = torch.repeat_interleave(counts)
        blocks = metadata.block_tables[requests, positions // self.block_size].long()
        slots = blocks * self.block_size + positions % self.block_size
        return ForwardInputs(
            ids[positions],
            positions,
            (GroupInputs(slots, self._attended_apart(metadata, spans)),),
            self.kv_caches,
            self.backend,
            lambda layer: None,
        )

    def run(self, pieces: list[ForwardInputs], finish: Callable[[Tensor], None]) -> Tensor:
        """Returns the normed stream of all pieces behind each other, [T, H]. Of each block, one
        piece comes after the other; a stream is handed to `finish` before it is read."""
        model = self.model
        streams = [ResidualStream(model.embedded(piece.input_ids)) for piece in pieces]
        inputs = [model.kinds.inputs(piece) for piece in pieces]
        for index, layer in enumerate(self.layers):
            attention, mlp = layer.self_attn, layer.mlp
            assert isinstance(attention, AttentionBlock) and isinstance(mlp, GatedMLP)
            for stream, given in zip(streams, inputs, strict=True):
                finish(stream.sum)
                normed = stream.read_rows(layer.before_attention, attention.input_form)
                of_layer = given[index]
                assert isinstance(of_layer, AttentionInputs)
                attention(normed, stream, self.kv_caches[index], of_layer)
            for stream in streams:
                finish(stream.sum)
                mlp(stream.read_rows(layer.before_mlp, mlp.input_form), stream)
        for stream in streams:
            finish(stream.sum)
        return torch.cat([stream.normed(model.norm) for stream in streams])

    def _attended_apart(self, metadata: AttentionMetadata, spans: list[Span]) -> AttentionMetadata:
        backend: AttentionBackend = self.backend
        if not isinstance(backend, UncachedPrefillBackend):
            return metadata
        if any(span.num_computed or span.num_tokens < backend.dense.min_tokens for span in spans):
            return metadata
        return split_metadata(metadata, tuple(span.num_tokens for span in spans))

    def _metadata(self, spans: list[Span]) -> AttentionMetadata:
        blocks = torch.arange(self.num_blocks, dtype=torch.int32, device=self.device)
        query_lens = [span.num_tokens for span in spans]
        seq_lens = [span.num_computed + span.num_tokens for span in spans]
        most = -(-max(seq_lens) // self.block_size)
        tables = torch.stack([blocks[span.prompt * most :][:most] for span in spans])
        return AttentionMetadata(
            block_tables=tables.contiguous(),
            query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).int().to(self.device),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=self.device),
            num_decodes=0,
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
        )
