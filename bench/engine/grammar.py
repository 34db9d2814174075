#!/usr/bin/env python3
"""Measures what grammars cost: masks on the host alone, and steps of an engine with and without.

Masks: 256 rows under different JSON schemas walk 64 tokens; the time to consume a token and fill
the next mask, all rows together. Steps: the time of a decode step with no row and with all rows
under grammars, and of the first token of a prompt. The grammars never end, so every row stays.

    python -m bench.engine.grammar                       # Llama 3.1 8B's shape on one GPU
    python -m bench.engine.grammar --device cpu          # masks, and steps of a tiny model
    python -m bench.engine.grammar --tokenizer FILE      # a real tokenizer.json

Weights and prompts are random; so is the vocabulary, unless given. Goals: masks of 256 rows at most
2.5 ms, a step of 64 rows at most 1.05 of one without grammars, the first token at most 3 ms later.
Results: bench/results/grammar.json.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import llguidance
import numpy as np
import torch

from bench.engine.models.shapes import SHAPES, shape_config
from bench.engine.models.tokenizer import save_tokenizer
from bench.record import write_result
from engine.config import EngineConfig
from engine.contracts.messages import EngineCoreRequest
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.row_grammar import RowGrammar
from engine.speed.offline_engine import OfflineEngine, offline_engine
from tandem_kernels import ops

_MASK_ROWS, _MASK_STEPS = 256, 64
_KERNEL_ROWS = (64, 256)


@dataclass(frozen=True, slots=True)
class Plan:
    """Says what is measured on a device. `context`: prompt tokens of requests that decode."""

    batches: tuple[int, ...]
    prompts: tuple[int, ...]
    context: int
    num_steps: int
    num_rounds: int


PLANS = {
    "cuda": Plan((1, 16, 64, 256), (128, 512, 2048), 1024, 128, 5),
    "cpu": Plan((1, 64), (128,), 32, 12, 3),
}


def grammar_of(index: int) -> str:
    """Returns a JSON schema's grammar that no answer of a bench completes; each index another."""
    item = {
        "type": "object",
        "properties": {
            f"name_{index}": {"type": "string", "maxLength": 40},
            "kind": {"enum": [f"kind {index}", "other", None]},
            "count": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        },
        "required": [f"name_{index}", "kind", "count", "tags"],
        "additionalProperties": False,
    }
    schema = {
        "type": "array",
        "items": item,
        "minItems": 10_000,
        "x-guidance": {"whitespace_flexible": False},
    }
    grammar: str = llguidance.LLMatcher.grammar_from_json_schema(schema)
    return grammar


