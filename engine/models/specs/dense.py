"""Decoders whose layers are all alike: grouped-query attention and a gated feed-forward block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

from engine.config import KVLayers, ModelConfig, ParallelConfig
from engine.models.config.config_file import DEFAULT_ROPE_THETA, ConfigFile
from engine.models.specs.ahead import AheadNames
from engine.models.specs.base import ModelSpec, UnsupportedField
from engine.models.specs.conv import ConvSpec
from engine.models.specs.experts import ExpertSpec, first_layers
from engine.models.specs.facts import rare_facts
from engine.models.specs.faults import head_faults, number_faults, rope_faults, size_faults
from engine.models.specs.kimi_delta import KimiDeltaSpec
from engine.models.specs.kv_planes import layers_alike
from engine.models.specs.latent import LatentSpec
from engine.models.specs.lightning import LightningSpec
from engine.models.specs.linear import LinearSpec
from engine.models.specs.mamba import MambaSpec
from engine.models.specs.parallel_checks import (
    check_counts,
    check_experts,
    check_kv_heads,
    check_one_stage,
    check_states,
)
from engine.models.specs.rope import read_rotary
from engine.models.specs.states import StateSpec
from engine.rope import UNROTATED, QueryScale, Rotary

HeadNorm = Literal["none", "each", "all"]
OutputGate = Literal["none", "paired", "apart", "per_head"]
GateActivation = Literal["sigmoid", "softplus"]
Activation = Literal["silu", "gelu_tanh", "relu_squared", "situ"]
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu2": "relu_squared",
    "situ": "situ",
}


@dataclass(frozen=True, slots=True)
class NormNames:
    """The checkpoint's names of a layer's norms; None: there is none in this place.

    Attributes:
        before_attention, before_mlp: Of what a block reads.
        after_attention, after_mlp: Of what a block adds to the residual stream.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


