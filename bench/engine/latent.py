"""Time and tune latent attention, beside its floor.

    python -m bench.engine.latent [--heads 16]     # decodes, with the tunings that are built in
    python -m bench.engine.latent --tune           # all candidates; the fastest of each shape first
    python -m bench.engine.latent --forms          # prompts: absorbed, and expanded by each kernel

The shape is DeepSeek's: rank 512, 64 that rotate, blocks of 64 tokens, bf16; 16 heads are those of
V2-Lite, and of V3 on eight ranks. The floor is the bytes of the latents over what a copy reaches.
`latent_decode_tuning` holds what was found.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from bench.engine.timing.device_time import copy_bytes_per_us, eager_us, graph_us, rotations
from engine.batch.input_batch import BatchOrder
from engine.layers.attention.flash_attention import FlashRagged
from engine.layers.attention.latent_backend import LatentBackend
from engine.layers.attention.latent_forms import LatentForms
from engine.layers.attention.layer import AttentionInputs
from engine.models.specs.latent import LatentSpec
from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.attention.latent_decode import (
    LatentDecodeTuning,
    latent_decode,
    latent_decode_tuning,
    num_splits,
)

LATENT, ROPE, BLOCK_SIZE = 512, 64, 64
SCALE = (128 + ROPE) ** -0.5
SHAPES = (
    *((batch, 1024) for batch in (1, 16, 32, 64, 128, 192, 256)),
    *((batch, 8192) for batch in (1, 16, 64)),
)


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """A step of decodes of equal contexts in scattered blocks; one cache for each layer."""

    q_latent: Tensor
    q_rope: Tensor
    kv_caches: list[Tensor]
    metadata: AttentionMetadata
    cache_bytes: int


def decode_inputs(batch: int, context: int, num_heads: int) -> DecodeInputs:
    blocks = -(-context // BLOCK_SIZE)
    width = LATENT + ROPE
    cache_bytes = 2 * batch * context * width
    with torch.device("cuda"):
        tables = torch.randperm(batch * blocks).int().view(batch, blocks)
        caches = [
            torch.randn(batch * blocks, BLOCK_SIZE, width, dtype=torch.bfloat16)
            for _ in range(rotations(cache_bytes, 16))
        ]
        q = torch.randn(batch, num_heads, width, dtype=torch.bfloat16)
        metadata = AttentionMetadata(
            block_tables=tables,
            query_start_loc=torch.arange(batch + 1, dtype=torch.int32),
            seq_lens=torch.full((batch,), context, dtype=torch.int32),
            num_decodes=batch,
            max_query_len=1,
            max_seq_len=context,
        )
    return DecodeInputs(q[:, :, :LATENT], q[:, :, LATENT:], caches, metadata, cache_bytes)


def decode_us(given: DecodeInputs, tuning: LatentDecodeTuning | None, replays: int = 15) -> float:
    """Returns microseconds, or infinity where the tuning does not fit the device."""
    out = torch.empty_like(given.q_latent, memory_format=torch.contiguous_format)
    calls = [
        partial(
            latent_decode, given.q_latent, given.q_rope, cache, given.metadata, SCALE, out, tuning
        )
        for cache in given.kv_caches
    ]
    try:
        calls[0]()
        return graph_us(calls, replays)
    except OutOfResources:
        return math.inf


def decode_tunings(*, turned: bool) -> list[LatentDecodeTuning]:
    """Returns the candidates for few heads. Those of 64 rows are mostly padding, which the matrix
    units of Hopper need: four groups of 16 rows or one of 64 cost them the same."""
    tiles: tuple[tuple[int, int, int, int], ...] = (
        (16, 16, 2, 4), (16, 16, 4, 4), (16, 16, 4, 6), (16, 32, 4, 3), (16, 32, 4, 4),
        (16, 32, 8, 3), (16, 64, 4, 3), (16, 64, 8, 3), (64, 32, 8, 3), (64, 64, 8, 2),
    )  # fmt: skip
    if turned:
        tiles = (16, 64, 4, 2), (16, 64, 4, 3), (16, 64, 8, 2), (16, 64, 8, 3)
    return [
        LatentDecodeTuning(*tile, programs, most_splits, turned)
        for tile in tiles
        for programs in (1, 2, 3, 4)
        for most_splits in (16, 64)
    ]


def distinct(
    tunings: list[LatentDecodeTuning], batch: int, num_heads: int
) -> list[LatentDecodeTuning]:
    """Returns `tunings` without those that cut contexts as one before does."""
    device = torch.device("cuda")
    kept: dict[LatentDecodeTuning, LatentDecodeTuning] = {}
    for tuning in tunings:
        splits = num_splits(tuning, batch * -(-num_heads // tuning.rows), device)
        kept.setdefault(replace(tuning, programs_per_sm=0, most_splits=splits), tuning)
    return list(kept.values())


def tune(num_heads: int, *, turned: bool) -> None:
    bytes_per_us = copy_bytes_per_us()
    for batch, context in SHAPES:
        given = decode_inputs(batch, context, num_heads)
        candidates = distinct(decode_tunings(turned=turned), batch, num_heads)
        times = {tuning: decode_us(given, tuning, 7) for tuning in candidates}
        print(f"{batch} x {context}, floor {given.cache_bytes / bytes_per_us:.1f} us")
        for tuning, us in sorted(times.items(), key=lambda item: item[1])[:6]:
            print(f"   {us:.1f} us {tuning}", flush=True)


def tune_apart(num_heads: int) -> None:
    """Times both kinds of candidates in a process each: one that faults ends its own alone."""
    for kind in ("left", "turned"):
        print(f"context on the {'left' if kind == 'turned' else 'right'}", flush=True)
        command = [sys.executable, "-m", "bench.engine.latent", "--heads", str(num_heads)]
        done = subprocess.run([*command, "--tune", "--kind", kind], check=False)
        print(f"ended with {done.returncode}", flush=True)


def report(num_heads: int) -> None:
    bytes_per_us = copy_bytes_per_us()
    print(latent_decode_tuning(num_heads, 2))
    for batch, context in SHAPES:
        given = decode_inputs(batch, context, num_heads)
        us, floor = decode_us(given, None), given.cache_bytes / bytes_per_us
        print(
            f"{batch} x {context}: {us:.1f} us, floor {floor:.1f}, {us / floor:.2f} x", flush=True
        )


CHUNKS = (
    *((1, length, 0) for length in (512, 1024, 2048, 8192)),
    (4, 2048, 0),
    *((1, length, 8192) for length in (128, 171, 256, 512, 2048)),
    (1, 2048, 30_000),
)
"""Triples (prompts, new tokens, cached tokens)."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """A step of equal chunks, as attention backends see it."""

    order: BatchOrder
    block_tables: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    window: int | None = None


def prompts(count: int, new: int, cached: int) -> Prompts:
    length = new + cached
    blocks = -(-length // BLOCK_SIZE)
    rows, query_lens = np.arange(count, dtype=np.int32), np.full(count, new, np.int32)
    with torch.device("cuda"):
        return Prompts(
            BatchOrder(rows, query_lens, query_lens + cached, 0, count),
            torch.randperm(count * blocks).int().view(count, blocks),
            torch.arange(0, count * new + 1, new, dtype=torch.int32),
            torch.full((count,), length, dtype=torch.int32),
        )


def compare_forms(num_heads: int) -> None:
    """Prints what attention of one layer takes, its products with `kv_b_proj` included."""
    # By these sizes expansion costs nothing, so that chunks below the rule's border are shown too.
    sizes = LatentSpec(q_rank=0, kv_rank=1, nope=0, rope=ROPE, value=0, scale=SCALE)
    ways = {
        "absorbed": LatentBackend(),
        "Triton": LatentBackend(shape=sizes, fewest_tokens=1, fewest_of_step=1),
    }
    package = FlashRagged.package(torch.bfloat16, 192, 128, torch.device("cuda"))
    if package is not None:
        ways["FlashAttention 3"] = replace(ways["Triton"], ragged=FlashRagged(package))
    kind = {"dtype": torch.bfloat16, "device": "cuda"}
    forms = LatentForms(torch.randn(num_heads, 256, LATENT, **kind) / 23, 128, SCALE, False)
    for count, new, cached in CHUNKS:
        batch = prompts(count, new, cached)
        cache = torch.randn(batch.block_tables.numel(), BLOCK_SIZE, LATENT + ROPE, **kind)
        heads = torch.randn(count * new, num_heads, 128 + ROPE, **kind)
        flops = 640.0 * num_heads * count * (new * cached + new * new / 2)
        found = []
        for name, backend in ways.items():
            inputs = AttentionInputs(cache, cache, cache, backend.metadata(batch), backend)
            us = eager_us(partial(forms.attend, heads, cache, inputs))
            found.append(f"{name} {us:.0f} us")
        print(
            f"{count} x {new} behind {cached}: {', '.join(found)}; "
            f"attention alone is {flops / 1e9:.1f} GFLOP",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=16, help="query heads of a rank")
    parser.add_argument("--tune", action="store_true", help="time all candidates")
    parser.add_argument("--kind", choices=["left", "turned"], help="only these candidates")
    parser.add_argument("--forms", action="store_true", help="compare the forms on prompts")
    given = parser.parse_args()
    if given.forms:
        compare_forms(given.heads)
        return
    if not given.tune:
        report(given.heads)
    elif given.kind is None:
        tune_apart(given.heads)
    else:
        tune(given.heads, turned=given.kind == "turned")


if __name__ == "__main__":
    main()
