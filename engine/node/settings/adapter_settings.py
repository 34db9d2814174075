"""Settings of adapters (LoRA), by vLLM's names. See docs/adapters.md."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from pydantic_settings import BaseSettings

from edge.command_line import SettingsError
from engine.config import EngineConfig, ModelConfig
from engine.lora import LoRAConfig, LoRAModule, check_adapter_name
from engine.models.adapters.adapter_files import read_adapter

_MOST_READERS = min(8, os.cpu_count() or 1)
"""Threads that read and hash adapters; each holds one in memory."""


def _number(value: object) -> object:
    """Reads a number of a command line or a variable, of which a choice of numbers takes none."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


class AdapterSettings(BaseSettings):
    """Says which adapters a node serves, and how many it has room for."""

    enable_lora: bool = Field(
        default=False,
        description="Serve adapters (LoRA, as PEFT saves them) of the model: each is a model name "
        "to clients. Prefill and decode nodes must agree.",
    )
    lora_modules: tuple[str, ...] = Field(
        default=(),
        description="Adapters that are served from the start, each as NAME=FOLDER. Prefill and "
        "decode nodes need the same.",
    )
    lora_dir: Path | None = Field(
        default=None,
        description="Folder below which /v1/load_lora_adapter may find adapters while the cluster "
        "runs, under the same path on every node. Default: none can be loaded.",
    )
    max_loras: int = Field(
        default=1, ge=1, le=256, description="Most adapters in one batch: slots in device memory."
    )
    max_lora_rank: Annotated[Literal[8, 16, 32, 64, 128, 256], BeforeValidator(_number)] = Field(
        default=16, description="Largest rank of an adapter; slots have room for it."
    )
    max_cpu_loras: int | None = Field(
        default=None,
        ge=1,
        description="Most adapters in each worker's host memory; more are read from their files "
        "when they are wanted. Default: as --max-loras.",
    )

    def with_lora(self, config: EngineConfig) -> EngineConfig:
        """Returns `config` with the adapters, which are read.

        Raises:
            SettingsError: The settings contradict each other.
            AdapterError: An adapter cannot be served.
        """
        if not self.enable_lora:
            if self.lora_modules or self.lora_dir:
                name = "--lora-modules" if self.lora_modules else "--lora-dir"
                raise SettingsError(f"{name} has no effect without --enable-lora: give that, too")
            return config
        parallel = config.parallel
        if parallel.pipeline_parallel_size > 1:
            raise SettingsError(
                "--enable-lora does not work with --pipeline-parallel-size: leave it, and use "
                "--tensor-parallel-size"
            )
        most = self.max_cpu_loras or self.max_loras
        if most < self.max_loras:
            raise SettingsError(
                f"--max-cpu-loras is {most}, less than --max-loras, {self.max_loras}: slots are "
                "filled from host memory; raise it"
            )
        lora = LoRAConfig(
            max_loras=self.max_loras,
            max_lora_rank=self.max_lora_rank,
            max_cpu_loras=most,
            modules=self._modules(config.model),
            folder="" if self.lora_dir is None else str(self.lora_dir.resolve()),
        )
        return replace(config, lora=lora)

    def _modules(self, model: ModelConfig) -> tuple[LoRAModule, ...]:
        paths: dict[str, str] = {}
        for text in self.lora_modules:
            name, path = _name_and_path(text)
            if fault := check_adapter_name(name, {*model.served_names, *paths}):
                raise SettingsError(f"--lora-modules {text}: {fault}")
            paths[name] = path
        with ThreadPoolExecutor(_MOST_READERS) as readers:
            try:
                digests = list(readers.map(self._digest, paths.values()))
            finally:
                readers.shutdown(cancel_futures=True)
        return tuple(
            LoRAModule(name=name, path=str(Path(path).resolve()), digest=digest)
            for (name, path), digest in zip(paths.items(), digests, strict=True)
        )

    def _digest(self, path: str) -> str:
        return read_adapter(path, self.max_lora_rank).digest


def _name_and_path(text: str) -> tuple[str, str]:
    """Reads NAME=FOLDER, or the JSON that vLLM takes as well."""
    if text.lstrip().startswith("{"):
        try:
            given = json.loads(text)
            return str(given["name"]), str(given["path"])
        except (ValueError, KeyError, TypeError):
            raise SettingsError(f"--lora-modules {text}: needs a name and a path") from None
    name, _, path = text.partition("=")
    if not path:
        raise SettingsError(f"--lora-modules {text}: must be NAME=FOLDER")
    return name, path
