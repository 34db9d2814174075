#!/usr/bin/env python3
"""Measures what images cost one engine: the encoder alone, the first token behind an image, and the
steps of requests that decode behind images.

Encoder: tokens per second of the vision tower, of images of three sizes. First token: one prompt
with an image of 1024 x 1024 (1369 tokens) and 32 tokens of text, nothing cached, beside a prompt of
as much text. Decode: time between tokens while all requests of a batch decode, behind prompts with
an image and behind prompts of as much text.

    python -m bench.engine.images                    # Qwen2.5-VL 7B's shape on one GPU
    python -m bench.engine.images --device cpu       # a tiny model

Goal: the 99th percentile of decode is that of text. Results: bench/results/images.json.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from bench.record import write_result
from engine.config import CacheConfig, DeviceConfig, EngineConfig, SchedulerConfig
from engine.contracts.messages import EngineCoreOutput, EngineCoreRequest
from engine.contracts.request_spec import RequestSpec
from engine.executor.uniproc_executor import UniprocExecutor
from engine.images.image_config import ImageConfig
from engine.images.image_input import ImagePixels, ImageSpan
from engine.models.checkpoint import load_model_config
from engine.models.factory import create_tower
from engine.models.loader import load_weights
from engine.parallel.place import ParallelPlace
from engine.speed.offline_engine import OfflineEngine, offline_engine

_TOWER = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16}
_7B = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "vocab_size": 152_064,
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "rope_theta": 1_000_000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vision_config": _TOWER,
    "image_token_id": 151_655,
}
_TINY = {
    **_7B,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "vision_config": {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2,
                      "fullatt_block_indexes": [1]},
    "image_token_id": 500,
}  # fmt: skip
_TEXT_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Plan:
    """Says what is measured on a device. Sizes are tokens of an image's side."""

    shape: dict[str, object]
    sizes: tuple[int, ...]
    first_token_size: int
    num_first_tokens: int
    decode_size: int
    num_rows: int
    num_tokens: int


PLANS = {
    "cuda": Plan(_7B, (16, 37, 64), 37, 12, 16, 64, 256),
    "cpu": Plan(_TINY, (2, 6), 6, 3, 3, 4, 24),
}


def config_of(plan: Plan, device: str) -> EngineConfig:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(plan.shape))
        dtype = "bfloat16" if device == "cuda" else "float32"
        model = load_model_config(folder, dtype=dtype, max_model_len=2048, load_format="dummy")
    return EngineConfig(
        engine_id="images",
        epoch=1,
        model=model,
        cache=CacheConfig(
            block_size=128 if device == "cuda" else 16,
            enable_prefix_caching=False,
            num_blocks=None if device == "cuda" else 512,
        ),
        scheduler=SchedulerConfig(max_num_seqs=plan.num_rows, max_num_batched_tokens=2048),
        device=DeviceConfig(device=device),
        images=ImageConfig(max_images=4, has_encoder=True, max_image_tokens=max(plan.sizes) ** 2),
    )


def pixels_of(config: EngineConfig, side: int, seed: int) -> ImagePixels:
    vision = config.model.vision
    assert vision is not None
    count = side * side * vision.pixels.merge_size**2
    patches = random.Random(seed).randbytes(count * vision.patch_bytes)
    return ImagePixels(hashlib.sha256(patches).digest(), side, side, patches)


def request_of(engine: OfflineEngine, image: ImagePixels | None, size: int, max_tokens: int,
               config: EngineConfig) -> EngineCoreRequest:  # fmt: skip
    """Returns a request whose prompt has text and an image of `size` tokens, or as much text."""
    request = engine.request(_TEXT_TOKENS + size, max_tokens)
    if image is None:
        return request
    vision = config.model.vision
    assert vision is not None
    text = [token % 400 + 1 for token in request.spec.prompt_token_ids[:_TEXT_TOKENS]]
    half = _TEXT_TOKENS // 2
    tokens = [*text[:half], *[vision.image_token_id] * size, *text[half:]]
    span = ImageSpan(half, image.rows, image.columns, image.digest)
    spec = RequestSpec(tokens, request.spec.sampling, images=(span,))
    return msgspec.structs.replace(request, spec=spec, pixels=(image,))


