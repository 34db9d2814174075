"""The decoder that Llama 3, Qwen2 and Qwen3 share.

`ModelConfig` states what differs: `attention_bias` (Qwen2), `qk_norm` (Qwen3), `rope_scaling`
(Llama 3.1 and later). One pass of T tokens:

    ids ─ embed ─┬─ norm ─ qkv ─ rope, cache, attend ─ o ─(+)─ norm ─ gate·up ─ down ─┐ ... norm
                 └───────────────── residual ─────────────────────── residual ───────┘

The residual sum and the norm after it are one kernel; with many tokens the sum is part of the
product before it.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from engine.config import EngineConfig, ModelConfig
from engine.layers.attention.layer import Attention, AttentionInputs
from engine.layers.embedding import LMHead, VocabParallelEmbedding
from engine.layers.linear import GateUpParallelLinear, QKVParallelLinear, RowParallelLinear
from engine.layers.norm import RMSNorm
from engine.layers.rotary import cos_sin_cache
from engine.layers.shard import CheckpointWeight, Shard
from engine.models.base import ForwardInputs
from kv_transfer.layout import HeadRange, heads_of_rank


class LlamaAttention(nn.Module):
    """[T, H] -> [T, H], or None: it was added to `residual`."""

    q_norm: RMSNorm | None
    k_norm: RMSNorm | None

    def __init__(self, config: ModelConfig, kv_heads: HeadRange, shard: Shard) -> None:
        super().__init__()
        _, num_heads = shard.part(config.num_heads)
        self.eps = config.rms_norm_eps
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.head_dim,
            config.num_heads,
            config.num_kv_heads,
            kv_heads,
            shard,
            bias=config.attention_bias,
        )
        self.q_norm = RMSNorm(config.head_dim, self.eps, shard) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, self.eps, shard) if config.qk_norm else None
        self.attention = Attention(num_heads, kv_heads.count, config.head_dim)
        self.o_proj = RowParallelLinear(
            config.num_heads * config.head_dim, config.hidden_size, shard
        )

    def forward(
        self, x: Tensor, residual: Tensor, kv_cache: Tensor, inputs: AttentionInputs
    ) -> Tensor | None:
        attended: Tensor = self.attention(
            self.qkv_proj(x),
            kv_cache,
            inputs,
            None if self.q_norm is None else self.q_norm.weight,
            None if self.k_norm is None else self.k_norm.weight,
            self.eps,
        )
        return _project(self.o_proj, attended, residual)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        yield from self.qkv_proj.checkpoint_weights(
            f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.v_proj"
        )
        yield from self.o_proj.checkpoint_weights(f"{prefix}.o_proj")
        for norm, name in ((self.q_norm, "q_norm"), (self.k_norm, "k_norm")):
            if norm is not None:
                yield from norm.checkpoint_weights(f"{prefix}.{name}")


class LlamaMLP(nn.Module):
    """[T, H] -> [T, H], or None: it was added to `residual`."""

    def __init__(self, config: ModelConfig, shard: Shard) -> None:
        super().__init__()
        self.gate_up_proj = GateUpParallelLinear(
            config.hidden_size, config.intermediate_size, shard
        )
        self.down_proj = RowParallelLinear(config.intermediate_size, config.hidden_size, shard)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor | None:
        return _project(self.down_proj, self.gate_up_proj(x), residual)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        yield from self.gate_up_proj.checkpoint_weights(f"{prefix}.gate_proj", f"{prefix}.up_proj")
        yield from self.down_proj.checkpoint_weights(f"{prefix}.down_proj")


class LlamaDecoderLayer(nn.Module):
    """(x, residual) -> (x, residual), both [T, H]; the layer's output is their sum, or `residual`
    alone when x is None."""

    def __init__(self, config: ModelConfig, kv_heads: HeadRange, shard: Shard) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, shard)
        self.self_attn = LlamaAttention(config, kv_heads, shard)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, shard)
        self.mlp = LlamaMLP(config, shard)

    def forward(
        self, x: Tensor | None, residual: Tensor | None, kv_cache: Tensor, inputs: AttentionInputs
    ) -> tuple[Tensor | None, Tensor]:
        if residual is None:
            assert x is not None
            x, residual = self.input_layernorm(x), x
        else:
            x, residual = self.input_layernorm.add(x, residual)
        x = self.self_attn(x, residual, kv_cache, inputs)
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x, residual), residual

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        yield from self.input_layernorm.checkpoint_weights(f"{prefix}.input_layernorm")
        yield from self.self_attn.checkpoint_weights(f"{prefix}.self_attn")
        yield from self.post_attention_layernorm.checkpoint_weights(
            f"{prefix}.post_attention_layernorm"
        )
        yield from self.mlp.checkpoint_weights(f"{prefix}.mlp")


class LlamaForCausalLM(nn.Module):
    """One rank's share of the model. `cos_sin_cache` covers `max_model_len` positions."""

    cos_sin_cache: Tensor

    def __init__(self, config: EngineConfig, shard: Shard) -> None:
        super().__init__()
        model = config.model
        kv_heads = heads_of_rank(model.num_kv_heads, shard.group.rank, shard.group.size)
        self.embed_tokens = VocabParallelEmbedding(model.vocab_size, model.hidden_size, shard)
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(model, kv_heads, shard) for _ in range(model.num_layers)
        )
        self.norm = RMSNorm(model.hidden_size, model.rms_norm_eps, shard)
        self.is_tied = model.tie_word_embeddings
        shared = self.embed_tokens.weight if self.is_tied else None
        self.lm_head = LMHead(model.vocab_size, model.hidden_size, shard, shared)
        rotary = cos_sin_cache(
            model.head_dim, model.max_model_len, model.rope_theta, model.rope_scaling
        )
        self.register_buffer("cos_sin_cache", rotary.to(shard.device), persistent=False)

    def forward(self, step: ForwardInputs) -> Tensor:
        """[T] token ids -> hidden states [T, H], after the last norm."""
        inputs = AttentionInputs(
            step.positions, self.cos_sin_cache, step.slot_mapping, step.metadata, step.backend
        )
        x: Tensor | None = self.embed_tokens(step.input_ids)
        residual: Tensor | None = None
        for index, (layer, kv_cache) in enumerate(zip(self.layers, step.kv_caches, strict=True)):
            x, residual = layer(x, residual, kv_cache, inputs)
            step.on_layer(index)
        assert residual is not None
        return self.norm.add(x, residual)[0]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[S, H] -> float32 [S, vocabulary], the same on every rank."""
        logits: Tensor = self.lm_head(hidden)
        return logits

    def checkpoint_weights(self) -> Iterator[CheckpointWeight]:
        """Every tensor that the checkpoint must have, and where it goes."""
        yield from self.embed_tokens.checkpoint_weights("model.embed_tokens")
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, LlamaDecoderLayer)
            yield from layer.checkpoint_weights(f"model.layers.{index}")
        yield from self.norm.checkpoint_weights("model.norm")
        if not self.is_tied:
            yield from self.lm_head.checkpoint_weights("lm_head")


def _project(layer: RowParallelLinear, x: Tensor, residual: Tensor) -> Tensor | None:
    """What the next norm adds; None: nothing is left to be added."""
    if layer.adds_to(residual):
        layer.add(x, residual)
        return None
    out: Tensor = layer(x)
    return out
