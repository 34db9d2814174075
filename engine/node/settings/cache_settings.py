"""Settings of the KV cache of either kind of node."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic_settings import BaseSettings

from engine.config import KVCacheDtype


def _without_e5m2(name: object) -> object:
    if name == "fp8_e5m2":
        raise ValueError(
            "fp8_e5m2 keeps two bits of each number, which is too few for keys; choose fp8, which "
            "is e4m3"
        )
    return name


class CacheSettings(BaseSettings):
    """See docs/operations.md."""

    block_size: int = Field(
        default=16,
        ge=1,
        le=1024,
        description="Tokens in one KV block. Prefill and decode nodes may differ.",
    )
    enable_prefix_caching: bool = Field(
        default=True, description="Keep KV of finished requests for prompts that begin the same."
    )
    num_blocks: int | None = Field(
        default=None, ge=1, description="KV blocks. Default: as many as fit into memory."
    )
    kv_cache_memory_bytes: int | None = Field(
        default=None, ge=1, description="Memory of each worker's KV cache. Default: measured."
    )
    gpu_memory_utilization: float = Field(
        default=0.9, gt=0, le=1, description="Share of the GPU's memory that a worker may use."
    )
    kv_cache_dtype: Annotated[KVCacheDtype, BeforeValidator(_without_e5m2)] = Field(
        default="auto",
        description="Type of keys and values in the cache and on the wire. fp8 or fp8_e4m3: one "
        "byte each, for twice the tokens in the same memory; bfloat16: unquantised; auto: fp8 "
        "where the checkpoint asks for it, else --dtype. Prefill and decode nodes must agree.",
    )
    kv_cache_scales: Path | None = Field(
        default=None,
        description="File with scales of an FP8 cache, written by `tandem calibrate-kv`. Default: "
        "those of the checkpoint, else 1.0. Prefill and decode nodes must agree.",
    )
