"""Kimi K3 as its report and its published code say it, in plain torch: transformers 5.24 does not
have it. There is no state and no cache: what a token reads is a sum over all tokens before it, in
float64.

Sources: Kimi K3 (arXiv 2607.24653), Attention Residuals (arXiv 2603.15031), Kimi Linear (arXiv
2510.26692). Tensors have the names of the published checkpoint.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, KimiLinearConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from tests.engine.models.family import Family

LATENT_EPS = 1e-6


class KimiK3Config(KimiLinearConfig):
    model_type = "kimi_k3"
    hidden_act: str = "situ"
    attn_res_block_size: int = 2
    routed_expert_hidden_size: int = 32
    latent_moe_use_norm: bool = True
    activation_situ_beta: float = 0.7
    activation_situ_linear_beta: float = 1.5
    mla_use_nope: bool = True
    mla_use_output_gate: bool = True
    first_k_dense_replace: int = 1


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class _Gated(nn.Module):
    """A feed-forward block; `names` are those of gate, up and down."""

    def __init__(self, config: KimiK3Config, size: int, units: int, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names = names
        self.bounds = config.activation_situ_beta, config.activation_situ_linear_beta
        for name, (inputs, outputs) in zip(
            names, ((size, units), (size, units), (units, size)), strict=True
        ):
            setattr(self, name, _linear(inputs, outputs))

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (getattr(self, name) for name in self.names)
        of_gate, of_up = self.bounds
        let, through = gate(x), up(x)
        let = of_gate * torch.tanh(let / of_gate) * torch.sigmoid(let)
        return down(let * of_up * torch.tanh(through / of_up))


_DENSE, _ROUTED = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")


class _Router(nn.Module):
    def __init__(self, config: KimiK3Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(config.num_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.num_experts))


class _Experts(nn.Module):
    def __init__(self, config: KimiK3Config) -> None:
        super().__init__()
        size, latent = config.hidden_size, config.routed_expert_hidden_size
        units = config.moe_intermediate_size
        self.top_k, self.scaling = config.num_experts_per_token, config.routed_scaling_factor
        self.gate = _Router(config)
        self.experts = nn.ModuleList(
            _Gated(config, latent, units, _ROUTED) for _ in range(config.num_experts)
        )
        self.shared_experts = _Gated(config, size, units * config.num_shared_experts, _DENSE)
        self.routed_expert_down_proj = _linear(size, latent)
        self.routed_expert_norm = nn.RMSNorm(latent, config.rms_norm_eps)
        self.routed_expert_up_proj = _linear(latent, size)

    def forward(self, x: Tensor) -> Tensor:
        scores = F.linear(x, self.gate.weight).sigmoid()
        chosen = (scores + self.gate.e_score_correction_bias).topk(self.top_k, dim=-1).indices
        weights = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
        weights = weights / weights.sum(-1, keepdim=True) * self.scaling
        latent = self.routed_expert_down_proj(x)
        every = torch.stack([expert(latent) for expert in self.experts], dim=-1)
        routed = self.routed_expert_norm((every * weights[..., None, :]).sum(-1))
        return self.routed_expert_up_proj(routed) + self.shared_experts(x)


class _Delta(nn.Module):
    """Kimi Delta Attention. With u_t = rate_t (v_t - what the state before t has under k_t), the
    state is the sum of k_j u_j, decayed since j."""

    def __init__(self, config: KimiK3Config) -> None:
        super().__init__()
        said = config.linear_attn_config
        self.heads, self.dim = said["num_heads"], said["head_dim"]
        self.floor, size = said["gate_lower_bound"], config.hidden_size
        inner, kernel = self.heads * self.dim, said["short_conv_kernel_size"]
        for name in "qkv":
            setattr(self, f"{name}_proj", _linear(size, inner))
            conv = nn.Conv1d(inner, inner, kernel, groups=inner, padding=kernel - 1, bias=False)
            setattr(self, f"{name}_conv1d", conv)
        self.f_a_proj, self.f_b_proj = _linear(size, self.dim), _linear(self.dim, inner)
        self.g_proj, self.b_proj = _linear(size, inner), _linear(size, self.heads)
        # There are as many as a head has numbers; those of heads come first.
        self.A_log = nn.Parameter(torch.zeros(self.dim))
        self.dt_bias = nn.Parameter(torch.zeros(inner))
        self.o_norm = nn.RMSNorm(self.dim, config.rms_norm_eps)
        self.o_proj = _linear(inner, size)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._convolved(x, name) for name in "qkv")
        q, k = (one / (one.square().sum(-1, keepdim=True) + 1e-6).sqrt() for one in (q, k))
        pace = self.A_log[: self.heads].double().exp()[:, None, None]
        decays = self._heads(self.f_b_proj(self.f_a_proj(x)) + self.dt_bias)
        since = (self.floor * torch.sigmoid(pace * decays)).cumsum(2)
        rates = self.b_proj(x).double().sigmoid().transpose(1, 2)
        kept = (since[:, :, :, None] - since[:, :, None]).clamp(max=0.0).exp()
        under = torch.einsum("bhic,bhjc,bhijc->bhij", k, k, kept).tril(-1)
        read = torch.einsum("bhic,bhjc,bhijc->bhij", q, k, kept).tril()
        one = torch.eye(x.shape[1], dtype=torch.float64)
        given = torch.linalg.solve_triangular(
            one + rates[..., None] * under, rates[..., None] * v, upper=False
        )
        found = (read @ given * self.dim**-0.5).transpose(1, 2).to(x.dtype)
        gates = self.g_proj(x).unflatten(-1, (self.heads, self.dim)).sigmoid()
        return self.o_proj((self.o_norm(found) * gates).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, self.dim)).transpose(1, 2).double()

    def _convolved(self, x: Tensor, name: str) -> Tensor:
        projected = getattr(self, f"{name}_proj")(x).transpose(1, 2)
        convolved = getattr(self, f"{name}_conv1d")(projected)[..., : x.shape[1]]
        return self._heads(F.silu(convolved).transpose(1, 2))


class _Latents(nn.Module):
    """Latent attention without rotation, and a gate for each number that a head attends to."""

    def __init__(self, config: KimiK3Config) -> None:
        super().__init__()
        size, self.heads = config.hidden_size, config.num_attention_heads
        self.nope, self.rope = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.value, self.rank = config.v_head_dim, config.kv_lora_rank
        self.q_a_proj = _linear(size, config.q_lora_rank)
        self.q_a_layernorm = nn.RMSNorm(config.q_lora_rank, LATENT_EPS)
        self.q_b_proj = _linear(config.q_lora_rank, self.heads * (self.nope + self.rope))
        self.kv_a_proj_with_mqa = _linear(size, self.rank + self.rope)
        self.kv_a_layernorm = nn.RMSNorm(self.rank, LATENT_EPS)
        self.kv_b_proj = _linear(self.rank, self.heads * (self.nope + self.value))
        self.g_proj = _linear(size, self.heads * self.value)
        self.o_proj = _linear(self.heads * self.value, size)

    def forward(self, x: Tensor) -> Tensor:
        queries = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        queries = queries.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        latent, shared = self.kv_a_proj_with_mqa(x).split([self.rank, self.rope], dim=-1)
        both = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.heads, -1))
        keys, values = both.transpose(1, 2).split([self.nope, self.value], dim=-1)
        shared = shared[:, None].expand(-1, self.heads, -1, -1)
        keys = torch.cat((keys, shared), dim=-1)
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.o_proj(attended.transpose(1, 2).flatten(2) * self.g_proj(x).sigmoid())


def _mixed(blocks: list[Tensor], norm: nn.RMSNorm, query: nn.Linear) -> Tensor:
    every = torch.stack(blocks)
    return (every * query(norm(every)).softmax(0)).sum(0)


class _Layer(nn.Module):
    def __init__(self, config: KimiK3Config, index: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.begins = index % config.attn_res_block_size == 0
        is_full = index + 1 in config.linear_attn_config["full_attn_layers"]
        self.self_attn = _Latents(config) if is_full else _Delta(config)
        if index < config.first_k_dense_replace:
            self.mlp = _Gated(config, size, config.intermediate_size, _DENSE)
        else:
            self.block_sparse_moe = _Experts(config)
        for name in ("input_layernorm", "post_attention_layernorm"):
            setattr(self, name, nn.RMSNorm(size, eps))
        for name in ("self_attention_res", "mlp_res"):
            setattr(self, f"{name}_norm", nn.RMSNorm(size, eps))
            setattr(self, f"{name}_proj", _linear(size, 1))

    def forward(self, blocks: list[Tensor]) -> None:
        """Adds to the last of the blocks, or begins one."""
        x = blocks[-1]
        if len(blocks) > 1:
            x = _mixed(blocks, self.self_attention_res_norm, self.self_attention_res_proj)
        if self.begins:
            blocks.append(torch.zeros_like(x))
        blocks[-1] = blocks[-1] + self.self_attn(self.input_layernorm(x))
        x = self.post_attention_layernorm(_mixed(blocks, self.mlp_res_norm, self.mlp_res_proj))
        mlp = self.mlp if hasattr(self, "mlp") else self.block_sparse_moe
        blocks[-1] = blocks[-1] + mlp(x)


class _Model(nn.Module):
    def __init__(self, config: KimiK3Config) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.layers = nn.ModuleList(_Layer(config, i) for i in range(config.num_hidden_layers))
        self.output_attn_res_norm = nn.RMSNorm(size, eps)
        self.output_attn_res_proj = _linear(size, 1)
        self.norm = nn.RMSNorm(size, eps)

    def forward(self, ids: Tensor) -> Tensor:
        blocks = [self.embed_tokens(ids)]
        for layer in self.layers:
            layer(blocks)
        return self.norm(_mixed(blocks, self.output_attn_res_norm, self.output_attn_res_proj))


class KimiK3ForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = KimiK3Config
    base_model_prefix = "model"

    def __init__(self, config: KimiK3Config) -> None:
        super().__init__(config)
        self.model = _Model(config)
        self.lm_head = _linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """All weights are the test's."""

    def forward(self, input_ids: Tensor, **_: Any) -> CausalLMOutput:
        self.double()
        return CausalLMOutput(logits=self.lm_head(self.model(input_ids)).float())

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return super().generate(*args, use_cache=False, **kwargs)


KIMI_K3_FAMILIES = {
    "kimi_k3": Family(
        KimiK3ForCausalLM,
        KimiK3Config,
        {
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "q_lora_rank": 20,
            "kv_lora_rank": 24,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "num_experts": 8,
            "num_experts_per_token": 3,
            "moe_intermediate_size": 32,
            "num_shared_experts": 2,
            "routed_scaling_factor": 1.5,
            "rms_norm_eps": 1e-5,
            "pad_token_id": 0,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "linear_attn_config": {
                "kda_layers": [1, 3],
                "full_attn_layers": [2],
                "num_heads": 4,
                "head_dim": 8,
                "short_conv_kernel_size": 4,
                "gate_lower_bound": -5.0,
                "use_full_rank_gate": True,
            },
        },
    ),
}
