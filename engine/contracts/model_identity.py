"""The identity of a model in an engine's configuration, which is pending until the weights are read
(`engine.models.identity`)."""

from __future__ import annotations

from dataclasses import replace

from engine.config import EngineConfig, ModelConfig

PENDING = "pending"
"""Stands for a `model_hash` that nothing has found yet, in those of drafters, too."""


def identified(config: EngineConfig, found: str) -> EngineConfig:
    """Returns the engine with the identity of its model in place of one that was pending."""
    speculative, model = config.speculative, _identified(config.model, found)
    if speculative is not None and (draft := speculative.draft) is not None:
        draft = replace(draft, model=_identified(draft.model, found))
        speculative = replace(speculative, draft=draft)
    return replace(config, model=model, speculative=speculative)


def _identified(model: ModelConfig, found: str) -> ModelConfig:
    return replace(model, model_hash=model.model_hash.replace(PENDING, found))
