"""Time to the first token of long prompts: two pipeline stages, two tensor-parallel ranks, or one.

    python -m bench.pipeline_parallel                  CPU: two network namespaces, slow links
    python -m bench.pipeline_parallel --device cuda    two GPUs of this host, 8k to 64k tokens

On CPU each rank is a process in a namespace of its own; the cable between them is limited. Layouts
take turns, so that what else runs on the machine meets all of them. Writes
bench/results/pipeline-parallel-DEVICE.json.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import msgspec

from bench.engine.offline import SHAPES
from bench.pipeline_rank import RankConfig
from bench.record import write_result
from bench.slow_link import ADDRESSES, slow_link
from engine.config import CacheConfig, DeviceConfig, EngineConfig, ParallelConfig, SchedulerConfig
from engine.models.checkpoint import load_model_config
from engine.speed.offline_engine import offline_engine

LAYOUTS = {"PP2": (1, 2), "TP2": (2, 1), "TP1": (1, 1)}
"""Ranks that share a layer, and stages."""
LINKS_MBIT = (50, 100, 1000)
CPU_SHAPE: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
_PORTS = 29711, 29712


def engine_config(
    shape: dict[str, object], layout: str, longest: int, chunk: int, device: str
) -> EngineConfig:
    tensor, stages = LAYOUTS[layout]
    with tempfile.TemporaryDirectory() as folder:
        text = json.dumps({"rms_norm_eps": 1e-5, "max_position_embeddings": longest + 64, **shape})
        (Path(folder) / "config.json").write_text(text)
        dtype = "float32" if device == "cpu" else "bfloat16"
        model = load_model_config(Path(folder), load_format="dummy", dtype=dtype)  # type: ignore[arg-type]
    block_size = 64
    return EngineConfig(
        engine_id=f"pipeline-{secrets.token_hex(4)}",
        epoch=1,
        model=model,
        cache=CacheConfig(
            block_size=block_size,
            num_blocks=longest // block_size + 2,
            enable_prefix_caching=False,
        ),
        parallel=ParallelConfig(tensor_parallel_size=tensor, pipeline_parallel_size=stages),
        scheduler=SchedulerConfig(
            max_num_seqs=4, max_num_batched_tokens=chunk, async_scheduling=True
        ),
        device=DeviceConfig(device=device),  # type: ignore[arg-type]
    )


def seconds_over(mbit: int, layout: str, lengths: list[int], chunk: int) -> list[float]:
    """Returns the seconds that each prompt took over a link of `mbit`."""
    config = engine_config(CPU_SHAPE, layout, max(lengths), chunk, "cpu")
    with slow_link(mbit) as namespaces:
        ranks = []
        for rank in range(config.parallel.num_ranks):
            of_rank = RankConfig(
                replace(config, engine_id=f"{config.engine_id}-{rank}"),
                rank,
                ADDRESSES[rank],
                f"{ADDRESSES[0]}:{_PORTS[0]}",
                f"{ADDRESSES[0]}:{_PORTS[1]}",
                lengths,
            )
            command = ["ip", "netns", "exec", namespaces[rank], sys.executable, "-m"]
            text = msgspec.json.encode(of_rank).decode()
            ranks.append(
                subprocess.Popen(
                    [*command, "bench.pipeline_rank", text], stdout=subprocess.PIPE, text=True
                )
            )
        found = [json.loads(rank.communicate()[0].splitlines()[-1]) for rank in ranks]
    last = next(times for rank, times in enumerate(found) if config.parallel.answers(rank))
    return [end - min(of_rank[i][0] for of_rank in found) for i, (_, end) in enumerate(last)]


def on_cpu(length: int, chunk: int, repeats: int) -> dict[str, object]:
    seconds: dict[str, dict[str, list[float]]] = {}
    for _ in range(repeats):
        for mbit in LINKS_MBIT:
            link = f"{mbit} Mbit/s"
            for layout in LAYOUTS:
                if layout == "TP1" and mbit != LINKS_MBIT[0]:
                    continue  # It has no link.
                # The first prompt warms everything up.
                _, *found = seconds_over(mbit, layout, [chunk, length], chunk)
                seconds.setdefault(link, {}).setdefault(layout, []).extend(found)
                print(f"{link:>12}  {layout}  {found[-1]:6.2f} s", flush=True)
    medians = {
        link: {layout: round(statistics.median(found), 3) for layout, found in of_link.items()}
        for link, of_link in seconds.items()
    }
    ratios = {link: round(found["PP2"] / found["TP2"], 3) for link, found in medians.items()}
    return {
        "model": CPU_SHAPE,
        "prompt_tokens": length,
        "chunk_tokens": chunk,
        "ttft_s": medians,
        "all_ttft_s": seconds,
        "pp2_over_tp2": ratios,
        "load_average": os.getloadavg(),
        "target": "pp2_over_tp2 <= 0.65 over a slow link",
    }


def on_gpu(shape: str, chunk: int, repeats: int) -> dict[str, object]:
    lengths = [8 << 10, 16 << 10, 32 << 10, 64 << 10]
    found: dict[str, dict[str, float]] = {}
    for layout in LAYOUTS:
        config = engine_config(SHAPES[shape], layout, max(lengths), chunk, "cuda")
        with offline_engine(config) as engine:
            engine.run([engine.request(chunk, 1)])
            for length in lengths:
                seconds = []
                for _ in range(repeats):
                    request = engine.request(length, 1)
                    began = time.perf_counter()
                    seconds.append(engine.run([request])[-1].at - began)
                best = round(1000 * statistics.median(seconds), 1)
                found.setdefault(str(length), {})[layout] = best
                print(f"{layout}  {length:6}  {best:8.1f} ms", flush=True)
    ratios = {length: round(ms["PP2"] / ms["TP2"], 3) for length, ms in found.items()}
    return {"model": shape, "chunk_tokens": chunk, "ttft_ms": found, "pp2_over_tp2": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--length", type=int, default=4096, help="tokens of the prompt on CPU")
    parser.add_argument("--chunk", type=int, help="tokens of a step; default: 256, on GPUs 4096")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if args.device == "cpu":
        figures = on_cpu(args.length, args.chunk or 256, args.repeats)
    else:
        figures = on_gpu(args.shape, args.chunk or 4096, args.repeats)
    print(write_result(f"pipeline-parallel-{args.device}", figures))


if __name__ == "__main__":
    main()
