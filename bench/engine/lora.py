#!/usr/bin/env python3
"""Measures what adapters cost: decode steps and first tokens with and without, in turns.

Two engines run side by side on one device, one that knows nothing of adapters and one with eight of
rank 16. Decode: the time of a step of 1, 16 and 64 requests, of the first engine, of the second
without adapters, with one and with eight in the batch. First token: of a prompt that is alone.

    python -m bench.engine.lora                      # Llama 3.1 8B's shape on one GPU
    python -m bench.engine.lora --device cpu         # a tiny model
    python -m bench.engine.lora --quantization fp8   # of a model with weights in FP8
    python -m bench.engine.lora --forms "beside,one launch" --batches 1,16

`--forms` names the ways that are compared, each with an engine of its own, and measures decode
steps alone.

Weights and prompts are random. Goals: at 16 requests with 8 adapters 1.10 of the first engine, and
without adapters 1.01. Results: bench/results/lora.json, of forms lora-forms.json.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file

from bench.engine.models.shapes import QUANTIZATIONS, SHAPES, config_json, shape_config
from bench.name_lists import names_among
from bench.record import write_result
from engine.config import EngineConfig
from engine.contracts.messages import EngineCoreRequest
from engine.contracts.request_spec import AdapterRef
from engine.executor.uniproc_executor import UniprocExecutor
from engine.fast_paths import FastPath
from engine.lora import LoRAConfig, LoRAModule
from engine.models.adapter_files import read_adapter
from engine.speed.offline_engine import OfflineEngine, offline_engine

FORMS: dict[str, tuple[FastPath, ...]] = {
    "beside": ("lora-gemm",),
    "one launch": (),
}
"""Names the ways to compute adapters of few rows, with what is turned off for them."""
_WARM_UP_TOKENS = 4
_LEAST_KV_TOKENS = 16_384


@dataclass(frozen=True, slots=True)
class Plan:
    """Says what is measured on a device. `context`: prompt tokens of requests that decode."""

    batches: tuple[int, ...]
    prompts: tuple[int, ...]
    context: int
    num_steps: int
    num_rounds: int


Case = tuple[OfflineEngine, Sequence[AdapterRef]]
"""An engine, and the adapters that its requests take turns with."""
PLANS = {
    "cuda": Plan((1, 16, 64), (128, 2048), 1024, 128, 3),
    "cpu": Plan((1, 16), (64,), 32, 8, 2),
}


def write_adapters(
    folder: Path, shape: str, count: int, rank: int, scale: float = 0.01
) -> tuple[LoRAModule, ...]:
    """Writes random adapters for all linear layers of a dense shape, whose numbers are from one
    pool, each matrix's from another place in it."""
    config = config_json(shape)
    hidden, inner = int(str(config["hidden_size"])), int(str(config["intermediate_size"]))
    heads, kv_heads = (int(str(config[f"num_{name}_heads"])) for name in ("attention", "key_value"))
    head_dim = int(str(config.get("head_dim", hidden // heads)))
    sizes = {
        "self_attn.q_proj": (heads * head_dim, hidden),
        "self_attn.k_proj": (kv_heads * head_dim, hidden),
        "self_attn.v_proj": (kv_heads * head_dim, hidden),
        "self_attn.o_proj": (hidden, heads * head_dim),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    torch.manual_seed(0)
    pool = (scale * torch.randn((4 << 20) + rank * max(map(max, sizes.values())))).bfloat16()
    starts = random.Random(0)

    def numbers(*size: int) -> torch.Tensor:
        start = starts.randrange(4 << 20)
        return pool[start : start + math.prod(size)].view(size).clone()

    modules = []
    for index in range(count):
        tensors = {}
        for layer in range(int(str(config["num_hidden_layers"]))):
            for name, (outputs, inputs) in sizes.items():
                prefix = f"base_model.model.model.layers.{layer}.{name}"
                tensors[f"{prefix}.lora_A.weight"] = numbers(rank, inputs)
                tensors[f"{prefix}.lora_B.weight"] = numbers(outputs, rank)
        path = folder / f"adapter-{index}"
        path.mkdir()
        save_file(tensors, path / "adapter_model.safetensors")
        text = json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank})
        (path / "adapter_config.json").write_text(text)
        digest = read_adapter(path, rank).digest
        modules.append(LoRAModule(name=path.name, path=str(path), digest=digest))
        print(f"wrote adapter {index + 1} of {count}", flush=True)
    return tuple(modules)


def requests_of(
    engine: OfflineEngine,
    count: int,
    refs: Sequence[AdapterRef],
    length: int,
    max_tokens: int,
) -> list[EngineCoreRequest]:
    """Makes requests that take turns with the adapters; none: all are of the model itself."""
    made = [engine.request(length, max_tokens) for _ in range(count)]
    for index, request in enumerate(made):
        ref = refs[index % len(refs)] if refs else None
        request.spec = msgspec.structs.replace(request.spec, adapter=ref)
    return made


def decode_ms(engine: OfflineEngine, batch: int, refs: Sequence[AdapterRef], plan: Plan) -> float:
    """Returns the median time of a decode step of `batch` requests."""
    max_tokens = plan.num_steps + 1 + -(-batch * plan.context // 8192)
    steps = engine.run(requests_of(engine, batch, refs, plan.context, max_tokens))
    first = next(i for i, step in enumerate(steps) if step.num_tokens >= batch)
    measured = steps[first : first + plan.num_steps + 1]
    return statistics.median(
        1e3 * (b.at - a.at) * batch / b.num_tokens for a, b in pairwise(measured)
    )


def first_token_ms(engine: OfflineEngine, length: int, refs: Sequence[AdapterRef]) -> float:
    """Returns the median time to the first token of a prompt that is alone."""
    times = []
    for _ in range(6):
        requests = requests_of(engine, 1, refs[:1], length, 1)
        started = time.perf_counter()
        times.append(1e3 * (engine.run(requests)[0].at - started))
    return statistics.median(times[1:])


def measure(
    plain: OfflineEngine, adapted: OfflineEngine, refs: Sequence[AdapterRef], plan: Plan
) -> dict[str, object]:
    """Takes the engines in turns, so that a machine that changes pace does not matter."""
    cases = {
        "base": (plain, refs[:0]),
        "none": (adapted, refs[:0]),
        "1 adapter": (adapted, refs[:1]),
        f"{len(refs)} adapters": (adapted, refs),
    }
    for engine, some in cases.values():  # Slots are filled, and kernels have run.
        engine.run(requests_of(engine, max(1, len(some)), some, plan.context, _WARM_UP_TOKENS))
    found = _decode_times(cases, plan)
    for length in plan.prompts:
        times = [
            {name: first_token_ms(engine, length, some) for name, (engine, some) in cases.items()}
            for _ in range(plan.num_rounds)
        ]
        found[f"first token of {length}"] = _compared(times)
        print(f"first token of {length}: {found[f'first token of {length}']}", flush=True)
    return found


def measure_forms(
    plain: OfflineEngine,
    adapted: Mapping[str, OfflineEngine],
    refs: Sequence[AdapterRef],
    plan: Plan,
) -> dict[str, object]:
    """Takes the engines in turns: the first one, and those of each form without adapters, with one
    and with all of them."""
    cases = {"base": (plain, refs[:0])}
    for form, engine in adapted.items():
        counts = refs[:0], refs[:1], refs
        cases |= {f"{form}, {len(some)}": (engine, some) for some in counts}
    for engine, some in cases.values():
        engine.run(requests_of(engine, max(1, len(some)), some, plan.context, _WARM_UP_TOKENS))
    return _decode_times(cases, plan)


def _decode_times(cases: Mapping[str, Case], plan: Plan) -> dict[str, object]:
    found: dict[str, object] = {}
    for batch in plan.batches:
        times = [
            {name: decode_ms(engine, batch, some, plan) for name, (engine, some) in cases.items()}
            for _ in range(plan.num_rounds)
        ]
        found[f"decode {batch}"] = _compared(times)
        print(f"decode {batch}: {found[f'decode {batch}']}", flush=True)
    return found


def _compared(rounds: list[dict[str, float]]) -> dict[str, object]:
    """Returns the median time of each case, and the median of its ratio to the first engine."""
    return {
        name: {
            "ms": round(statistics.median(times[name] for times in rounds), 3),
            "ratio": round(statistics.median(times[name] / times["base"] for times in rounds), 4),
        }
        for name in rounds[0]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=sorted(SHAPES))
    parser.add_argument("--quantization", choices=sorted(QUANTIZATIONS), default="")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--forms", type=names_among(FORMS), help="ways to compute few rows")
    parser.add_argument("--batches", type=lambda text: tuple(map(int, text.split(","))))
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    shape = args.shape or ("llama-3.1-8b" if on_gpu else "tiny")
    plan = PLANS[args.device]
    plan = replace(plan, batches=args.batches or plan.batches)
    limits = {} if on_gpu else {"max_model_len": 512}
    config = shape_config(
        shape,
        device=args.device,
        max_num_seqs=max(plan.batches),
        capture_sizes=plan.batches,
        quantization=args.quantization,
        **limits,
    )
    if on_gpu:
        size = _kv_bytes(shape, max(plan.batches) * (plan.context + 2 * plan.num_steps))
        config = replace(config, cache=replace(config.cache, kv_cache_memory_bytes=size))
    with tempfile.TemporaryDirectory() as name:
        modules = write_adapters(Path(name), shape, args.adapters, args.rank)
        lora = LoRAConfig(
            max_loras=args.adapters,
            max_lora_rank=args.rank,
            max_cpu_loras=args.adapters,
            modules=modules,
        )
        refs = [AdapterRef(module.name, module.digest) for module in modules]
        with ExitStack() as stack:
            plain = stack.enter_context(_engine(config))
            if args.forms:
                adapted = {
                    form: stack.enter_context(_engine(_beside(config, lora, *FORMS[form])))
                    for form in args.forms
                }
                figures = measure_forms(plain, adapted, refs, plan)
            else:
                beside = stack.enter_context(_engine(_beside(config, lora)))
                figures = measure(plain, beside, refs, plan)
    about = {"shape": shape, "rank": args.rank, "quantization": args.quantization or "none"}
    name = "-".join(filter(None, ("lora", "forms" if args.forms else "", args.quantization)))
    print(write_result(name if on_gpu else f"{name}_cpu", {**about, **figures}))


def _kv_bytes(shape: str, num_tokens: int) -> int:
    """Returns what so many tokens take: were it less, not all requests would decode at once."""
    config = config_json(shape)
    layers, kv_heads, head_dim = (
        int(str(config[name])) for name in ("num_hidden_layers", "num_key_value_heads", "head_dim")
    )
    return max(num_tokens, _LEAST_KV_TOKENS) * 4 * layers * kv_heads * head_dim


def _beside(config: EngineConfig, lora: LoRAConfig, *without: FastPath) -> EngineConfig:
    device = replace(config.device, disabled_fast_paths=without)
    name = "-".join((config.engine_id, "lora", *without))
    return replace(config, engine_id=name, lora=lora, device=device)


def _engine(config: EngineConfig) -> AbstractContextManager[OfflineEngine]:
    executor = None if config.device.device == "cuda" else UniprocExecutor(config)
    return offline_engine(config, executor)


if __name__ == "__main__":
    main()
