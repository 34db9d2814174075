"""`config.json` and `generation_config.json` of a Hugging Face checkpoint, typed.

Only what tandem reads is declared; other keys are ignored. Both spellings of the rotary settings
are read: `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` (before).
"""

from __future__ import annotations

import msgspec

from engine.models.config.config_parts import (
    MOST,
    ScaledResiduals,
    SparseAttentionFields,
)

DEFAULT_ROPE_THETA = 10_000.0


class RopeFields(msgspec.Struct):
    rope_type: str | None = None
    type: str | None = None
    """The older name of `rope_type`."""
    rope_theta: float | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    short_factor: list[float] | None = None
    long_factor: list[float] | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    llama_4_scaling_beta: float | None = None
    partial_rotary_factor: float | None = None
    full_attention: RopeFields | None = None
    """Belongs to layers that see everything, where kinds of layers differ."""
    sliding_attention: RopeFields | None = None
    main: RopeFields | None = None
    """Belongs to layers that see a window alone, in DeepSeek-V4."""
    compress: RopeFields | None = None
    """Belongs to its other layers."""

    @property
    def kind(self) -> str:
        return self.rope_type or self.type or "default"

    @property
    def scales(self) -> bool:
        """Returns whether positions count otherwise than one by one."""
        return self.kind not in ("default", "mrope")


class ConfigHead(msgspec.Struct):
    """Holds what says whose `config.json` this is: the rest of it differs between kinds of models.

    Attributes:
        text_config: Of the text part, where a model has several.
    """

    architectures: list[str] | None = None
    model_type: str | None = None
    text_config: ConfigHead | None = None

    @property
    def model_types(self) -> list[str]:
        """Returns `model_type`, then that of the text part."""
        inner = [] if self.text_config is None else self.text_config.model_types
        return [*([self.model_type] if self.model_type else []), *inner]


