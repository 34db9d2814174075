"""Describes a mixture of experts, apart from the rest of its model."""

from __future__ import annotations

import msgspec

from engine.models.config.config_file import ConfigFile
from engine.models.specs.base import UnsupportedField, of_each_layer


class ExpertNames(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """The checkpoint's names inside a layer.

    Attributes:
        block: Of the whole block.
        router, choice_bias, router_bias: Of the router's weight, of the bias it chooses by, and of
            the bias of its logits.
        table: Of the experts of each token.
        gate, up, down: Of an expert's projections, unless they are stacked; gate "": there is none.
        to_latent, from_latent: Of projections around routed experts, where they read latents.
        latent_norm: Of the norm of their sum; "": there is none.
        shared: Of the expert that every token goes to.
        router_norm, expert_scales: Of the weight of a norm of what the router reads, and of numbers
            by which experts' weights are multiplied; "": there are none.
        input_norm, dense_norm, sparse_norm: Of the layer's norms of what experts read, of what a
            dense block beside them gives, and of what they give; "": there is no such block.
    """

    block: str = "mlp"
    router: str = "gate.weight"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    to_latent: str = ""
    from_latent: str = ""
    latent_norm: str = ""
    shared: str = "shared_expert"
    choice_bias: str = "gate.e_score_correction_bias"
    router_bias: str = "gate.bias"
    table: str = "gate.tid2eid"
    router_norm: str = ""
    expert_scales: str = ""
    input_norm: str = ""
    dense_norm: str = ""
    sparse_norm: str = ""


SHARED_EXPERTS = ExpertNames(shared="shared_experts")


class ExpertSpec(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """The experts of a model. Nodes compare its repr, which a new field must not change.

    Attributes:
        count: Experts of a layer.
        top_k: Experts that a token goes to.
        intermediate_size: Units of one expert.
        renormalise: The weights of the chosen ones are divided by their sum.
        dense_layers: Layers that have an ordinary feed-forward block instead.
        shared_size: Units of the expert that every token goes to; 0: there is none.
        shared_gate: Its output is weighted by the token.
        sigmoid: Scores are sigmoids of the router's logits, not their softmax.
        choice_bias: Experts are chosen by their score plus a bias of their own.
        scaling: Multiplies the weights of the routed experts.
        num_groups, top_groups: Only experts of the best `top_groups` of `num_groups` groups are
            chosen.
        router_bias: The router's logits have a bias.
        biases: The projections of experts have one each.
        stacked: The checkpoint has the tensors of all experts of a layer in one; see
            `engine.layers.expert_methods.stacked`.
        gate_limit, gate_alpha: See `tandem_kernels.elementwise.gate_form.GateForm`; limit 0:
            SiLU.
        clamps_dense: So are the gates of shared experts, and of dense blocks.
        gelu: The activation is GELU by its tanh formula, not SiLU.
        limits: Of the activations of routed experts, a number a layer; see `GateForm`'s "limited".
            0: there is none. Empty: no layer has one.
        dense_limits: The same of shared experts, and of dense blocks.
        squared: There is no gate: the activation is relu(up) ** 2, of shared experts as well.
        root_softplus: Scores are roots of the softplus of the logits.
        hashed_layers: In these, experts follow from the id of a token alone, of which there are
            `hashed_tokens`, by a table that the checkpoint has.
        caps: Limit of the activations of all experts, as `GateForm`'s "capped"; 0: there is none.
        soft_bounds: Of gates and of what they let through, of all experts and dense blocks, as
            `GateForm`'s "situ" has them; None: the activation is another one.
        latent_size: Numbers of a token that routed experts read and give; 0: as the model has.
    """

    count: int
    top_k: int
    intermediate_size: int
    renormalise: bool
    dense_layers: tuple[int, ...] = ()
    shared_size: int = 0
    shared_gate: bool = False
    sigmoid: bool = False
    choice_bias: bool = False
    scaling: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    router_bias: bool = False
    biases: bool = False
    stacked: bool = False
    gate_limit: float = 0.0
    gate_alpha: float = 0.0
    clamps_dense: bool = False
    gelu: bool = False
    limits: tuple[float, ...] = ()
    dense_limits: tuple[float, ...] = ()
    squared: bool = False
    latent_size: int = 0
    root_softplus: bool = False
    hashed_layers: tuple[int, ...] = ()
    hashed_tokens: int = 0
    caps: float = 0.0
    soft_bounds: tuple[float, float] | None = None
    names: ExpertNames = ExpertNames()

    def limit_of(self, layer: int) -> float:
        return self.limits[layer] if layer < len(self.limits) else 0.0

    def dense_limit_of(self, layer: int) -> float:
        return self.dense_limits[layer] if layer < len(self.dense_limits) else 0.0

    @property
    def stands_beside_dense(self) -> bool:
        """Returns whether layers with experts have an ordinary feed-forward block as well."""
        return bool(self.names.dense_norm)


def number_of(file: ConfigFile, name: str) -> int:
    """Returns a field that a mixture of experts must have. Raises `UnsupportedField`."""
    value: int | None = getattr(file, name)
    if value is None or value < 1:
        raise UnsupportedField(name, "a mixture of experts without it")
    return value


def num_experts_of(file: ConfigFile) -> int:
    """Returns the number of experts; releases of transformers differ in the name. Raises
    `UnsupportedField`, also for groups that they cannot be in."""
    count = file.num_experts or file.num_local_experts or file.n_routed_experts
    top_k = number_of(file, "num_experts_per_tok")
    if count is None or count < top_k:
        raise UnsupportedField("num_experts", f"{count} experts")
    groups, best = file.n_group or 1, file.topk_group or 1
    if groups < 1 or count % groups:
        raise UnsupportedField("n_group", f"{groups} groups of {count} experts")
    if groups > 1 and not 1 <= best <= groups:
        raise UnsupportedField("topk_group", f"the best {best} of {groups} groups")
    if groups > 1 and best * (count // groups) < top_k:
        held = best * (count // groups)
        raise UnsupportedField("topk_group", f"{top_k} of the {held} experts of the best groups")
    return count


def gate_limit_of(file: ConfigFile) -> float:
    """Returns the limit of gates that are clamped, as gpt-oss has it."""
    return 7.0 if file.swiglu_limit is None else file.swiglu_limit


def sigmoid_experts(
    file: ConfigFile,
    num_dense: int,
    scaling: float = 1.0,
    *,
    num_shared: int = 0,
    renormalises: bool | None = None,
) -> ExpertSpec:
    """Returns the experts of DeepSeek V3 and of what follows it: chosen by sigmoid scores and a
    bias, out of the best groups, beside shared ones and behind a few dense layers.

    Args:
        num_dense: The number of those where config.json does not say.
        scaling: Of the routed experts' weights, where config.json does not say.
        num_shared: The number of shared ones where config.json does not say.
        renormalises: Whether their weights are divided by their sum; None: unless config.json
            denies it.

    Raises:
        UnsupportedField: A number is missing.
    """
    width, said = number_of(file, "moe_intermediate_size"), file.routed_scaling_factor
    return ExpertSpec(
        count=num_experts_of(file),
        top_k=number_of(file, "num_experts_per_tok"),
        intermediate_size=width,
        renormalise=file.norm_topk_prob is not False if renormalises is None else renormalises,
        dense_layers=first_layers(file, num_dense),
        shared_size=width * _num_shared_of(file, num_shared),
        sigmoid=True,
        choice_bias=True,
        scaling=scaling if said is None else said,
        num_groups=file.n_group or 1,
        top_groups=file.topk_group or 1,
        names=SHARED_EXPERTS,
    )


def _num_shared_of(file: ConfigFile, default: int) -> int:
    """Returns the number of shared experts, by either name."""
    said = file.num_shared_experts if file.n_shared_experts is None else file.n_shared_experts
    return default if said is None else said


def first_layers(file: ConfigFile, default: int) -> tuple[int, ...]:
    """Returns the layers without experts: those that config.json names, or the first ones, of which
    there are `default` where it does not say."""
    if (kinds := of_each_layer(file, "mlp_layer_types")) is not None:
        return tuple(i for i, kind in enumerate(kinds) if kind == "dense")
    said = file.first_k_dense_replace
    return tuple(range(min(default if said is None else said, file.num_hidden_layers)))
