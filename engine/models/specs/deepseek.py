"""DeepSeek V2, V3 and R1, and what is a V3: Kimi K2 and GLM-4.7-Flash."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from engine.config import KVLayers, ModelConfig
from engine.models.config.config_file import ConfigFile
from engine.models.specs.base import UnsupportedField
from engine.models.specs.dense import DenseSpec
from engine.models.specs.experts import (
    SHARED_EXPERTS,
    ExpertSpec,
    first_layers,
    num_experts_of,
    number_of,
    sigmoid_experts,
)
from engine.models.specs.latent import LatentSpec
from engine.models.specs.rope import read_rotary, yarn_magnitude
from engine.rope import Rotary
from kv_transfer.layout import DTYPE_BYTES
from kv_transfer.planes import Plane


class DeepseekV2Spec(DenseSpec, frozen=True, kw_only=True):
    """Latent attention, and experts beside shared ones behind a few dense layers."""

    scoring: ClassVar[str] = "softmax"
    num_dense: ClassVar[int | None] = 0

    @classmethod
    def head_dim_of(cls, file: ConfigFile) -> int:
        """Returns the size of what rotates."""
        return number_of(file, "qk_rope_head_dim")

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        nope, rope = number_of(file, "qk_nope_head_dim"), number_of(file, "qk_rope_head_dim")
        scale = (nope + rope) ** -0.5
        yarn = file.rope
        if yarn.kind != "default" and yarn.mscale_all_dim and yarn.factor:
            scale *= yarn_magnitude(yarn.factor, yarn.mscale_all_dim) ** 2
        return {
            "latent": LatentSpec(
                q_rank=file.q_lora_rank or 0,
                kv_rank=number_of(file, "kv_lora_rank"),
                nope=nope,
                rope=rope,
                value=number_of(file, "v_head_dim"),
                scale=scale,
            ),
            "experts": cls.read_experts(file),
        }

    @classmethod
    def read_rotary(cls, file: ConfigFile, max_model_len: int) -> Rotary:
        interleaved = file.rope_interleave is not False
        head_dim = cls.head_dim_of(file)
        return read_rotary(file, head_dim, max_model_len, interleaved=interleaved)

    def kv_layers(self, model: ModelConfig) -> tuple[KVLayers, ...]:
        """Returns one group whose only plane every rank has whole."""
        assert self.latent is not None
        width = self.latent.kv_rank + self.latent.rope
        plane = Plane("latent", 1, width * DTYPE_BYTES[model.dtype], replicated=True)
        return (KVLayers(layers=tuple(range(model.num_layers)), planes=(plane,)),)

    @classmethod
    def read_experts(cls, file: ConfigFile) -> ExpertSpec:
        """Returns the experts. Raises `UnsupportedField`."""
        width = number_of(file, "moe_intermediate_size")
        method = file.topk_method or "greedy"
        if method not in ("greedy", "group_limited_greedy"):
            raise UnsupportedField("topk_method", repr(method))
        is_grouped = method == "group_limited_greedy"
        return ExpertSpec(
            count=num_experts_of(file),
            top_k=number_of(file, "num_experts_per_tok"),
            intermediate_size=width,
            renormalise=False,
            dense_layers=first_layers(file, cls.num_dense or 0),
            shared_size=width * (file.n_shared_experts or 0),
            scaling=1.0 if file.routed_scaling_factor is None else file.routed_scaling_factor,
            num_groups=(file.n_group or 1) if is_grouped else 1,
            top_groups=(file.topk_group or 1) if is_grouped else 1,
            names=SHARED_EXPERTS,
        )

    @classmethod
    def _faults(cls, file: ConfigFile) -> Iterator[UnsupportedField]:
        yield from super()._faults(file)
        if file.moe_layer_freq != 1:
            yield UnsupportedField("moe_layer_freq", "experts on some of the later layers alone")
        if (file.scoring_func or cls.scoring) != cls.scoring:
            yield UnsupportedField("scoring_func", repr(file.scoring_func))


class DeepseekV3Spec(DeepseekV2Spec, frozen=True, kw_only=True):
    """Experts are chosen by sigmoid scores and a bias, of the best groups."""

    scoring: ClassVar[str] = "sigmoid"
    num_dense: ClassVar[int | None] = 3
    default_scaling: ClassVar[float] = 2.5
    """The scaling of routed experts where config.json does not say."""

    @classmethod
    def read_experts(cls, file: ConfigFile) -> ExpertSpec:
        return sigmoid_experts(file, cls.num_dense or 0, cls.default_scaling)


class Glm4MoeLiteSpec(DeepseekV3Spec, frozen=True, kw_only=True):
    """A V3 with other sizes."""

    default_eps: ClassVar[float] = 1e-5
    num_dense: ClassVar[int | None] = 1
    default_scaling: ClassVar[float] = 1.8
