"""A model without an engine: its weights, a cache that fills most of the memory, and steps over
scattered blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from bench.engine.models.shapes import shape_config
from engine.config import KVCacheDtype
from engine.layers.attention.backend import AttentionBackend, PrefillChunk
from engine.layers.attention.context_passes import context_passes
from engine.layers.attention.cudnn_prefill import CudnnPrefill
from engine.layers.attention.flash_attention import FlashPrefill
from engine.layers.attention.paged import PagedBackend
from engine.layers.attention.selection import choose_attention
from engine.layers.attention.uncached_prefill import UncachedPrefillBackend, split_metadata
from engine.layers.gemm_policy import GemmPolicy
from engine.models.base import ForwardInputs, GroupInputs
from engine.models.factory import create_model
from engine.models.llama import LlamaForCausalLM
from engine.models.llama_layer import LlamaDecoderLayer
from engine.models.loader import load_weights
from engine.parallel.place import ParallelPlace
from engine.worker.kv_cache import layer_views
from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.attention.kv_scales import E4M3

_SHARE_OF_MEMORY = 0.75
_MAX_MODEL_LEN = 16_384
_SHORTEST_APART = 512
_SMALL_NUMBERS, _LARGE_NUMBERS = 0x28, 0x40
"""Bytes of e4m3 numbers from 1/4 to 2."""
_TINY_SPEC = {"hidden_size": 256, "intermediate_size": 512}
_TINY = {
    "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "vocab_size": 512,
}  # fmt: skip


class VariantModel:
    """A model with random weights; `tiny` makes a small one on the CPU."""

    def __init__(
        self,
        shape: str,
        *,
        tiny: bool = False,
        num_layers: int = 0,
        most_bytes: int = 1 << 40,
        quantization: str = "",
        kv_cache_dtype: KVCacheDtype = "auto",
    ) -> None:
        self.device = torch.device("cpu" if tiny else "cuda")
        config = shape_config(
            shape,
            device=self.device.type,
            max_model_len=_MAX_MODEL_LEN,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
        )
        model = config.model
        if tiny:
            rotary = {**model.spec["rotary"], "dim": _TINY["head_dim"]}
            model = replace(model, **_TINY, spec={**model.spec, **_TINY_SPEC, "rotary": rotary})
        if num_layers:
            model = replace(model, num_layers=num_layers)
        self.config = config = replace(config, model=model)
        self._block_size = config.cache.block_size
        self.gemms = GemmPolicy.choose(config.device, self.device, 1)
        place = ParallelPlace(range(model.num_layers))
        self.model = cast(LlamaForCausalLM, create_model(config, place, self.device))
        load_weights(self.model, config, lambda fraction: None)
        self.longest_context, self.longest = (40, 512) if tiny else (8192, 8192)
        block_bytes = config.kv_layout.block_bytes
        free = 1 << 28 if tiny else torch.cuda.mem_get_info()[0]
        budget = min(int(free * _SHARE_OF_MEMORY), most_bytes) if not tiny else free
        most_needed = 256 * 10
        self.num_blocks = max(budget // block_bytes, most_needed)
        memory = torch.empty(self.num_blocks * block_bytes, dtype=torch.uint8, device=self.device)
        self.kv_caches = layer_views(memory, config.kv_layout)
        for layer in self.kv_caches:
            if layer.dtype == E4M3:
                layer.view(torch.uint8).random_(_SMALL_NUMBERS, _LARGE_NUMBERS)
            else:
                layer.normal_()
        self.layer = cast("LlamaDecoderLayer", self.model.layers[0])

    def decode_metadata(self, batch: int, context: int) -> AttentionMetadata:
        """Returns one token for each of `batch` requests that have `context` tokens already."""
        context = min(context, self.longest_context)
        return self._metadata([context + 1] * batch, [1] * batch)

    def decode_step(self, metadata: AttentionMetadata) -> Callable[[], Tensor]:
        """Gives logits."""
        positions = metadata.seq_lens.long() - 1
        step = self._step(positions, metadata, PagedBackend())
        return lambda: self.model.compute_logits(step())

    def prefill_step(
        self,
        lengths: tuple[int, ...],
        backend: AttentionBackend,
        num_cached: int = 0,
        *,
        keeps_rows: bool = False,
    ) -> Callable[[], Tensor]:
        """Prompts behind `num_cached` tokens that are in the cache; gives the logits of their last
        tokens. Uncached prompts are attended apart, as the runner has it. `keeps_rows`: behind its
        attention the last layer computes these tokens alone."""
        lengths = tuple(sorted(lengths, reverse=True))
        num_cached = min(num_cached, self.longest_context)
        positions = torch.cat([torch.arange(n, device=self.device) for n in lengths]) + num_cached
        metadata = self._metadata([n + num_cached for n in lengths], list(lengths))
        if isinstance(backend, UncachedPrefillBackend):
            apart = tuple(n for n in lengths if n >= backend.dense.min_tokens)
            if apart and num_cached == 0:
                metadata = split_metadata(metadata, apart)
            elif apart and backend.expands_contexts:
                chunks = [PrefillChunk(-1, n, num_cached) for n in apart]
                passes = context_passes(chunks, metadata.block_tables, backend.pass_tokens)
                metadata = split_metadata(metadata, (), apart, passes)
        last = metadata.query_start_loc[1:].long() - 1
        if keeps_rows:
            kept = self._step(positions, metadata, backend, last)
            return lambda: self.model.compute_logits(kept())
        step = self._step(positions, metadata, backend)
        return lambda: self.model.compute_logits(step().index_select(0, last))

    def attention_ways(self) -> dict[str, AttentionBackend]:
        """Returns ways to attend by name; `present` is what the engine chooses here, the others
        attend to all prompts of a batch alike.
        """
        shape = torch.bfloat16, self.config.model.head_dim, self.device
        ways: dict[str, AttentionBackend] = {
            "present": choose_attention(self.config, self.device),
            "triton": PagedBackend(),
        }
        if CudnnPrefill.is_available(*shape):
            ways["cuDNN"] = UncachedPrefillBackend(CudnnPrefill(_SHORTEST_APART))
        package = FlashPrefill.package(*shape)
        if package is not None:
            dense = FlashPrefill(package, _SHORTEST_APART)
            ways["FlashAttention 3"] = UncachedPrefillBackend(dense)
        return ways

    def _step(
        self,
        positions: Tensor,
        metadata: AttentionMetadata,
        backend: AttentionBackend,
        kept: Tensor | None = None,
    ) -> Callable[[], Tensor]:
        counts = metadata.query_start_loc.diff()
        requests, ends = torch.repeat_interleave(counts), None
        if kept is not None:
            each = torch.arange(len(counts) + 1, dtype=torch.int32, device=self.device)
            bounds = metadata.block_tables, each, metadata.seq_lens
            ends = AttentionMetadata(*bounds, len(counts), 1, metadata.max_seq_len)
        blocks = metadata.block_tables[requests, positions // self._block_size].long()
        slots = blocks * self._block_size + positions % self._block_size
        generator = torch.Generator(self.device).manual_seed(1)
        ids = torch.randint(
            1, self.config.model.vocab_size, (len(positions),), generator=generator,
            dtype=torch.int32, device=self.device,
        )  # fmt: skip

        def run() -> Tensor:
            ordered = replace(metadata, fixed_order=self.model.lm_head.gemms.deterministic)
            hidden: Tensor = self.model(
                ForwardInputs(
                    ids,
                    positions,
                    (GroupInputs(slots, ordered, ends),),
                    self.kv_caches,
                    backend,
                    lambda layer: None,
                    kept=kept,
                )
            )
            return hidden

        return run

    def _metadata(self, seq_lens: list[int], query_lens: list[int]) -> AttentionMetadata:
        most = max(-(-n // self._block_size) for n in seq_lens)
        num_blocks = len(seq_lens) * most
        generator = torch.Generator(self.device).manual_seed(2)
        order = torch.randperm(self.num_blocks, generator=generator, device=self.device)
        ints = {"dtype": torch.int32, "device": self.device}
        return AttentionMetadata(
            block_tables=order[:num_blocks].int().view(len(seq_lens), most).contiguous(),
            query_start_loc=torch.tensor([0, *query_lens], device=self.device).cumsum(0).int(),
            seq_lens=torch.tensor(seq_lens, **ints),
            num_decodes=next((r for r, n in enumerate(query_lens) if n > 1), len(query_lens)),
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
        )
