"""One tensor-parallel rank that computes all checkpoints of a folder:

    python -m tests.engine.models.rank_process FOLDER OUT RANK SIZE RENDEZVOUS

Writes OUT/rank-RANK.safetensors with the logits that `compute_all` describes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.config import CacheConfig, Dtype, EngineConfig, ParallelConfig
from engine.models.checkpoint import load_model_config
from engine.models.factory import create_model
from engine.models.loader import load_weights
from engine.parallel.distributed import ParallelGroup
from engine.parallel.place import ParallelPlace
from tests.engine.models.paged_model import BLOCK_SIZE, PagedModel
from tests.engine.models.parity_cases import prompts

WHOLE, CHUNK = 1000, 13


def make_paged_model(
    folder: Path,
    group: ParallelGroup,
    dtype: Dtype | None = None,
    device: str = "cpu",
    adapt: Callable[[EngineConfig], EngineConfig] = lambda config: config,
) -> PagedModel:
    config = EngineConfig(
        engine_id="parity",
        epoch=1,
        model=load_model_config(folder, dtype=dtype or "auto"),
        cache=CacheConfig(block_size=BLOCK_SIZE),
        parallel=ParallelConfig(tensor_parallel_size=group.size),
    )
    config = adapt(config)
    place = ParallelPlace(range(config.model.num_layers), group)
    model = create_model(config, place, device)
    load_weights(model, config, lambda fraction: None)
    return PagedModel(config, model, device)


def compute(model: PagedModel) -> dict[str, torch.Tensor]:
    """Logits by "whole/i", "chunked/i" (prompt i) and "cached" (the last prompt behind the
    prefix that it shares with the one before)."""
    whole = model.prefill(prompts(), WHOLE)
    chunked, cached = model.prefill_sharing(prompts(), CHUNK)
    modes = {"whole": whole, "chunked": chunked}
    logits = {f"{name}/{i}": part for name, parts in modes.items() for i, part in enumerate(parts)}
    return logits | {"cached": cached}


def compute_all(folder: Path, group: ParallelGroup) -> dict[str, torch.Tensor]:
    """Calls `compute` of every family, by "family/..."."""
    return {
        f"{checkpoint.name}/{key}": logits
        for checkpoint in sorted(folder.iterdir())
        for key, logits in compute(make_paged_model(checkpoint, group)).items()
    }


def main(folder: str, out: str, rank: str, size: str, rendezvous: str) -> None:
    torch.set_num_threads(1)
    with ParallelGroup(int(rank), int(size), "cpu", rendezvous, timeout_s=60) as group:
        logits = compute_all(Path(folder), group)
    save_file(logits, Path(out) / f"rank-{rank}.safetensors")


if __name__ == "__main__":
    main(*sys.argv[1:])
