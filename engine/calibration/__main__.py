"""Finds the scales of an FP8 KV cache, for a checkpoint that has none, and writes them to a file.

    tandem calibrate-kv --model FOLDER --output scales.json

The model continues beginnings of texts by itself, with fixed seeds, so it sees what it would write;
or reads texts of yours. The largest key and the largest value of each head become half of what the
format holds, which leaves room for larger ones: in a format with exponents it costs nothing. All
nodes take the same file (`--kv-cache-scales`), because on two machines two runs may differ in the
last bit. One device must hold the model.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import get_args

import msgspec
import torch

from edge.command_line import check_output
from engine.calibration.beginnings import BEGINNINGS
from engine.calibration.observer import LargestKeysAndValues
from engine.config import (
    CacheConfig,
    Device,
    DeviceConfig,
    Dtype,
    EngineConfig,
    ModelConfig,
    QuantizationName,
    SchedulerConfig,
)
from engine.contracts.errors import CannotStartError
from engine.contracts.messages import EngineCoreRequest
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from engine.core.core import EngineCore
from engine.executor.uniproc_executor import UniprocExecutor
from engine.frontend.tokenizer import Tokenizer, TokenizerError
from engine.models.checkpoint import load_model_config, resolve_model
from engine.models.kv_scale_files import FILE_FORMAT, KVCacheDtypeError, ScaleFile, choose_kv_scales
from engine.node.settings.engine_settings import detect_device

LARGEST = 224.0
"""The largest number that was seen becomes this; the format ends at 448."""
_MAX_BATCH = 16


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    arguments = _parse(argv)
    try:
        _calibrate(arguments)
    except (CannotStartError, TokenizerError, OSError) as error:
        print(f"tandem calibrate-kv: {error}", file=sys.stderr)
        return 1
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tandem calibrate-kv",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="folder of a checkpoint, or a hub name")
    parser.add_argument("--output", required=True, type=Path, help="file of scales, JSON")
    parser.add_argument("--prompts", type=Path, help="a text in each line, instead of our own")
    parser.add_argument(
        "--num-tokens", type=int, default=256, help="that the model adds to each text, 1 or more"
    )
    parser.add_argument("--dtype", choices=["auto", *get_args(Dtype)], default="auto")
    parser.add_argument(
        "--quantization",
        choices=get_args(QuantizationName),
        help="of the weights, as nodes have it",
    )
    parser.add_argument("--device", choices=["auto", *get_args(Device)], default="auto")
    arguments = parser.parse_args(argv)
    if arguments.num_tokens < 1:
        parser.error("--num-tokens must be 1 or more")
    return arguments


def _calibrate(arguments: argparse.Namespace) -> None:
    check_output(arguments.output)
    model = load_model_config(
        resolve_model(arguments.model), dtype=arguments.dtype, quantization=arguments.quantization
    )
    beside = choose_kv_scales(model, "fp8")  # Refuses what cannot have such a cache.
    if beside is not None and beside.beside:
        raise KVCacheDtypeError(
            f"an FP8 cache of {arguments.model} has scales beside its numbers; nodes need no file, "
            "start them with --kv-cache-dtype fp8"
        )
    texts = list(BEGINNINGS)
    if arguments.prompts is not None:
        texts = [line for line in arguments.prompts.read_text("utf-8").splitlines() if line.strip()]
    tokenizer = Tokenizer.of_model(model)
    most = model.max_model_len - arguments.num_tokens
    if most < 1 or not texts:
        raise KVCacheDtypeError(
            f"{len(texts)} texts and {arguments.num_tokens} --num-tokens, for sequences of "
            f"{model.max_model_len} tokens at most: there is nothing to calibrate with"
        )
    prompts = [tokenizer.encode(text)[:most] for text in texts]
    device = detect_device() if arguments.device == "auto" else arguments.device
    observer = LargestKeysAndValues()
    run(model, device, [p for p in prompts if p], arguments.num_tokens, observer)
    scales = scale_file(model, observer.largest)
    arguments.output.write_bytes(msgspec.json.format(msgspec.json.encode(scales), indent=1))
    table = choose_kv_scales(model, "fp8", arguments.output)
    assert table is not None
    print(f"wrote {arguments.output}: scales {table.digest} of {len(observer.largest)} layers")


def run(
    model: ModelConfig,
    device: Device,
    prompts: list[list[int]],
    num_tokens: int,
    observer: LargestKeysAndValues,
) -> None:
    """Lets the model continue all prompts, while `observer` watches."""
    config = EngineConfig(
        engine_id="calibration",
        epoch=1,
        model=model,
        cache=CacheConfig(enable_prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=min(_MAX_BATCH, len(prompts))),
        device=DeviceConfig(device=device, enforce_eager=True),
    )
    executor = UniprocExecutor(config)
    core = EngineCore(config, executor, lambda *_: None)
    try:
        with observer.watching():
            for index, prompt in enumerate(prompts):
                sampling = SamplingParams(
                    temperature=1.0, seed=index, max_tokens=num_tokens, ignore_eos=True
                )
                spec = RequestSpec(prompt, sampling)
                core.handle(EngineCoreRequest(request_id=str(index), spec=spec))
            while not core.is_idle:
                core.step()
    finally:
        core.shutdown()
        executor.shutdown()


def scale_file(model: ModelConfig, largest: list[torch.Tensor]) -> ScaleFile:
    """Returns scales by layer; those of layers without keys and values are 1."""
    attending = {layer for kv in model.kv_layers if not kv.is_state for layer in kv.layers}
    found = iter(largest)
    k, v = [], []
    for layer in range(model.num_layers):
        has_keys = not attending or layer in attending
        of_layer = next(found).cpu() / LARGEST if has_keys else torch.ones(2, 1)
        keys, values = of_layer.clamp(min=1e-6).tolist()
        k.append(keys)
        v.append(values)
    return ScaleFile(format=FILE_FORMAT, model_hash=model.model_hash, k=k, v=v)


if __name__ == "__main__":
    sys.exit(main())
