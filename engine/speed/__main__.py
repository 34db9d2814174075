"""Measures the speed of one node on this machine's GPUs, for `tandem plan`.

    tandem bench --model meta-llama/Llama-3.1-8B-Instruct --output profile.json
    tandem bench --model FOLDER --load-format dummy --tensor-parallel-size 2 --output profile.json

Prefill: prompts of 16 to 8192 tokens alone, and many at once. Decode: steps of 1 to 256 sequences
at 1024 tokens, and one batch at 4096. Takes about two minutes after the model is loaded, in which
nothing else may use the GPUs. Random prompts, no prefix cache, greedy.
"""

from __future__ import annotations

import argparse
import platform
import random
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import get_args

from edge.command_line import check_output
from engine.config import (
    CacheConfig,
    Device,
    DeviceConfig,
    Dtype,
    EngineConfig,
    KVCacheDtype,
    LoadFormat,
    ModelConfig,
    ParallelConfig,
    QuantizationName,
    SchedulerConfig,
)
from engine.contracts.errors import CannotStartError
from engine.kv_cache.capacity import tokens_that_fit
from engine.models.checkpoint import load_model_config, resolve_model
from engine.models.kv_scale_files import choose_kv_scales
from engine.node.settings.engine_settings import detect_device
from engine.speed.config_map import ClusterError, write_config_map
from engine.speed.measurements import MeasurementPlan, Measurements
from engine.speed.offline_engine import OfflineEngine, offline_engine
from engine.speed.profile import SpeedProfile
from kv_transfer.control.sizing import pull_bytes_per_token

_PACKAGES = ("tandem", "torch", "triton")
_QUICK = MeasurementPlan(
    lengths=(16, 64), many=(64,), batches=(1, 2, 4), contexts=(32, 64), num_steps=16
)


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    arguments = make_parser().parse_args(argv)
    try:
        if arguments.output is not None:
            check_output(arguments.output)
        profile = measure(arguments)
    except (CannotStartError, OSError) as error:
        print(f"tandem bench: {error}", file=sys.stderr)
        return 1
    try:
        if arguments.output is not None:
            profile.save(arguments.output)
            print(f"wrote {arguments.output}", file=sys.stderr)
        if arguments.config_map:
            write_config_map(arguments.config_map, {"profile.json": profile.encode().decode()})
            print(f"wrote the ConfigMap {arguments.config_map}", file=sys.stderr)
        if arguments.output is None and not arguments.config_map:
            sys.stdout.write(profile.encode().decode())
    except (ClusterError, OSError) as error:
        sys.stdout.write(profile.encode().decode())  # It took minutes, so it is not lost.
        print(f"tandem bench: {error}; standard output has the profile", file=sys.stderr)
        return 1
    return 0


def measure(arguments: argparse.Namespace) -> SpeedProfile:
    """Starts an engine, measures it, and returns the profile. Raises `CannotStartError`."""
    config = _config(arguments)
    with offline_engine(config) as engine:
        return profile_of(config, engine, arguments)


