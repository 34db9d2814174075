"""A node finds the identity of its model while its workers load it, and everybody has it before
anything compares it."""

from __future__ import annotations

import secrets
import shutil
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
from torch import Tensor
from xxhash import xxh3_128_digest

from engine.config import CacheConfig, DraftModel, EngineConfig, SpeculativeConfig
from engine.contracts.model_identity import PENDING, identified
from engine.executor.uniproc_executor import UniprocExecutor
from engine.frontend.async_llm import AsyncLLM
from engine.models.checkpoint import load_model_config
from engine.models.errors import CheckpointError
from engine.models.factory import create_model
from engine.models.files import content_digests
from engine.models.files.passing_digests import PassingDigests
from engine.models.files.stored_tensors import StoredTensor
from engine.models.identity import IdentityJob, model_hash_of
from engine.models.loader import load_weights
from engine.models.weights.fill_jobs import FillJob
from tandem_kernels.checksums import xxh3
from tandem_kernels.checksums.xxh3_sizes import is_hashed_on_gpu
from tests.engine.models.digest_reads import watch_digests
from tests.engine.tiny_model import place_alone


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


@pytest.mark.parametrize(
    ("family", "again"),
    [
        ("llama", ()),
        ("deepseek_v3_yarn", ()),
        ("mixtral", ()),
        ("gpt_oss", ("_bias",)),
        ("qwen3_next", ("conv1d.weight",)),
    ],
)
def test_a_rank_alone_hashes_what_it_reads(
    family: str, again: tuple[str, ...], checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Little is read again for the identity: what is loaded in parts that are no blocks."""
    monkeypatch.setattr(content_digests, "_LEAST_SLICE", 1)
    expected = load_model_config(checkpoints / family).model_hash
    read = watch_digests(monkeypatch)
    executor = UniprocExecutor(pending_engine(checkpoints / family))
    try:
        assert executor.initialize(lambda *told: None).model_hash == expected
    finally:
        executor.shutdown()
    assert all(name.endswith(again) for name in read), read


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("family", "least"), [("llama", 0.9), ("mixtral", 0.9), ("gpt_oss", 0.1)])
def test_what_lies_on_a_gpu_is_hashed_there(
    family: str, least: float, device: str, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that read hash the rest. Without a GPU the library hashes in its place."""
    hashed: list[int] = []
    on_gpu = xxh3.xxh3_128

    def watched(parts: list[Tensor]) -> list[bytes]:
        hashed.extend(part.nbytes for part in parts)
        if device == "cuda":
            return on_gpu(parts)
        return [xxh3_128_digest(part.view(torch.uint8).numpy()) for part in parts]

    monkeypatch.setattr(xxh3, "xxh3_128", watched)
    if device == "cpu":
        on_host = property(lambda job: job.is_verbatim and is_hashed_on_gpu(job.target))
        monkeypatch.setattr(FillJob, "is_hashed_on_gpu", on_host)
    config = pending_engine(checkpoints / family)
    expected = load_model_config(checkpoints / family).model_hash
    model = create_model(config, place_alone(config.model), device)
    digests = PassingDigests()
    load_weights(model, config, lambda fraction: None, digests=digests)
    assert model_hash_of(config.model, digests.complete()) == expected
    weights = sum(part.nbytes for part in model.parameters())
    assert least * weights < sum(hashed) <= weights


@pytest.mark.parametrize(
    ("first", "stop", "is_hashed"), [(0, 256, True), (0, 240, False), (0, 252, False),
                                     (4, 260, False), (8, 264, True)]
)  # fmt: skip
def test_a_gpu_hashes_whole_words(first: int, stop: int, is_hashed: bool) -> None:
    assert is_hashed_on_gpu(torch.zeros(264, dtype=torch.uint8)[first:stop]) == is_hashed


def test_a_file_that_changes_while_it_is_loaded_is_read_again(
    checkpoints: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "changing"
    shutil.copytree(checkpoints / "llama", folder)
    config = pending_engine(folder)
    digests = PassingDigests()
    model = create_model(config, place_alone(config.model), "cpu")
    load_weights(model, config, lambda fraction: None, digests=digests)
    before = digests.complete()
    expected = load_model_config(checkpoints / "llama").model_hash
    assert model_hash_of(config.model, before) == expected
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    changed = load_model_config(folder).model_hash
    assert digests.complete() == ()
    assert model_hash_of(config.model, before) == changed != expected


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ((), [2]),
        ((0, 7), []),
        ((5,), [10]),
        ((3 << 20, 3), [8388606, 8388606, 2097156]),
        ((3, 5 << 20), [10 << 20] * 3),
        ((3, 4, 16), [384]),
        ((2, 4096, 2048), [8 << 20] * 4),
        ((2, 3000, 2048), [8 << 20, 3899392] * 2),
    ],
)
def test_blocks_are_whole_rows_and_cover_a_tensor(shape: tuple[int, ...], sizes: list[int]) -> None:
    tensor = StoredTensor("a", Path(), "BF16", shape, 100, 100 + 2 * prod(shape))
    blocks = list(content_digests.blocks_of(tensor))
    assert [stop - start for start, stop in blocks] == sizes
    ends = [100, *(stop for _, stop in blocks)]
    assert [start for start, _ in blocks] == ends[:-1] and ends[-1] == tensor.stop


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
