"""Shapes of models, and engines for them with random weights (`engine.speed.offline_engine`)."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

from engine.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    KVCacheDtype,
    ParallelConfig,
    SchedulerConfig,
)
from engine.fast_paths import FastPath
from engine.models.checkpoint import load_model_config
from engine.models.kv_scale_files import choose_kv_scales

_FILE: dict[str, dict[str, dict[str, Any]]] = json.loads(
    Path(__file__).with_name("shapes.json").read_text()
)


def _whole(name: str) -> dict[str, object]:
    """Returns a shape's config.json; one with a `base` says what is different from that."""
    own = {key: value for key, value in _FILE["shapes"][name].items() if key != "note"}
    base = own.pop("base", "")
    return (_whole(str(base)) if base else {}) | own


SHAPES = {name: _whole(name) for name in _FILE["shapes"]}
QUANTIZATIONS = _FILE["quantizations"]
"""Holds what config.json says of quantised weights; `fp8`: nothing, they are as they are loaded."""
EXPERTS: dict[str, Any] = _FILE["experts"]
"""Holds of layers on one rank: experts, those of a token, hidden size and width, and the kind of
their gate where it is not SiLU."""
TOWERS = _FILE["towers"]
"""Holds of each vision tower its architecture, the decoder behind it, and `vision_config` where it
is not as a reader completes it."""
_COMMON = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131_072,
    "torch_dtype": "bfloat16",
    "eos_token_id": 0,
}


def config_json(shape: str) -> dict[str, object]:
    """Returns the config.json of a shape."""
    return {**_COMMON, **SHAPES[shape]}


def shape_config(
    shape: str,
    *,
    device: str = "cuda",
    num_layers: int | None = None,
    max_model_len: int = 9216,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 8192,
    block_size: int = 128,
    capture_sizes: tuple[int, ...] = (),
    enforce_eager: bool = False,
    disabled_fast_paths: tuple[FastPath, ...] = (),
    deterministic: bool = False,
    tensor_parallel_size: int = 1,
    quantization: str = "",
    kv_cache_dtype: KVCacheDtype = "auto",
    **changes: object,
) -> EngineConfig:
    """Returns an engine with random weights, of `QUANTIZATIONS` or plain; the prefix cache is
    off. `num_layers`: None for all of them. `changes`: to the shape's `config.json`."""
    published = QUANTIZATIONS.get(quantization)
    changed = {**changes, "quantization_config": published} if published else changes
    if num_layers is not None:
        changed["num_hidden_layers"] = num_layers
    with tempfile.TemporaryDirectory() as folder:
        text = json.dumps(config_json(shape) | changed)
        (Path(folder) / "config.json").write_text(text)
        model = load_model_config(
            folder,
            max_model_len=max_model_len,
            load_format="dummy",
            served_model_name=shape,
            quantization="fp8" if quantization == "fp8" else None,
        )
    return EngineConfig(
        engine_id=f"bench-{random.getrandbits(32):08x}",
        epoch=1,
        model=model,
        cache=CacheConfig(
            block_size=block_size,
            enable_prefix_caching=False,
            kv_scales=choose_kv_scales(model, kv_cache_dtype),
        ),
        parallel=ParallelConfig(tensor_parallel_size=tensor_parallel_size),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            async_scheduling=device == "cuda",
        ),
        device=DeviceConfig(
            device="cuda" if device == "cuda" else "cpu",
            enforce_eager=enforce_eager,
            cudagraph_capture_sizes=capture_sizes,
            disabled_fast_paths=disabled_fast_paths,
            deterministic=deterministic,
        ),
    )