def measure_masks(config: EngineConfig, num_threads: int) -> dict[str, float]:
    """Walks rows under grammars: each takes any token that its mask allows."""
    compiler = GrammarCompiler(config.model, num_threads)
    started = time.perf_counter()
    compiler.prepare()
    rows = [
        RowGrammar(compiler, grammar_of(i), epoch=0, output=[], eos_token_ids=[0])
        for i in range(_MASK_ROWS)
    ]
    compiling = [row.wait() or 0.0 for row in rows]
    ready_s = time.perf_counter() - started
    executor = llguidance.LLExecutor(num_threads)
    words = np.zeros((_MASK_ROWS, -(-config.model.vocab_size // 32)), np.int32)
    draw = np.random.default_rng(0)
    times = []
    tokens: list[int] = []
    for step in range(_MASK_STEPS):
        started = time.perf_counter()
        if step > 0:
            assert all(row.append(token) for row, token in zip(rows, tokens, strict=True))
            executor.consume_token_par(
                [(row.matcher, token) for row, token in zip(rows, tokens, strict=True)]
            )
        jobs = [(row.matcher, index) for index, row in enumerate(rows)]
        executor.unsafe_compute_mask_ptr(
            jobs, words.ctypes.data, words.shape[1] * words.itemsize, _MASK_ROWS
        )
        for row, of_row in zip(rows, words, strict=True):
            assert row.check_mask(of_row) == ""
        times.append(1e3 * (time.perf_counter() - started))
        tokens = [
            int(
                draw.choice(np.flatnonzero(np.unpackbits(of_row.view(np.uint8), bitorder="little")))
            )
            for of_row in words
        ]
    compiler.close()
    return {
        "rows": _MASK_ROWS,
        "threads": num_threads,
        "tokenizer_and_compiling_s": round(ready_s, 3),
        "compile_ms_p50": round(1e3 * statistics.median(compiling), 3),
        "compile_ms_max": round(1e3 * max(compiling), 3),
        "masks_ms_p50": round(statistics.median(times), 3),
        "masks_ms_p90": round(sorted(times)[int(0.9 * len(times))], 3),
        "masks_ms_max": round(max(times), 3),
    }


def under_grammar(request: EngineCoreRequest, index: int) -> EngineCoreRequest:
    """Returns the request with a grammar of its own."""
    request.spec = request.spec.with_sampling(grammar=grammar_of(index), ignore_eos=False)
    request.eos_token_ids = (0,)
    return request


def requests_of(
    engine: OfflineEngine, count: int, num_grammars: int, length: int, max_tokens: int
) -> list[EngineCoreRequest]:
    made = [engine.request(length, max_tokens) for _ in range(count)]
    return [
        under_grammar(request, random.randrange(1 << 30)) if i < num_grammars else request
        for i, request in enumerate(made)
    ]


def decode_ms(engine: OfflineEngine, batch: int, num_grammars: int, plan: Plan) -> float:
    """Returns the median time of a decode step of `batch` requests."""
    max_tokens = plan.num_steps + 1 + -(-batch * plan.context // 8192)
    requests = requests_of(engine, batch, num_grammars, plan.context, max_tokens)
    steps = engine.run(requests)
    first = next(i for i, step in enumerate(steps) if step.num_tokens >= batch)
    measured = steps[first : first + plan.num_steps + 1]
    return statistics.median(
        1e3 * (b.at - a.at) * batch / b.num_tokens for a, b in pairwise(measured)
    )


def first_token_ms(engine: OfflineEngine, length: int, has_grammar: bool) -> float:
    """Returns the median time to the first token of a prompt that is alone."""
    times = []
    for _ in range(6):
        requests = requests_of(engine, 1, int(has_grammar), length, 1)
        started = time.perf_counter()
        times.append(1e3 * (engine.run(requests)[0].at - started))
    return statistics.median(times[1:])


def measure_steps(config: EngineConfig, plan: Plan) -> dict[str, object]:
    """Alternates with and without grammars, so that a machine that changes pace does not matter."""
    found: dict[str, object] = {}
    with offline_engine(config) as engine:
        first_token_ms(engine, plan.prompts[0], has_grammar=True)
        for batch in plan.batches:
            found[f"decode {batch}"] = _compared(
                [
                    (decode_ms(engine, batch, 0, plan), decode_ms(engine, batch, batch, plan))
                    for _ in range(plan.num_rounds)
                ]
            )
        for length in plan.prompts:
            found[f"first token of {length}"] = _compared(
                [
                    (first_token_ms(engine, length, False), first_token_ms(engine, length, True))
                    for _ in range(plan.num_rounds)
                ]
            )
        stats = engine.core.stats().grammar
    found["masks of a step, ms"] = round(1e3 * stats.filling.total_s / sum(stats.filling.counts), 3)
    found["waits for a grammar, ms"] = round(
        1e3 * stats.waiting.total_s / sum(stats.waiting.counts), 3
    )
    return found


def _compared(pairs: list[tuple[float, float]]) -> dict[str, float]:
    """Compares medians of pairs (without grammars, under them)."""
    without, under = (statistics.median(times) for times in zip(*pairs, strict=True))
    return {
        "plain_ms": round(without, 3),
        "grammar_ms": round(under, 3),
        "ratio": round(under / without, 3),
        "more_ms": round(under - without, 3),
    }


def measure_kernel(vocab_size: int) -> dict[str, float]:
    """Returns the microseconds of masking logits on the GPU, a tenth of the tokens allowed."""
    found = {}
    for rows in _KERNEL_ROWS:
        logits = torch.randn(rows, vocab_size, device="cuda")
        words = torch.randint(0, 2**31, (rows, -(-vocab_size // 32)), device="cuda")
        masks = (words & words.roll(1, 1) & words.roll(2, 1)).int()
        entries = torch.arange(rows, dtype=torch.int32, device="cuda")
        ops.mask_logits(logits, masks, entries)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(100):
            ops.mask_logits(logits, masks, entries)
        end.record()
        end.synchronize()
        found[f"mask kernel of {rows} rows, us"] = round(10 * start.elapsed_time(end), 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=sorted(SHAPES))
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json; made up unless given")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--only-masks", action="store_true")
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    shape = args.shape or ("llama-3.1-8b" if on_gpu else "tiny")
    limits = {} if on_gpu else {"max_model_len": 1024, "max_num_seqs": 64}
    config = shape_config(shape, device=args.device, **limits)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.tokenizer is None:
            save_tokenizer(folder, config.model.vocab_size)
        else:
            shutil.copy(args.tokenizer, folder / "tokenizer.json")
        config = replace(config, model=replace(config.model, path=name, eos_token_ids=(0,)))
        figures: dict[str, object] = {
            "shape": shape,
            "masks": [measure_masks(config, threads) for threads in args.threads],
        }
        print(json.dumps(figures, indent=1), flush=True)
        if not args.only_masks:
            figures["steps"] = measure_steps(config, PLANS[args.device])
            if on_gpu:
                figures["kernel"] = measure_kernel(config.model.vocab_size)
            print(json.dumps(figures, indent=1))
    print(write_result("grammar" if on_gpu else "grammar_cpu", figures))


if __name__ == "__main__":
    main()
