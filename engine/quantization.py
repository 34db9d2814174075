"""Says how the weights of a checkpoint are quantised: the scheme of each layer, by its name.

Torch-free; part of `ModelConfig`. `engine.models.quantization` reads it from a checkpoint's files,
layers ask for their scheme by name, and `engine.layers.methods.registry` says who computes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import ClassVar, Literal

import msgspec

Fp8Scales = Literal["block", "channel", "tensor"]
Activations = Literal["none", "dynamic", "static"]
IntegerLayout = Literal[
    "awq", "gptq", "compressed-tensors", "int-quantized", "modelopt", "quark", "quark-signed"
]


class Fp8Scheme(msgspec.Struct, frozen=True, kw_only=True, tag="fp8"):
    """Numbers in float8 e4m3: a weight is its number times the scale that it shares.

    Attributes:
        scales: What shares a scale: a block, an output (channel), the whole tensor.
        block: Outputs and inputs of a block; other than blocks: (0, 0).
        activations: How a GEMM's inputs are quantised: not at all, by the largest number of each
            token (and each block's inputs), or by a scale that the checkpoint has (`input_scale`).
        scale_name: The scales' suffix in the checkpoint.
        online: The checkpoint has plain weights, which are quantised as they are loaded.
    """

    scales: Fp8Scales
    block: tuple[int, int] = (0, 0)
    activations: Activations = "dynamic"
    scale_name: str = "weight_scale"
    online: bool = False


class IntegerScheme(msgspec.Struct, frozen=True, kw_only=True):
    """Integers; those of `group_size` inputs of an output share a scale.

    Attributes:
        layout: Whose names and order of bits.
        group_size: -1: all inputs of an output; 0: all of the tensor.
        symmetric: There are no zero points.
        ordered_by_activation: Inputs are in groups of any order, which the checkpoint lists
            (`g_idx`).
        zeros_are_less_by: What is stored of a zero point is this much less, modulo 2^bits.
        activations: How the publisher means a GEMM's inputs to be quantised; see `Fp8Scheme`.
        activation_numbers: In which numbers; empty: in none.
        smoothed: Inputs are multiplied by numbers of their own first, where a layer has them
            (`pre_quant_scale`).
    """

    bits: ClassVar[int]

    layout: IntegerLayout
    group_size: int
    symmetric: bool
    ordered_by_activation: bool = False
    zeros_are_less_by: int = 0
    activations: Activations = "none"
    activation_numbers: str = ""
    smoothed: bool = False


class Int4Scheme(IntegerScheme, frozen=True, kw_only=True, tag="int4"):
    """Integers have 4 bits. Inputs stay in the model's dtype, whatever the publisher means."""

    bits: ClassVar[int] = 4


class Int8Scheme(IntegerScheme, frozen=True, kw_only=True, tag="int8"):
    """Integers have 8 bits. Inputs are quantised to int8 where the publisher means that, by the
    largest number of each token; asymmetrically quantised ones stay in the model's dtype."""

    bits: ClassVar[int] = 8


class Mxfp4Scheme(msgspec.Struct, frozen=True, tag="mxfp4"):
    """Numbers in float4 e2m1; 32 inputs of an output share an exponent of 8 bits.

    Attributes:
        layout: Whose names; gpt-oss has the tensors of all experts in one.
    """

    layout: Literal["gpt-oss", "compressed-tensors", "modelopt", "deepseek"] = "gpt-oss"


class Nvfp4Scheme(msgspec.Struct, frozen=True, kw_only=True, tag="nvfp4"):
    """Numbers in float4 e2m1; some inputs of an output share a scale in float8 e4m3, all weights a
    factor in float32. Inputs stay in the model's dtype, whatever the publisher means.

    Attributes:
        layout: Whose names. ModelOpt's weights are multiplied by the factor, those of
            compressed-tensors divided.
        group_size: Inputs that share a scale, a multiple of 16.
        smoothed: Inputs are multiplied by numbers of their own first, where a layer has them
            (`pre_quant_scale`).
    """

    layout: Literal["compressed-tensors", "modelopt"]
    group_size: int = 16
    smoothed: bool = False


class Mxfp8Scheme(msgspec.Struct, frozen=True, tag="mxfp8"):
    """Numbers in float8 e4m3; 32 inputs of an output share an exponent of 8 bits. Inputs stay in
    the model's dtype.

    Attributes:
        scale_name: The exponents' suffix in the checkpoint.
    """

    scale_name: str = "weight_scale"


Integers = Int4Scheme | Int8Scheme
Scheme = Fp8Scheme | Integers | Mxfp4Scheme | Nvfp4Scheme | Mxfp8Scheme


class SchemeRule(msgspec.Struct, frozen=True):
    """Layers that have one scheme; `targets` as in `Quantization`, "Linear" stands for all."""

    targets: tuple[str, ...]
    scheme: Scheme


class MixedSchemes(ValueError):
    """Layers that are computed together have different schemes.

    Attributes:
        names: Of the layers.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__(f"{', '.join(names)} are one GEMM here, but quantised differently")
        self.names = names


class Quantization(msgspec.Struct, frozen=True, kw_only=True):
    """The schemes of a checkpoint.

    A pattern is a layer's name or any run of its components ("self_attn", "layers.3.mlp"), or a
    regular expression behind "re:", matched from the name's beginning. Where a name's last
    component is a part of a fused one ("q_proj" of "qkv_proj"), patterns of that match, too.

    Attributes:
        method: As config.json calls it, like "compressed-tensors".
        rules: The first one that matches says the scheme.
        ignored: Patterns of layers that are not quantised.
        ignored_parts: Parts of names, cut anywhere but inside of a number. A layer whose full names
            all contain one is not quantised either.
        kv_cache: What the checkpoint recommends for the KV cache; None: nothing.
        written_names, stored_layers: How the checkpoint names our layers, whom patterns then match
            by either name: see `ModelSpec.written_names` and `engine.models.weights.joined_layers`.
    """

    method: str
    rules: tuple[SchemeRule, ...]
    ignored: tuple[str, ...] = ()
    ignored_parts: tuple[str, ...] = ()
    kv_cache: Literal["fp8"] | None = None
    written_names: tuple[tuple[str, str], ...] = ()
    stored_layers: tuple[int, ...] = ()

    def __repr__(self) -> str:
        """Returns what nodes compare: not how names are written."""
        fields = "method", "rules", "ignored", "ignored_parts", "kv_cache"
        return f"Quantization({', '.join(f'{name}={getattr(self, name)!r}' for name in fields)})"

    def scheme_of(self, *names: str) -> Scheme | None:
        """Returns the scheme that layers of these full names share; None: not quantised.

        Raises:
            MixedSchemes: They share none.
        """
        if all(any(self._contains(name, part) for part in self.ignored_parts) for name in names):
            return None
        found = {self._scheme_of(name) for name in names}
        if len(found) > 1:
            raise MixedSchemes(names)
        return next(iter(found), None)

    def _scheme_of(self, name: str) -> Scheme | None:
        if any(self._matches(pattern, name) for pattern in self.ignored):
            return None
        for rule in self.rules:
            if any(target == "Linear" or self._matches(target, name) for target in rule.targets):
                return rule.scheme
        return None

    def _matches(self, pattern: str, name: str) -> bool:
        return any(matches(pattern, known) for known in self._known_as(name))

    def _contains(self, name: str, part: str) -> bool:
        return any(_contains(known, part) for known in self._known_as(name))

    def _known_as(self, name: str) -> Iterator[str]:
        """Yields our name of a layer, and what the checkpoint may call it."""
        yield name
        found = _LAYER.match(name)
        if self.stored_layers and found is not None:
            # A feed-forward block is a layer of its own there, the one behind.
            number = self.stored_layers[int(found[1])] + (found[2] == "mlp")
            name = f"model.layers.{number}{name[found.end(1) :]}"
        for expression, written in self.written_names:
            name = _compiled(expression).sub(written, name)
            yield name


_LAYER = re.compile(r"model\.layers\.(\d+)\.(\w+)")
_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


def matches(pattern: str, name: str) -> bool:
    """Returns whether a layer's full name matches a pattern of `Quantization`."""
    if _matches_one(pattern, name):
        return True
    parent, _, last = name.rpartition(".")
    return last in _FUSED and _matches_one(pattern, f"{parent}.{_FUSED[last]}")


def _matches_one(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return _compiled(pattern[3:]).match(name) is not None
    return f".{pattern.strip('.')}." in f".{name}."


def _contains(name: str, part: str) -> bool:
    start, end = r"(?<!\d)" * part[:1].isdigit(), r"(?!\d)" * part[-1:].isdigit()
    return _compiled(f"{start}{re.escape(part)}{end}").search(name) is not None


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)
