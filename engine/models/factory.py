"""One rank's model, built from its place and its device."""

from __future__ import annotations

import logging
from typing import cast

import torch
from torch import nn

from engine.config import EngineConfig
from engine.layers.gemm_policy import GemmPolicy
from engine.layers.methods.base import LinearLayer
from engine.layers.methods.formats.weight_format import Dequantised
from engine.layers.shard import Shard
from engine.models.base import CausalLM
from engine.models.decoder.decoder import Decoder
from engine.models.quantization.fused_layers import mixed_schemes
from engine.models.registry import spec_of
from engine.models.specs.dense import DenseSpec
from engine.models.vision.tower import VisionTower
from engine.parallel.place import ParallelPlace
from engine.quantization import IntegerScheme, MixedSchemes, Quantization

logger = logging.getLogger(__name__)


def create_model(
    config: EngineConfig, place: ParallelPlace, device: torch.device | str
) -> CausalLM:
    """Returns one rank's share, allocated on `device`, not yet loaded.

    Raises:
        CheckpointError: This many ranks cannot share the model, or parts of a GEMM are quantised
            differently.
    """
    model, device = config.model, torch.device(device)
    spec = spec_of(model)
    spec.check_parallel(model, config.parallel)
    dtype = getattr(torch, model.dtype)
    gemms = GemmPolicy.choose(config.device, device, place.tp.size, dtype)
    shard = Shard(place, dtype, device, gemms, model.quantization)
    try:
        created = Decoder(config, cast(DenseSpec, spec), shard)
    except MixedSchemes as error:
        raise mixed_schemes(model.path, error) from error
    if place.tp.rank == 0:
        _tell_of_plain_inputs(model.quantization)
    if device.type == "cuda":
        _tell_of_plain_layers(created)
    return created.eval()


def create_tower(
    config: EngineConfig, place: ParallelPlace, device: torch.device | str
) -> VisionTower | None:
    """Returns the vision tower, whole, allocated on `device`, not yet loaded; None: this engine
    encodes no images."""
    if config.model.vision is None or not config.images.has_encoder:
        return None
    shard = Shard(place, getattr(torch, config.model.dtype), torch.device(device))
    return VisionTower(config.model.vision, shard).eval()


def _tell_of_plain_inputs(quantization: Quantization | None) -> None:
    """Logs of which weights the inputs stay as they are, though the publisher means otherwise."""
    told = set()
    for rule in () if quantization is None else quantization.rules:
        scheme = rule.scheme
        if not isinstance(scheme, IntegerScheme) or not scheme.activation_numbers:
            continue
        if scheme.bits == 8 and scheme.activations != "none":
            continue
        told.add((scheme.bits, scheme.activation_numbers))
    for bits, numbers in sorted(told):
        logger.info(
            "inputs are meant to be quantised to %s beside these weights of %d bits, and stay in "
            "the model's dtype here: answers are more exact, and GEMMs those of half precision",
            numbers,
            bits,
        )


def _tell_of_plain_layers(model: nn.Module) -> None:
    """Logs which quantised layers a GPU holds in plain numbers: they take more memory and time."""
    names = [
        layer.share.name
        for layer in model.modules()
        if isinstance(layer, LinearLayer) and isinstance(layer.method, Dequantised)
    ]
    if names:
        logger.warning(
            "%d quantised linear layers are dequantised as they are loaded, and take the memory of "
            "plain weights; the first is %s. docs/models.md says when",
            len(names),
            names[0],
        )
