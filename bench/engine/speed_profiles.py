#!/usr/bin/env python3
"""Makes the profiles that `tandem plan` ships with from measured results of `bench.engine.speed`.

    python -m bench.engine.speed_profiles

One H200 each. What a token of context costs a decode step was not measured: it is the bytes of its
KV at the bandwidth that the GPU was measured to reach. Writes planner/profiles/NAME.json.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from bench.engine.models.shapes import SHAPES
from bench.record import RESULTS
from engine.speed.profile import DecodePoint, PrefillPoint, SpeedProfile

PROFILES = Path(__file__).resolve().parents[2] / "planner" / "profiles"
NAMES = {
    "h200-llama-3.1-8b": "llama-3.1-8b",
    "h200-qwen2.5-7b": "qwen2.5-7b",
    "h200-qwen3-30b-a3b": "qwen3-30b-a3b",
    "h200-deepseek-v2-lite": "deepseek-v2-lite",
}
_BYTES_PER_S = 4.3e12
_BLOCK = 128
_CONTEXT = 1024 + 64
_ALONE = re.compile(r"prefill (\d+) alone")
_MANY = re.compile(r"prefill (\d+) x (\d+)")
_DECODE = re.compile(r"decode (\d+)")


def kv_bytes_per_token(shape: str) -> int:
    """Returns the bytes of one token's KV in bf16."""
    config: dict[str, Any] = SHAPES[shape]
    layers = config["num_hidden_layers"]
    if "kv_lora_rank" in config:
        return 2 * layers * (config["kv_lora_rank"] + config["qk_rope_head_dim"])
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * 2 * layers * config["num_key_value_heads"] * head


def profile(name: str) -> SpeedProfile:
    shape = NAMES[name]
    result = json.loads((RESULTS / f"engine-{shape}.json").read_text())
    figures = result["figures"]
    prefill, decode = [], []
    for case in figures["cases"]:
        value = case["value"]
        if found := _ALONE.fullmatch(case["case"]):
            prefill.append(PrefillPoint(1, int(found[1]), value / 1e3))
        elif found := _MANY.fullmatch(case["case"]):
            count, length = int(found[1]), int(found[2])
            prefill.append(PrefillPoint(count, length, round(count * length / value / 1e3, 6)))
        elif found := _DECODE.fullmatch(case["case"]):
            slow = case.get("p99") or 0.0
            decode.append(DecodePoint(int(found[1]), _CONTEXT, value / 1e3, slow / 1e3))
    return SpeedProfile(
        name=name,
        model=f"{shape} (random weights of its shape, bf16)",
        gpu=result["machine"]["gpus"][0],
        date=result["date"],
        note=f"measured by tandem's authors (bench/results/engine-{shape}.json); the cost of "
        "context in a decode step is the bytes of its KV at 4.3 TB/s",
        machine=result["machine"] | {"gpus": result["machine"]["gpus"][:1]},
        versions=result["versions"],
        kv_tokens=figures["num_blocks"] * _BLOCK,
        kv_read_s=kv_bytes_per_token(shape) / _BYTES_PER_S,
        kv_bytes_per_token=kv_bytes_per_token(shape),
        prefill=tuple(prefill),
        decode=tuple(decode),
    )


def main() -> None:
    PROFILES.mkdir(exist_ok=True)
    for name in NAMES:
        profile(name).save(PROFILES / f"{name}.json")
        print(PROFILES / f"{name}.json")


if __name__ == "__main__":
    main()