class DenseSpec(ModelSpec, frozen=True, kw_only=True):
    """The settings that dense architectures share; each states how it differs.

    Attributes:
        default_attention_bias, default_head_norm: `attention_bias` and `head_norm` where the
            family has no choice.
        fused_qkv, fused_gate_up: The checkpoint has queries, keys and values as one tensor, gate
            and up as one.
        default_head_dim: Where config.json has none; None: hidden_size / heads.
        norms: Where norms stand.
        norm_offset: Added to the weights of norms: 1 where checkpoints hold their distance from 1.
        activation: Of the gate; `relu_squared`: there is none.
        default_eps: Of norms, where config.json does not say.
        default_tied: Where config.json does not say whether embedding and head share weights.
        default_rotary_part: The part of a head that rotates where config.json does not say; None:
            always all of it.
        default_theta: The base by which heads rotate where config.json has none.
        interleaved_rotary: See `engine.rope.Rotary`.
        default_output_gate: `output_gate` where the family has no choice.
        gate_activation, gate_name: What is done to it, and its projection's name, if it has one.
        last_norm_offset: The same of the norm behind all layers; None: as all others.
        has_plain_head_norms: Norms of heads have no weights.
        norms_embedding: Embeddings are normalised, without weights.
        gate_bias: The gates of each head have a bias of one number.
        scales_unrotated: `query_scale` belongs to layers that do not rotate alone.
        scales_layers: The stream is multiplied by a number of its own behind each layer.
        value_norm: Values are divided by their root mean square, head by head.
        ahead: What layers are called that predict several tokens ahead.
        other_weights: Names of the checkpoint's tensors that are not read, such as layers that
            predict several tokens at once; those that begin with them.
        has_dense_layers: Layers may have an ordinary feed-forward block.
        num_dense: How many first layers have one by default; None: those are no first ones.
        scales_embedding: Embeddings are multiplied by the root of the hidden size.
        attention_bias: Queries, keys and values have a bias.
        output_bias: So has the projection behind attention.
        output_gate: What a head attends to is multiplied by a gate; see
            `engine.layers.linear.GateForm`.
        sink_layers: Layers whose query heads each have an attention sink; see `AttentionSpec`.
        shared_projections: Layers whose values are projected by the weights of their keys.
        projection_ranks: The number of ranks that the checkpoint's projections of attention are cut
            for; see `engine.models.weights.cut_projections`. 0: they are not cut.
        value_scale: Multiplies values.
        head_norm: RMSNorm of queries and keys before RoPE: over each head, over all heads of all
            ranks together, or none.
        num_extra_layers: Layers behind the last that a checkpoint may have, which predict several
            tokens ahead and are read to draft alone.
        sliding_window: A token sees itself and this many less one before it; None: all before it,
            or no sequence is longer than the window.
        window_layers: The layers that the window belongs to; None: all.
        window_rotary: How those rotate; None: as all others.
        unrotated_layers: Layers that do not rotate at all.
        query_scale: How scores grow with the position; None: no sequence is so long that they do.
        after_eps: Of norms of what a block adds; None: as all others.
        attention_scale: Of the scores; None: head_dim ** -0.5.
        stream_scale: Multiplies embeddings. A family that multiplies what each layer adds by a
            number has it here: the whole stream is held divided by that number, which norms undo.
        norm_factor: The stream goes on with what norms make of it, this many times; 0: with itself.
        logit_scale: Multiplies logits.
        attention_softcap, final_softcap: Bound of scores and of logits, `cap * tanh(x / cap)`; 0:
            none.
        first_sharing_layer: Layers from here on keep no keys and values, but attend to those of the
            last layer before it of their kind; None: there are none.
        wide_layers: Layers whose dense feed-forward block has twice as many units.
        layer_input_size, layer_input_vocab: Numbers of a token that each layer reads by itself, and
            the tokens that have them; see `engine.layers.streams.layer_inputs`. 0: there are none.
        experts: Those of layers with a mixture of experts; None: no layer has one.
        latent: All heads share one latent vector a token; None: heads have keys and values.
        linear, kda, mamba, conv, lightning: Some layers keep one state of all tokens instead; None:
            none does.
        unit_scales: Of what gate and up of a dense feed-forward block give; None: none.
        bare_layers: Layers without a feed-forward block.
        stored_layers: The checkpoint's numbers; see `weights.joined_layers`. Empty: ours.
    """

    default_attention_bias: ClassVar[bool] = False
    default_head_norm: ClassVar[HeadNorm] = "none"
    fused_qkv: ClassVar[bool] = False
    fused_gate_up: ClassVar[bool] = False
    mlp_module: ClassVar[str] = "mlp"
    default_head_dim: ClassVar[int | None] = None
    norms: ClassVar[NormNames] = NormNames()
    norm_offset: ClassVar[float] = 0.0
    activation: ClassVar[Activation] = "silu"
    default_eps: ClassVar[float] = 1e-6
    default_tied: ClassVar[bool] = False
    default_rotary_part: ClassVar[float | None] = None
    default_theta: ClassVar[float] = DEFAULT_ROPE_THETA
    interleaved_rotary: ClassVar[bool] = False
    scales_embedding: ClassVar[bool] = False
    default_output_gate: ClassVar[OutputGate] = "none"
    gate_activation: ClassVar[GateActivation] = "sigmoid"
    gate_name: ClassVar[str] = "gate_proj"
    last_norm_offset: ClassVar[float | None] = None
    has_plain_head_norms: ClassVar[bool] = False
    norms_embedding: ClassVar[bool] = False
    gate_bias: ClassVar[bool] = False
    scales_unrotated: ClassVar[bool] = False
    scales_layers: ClassVar[bool] = False
    value_norm: ClassVar[bool] = False
    ahead: ClassVar[AheadNames] = AheadNames()
    other_weights: ClassVar[tuple[str, ...]] = ()
    has_dense_layers: ClassVar[bool] = True
    num_dense: ClassVar[int | None] = None

    hidden_size: int
    intermediate_size: int
    rms_norm_eps: float
    rotary: Rotary
    tie_word_embeddings: bool
    attention_bias: bool = False
    output_bias: bool = False
    output_gate: OutputGate = "none"
    sink_layers: tuple[int, ...] = ()
    shared_projections: tuple[int, ...] = ()
    projection_ranks: int = 0
    value_scale: float = 1.0
    head_norm: HeadNorm = "none"
    num_extra_layers: int = 0
    sliding_window: int | None = None
    window_layers: tuple[int, ...] | None = None
    window_rotary: Rotary | None = None
    unrotated_layers: tuple[int, ...] = ()
    query_scale: QueryScale | None = None
    stream_scale: float = 1.0
    norm_factor: float = 0.0
    logit_scale: float = 1.0
    after_eps: float | None = None
    attention_scale: float | None = None
    attention_softcap: float = 0.0
    final_softcap: float = 0.0
    first_sharing_layer: int | None = None
    wide_layers: tuple[int, ...] = ()
    layer_input_size: int = 0
    layer_input_vocab: int = 0
    experts: ExpertSpec | None = None
    latent: LatentSpec | None = None
    linear: LinearSpec | None = None
    kda: KimiDeltaSpec | None = None
    mamba: MambaSpec | None = None
    conv: ConvSpec | None = None
    lightning: LightningSpec | None = None
    unit_scales: tuple[float, float] | None = None
    bare_layers: tuple[int, ...] = ()
    stored_layers: tuple[int, ...] = ()

    @classmethod
    def from_config(cls, file: ConfigFile, max_model_len: int) -> Self:
        for fault in (*cls._faults(file), *head_faults(cls.read_heads(file))):
            raise fault
        window = cls.read_window(file)
        tied = file.tie_word_embeddings
        common: dict[str, Any] = {
            "hidden_size": file.hidden_size,
            "intermediate_size": file.intermediate_size,
            "rms_norm_eps": cls.eps_of(file),
            "rotary": cls.read_rotary(file, max_model_len),
            "tie_word_embeddings": cls.default_tied if tied is None else tied,
            "attention_bias": cls.default_attention_bias,
            "head_norm": cls.default_head_norm,
            "output_gate": cls.default_output_gate,
            "num_extra_layers": file.num_nextn_predict_layers or file.num_mtp_layers or 0,
            "sliding_window": None if window is None or window >= max_model_len else window,
        }
        return cls(**{**common, **cls.read_more(file, max_model_len)})

    @classmethod
    def may_have_dense_layers(cls, file: ConfigFile) -> bool:
        """Returns whether config.json leaves a layer with an ordinary feed-forward block."""
        return (
            cls.has_dense_layers
            if cls.num_dense is None
            else bool(first_layers(file, cls.num_dense))
        )

    @classmethod
    def head_dim_of(cls, file: ConfigFile) -> int:
        computed = file.hidden_size // file.num_attention_heads
        return file.head_dim or cls.default_head_dim or computed

    @classmethod
    def eps_of(cls, file: ConfigFile) -> float:
        return cls.default_eps if file.rms_norm_eps is None else file.rms_norm_eps

    @classmethod
    def read_rotary(cls, file: ConfigFile, max_model_len: int) -> Rotary:
        """Returns how all layers rotate. Raises `UnsupportedField`."""
        return read_rotary(
            file,
            cls.head_dim_of(file),
            max_model_len,
            theta=file.rope_theta or cls.default_theta,
            partial=cls.default_rotary_part or 1.0,
            interleaved=cls.interleaved_rotary,
        )

    @classmethod
    def read_window(cls, file: ConfigFile) -> int | None:
        """Returns the sliding window of all layers. Raises `UnsupportedField` for a window of some
        layers, or where the family has none."""
        if file.use_sliding_window or set(file.layer_types or ()) - {"full_attention"}:
            raise UnsupportedField("use_sliding_window", "attention over a sliding window")
        return None

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        """Returns the fields that only some families set. Raises `UnsupportedField`."""
        return {}

    def rotary_of(self, layer: int) -> Rotary:
        """Returns how one layer rotates."""
        if layer in self.unrotated_layers:
            return UNROTATED
        is_local = self.window_layers is not None and layer in self.window_layers
        return self.window_rotary if is_local and self.window_rotary is not None else self.rotary

    def kv_source(self, layer: int) -> int:
        """Returns the layer whose keys and values one attends to: mostly itself."""
        first = self.first_sharing_layer
        if first is None or layer < first:
            return layer
        local = set(self.window_layers or ())
        return max(one for one in range(first) if (one in local) == (layer in local))

    def norms_of(self, layer: int) -> NormNames:
        """Returns where norms stand in one layer: mostly as in all."""
        return self.norms

    @property
    def offset_of_last_norm(self) -> float:
        """Returns what is added to the weights of the norm behind all layers."""
        return self.norm_offset if self.last_norm_offset is None else self.last_norm_offset

    def units_of(self, layer: int) -> int:
        """Returns the units of a layer's dense feed-forward block."""
        return self.intermediate_size * (2 if layer in self.wide_layers else 1)

    @property
    def states(self) -> StateSpec | None:
        """Returns the layers that keep a state; None: there are none."""
        return self.linear or self.kda or self.mamba or self.conv or self.lightning

    def kv_layers(self, model: ModelConfig) -> tuple[KVLayers, ...]:
        if self.states is not None:
            seen = self.sliding_window
            return self.states.kv_layers(model, (seen and self.window_layers) or (), seen)
        if self.sliding_window is None and not model.layer_heads:
            return ()
        every = range(self.first_sharing_layer or model.num_layers)
        windows = self.window_layers or every
        local = () if self.sliding_window is None else [one for one in windows if one in every]
        return layers_alike(model, every, local, self.sliding_window)

    def kv_layers_ahead(self, model: ModelConfig) -> tuple[KVLayers, ...]:
        """Returns the same of layers that predict ahead, which `model` has in place of its own."""
        if self.states is not None:
            return (replace(model.kv_layers[0], layers=tuple(range(model.num_layers))),)
        return self.kv_layers(model)

    @property
    def rare_attention(self) -> str:
        if self.latent is not None:
            return "latent attention"
        if self.first_sharing_layer is not None:
            return "layers that attend to keys of another layer"
        return "a soft bound of scores" if self.attention_softcap else ""

    @property
    def reads_across_layers(self) -> bool:
        """Returns whether a layer needs more than what the one before it gives."""
        return self.first_sharing_layer is not None or self.layer_input_size > 0

    @property
    def latent_shape(self) -> LatentSpec | None:
        return self.latent

    @property
    def has_sinks(self) -> bool:
        return bool(self.sink_layers)

    @property
    def num_experts(self) -> int:
        return 0 if self.experts is None else self.experts.count

    @property
    def num_experts_per_token(self) -> int:
        return 0 if self.experts is None else self.experts.top_k

    def check_parallel(self, model: ModelConfig, parallel: ParallelConfig) -> None:
        experts, spreads_experts = self.experts, parallel.enable_expert_parallel
        check_experts(model, parallel, self.num_experts)
        if self.reads_across_layers:
            what = "layers that attend to keys of others, or that read embeddings of their own"
            check_one_stage(model, parallel, what)
        has_dense = experts is None or experts.stands_beside_dense or len(experts.dense_layers) > 0
        units = 0 if experts is None or spreads_experts else experts.intermediate_size
        counts = (
            *((heads.num_heads, "attention heads") for heads in model.kinds_of_heads),
            (self.intermediate_size if has_dense else 0, "feed-forward units"),
            (units, "units in each expert"),
            (0 if experts is None else experts.shared_size, "units in the shared expert"),
        )
        check_counts(model, parallel, counts)
        if self.latent is None:
            check_kv_heads(model, parallel)
        check_states(model, parallel, self.states)

    def hash_facts(self, model: ModelConfig) -> tuple[Any, ...]:
        return (
            model.architecture,
            self.hidden_size,
            self.intermediate_size,
            model.num_layers,
            model.num_heads,
            model.num_kv_heads,
            model.head_dim,
            model.vocab_size,
            self.rms_norm_eps,
            self.rotary.theta,
            self.rotary.scaling,
            *(() if self.sliding_window is None else (self.sliding_window,)),
            *self._rare_facts(model),
        )

    def _rare_facts(self, model: ModelConfig) -> tuple[Any, ...]:
        """Returns what differs from its default."""
        return rare_facts(self, self.rotary, model)

    @classmethod
    def _faults(cls, file: ConfigFile) -> Iterator[UnsupportedField]:
        """Yields what config.json asks for and this family does not have."""
        yield from size_faults(file, cls.may_have_dense_layers(file))
        yield from number_faults(file)
        if isinstance(file.rope_bases, list):
            yield UnsupportedField("rope_theta", "a number for each layer")
        activation = file.hidden_activation or file.hidden_act
        if ACTIVATIONS.get(activation) != cls.activation:
            yield UnsupportedField("hidden_act", repr(activation))
        for name, is_set in (
            ("attention_bias", bool(file.attention_bias) > cls.default_attention_bias),
            ("mlp_bias", file.mlp_bias),
        ):
            if is_set:
                yield UnsupportedField(name, "biases beyond those of its family")
        yield from rope_faults(file)
        if file.dual_chunk_attention_config is not None:
            yield UnsupportedField("dual_chunk_attention_config", "attention within chunks")
        part = file.partial_rotary_factor or file.rope.partial_rotary_factor or 1.0
        if cls.default_rotary_part is None and part != 1.0:
            yield UnsupportedField(
                "partial_rotary_factor", "rotary embedding of a part of each head"
            )
