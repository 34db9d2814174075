"""Says which kernels compute a step, and why: `tandem explain`.

    tandem explain openai/gpt-oss-120b --device h200 --batch 16
    tandem explain FOLDER --device cpu --tokens 2048 --json

Of the model only config.json is read, and no GPU is needed: the code chooses as on the device.
"""

from __future__ import annotations

import argparse
import sys
from typing import get_args

import msgspec
import torch

from engine.config import (
    CacheConfig,
    DeviceConfig,
    Dtype,
    EngineConfig,
    KVCacheDtype,
    ParallelConfig,
    QuantizationName,
    SchedulerConfig,
)
from engine.contracts.errors import CannotStartError
from engine.explain.explanation import Batch, Explanation, explain
from engine.explain.report import report
from engine.explain.towers import explain_tower
from engine.models.checkpoint import load_model_config, resolve_model
from engine.models.kv_scale_files import choose_kv_scales
from tandem_kernels.device import KNOWN_GPUS, GpuFacts, gpu_facts


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    arguments = _parse(argv)
    try:
        found = _explained(arguments)
    except (CannotStartError, OSError) as error:
        print(f"tandem explain: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        print(report(found), end="")
    return 0


def _explained(arguments: argparse.Namespace) -> list[Explanation]:
    gpu = _gpu(arguments.device)
    model = load_model_config(
        resolve_model(arguments.model, load_format="dummy"),
        dtype=arguments.dtype,
        max_model_len=arguments.max_model_len,
        load_format="dummy",
        quantization=arguments.quantization,
        hashes_later=True,
    )
    config = EngineConfig(
        engine_id="explain",
        epoch=1,
        model=model,
        cache=CacheConfig(
            block_size=arguments.block_size,
            kv_scales=choose_kv_scales(model, arguments.kv_cache_dtype),
        ),
        parallel=ParallelConfig(tensor_parallel_size=arguments.tensor_parallel_size),
        scheduler=SchedulerConfig(
            max_num_seqs=arguments.max_num_seqs,
            max_num_batched_tokens=max(arguments.max_num_batched_tokens, arguments.max_num_seqs),
        ),
        device=DeviceConfig(
            device="cpu" if gpu is None else "cuda", deterministic=arguments.deterministic
        ),
    )
    batches = [Batch(count, arguments.context) for count in arguments.batch]
    beside = arguments.beside
    batches += [Batch(beside, arguments.context, (length,)) for length in arguments.tokens]
    found = explain(config, gpu, batches, has_flash=not arguments.no_flash_attention)
    if model.vision is not None:
        found += [explain_tower(config, tokens) for tokens in arguments.image]
    return found


def _gpu(device: str) -> GpuFacts | None:
    """Returns the facts of the device that is asked for; None: a CPU."""
    if device in KNOWN_GPUS:
        return KNOWN_GPUS[device]
    if device == "auto" and torch.cuda.is_available():
        return gpu_facts(torch.device("cuda"))
    return None


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Leaves the lines of the examples as they are, and tells defaults."""


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("tandem explain", description=__doc__, formatter_class=_Help)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("model", nargs="?", help="folder or hub name")
    model.add_argument(
        "--model", dest="model_option", metavar="MODEL", help="the same, as nodes take it"
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", *KNOWN_GPUS), default="auto", help="need not be here"
    )
    parser.add_argument("--batch", type=_positive, nargs="*", default=[1, 16, 128], help="decodes")
    parser.add_argument("--context", type=_positive, default=1024, help="tokens of each decode")
    parser.add_argument("--tokens", type=_positive, nargs="*", default=[2048], help="of a prompt")
    parser.add_argument("--beside", type=int, default=0, help="decodes in the step of a prompt")
    parser.add_argument(
        "--image", type=_positive, nargs="*", default=[1024], help="tokens of one, at most"
    )
    parser.add_argument("--dtype", choices=("auto", *get_args(Dtype)), default="auto")
    parser.add_argument("--quantization", choices=get_args(QuantizationName))
    parser.add_argument("--kv-cache-dtype", choices=get_args(KVCacheDtype), default="auto")
    parser.add_argument("--tensor-parallel-size", type=_positive, default=1)
    parser.add_argument("--block-size", type=_positive, default=CacheConfig().block_size)
    parser.add_argument("--max-model-len", type=_positive)
    parser.add_argument("--max-num-seqs", type=_positive, default=256)
    parser.add_argument("--max-num-batched-tokens", type=_positive, default=8192)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument(
        "--no-flash-attention", action="store_true", help="FlashAttention 3 is not installed there"
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    arguments = parser.parse_args(argv)
    arguments.model = arguments.model or arguments.model_option
    return arguments


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
