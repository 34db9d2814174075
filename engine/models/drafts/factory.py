"""One rank's share of a drafter, built for a model and from its place."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import torch

from engine.config import EngineConfig
from engine.layers.gemm_policy import GemmPolicy
from engine.layers.shard import Shard
from engine.models.base import CausalLM
from engine.models.draft_checkpoint import EagleSpec
from engine.models.drafts.base import DraftNetwork
from engine.models.drafts.eagle import EagleHead
from engine.models.drafts.eagle3 import Eagle3Head
from engine.models.drafts.medusa import MedusaHeads
from engine.models.drafts.mtp import MtpLayer
from engine.models.drafts.second_model import SecondModel
from engine.models.errors import CheckpointError
from engine.models.factory import create_model
from engine.models.registry import spec_of
from engine.models.specs.dense import DenseSpec
from engine.models.specs.llama import LlamaSpec
from engine.parallel.place import ParallelPlace


def config_of_draft(config: EngineConfig) -> EngineConfig:
    """Returns the configuration of an engine of which the drafter is the model: its weights are
    loaded by it, and its layers number their KV groups by it."""
    draft = config.draft
    assert draft is not None
    return replace(config, model=draft.model, speculative=None, decode_query_len=1)


def create_draft(
    config: EngineConfig, place: ParallelPlace, device: torch.device, target: CausalLM
) -> DraftNetwork:
    """Returns one rank's share of the drafter of `config`, allocated on `device`, not yet loaded.

    Raises:
        CheckpointError: This many ranks cannot share it, or the cache does not take its layers.
    """
    speculative, draft = config.speculative, config.draft
    assert speculative is not None and draft is not None
    method, model = speculative.method, draft.model
    own = config_of_draft(config)
    has_own = model.kv_layers and all(kv.narrow_planes for kv in model.kv_layers)
    if draft.num_layers > 0 and config.cache.kv_scales is not None and not has_own:
        raise CheckpointError(
            model.path,
            f"{method} keeps keys and values for which an FP8 cache has no scales",
            "start without --kv-cache-dtype fp8, or draft with method ngram or medusa",
        )
    if draft.num_layers > 0 and spec_of(config.model).latent_shape != spec_of(model).latent_shape:
        raise CheckpointError(
            model.path,
            f"{method} attends to keys and values, and the model to latent vectors, or the other "
            "way round",
            "draft with method mtp, medusa or ngram",
        )
    if draft.num_layers > 0:
        spec_of(model).check_parallel(model, config.parallel)
    if method == "draft_model":
        of_model = replace(place, layers=range(model.num_layers))
        return SecondModel(create_model(own, of_model, device), target)
    dtype = getattr(torch, model.dtype)
    gemms = GemmPolicy.choose(config.device, device, place.tp.size, dtype)
    shard = Shard(place, dtype, device, gemms, model.quantization)
    if method == "medusa":
        return MedusaHeads(config, draft, shard, target).eval()
    if method == "eagle":
        return EagleHead(own, draft, msgspec.convert(model.spec, EagleSpec), shard, target).eval()
    if method == "eagle3":
        spec = msgspec.convert(model.spec, LlamaSpec)
        return Eagle3Head(own, draft, spec, shard, target).eval()
    layer = spec_of(config.model)
    assert isinstance(layer, DenseSpec)
    return MtpLayer(own, draft, layer, shard, target).eval()
