"""A node finds the identity of its model while its workers load it, and everybody has it before
anything compares it."""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config import CacheConfig, DraftModel, EngineConfig, SpeculativeConfig
from engine.contracts.model_identity import PENDING, identified
from engine.executor.uniproc_executor import UniprocExecutor
from engine.frontend.async_llm import AsyncLLM
from engine.models.checkpoint import load_model_config
from engine.models.errors import CheckpointError
from engine.models.identity import IdentityJob


def pending_engine(folder: Path) -> EngineConfig:
    model = load_model_config(folder, hashes_later=True)
    return EngineConfig(
        engine_id=f"identity-{secrets.token_hex(4)}",
        epoch=1,
        model=model,
        cache=CacheConfig(block_size=16, num_blocks=24),
    )


@pytest.mark.parametrize("family", ["llama", "mixtral", "deepseek_v3_yarn"])
def test_it_is_what_reading_the_configuration_finds(family: str, checkpoints: Path) -> None:
    config = pending_engine(checkpoints / family)
    assert config.model.model_hash == PENDING
    found = IdentityJob(config).result()
    assert found == load_model_config(checkpoints / family).model_hash


def test_a_drafter_of_the_same_weights_has_it_too(checkpoints: Path) -> None:
    config = pending_engine(checkpoints / "llama")
    draft = DraftModel(
        model=replace(config.model, num_layers=1, model_hash=f"mtp-{PENDING}"), vocab_size=8
    )
    config = replace(config, speculative=SpeculativeConfig(
        method="mtp", num_speculative_tokens=1, prompt_lookup_max=1, prompt_lookup_min=1,
        draft=draft,
    ))  # fmt: skip
    layout = identified(config, "abc").kv_layout
    assert (layout.model_hash, layout.draft_hash) == ("abc", "mtp-abc")


def test_a_rank_knows_it_before_its_cache_is_there(checkpoints: Path) -> None:
    executor = UniprocExecutor(pending_engine(checkpoints / "llama"))
    try:
        caches = executor.initialize(lambda *told: None)
        expected = load_model_config(checkpoints / "llama").model_hash
        assert caches.model_hash == executor._worker.config.model.model_hash == expected
        assert executor._worker._layout.model_hash == expected
    finally:
        executor.shutdown()


@pytest.mark.asyncio
async def test_a_node_server_knows_it_when_the_engine_is_ready(checkpoints: Path) -> None:
    engine = await AsyncLLM.start(pending_engine(checkpoints / "llama"))
    try:
        expected = load_model_config(checkpoints / "llama").model_hash
        assert engine.config.kv_layout.model_hash == engine.ready.model_hash == expected
    finally:
        await engine.shutdown()


def test_weights_that_are_gone_are_an_error(checkpoints: Path, tmp_path: Path) -> None:
    config = pending_engine(checkpoints / "llama")
    config = replace(config, model=replace(config.model, path=str(tmp_path)))
    with pytest.raises(CheckpointError, match="safetensors"):
        IdentityJob(config).result()
