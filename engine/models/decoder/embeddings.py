"""Makes what a decoder reads of tokens: the stream's first rows, and inputs of single layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.layers.shard import Shard
from engine.layers.streams.layer_inputs import LayerInput, LayerInputs
from engine.models.specs.dense import DenseSpec
from tandem_kernels import ops


def scaled(embedded: Tensor, spec: DenseSpec) -> Tensor:
    """Returns rows of the embedding, [T, H], as the stream begins with them."""
    if spec.norms_embedding:
        embedded = ops.rms_norm(embedded, embedded.new_ones(spec.hidden_size), spec.rms_norm_eps)
    if spec.scales_embedding:
        embedded = embedded * torch.tensor(spec.hidden_size**0.5, dtype=embedded.dtype)
    return embedded if spec.stream_scale == 1.0 else embedded * spec.stream_scale


def layer_inputs(model: ModelConfig, spec: DenseSpec, shard: Shard) -> LayerInputs | None:
    """Returns what makes the inputs of single layers, not yet loaded; None: they have none."""
    if spec.layer_input_size == 0:
        return None
    sizes = model.num_layers, spec.layer_input_size, spec.hidden_size
    own = spec.rms_norm_eps, shard.at("model")
    is_short = spec.layer_input_vocab < model.vocab_size
    return LayerInputs(spec.layer_input_vocab, *sizes, *own, is_short=is_short)


def layer_input(spec: DenseSpec, shard: Shard) -> LayerInput | None:
    """Returns what reads a layer's own input, not yet loaded; None: it has none."""
    if spec.layer_input_size == 0:
        return None
    return LayerInput(spec.layer_input_size, spec.hidden_size, spec.rms_norm_eps, shard)


def inputs_by_layer(
    inputs: LayerInputs | None, input_ids: Tensor, embedded: Tensor, num_layers: int
) -> Sequence[Tensor | None]:
    """Returns each layer's own input, [T, P]; None: it has none."""
    if inputs is None:
        return (None,) * num_layers
    found: Tensor = inputs(input_ids, embedded)
    return found.unbind(1)
