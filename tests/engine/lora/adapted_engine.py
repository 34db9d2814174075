"""Engines on the CPU with adapters, and what merged models answer to the same requests."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
from safetensors.torch import load_file

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.contracts.messages import EngineCoreRequest
from engine.contracts.request_spec import AdapterRef, RequestSpec
from engine.contracts.sampling_params import SamplingParams
from engine.lora import LoRAConfig, LoRAModule
from engine.models.adapters.adapter_files import read_adapter
from engine.models.checkpoint import load_model_config
from tests.engine.lora.adapter_checkpoints import (
    ALL,
    FUSED,
    AdapterShape,
    write_adapter,
    write_merged,
)
from tests.engine.worker.one_engine import OneEngine

MAX_LEN, MAX_RANK = 96, 16
SHAPES = (
    AdapterShape(1),
    AdapterShape(2, rank=16, alpha=8.0),
    AdapterShape(3, rank=8, config={"use_rslora": True}),
    AdapterShape(4, rank=4, targets=("q_proj", "v_proj", "down_proj", "qkv_proj")),
    AdapterShape(
        5, config={"rank_pattern": {"layers.0.mlp.down_proj": 16}, "alpha_pattern": {"o_proj": 4}}
    ),
)


@dataclass
class Adapted:
    """A model's folder with those of its adapters and of the merged models, by adapter."""

    folder: Path
    shapes: tuple[AdapterShape, ...]
    refs: list[AdapterRef] = field(default_factory=list)
    known: dict[Any, list[int]] = field(default_factory=dict)

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def path(self, index: int) -> Path:
        return self.folder / f"adapter-{index}"

    def config(self, model: Path | None = None, **changes: Any) -> EngineConfig:
        """Returns an engine's configuration, of the model itself unless another is given."""
        fields: dict[str, Any] = {
            "engine_id": "adapted",
            "epoch": 1,
            "model": load_model_config(model or self.model, max_model_len=MAX_LEN),
            "cache": CacheConfig(block_size=8, num_blocks=96),
            "scheduler": SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=48),
        }
        return EngineConfig(**{**fields, **changes})

    def lora(self, **changes: Any) -> LoRAConfig:
        modules = tuple(
            LoRAModule(name=ref.name, path=str(self.path(i)), digest=ref.digest)
            for i, ref in enumerate(self.refs)
        )
        fields: dict[str, Any] = {"max_loras": 5, "max_cpu_loras": 5, "max_lora_rank": MAX_RANK}
        return LoRAConfig(**{**fields, "modules": modules, **changes})

    def with_adapter(self, message: EngineCoreRequest, index: int | None) -> EngineCoreRequest:
        """Returns the request for an adapter; None: for the model itself."""
        ref = None if index is None else self.refs[index]
        spec = msgspec.structs.replace(message.spec, adapter=ref)
        return msgspec.structs.replace(message, spec=spec)

    def expected(self, message: EngineCoreRequest, index: int | None) -> list[int]:
        """Returns what the merged model answers, alone."""
        message = self.with_adapter(message, None)
        key = index, msgspec.msgpack.encode(message.spec)
        if key not in self.known:
            model = self.model if index is None else self.folder / f"merged-{index}"
            engine = OneEngine(self.config(model), 1)
            engine.add(message)
            engine.finish()
            self.known[key] = engine.tokens[message.request_id]
            engine.worker.shutdown()
        return self.known[key]


def adapted(folder: Path, *wanted: AdapterShape) -> Adapted:
    """Writes adapters for the model in `folder`, those of `SHAPES` unless others are wanted, and
    merged models."""
    names = load_file(folder / "model" / "model.safetensors")
    targets = FUSED if any("qkv_proj" in name for name in names) else ALL
    shapes = tuple(
        replace(shape, targets=targets if shape.targets == ALL else shape.targets)
        for shape in wanted or SHAPES
    )
    found = Adapted(folder, shapes)
    for index, shape in enumerate(shapes):
        write_adapter(found.path(index), found.model, shape)
        write_merged(folder / f"merged-{index}", found.model, shape)
        digest = read_adapter(found.path(index), MAX_RANK).digest
        found.refs.append(AdapterRef(f"adapter-{index}", digest))
    return found


def request(name: str, seed: int, **sampling: Any) -> EngineCoreRequest:
    """Makes a request; those of even seeds are greedy. All prompts begin alike."""
    prompt = [7 + i * 5 % 90 for i in range(17)] + [
        (seed * 31 + i * 7) % 90 for i in range(seed % 9)
    ]
    settings: dict[str, Any] = {
        "max_tokens": 12,
        "temperature": 0.7 * (seed % 2),
        "seed": seed,
        "ignore_eos": True,
        **sampling,
    }
    return EngineCoreRequest(
        request_id=name, spec=RequestSpec(prompt, SamplingParams(**settings)), arrival_time=seed
    )