def profile_of(
    config: EngineConfig, engine: OfflineEngine, arguments: argparse.Namespace
) -> SpeedProfile:
    """Measures a running engine."""
    plan, scheduler = _QUICK if arguments.quick else MeasurementPlan(), config.scheduler
    plan = replace(plan, batches=[n for n in plan.batches if n <= scheduler.max_num_seqs])
    kv_tokens = tokens_that_fit(
        config.kv_layout.groups, engine.core.num_blocks, scheduler.max_num_batched_tokens
    )
    engine.run([engine.request(16, 8) for _ in range(2)])
    measurements = Measurements(
        engine,
        plan,
        kv_tokens,
        config.model.max_model_len,
        scheduler.max_num_batched_tokens,
        lambda text: print(text, file=sys.stderr, flush=True),
    )
    prefill, decode = measurements.prefill(), measurements.decode()
    if not prefill or not decode:
        raise CannotStartError(
            f"the KV cache has room for {kv_tokens} tokens, and sequences may have "
            f"{config.model.max_model_len}: too few to measure; use a larger GPU or --quick"
        )
    gpus = _gpus()
    return SpeedProfile(
        name=arguments.name or config.model.served_model_name,
        model=config.model.served_model_name,
        gpu=gpus[0] if gpus else _cpu(),
        gpus=config.parallel.tensor_parallel_size,
        date=datetime.now(UTC).date().isoformat(),
        note="measured by tandem bench",
        machine={"gpus": gpus, "cpu": _cpu(), "system": platform.platform()},
        versions=_versions(),
        kv_tokens=kv_tokens,
        kv_bytes_per_token=pull_bytes_per_token(config.kv_layout),
        max_batched_tokens=scheduler.max_num_batched_tokens,
        max_sequences=scheduler.max_num_seqs,
        prefill=prefill,
        decode=decode,
    )


def _config(arguments: argparse.Namespace) -> EngineConfig:
    device = detect_device() if arguments.device == "auto" else arguments.device
    model = _model(arguments)
    return EngineConfig(
        engine_id=f"bench-{random.getrandbits(32):08x}",
        epoch=1,
        model=model,
        cache=CacheConfig(
            block_size=arguments.block_size,
            enable_prefix_caching=False,
            gpu_memory_utilization=arguments.gpu_memory_utilization,
            kv_scales=choose_kv_scales(model, arguments.kv_cache_dtype),
        ),
        parallel=ParallelConfig(tensor_parallel_size=arguments.tensor_parallel_size),
        scheduler=SchedulerConfig(
            max_num_seqs=arguments.max_num_seqs,
            max_num_batched_tokens=arguments.max_num_batched_tokens,
            async_scheduling=device == "cuda",
        ),
        device=DeviceConfig(device=device),
    )


def _model(arguments: argparse.Namespace) -> ModelConfig:
    folder = resolve_model(
        arguments.model, load_format=arguments.load_format, revision=arguments.revision
    )
    load = partial(
        load_model_config,
        folder,
        dtype=arguments.dtype,
        quantization=arguments.quantization,
        load_format=arguments.load_format,
    )
    longest = load(hashes_later=True).max_model_len
    return load(max_model_len=min(arguments.max_model_len, longest))


def _gpus() -> list[str]:
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return []
    return done.stdout.split("\n")[:-1] if done.returncode == 0 else []


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tandem bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="folder of a checkpoint, or a hub name")
    parser.add_argument("--revision", help="branch, tag or commit of a model on the hub")
    parser.add_argument("--output", type=Path, help="file of the profile; without: printed")
    parser.add_argument("--config-map", default="", help="of this pod's namespace, gets it")
    parser.add_argument("--name", default="", help="of the profile; default: the model's")
    parser.add_argument("--quick", action="store_true", help="a few short points, for a try")
    node = parser.add_argument_group("as nodes have it")
    node.add_argument("--tensor-parallel-size", type=int, default=1)
    node.add_argument("--dtype", choices=["auto", *get_args(Dtype)], default="auto")
    node.add_argument("--quantization", choices=get_args(QuantizationName))
    node.add_argument("--kv-cache-dtype", choices=get_args(KVCacheDtype), default="auto")
    node.add_argument("--load-format", choices=get_args(LoadFormat), default="safetensors")
    node.add_argument("--device", choices=["auto", *get_args(Device)], default="auto")
    node.add_argument("--block-size", type=int, default=128)
    node.add_argument(
        "--max-model-len", type=int, default=9216, help="at most; a model's own is taken if shorter"
    )
    node.add_argument("--max-num-seqs", type=int, default=256)
    node.add_argument("--max-num-batched-tokens", type=int, default=8192)
    node.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    return parser


if __name__ == "__main__":
    sys.exit(main())
