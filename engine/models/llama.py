"""The decoder that Llama, Mistral, Phi-3, Qwen2 and Qwen3 share; `DenseSpec` states what differs.

ids ─ embed ─┬─ norm ─ qkv ─ rope, cache, attend ─ o ─(+)─ norm ─ gate·up ─ down ─(+) ... norm
             └────────────────── residual stream ──────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from engine.config import EngineConfig
from engine.layers.attention.block import AttentionBlock
from engine.layers.attention.layer import AttentionInputs
from engine.layers.embedding import LMHead, VocabParallelEmbedding
from engine.layers.mlp import GatedMLP
from engine.layers.norm import RMSNorm
from engine.layers.residual import ResidualStream
from engine.layers.rotary import cos_sin_cache
from engine.layers.shard import CheckpointWeight, Shard
from engine.models.base import CausalLM, ForwardInputs
from engine.models.specs.dense import DenseSpec


class LlamaDecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm."""

    def __init__(self, config: EngineConfig, spec: DenseSpec, shard: Shard) -> None:
        super().__init__()
        model = config.model
        self.is_fused = spec.fused_projections
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, shard)
        self.self_attn = AttentionBlock(
            spec.hidden_size,
            model.head_dim,
            model.num_heads,
            model.num_kv_heads,
            shard,
            bias=spec.attention_bias,
            head_norm=spec.head_norm,
            eps=spec.rms_norm_eps,
        )
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, shard)
        self.mlp = GatedMLP(spec.hidden_size, spec.intermediate_size, shard)

    def forward(self, stream: ResidualStream, kv_cache: Tensor, inputs: AttentionInputs) -> None:
        self.self_attn(stream.normed(self.input_layernorm), stream, kv_cache, inputs)
        self.mlp(stream.normed(self.post_attention_layernorm), stream)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        fused = self.is_fused
        yield from self.input_layernorm.checkpoint_weights(f"{prefix}.input_layernorm")
        yield from self.self_attn.checkpoint_weights(f"{prefix}.self_attn", is_fused=fused)
        yield from self.post_attention_layernorm.checkpoint_weights(
            f"{prefix}.post_attention_layernorm"
        )
        yield from self.mlp.checkpoint_weights(f"{prefix}.mlp", is_fused=fused)


class LlamaForCausalLM(CausalLM):
    """Embedding, layers, head. `cos_sin_cache` covers `max_model_len` positions."""

    cos_sin_cache: Tensor

    def __init__(self, config: EngineConfig, spec: DenseSpec, shard: Shard) -> None:
        super().__init__()
        model = config.model
        self.embed_tokens = VocabParallelEmbedding(model.vocab_size, spec.hidden_size, shard)
        self.layer_indices = shard.place.layers
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(config, spec, shard) for _ in self.layer_indices
        )
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, shard)
        self.is_tied = spec.tie_word_embeddings
        shared = self.embed_tokens.weight if self.is_tied else None
        self.lm_head = LMHead(model.vocab_size, spec.hidden_size, shard, shared)
        rotary = cos_sin_cache(
            model.head_dim, model.max_model_len, spec.rope_theta, spec.rope_scaling
        )
        self.register_buffer("cos_sin_cache", rotary.to(shard.device), persistent=False)

    def forward(self, step: ForwardInputs) -> Tensor:
        (group,) = step.groups
        inputs = AttentionInputs(
            step.positions, self.cos_sin_cache, group.slot_mapping, group.metadata, step.backend
        )
        stream = ResidualStream(self.embed_tokens(step.input_ids))
        for index, (layer, kv_cache) in enumerate(zip(self.layers, step.kv_caches, strict=True)):
            layer(stream, kv_cache, inputs)
            step.on_layer(index)
        return stream.normed(self.norm)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden)
        return logits

    def checkpoint_weights(self) -> Iterator[CheckpointWeight]:
        yield from self.embed_tokens.checkpoint_weights("model.embed_tokens")
        for index, layer in zip(self.layer_indices, self.layers, strict=True):
            assert isinstance(layer, LlamaDecoderLayer)
            yield from layer.checkpoint_weights(f"model.layers.{index}")
        yield from self.norm.checkpoint_weights("model.norm")
        if not self.is_tied:
            yield from self.lm_head.checkpoint_weights("lm_head")

    @property
    def unused_weights(self) -> frozenset[str]:
        """Returns the names of a tied head, which may be stored beside the embedding."""
        return frozenset({"lm_head.weight"} if self.is_tied else ())