def encoder_figures(plan: Plan, config: EngineConfig) -> list[dict[str, float]]:
    """Returns tokens per second of the tower alone, an image at a time."""
    device = torch.device(config.device.device)
    place = ParallelPlace(range(config.model.num_layers))
    tower = create_tower(config, place, device)
    assert tower is not None
    load_weights(tower, config, lambda fraction: None, is_tower=True)
    figures = []
    for side in plan.sizes:
        image = pixels_of(config, side, side)
        times = []
        for _ in range(8):
            started = time.perf_counter()
            tower.encode(image).sum().item()
            times.append(time.perf_counter() - started)
        best = statistics.median(times[2:])
        figures.append(
            {"tokens": side * side, "ms": best * 1e3, "tokens_per_s": side * side / best}
        )
        print(f"encoder, {side * side} tokens: {best * 1e3:.2f} ms", flush=True)
    return figures


def first_token_ms(engine: OfflineEngine, config: EngineConfig, side: int, count: int,
                   *, has_image: bool) -> float:  # fmt: skip
    """Returns the median time from a request's arrival to its first token, alone in the engine."""
    times = []
    for index in range(count):
        image = pixels_of(config, side, 1000 + index) if has_image else None
        request = request_of(engine, image, side * side, 1, config)
        started = time.perf_counter()
        engine.run([request])
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:] if count > 4 else times) * 1e3


def decode_gaps_ms(engine: OfflineEngine, config: EngineConfig, plan: Plan,
                   *, has_image: bool) -> dict[str, float]:  # fmt: skip
    """Returns percentiles of the time between two steps while all requests decode."""
    size = plan.decode_size**2
    requests = [
        request_of(
            engine,
            pixels_of(config, plan.decode_size, 2000 + index) if has_image else None,
            size,
            plan.num_tokens,
            config,
        )
        for index in range(plan.num_rows)
    ]
    begun: set[str] = set()
    ends: list[float] = []
    has_ended = False

    def watch(outputs: list[EngineCoreOutput]) -> None:
        nonlocal has_ended
        begun.update(output.request_id for output in outputs if output.new_token_ids)
        has_ended |= any(output.finish_reason for output in outputs)
        if outputs and len(begun) == len(requests) and not has_ended:
            ends.append(time.perf_counter())

    engine.run(requests, on_outputs=watch)
    gaps = sorted((b - a) * 1e3 for a, b in itertools.pairwise(ends))
    return {"p50": gaps[len(gaps) // 2], "p99": gaps[int(len(gaps) * 0.99)], "steps": len(gaps)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=sorted(PLANS), default="cuda")
    device = parser.parse_args().device
    plan = PLANS[device]
    config = config_of(plan, device)
    torch.set_num_threads(config.device.num_threads)
    figures: dict[str, object] = {"encoder": encoder_figures(plan, config)}
    if device == "cuda":
        torch.cuda.empty_cache()
    with offline_engine(config, UniprocExecutor(config)) as engine:
        side, count = plan.first_token_size, plan.num_first_tokens
        for name, has_image in (("text", False), ("image", True)):
            took = first_token_ms(engine, config, side, count, has_image=has_image)
            figures[f"first_token_ms_{name}"] = took
            print(f"first token behind {side * side} tokens of {name}: {took:.1f} ms", flush=True)
        for name, has_image in (("text", False), ("image", True)):
            decode_gaps_ms(engine, config, plan, has_image=has_image)
            gaps = decode_gaps_ms(engine, config, plan, has_image=has_image)
            figures[f"decode_ms_{name}"] = gaps
            print(f"decode behind {name}: {gaps}", flush=True)
    if device == "cuda":
        print(f"wrote {write_result('images', figures)}")


if __name__ == "__main__":
    main()