class ConfigFile(ScaledResiduals):
    """Holds what `config.json` says, with the defaults that transformers gives absent keys where
    these are the same for all architectures."""

    vocab_size: int
    hidden_size: int
    num_attention_heads: int
    max_position_embeddings: int = 0
    """Kimi Linear calls it `model_max_length`."""
    num_hidden_layers: int = 0
    """Nemotron-H has a list of them instead."""
    units: int | list[int] = msgspec.field(default=0, name="intermediate_size")
    """Checkpoints whose every layer has experts may leave it out; a number for each layer is Gemma
    3n's form."""
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float | None = None
    """Families differ in the default."""
    rope_bases: float | list[float] | None = msgspec.field(default=None, name="rope_theta")
    """A number for each layer is Step's form."""
    rope_local_base_freq: float | None = None
    rope_scaling: RopeFields | None = None
    rope_parameters: RopeFields | None = None
    tie_word_embeddings: bool | None = None
    """Families differ in the default."""
    attention_bias: bool | None = None
    mlp_bias: bool = False
    hidden_act: str = "silu"
    hidden_activation: str | None = None
    """Gemma's name of `hidden_act`."""
    query_pre_attn_scalar: float | None = None
    attn_logit_softcapping: float | msgspec.UnsetType | None = msgspec.UNSET
    qk_scale_factor: float | None = None
    output_multiplier: float | None = None
    post_norm_eps: float | None = None
    layer_rope_theta: list[float] | None = None
    """It is 0 for a layer that does not rotate."""
    final_logit_softcapping: float | msgspec.UnsetType | None = msgspec.UNSET
    use_bidirectional_attention: bool | str | None = None
    partial_rotary_factor: float | None = None
    partial_rotary_factors: list[float] | None = None
    original_max_position_embeddings: int | None = None
    sliding_window: int | msgspec.UnsetType | None = msgspec.UNSET
    use_sliding_window: bool = False
    layer_types: list[str] | None = None
    sliding_window_pattern: int | str | None = None
    """One of this many layers sees everything; or "L" and "G" in turns, EXAONE's form."""
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    rope_interleave: bool | None = None
    index_n_heads: int | None = None
    index_head_dim: int | None = None
    index_topk: int | None = None
    indexer_types: list[str] | None = None
    index_topk_pattern: str | list[str] | None = None
    """The older form of `indexer_types`, of letters."""
    index_share_for_mtp_iteration: bool = False
    """Drafts behind the first one attend to what that one has chosen."""
    index_topk_freq: int = 1
    index_skip_topk_offset: int = 2
    sparse_attention_config: SparseAttentionFields | None = None
    index_block_size: int | None = None
    """This and the next two say the same as it, in transformers' words."""
    index_topk_blocks: int | None = None
    index_local_blocks: int | None = None
    dense_intermediate_size: int | None = None
    shared_intermediate_size: int | None = None
    use_gemma_norm: bool | None = None
    use_routing_bias: bool | None = None
    qk_norm_type: str = "per_head"
    topk_method: str | None = None
    rotary_dim: int | None = None
    num_dense_layers: int | None = None
    """AFMoE's name of `first_k_dense_replace`."""
    global_attn_every_n_layers: int | None = None
    mup_enabled: bool = False
    route_scale: float | None = None
    route_norm: bool | None = None
    score_func: str | None = None
    no_rope_layers: list[int] | None = None
    """It is 0 for a layer that does not rotate."""
    no_rope_layer_interval: int = 4
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float | None = None
    logits_scaling: float = 1.0
    use_bias: bool = False
    attention_out_bias: bool = False
    dual_chunk_attention_config: dict[str, object] | None = None
    mlp_layer_types: list[str] | None = None
    moe_layer_freq: int | list[int] = 1
    """One of this many layers has experts; or 0 for a layer that has none, MiMo's form."""
    scoring_func: str | None = None
    use_qk_norm: bool | None = None
    moe_intermediate_size: int | None = None
    num_experts: int | None = None
    num_local_experts: int | None = None
    num_experts_per_tok: int | None = None
    norm_topk_prob: bool | None = None
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None
    shared_expert_intermediate_size: int | None = None
    n_routed_experts: int | None = None
    n_shared_experts: int | None = None
    num_shared_experts: int | None = None
    """The other name of `n_shared_experts`."""
    router_scaling_factor: float | None = None
    score_function: str | None = None
    moe_num_experts: int | None = None
    moe_k: int | None = None
    moe_num_shared_experts: int | None = None
    moe_layer_start_index: int = 1
    moe_layer_end_index: int = -1
    moe_layer_interval: int = 1
    routed_scaling_factor: float | None = None
    n_group: int | None = None
    topk_group: int | None = None
    first_k_dense_replace: int | None = None
    swiglu_limit: float | None = None
    """Families differ in the default."""
    swiglu_alpha: float = 1.702
    num_nextn_predict_layers: int | None = None
    num_mtp_layers: int | None = None
    """The newer name of `num_nextn_predict_layers`."""
    mtp_num_hidden_layers: int | None = None
    """Qwen3.5's name; where a config of its family has none, there is one."""
    mtp_use_dedicated_embeddings: bool = False
    qkv_bias: bool | None = None
    use_qkv_bias: bool = False
    bias: bool = False
    clip_qkv: float | None = None
    full_attention_interval: int | None = None
    attn_output_gate: bool | None = None
    swa_num_attention_heads: int | None = None
    """Fields that begin with `swa` are of layers with a window."""
    swa_num_key_value_heads: int | None = None
    swa_head_dim: int | None = None
    swa_v_head_dim: int | None = None
    swa_rope_theta: float | None = None
    sliding_window_size: int | None = None
    """MiMo's name of the tokens before itself that a token sees."""
    hybrid_layer_pattern: list[int] | None = None
    """It is 1 for a layer with a window, MiMo's form of `layer_types`."""
    attention_value_scale: float | msgspec.UnsetType | None = msgspec.UNSET
    add_swa_attention_sink_bias: bool | None = None
    add_full_attention_sink_bias: bool | None = None
    layernorm_epsilon: float | None = None
    attention_projection_layout: str | None = None
    global_head_dim: int | None = None
    """Global are layers without a window, in Gemma's words."""
    num_global_key_value_heads: int | None = None
    per_layer_config: dict[str, dict[str, object]] | None = None
    """The same as transformers writes it: changes of fields by the number of a layer."""
    attention_k_eq_v: bool = False
    num_kv_shared_layers: int | None = None
    hidden_size_per_layer_input: int | None = None
    vocab_size_per_layer_input: int | None = None
    use_double_wide_mlp: bool = False
    altup_num_inputs: int | None = None
    """This and what follows are of Gemma 3n."""
    altup_active_idx: int = 0
    altup_correct_scale: bool = True
    laurel_rank: int | None = None
    activation_sparsity_pattern: float | list[float] | None = None
    enable_moe_block: bool = False
    top_k_experts: int | None = None
    """Gemma's name of `num_experts_per_tok`."""
    num_attention_heads_per_layer: list[int] | None = None
    gating: bool | str = True
    moe_routed_scaling_factor: float | None = None
    moe_apply_router_weight_on_input: bool = False
    moe_router_logit_softcapping: float = 0.0
    linear_num_key_heads: int | None = None
    linear_num_value_heads: int | None = None
    linear_key_head_dim: int | None = None
    linear_value_head_dim: int | None = None
    linear_conv_kernel_dim: int | None = None
    linear_allow_neg_eigval: bool = True
    layer_group_size: int | None = None
    """Ling 3's name of `full_attention_interval`; so are those down to the limits."""
    short_conv_kernel_size: int | None = None
    no_kda_lora: bool = True
    kda_safe_gate: bool = True
    kda_lower_bound: float = -5.0
    linear_attention: str = "kda"
    group_norm_size: int | None = None
    """Groups of heads that Ling 2.5 norms together."""
    linear_silu: bool = False
    gated_attention_proj_granularity_type: str = "head_wise"
    expert_swiglu_limit_list: list[float | None] | None = None
    share_expert_swiglu_limit_list: list[float | None] | None = None
    quantization_config: dict[str, object] | None = None
    compression_config: dict[str, object] | None = None
    """Early compressed-tensors' name of `quantization_config`."""
    dtype: str | None = None
    torch_dtype: str | None = None
    eos_token_id: int | list[int] | None = None

    mamba_n_heads: int | None = None
    mamba_d_ssm: int | None = None
    """Falcon-H1's inner size; so are the names below of multipliers."""
    mamba_rms_norm: bool = False
    mamba_norm_before_gate: bool = True
    projectors_bias: bool = False
    lm_head_multiplier: float = 1.0
    key_multiplier: float = 1.0
    attention_in_multiplier: float = 1.0
    attention_out_multiplier: float = 1.0
    ssm_in_multiplier: float = 1.0
    ssm_out_multiplier: float = 1.0
    ssm_multipliers: list[float] | None = None
    mlp_multipliers: list[float] | None = None
    attn_layer_indices: list[int] | None = None
    """Bamba's layers with attention."""
    mamba_n_groups: int | None = None
    mamba_d_state: int | None = None
    mamba_d_head: int | str | None = None
    mamba_d_conv: int | None = None
    mamba_expand: float = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    time_step_limit: list[float | dict[str, str]] | None = None
    """transformers 5 writes an infinite number as an object."""
    hybrid_override_pattern: str | None = None
    """A letter for each layer, Nemotron's form of `layers_block_type`; so are the names below."""
    layers_block_type: list[str] | None = None
    mtp_hybrid_override_pattern: str | None = None
    mtp_layers_block_type: list[str] | None = None
    mamba_num_heads: int | None = None
    mamba_head_dim: int | None = None
    n_groups: int | None = None
    ssm_state_size: int | None = None
    conv_kernel: int | None = None
    use_conv_bias: bool = True
    layer_norm_epsilon: float | None = None
    mlp_hidden_act: str = "relu2"
    mamba_hidden_act: str = "silu"
    moe_shared_expert_intermediate_size: int | None = None
    moe_latent_size: int | None = None
    position_embedding_type: str | None = None

    conv_L_cache: int = 3
    """Inputs that a channel of LFM's is convolved over; so are the names below."""
    conv_bias: bool = False
    norm_eps: float | None = None
    full_attn_idxs: list[int] | None = None
    tie_embedding: bool | None = None
    block_ff_dim: int | None = None
    block_auto_adjust_ff_dim: bool = True
    block_ffn_dim_multiplier: float | None = 1.0
    block_multiple_of: int = 256
    use_expert_bias: bool = True
    use_sandwich_norm: bool = True
    use_attention_gate: bool = True

    num_attention_groups: int | None = None
    """Step's names: this one of `num_key_value_heads`."""
    attention_other_setting: dict[str, object] | None = None
    num_sliding_attention_heads: int | None = None
    moe_layers_enum: str | list[int] | None = None
    moe_top_k: int | None = None
    share_expert_dim: int | None = None
    share_expert_dims: int | None = None
    moe_router_activation: str | None = None
    moe_router_scaling_factor: float | None = None
    norm_expert_weight: bool | None = None
    use_moe_router_bias: bool | None = None
    use_head_wise_attn_gate: bool | None = None
    swiglu_limits: list[float | None] | None = None
    swiglu_limits_shared: list[float | None] | None = None

    compress_ratios: list[int] | None = None
    """DeepSeek-V4's names: of each layer, the tokens that a row stands for; 0 or 1: it has a window
    alone. Layers that predict ahead are behind the others."""
    compress_rates: dict[str, int] | None = None
    """The same of each of `layer_types`."""
    compress_rope_theta: float | None = None
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    num_hash_layers: int | None = None
    o_groups: int | None = None
    o_lora_rank: int | None = None
    expert_dtype: str | None = None

    @property
    def intermediate_size(self) -> int:
        """Returns the one of all layers; -1: they differ."""
        sizes = {self.units} if isinstance(self.units, int) else set(self.units)
        return sizes.pop() if len(sizes) == 1 else -1

    @property
    def rope_theta(self) -> float | None:
        return None if isinstance(self.rope_bases, list) else self.rope_bases

    @property
    def num_kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def rope(self) -> RopeFields:
        return self.rope_parameters or self.rope_scaling or RopeFields()

    @property
    def quantization(self) -> tuple[str, dict[str, object] | None]:
        """Returns what is said of quantised weights, behind the name of its field."""
        if self.quantization_config is None and self.compression_config is not None:
            return "compression_config", self.compression_config
        return "quantization_config", self.quantization_config

    def size_fault(self) -> str:
        """Returns which size no model has; empty if all are possible."""
        for name, most in MOST.items():
            size = getattr(self, name)
            if size is not None and not 0 <= size <= most:
                return f"says that {name} is {size}, and no model has more than {most}"
        are_listed = self.hybrid_override_pattern or self.layers_block_type or self.layer_types
        if not (self.num_hidden_layers or are_listed):
            return "says that num_hidden_layers is a size below 1, or it is missing"
        if not (self.max_position_embeddings or self.model_max_length):
            return "says that max_position_embeddings is a size below 1, or it is missing"
        return ""

    def base_frequency(self) -> float:
        return self.rope.rope_theta or self.rope_theta or DEFAULT_ROPE_THETA


class GenerationConfigFile(msgspec.Struct):
    eos_token_id: int | list[int] | None = None
