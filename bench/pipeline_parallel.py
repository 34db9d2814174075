"""Time to the first token of long prompts: two pipeline stages, two tensor-parallel ranks, or one.

    python -m bench.pipeline_parallel                  CPU: two network namespaces, slow links; root
    python -m bench.pipeline_parallel --device cuda    two GPUs of this host, 8k to 64k tokens

On CPU each rank is a process in a namespace of its own; the cable between them is limited. Layouts
take turns, so that what else runs on the machine meets all of them. Writes
bench/results/pipeline-parallel-DEVICE.json, on GPUs behind each layout: what was measured stays if
the next one fails. The same engines run without a GPU, to try the command:

    python -m bench.pipeline_parallel --device cpu --engines --shape tiny --lengths 512,1024
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from bench.engine.models.shapes import SHAPES, config_json
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
        text = json.dumps({"rms_norm_eps": 1e-5, **shape, "max_position_embeddings": longest + 64})
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


class Progress:
    """Prints a line for each measurement: which of how many, and since when."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._began = time.monotonic()

    def tell(self, what: str) -> None:
        self._done += 1
        minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
        number = f"[{self._done}/{self._total} {minutes}:{seconds:02}]"
        print(f"{number:>14}  {what}", flush=True)


def seconds_over(mbit: int, layout: str, lengths: list[int], chunk: int) -> list[float]:
    """Returns the seconds that each prompt took over a link of `mbit`."""
    config = engine_config(CPU_SHAPE, layout, max(lengths), chunk, "cpu")
    with slow_link(mbit) as namespaces, ExitStack() as running:
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
            process = subprocess.Popen(
                [*command, "bench.pipeline_rank", text], stdout=subprocess.PIPE, text=True
            )
            running.callback(process.kill)
            ranks.append(process)
        found = [_times_of(rank, process) for rank, process in enumerate(ranks)]
    last = next(times for rank, times in enumerate(found) if config.parallel.answers(rank))
    return [end - min(of_rank[i][0] for of_rank in found) for i, (_, end) in enumerate(last)]


def _times_of(rank: int, process: subprocess.Popen[str]) -> list[tuple[float, float]]:
    output = process.communicate()[0]
    if process.returncode:
        raise SystemExit(f"rank {rank} ended with code {process.returncode}; it said why above")
    times: list[tuple[float, float]] = json.loads(output.splitlines()[-1])
    return times


def over_slow_links(length: int, chunk: int, repeats: int) -> dict[str, object]:
    seconds: dict[str, dict[str, list[float]]] = {}
    runs = [
        (mbit, layout)
        for mbit in LINKS_MBIT
        for layout in LAYOUTS
        if layout != "TP1" or mbit == LINKS_MBIT[0]  # It has no link.
    ]
    progress = Progress(repeats * len(runs))
    for _ in range(repeats):
        for mbit, layout in runs:
            link = f"{mbit} Mbit/s"
            # The first prompt warms everything up.
            _, *found = seconds_over(mbit, layout, [chunk, length], chunk)
            seconds.setdefault(link, {}).setdefault(layout, []).extend(found)
            progress.tell(f"{link:>12}  {layout}  {found[-1]:6.2f} s")
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


def by_engines(
    device: str, shape: str, chunk: int, repeats: int, lengths: list[int]
) -> Iterator[dict[str, object]]:
    """Yields the figures behind each layout, with those of layouts before."""
    found: dict[str, dict[str, float]] = {str(length): {} for length in lengths}
    progress = Progress(len(LAYOUTS) * len(lengths))
    for layout in LAYOUTS:
        config = engine_config(config_json(shape), layout, max(lengths), chunk, device)
        with offline_engine(config) as engine:
            engine.run([engine.request(chunk, 1)])
            for length in lengths:
                seconds = []
                for _ in range(repeats):
                    request = engine.request(length, 1)
                    began = time.perf_counter()
                    seconds.append(engine.run([request])[-1].at - began)
                median = round(1000 * statistics.median(seconds), 1)
                found[str(length)][layout] = median
                progress.tell(f"{layout}  {length:6} tokens  {median:8.1f} ms")
        ratios = {
            length: round(ms["PP2"] / ms["TP2"], 3)
            for length, ms in found.items()
            if {"PP2", "TP2"} <= ms.keys()
        }
        yield {"model": shape, "chunk_tokens": chunk, "ttft_ms": found, "pp2_over_tp2": ratios}


def check_machine(device: str, *, has_engines: bool) -> None:
    """Exits, saying why, where the bench cannot run."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        raise SystemExit(f"two GPUs are needed, and {torch.cuda.device_count()} are here")
    if not has_engines:
        missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
        if missing or os.geteuid() != 0:
            raise SystemExit("network namespaces need root, ip and tc (Debian: iproute2)")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--engines",
        action="store_true",
        help="whole engines on CPU, as on GPUs, no slow links",
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--length", type=int, default=4096, help="tokens of the prompt on CPU")
    parser.add_argument(
        "--lengths", default="8192,16384,32768,65536", help="tokens of prompts of engines"
    )
    parser.add_argument("--chunk", type=int, help="tokens of a step; default: 256, on GPUs 4096")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    has_engines = args.engines or args.device == "cuda"
    check_machine(args.device, has_engines=has_engines)
    chunk = args.chunk or (256 if args.device == "cpu" else 4096)
    if not has_engines:
        figures = over_slow_links(args.length, chunk, args.repeats)
        print(write_result("pipeline-parallel-cpu", figures))
        return
    name = "pipeline-parallel-cuda" if args.device == "cuda" else "pipeline-parallel-engines"
    lengths = [int(length) for length in args.lengths.split(",")]
    for of_layouts in by_engines(args.device, args.shape, chunk, args.repeats, lengths):
        print(write_result(name, of_layouts))


if __name__ == "__main__":
    main()
