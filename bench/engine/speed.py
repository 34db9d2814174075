#!/usr/bin/env python3
"""Speed of one engine, without a server, beside floor, peer and goals.

Decode: all requests of a batch have 1024 tokens of prompt; the time of each of the next 128 steps.
Short: one prompt of up to 512 tokens alone, until its first token. Prefill: the same for long
prompts, and many at once, prompt tokens per second.
Row, prompt: the first of decode and of prefill alone, for comparisons. Rested: that prompt on a GPU
that has rested half a second, as one finds it that has a node to itself.
Parameters: steps of 64 requests that all use one sampling parameter; to be compared with decode.
Throughput: 256 requests at once, 2000 tokens in, 150 out. Small: fewer of both, as measured for
mixtures of experts. Large: the cases measured beside vLLM for 70B on four GPUs. `--prompts`: single
prompts of other lengths.

    python -m bench.engine.speed                          # the shape of Llama 3.1 8B on one GPU
    python -m bench.engine.speed --shape qwen2.5-7b --cases decode
    python -m bench.engine.speed --cases decode,parameters
    python -m bench.engine.speed --breakdown              # also: where the time of a step goes
    python -m bench.engine.speed --tp 2 --cases decode    # two GPUs
    python -m bench.engine.speed --shape gpt-oss-120b --uniform-routing
    python -m bench.engine.speed --quantization fp8       # or fp8-block, int4, int8
    python -m bench.engine.speed --quantization fp8 --kv-cache-dtype fp8
    python -m bench.engine.speed --cases '' --prompts 2420,3020,4220
    python -m bench.engine.speed --drafts 3               # up to 3 a step, 0.8 and none right

Weights and prompts are random. Results: bench/results/NAME.json.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise, product
from pathlib import Path

import msgspec

from bench.arguments import add_model, names_among, numbers, parser_of
from bench.engine.models.parameters import PARAMETERS, with_tokenizer
from bench.engine.models.planted import PlantedDrafts, planted_tokens, uniform_routing, with_drafts
from bench.engine.models.shapes import shape_config
from bench.figures import markdown
from bench.record import write_result
from engine.config import EngineConfig
from engine.executor.uniproc_executor import UniprocExecutor
from engine.speed.measurements import (
    BatchDoesNotFit,
    decode_steps,
    duration_s,
    prompts_alone,
    prompts_together,
)
from engine.speed.offline_engine import OfflineEngine, offline_engine

_CONTEXT, _STEPS = 1024, 128
_REST_S = 0.5
_REFERENCES = Path(__file__).parent / "timing" / "references.json"


class Reference(msgspec.Struct, frozen=True):
    """Says what a figure is held against, of one H200, in bf16 unless a shape's name says how
    weights and cache are quantised. `peer`: vLLM 0.26.0 on the same kind of machine, of mixtures of
    experts with uniform routing; `must`, `goal`: what we ask of ourselves; `floor`: the bytes that
    are read (70B: a rank's; qwen3.5: states, too, and the distinct experts) at 4.3 TB/s. None:
    unknown."""

    peer: float | None = None
    must: float | None = None
    goal: float | None = None
    floor: float | None = None


@dataclass(frozen=True, slots=True)
class Figure:
    """`value` in `unit`. Speeds against others are above 1 where we are faster."""

    case: str
    value: float
    unit: str
    median: float | None = None
    p99: float | None = None

    def speed(self, other: float) -> float:
        return self.value / other if self.unit == "ktok/s" else other / self.value


def measure_decode(engine: OfflineEngine, batch: int, parameter: str = "") -> Figure:
    sampling = [PARAMETERS[parameter]] * batch if parameter else []
    found = decode_steps(engine, batch, _CONTEXT, _STEPS, 8192, sampling)
    return Figure(
        f"decode {batch}{parameter and f' with {parameter}'}",
        round(1e3 * found.mean_s, 3),
        "ms",
        round(1e3 * found.median_s, 3),
        round(1e3 * found.p99_s, 3),
    )


def measure_drafts(engine: OfflineEngine, share: float, batch: int) -> Figure:
    """Measures what a token of each request takes, when this share of drafts is right. The first
    batch shows what drafts cost and how many are right."""
    drafter = PlantedDrafts(engine.vocab_size)
    drafter.share = share
    assert isinstance(engine.executor, UniprocExecutor)
    engine.executor._worker.runner.drafts.drafter = drafter
    tokens = _STEPS * engine.core.config.decode_query_len
    for _ in range(2):
        steps = engine.run([engine.request(_CONTEXT, tokens) for _ in range(batch)])
    first = next(i for i, step in enumerate(steps) if step.num_tokens >= batch)
    measured = steps[first : first + _STEPS + 1]
    each = [1e3 * (b.at - a.at) * batch / b.num_tokens for a, b in pairwise(measured)]
    count = sum(step.num_tokens for step in measured[1:]) / batch
    mean = 1e3 * (measured[-1].at - measured[0].at) / count
    name = f"decode {batch}, {share:g} of drafts right"
    return Figure(name, round(mean, 3), "ms", round(statistics.median(each), 3))


def measure_single_prefill(engine: OfflineEngine, length: int, rest_s: float = 0.0) -> Figure:
    times = [1e3 * seconds for seconds in prompts_alone(engine, length, rest_s)]
    return Figure(
        f"prefill {length} {'rested' if rest_s else 'alone'}",
        round(statistics.median(times), 2),
        "ms",
        round(statistics.median(times), 2),
        round(times[-1], 2),
    )


def measure_prefill(engine: OfflineEngine, count: int, length: int) -> Figure:
    seconds = prompts_together(engine, count, length)
    return Figure(f"prefill {count} x {length}", round(count * length / seconds / 1e3, 2), "ktok/s")


def measure_throughput(
    engine: OfflineEngine, count: int, num_in: int = 2000, num_out: int = 150
) -> Figure:
    requests = [engine.request(num_in, num_out) for _ in range(count)]
    seconds = duration_s(engine, requests)
    return Figure(f"throughput {count} x {num_in}/{num_out}", round(seconds, 3), "s")


Measure = Callable[[OfflineEngine], Figure]


def _decodes(*batches: int) -> list[Measure]:
    return [partial(measure_decode, batch=batch) for batch in batches]


def _alone(*lengths: int, rest_s: float = 0.0) -> list[Measure]:
    return [partial(measure_single_prefill, length=n, rest_s=rest_s) for n in lengths]


def _together(*prompts: tuple[int, int]) -> list[Measure]:
    return [partial(measure_prefill, count=count, length=length) for count, length in prompts]


def _throughput(count: int, num_in: int = 2000, num_out: int = 150) -> Measure:
    return partial(measure_throughput, count=count, num_in=num_in, num_out=num_out)


CASES: dict[str, list[Measure]] = {
    "decode": _decodes(1, 16, 64, 128, 256),
    "short": _alone(16, 128, 512),
    "prefill": [*_alone(2048, 8192), *_together((32, 2048), (12, 8192))],
    "row": _decodes(1),
    "prompt": _alone(2048),
    "rested": _alone(2048, rest_s=_REST_S),
    "many": _together((16, 2048), (4, 8192)),
    "parameters": [partial(measure_decode, batch=64, parameter=name) for name in PARAMETERS],
    "throughput": [_throughput(256)],
    "small": [*_together((16, 2048)), _throughput(128)],
    "large": [
        *_decodes(1, 16, 64, 200),
        *_alone(1500, 6000),
        *_together((16, 1500), (6, 6000)),
        _throughput(128, 1000, 200),
    ],
}
_BY_DEFAULT = ["decode", "short", "prefill", "throughput"]


def print_table(figures: list[Figure], references: dict[str, Reference]) -> None:
    cells = []
    for figure in figures:
        own = references.get(figure.case, Reference())
        speeds = [
            other and figure.speed(other) for other in (own.floor, own.peer, own.must, own.goal)
        ]
        numbers = [f"{one:.2f}" if one else "" for one in (figure.median, figure.p99, *speeds)]
        cells.append([figure.case, f"{figure.value:.2f} {figure.unit}", *numbers])
    print(markdown("case, value, median, p99, speed of floor, of peer, of must, of goal", cells))


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, "")
    add_model(parser, "llama-3.1-8b")
    parser.add_argument("--cases", type=names_among(CASES), default=_BY_DEFAULT, help="by comma")
    parser.add_argument("--prompts", type=numbers, default=[], help="tokens of each, by comma")
    parser.add_argument("--tp", type=int, default=1, help="GPUs that share the model")
    kinds = "auto", "bfloat16", "fp8"
    parser.add_argument("--kv-cache-dtype", choices=kinds, default="auto", help="see the setting")
    parser.add_argument(
        "--uniform-routing", action="store_true", help="to experts, in one process, on one GPU"
    )
    parser.add_argument(
        "--drafts", type=int, default=0, help="planted ones, this many at most, in place of cases"
    )
    parser.add_argument("--breakdown", action="store_true", help="also profile single steps")
    parser.add_argument(
        "--disabled-fast-paths", default="", help="comma separated; see the setting"
    )
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192, help="see the setting")
    arguments = parser.parse_args()
    if (arguments.breakdown or arguments.uniform_routing) and arguments.tp > 1:
        parser.error("--breakdown and --uniform-routing: one process, one GPU")
    return arguments


def config_of(arguments: argparse.Namespace) -> EngineConfig:
    return shape_config(
        arguments.shape,
        disabled_fast_paths=tuple(filter(None, arguments.disabled_fast_paths.split(","))),
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        max_model_len=max([9216, *(length + 64 for length in arguments.prompts)]),
        tensor_parallel_size=arguments.tp,
        quantization=arguments.quantization,
        kv_cache_dtype=arguments.kv_cache_dtype,
    )


def measures_of(arguments: argparse.Namespace) -> list[Measure]:
    if arguments.drafts:
        planted = product((1, 64), (0.8, 0.0))
        return [partial(measure_drafts, share=share, batch=batch) for batch, share in planted]
    cases = [measure for case in arguments.cases for measure in CASES[case]]
    return [*cases, *_alone(*arguments.prompts)]


def run_cases(
    config: EngineConfig, measures: Sequence[Measure], results: dict[str, object], in_process: bool
) -> list[Figure]:
    """Measures on one engine, and adds to `results` how it started."""
    figures: list[Figure] = []
    with offline_engine(config, UniprocExecutor(config) if in_process else None) as engine:
        results["start_s"] = round(engine.start_s, 1)
        results["num_blocks"] = engine.core.num_blocks
        print(f"started in {engine.start_s:.1f} s, {engine.core.num_blocks} blocks", flush=True)
        engine.run([engine.request(100, 20) for _ in range(4)])
        for measure in measures:
            try:
                figures.append(measure(engine))
            except BatchDoesNotFit as error:
                print(f"left out: {error}", flush=True)
                continue
            print(figures[-1], flush=True)
    return figures


def main() -> None:
    arguments = parse_arguments()
    suffix = f"-tp{arguments.tp}" if arguments.tp > 1 else ""
    if arguments.quantization:
        suffix = f"-{arguments.quantization}{suffix}"
    if arguments.kv_cache_dtype == "fp8":
        suffix = f"{suffix}-kv-fp8"
    name = arguments.name or f"engine-{arguments.shape}{suffix}"
    figures: list[Figure] = []
    results: dict[str, object] = {"shape": arguments.shape, "tensor_parallel_size": arguments.tp}
    measures = measures_of(arguments)
    config = config_of(arguments)
    in_process = arguments.uniform_routing
    planted = nullcontext()
    words = with_tokenizer(config) if "parameters" in arguments.cases else nullcontext(config)
    if arguments.drafts:
        config, in_process = with_drafts(config, arguments.drafts), True
        planted = planted_tokens(config.model.vocab_size)
    results["quantization"] = arguments.quantization
    in_fp8 = config.cache.kv_scales is not None
    results["kv_cache_dtype"] = "float8_e4m3fn" if in_fp8 else config.model.dtype
    results["disabled_fast_paths"] = config.device.disabled_fast_paths
    results["uniform_routing"] = arguments.uniform_routing
    results["max_num_batched_tokens"] = arguments.max_num_batched_tokens
    budget = arguments.max_num_batched_tokens
    uniform = uniform_routing(budget) if arguments.uniform_routing else nullcontext()
    with planted, uniform, words as config:
        if measures:
            figures = run_cases(config, measures, results, in_process)
        if arguments.breakdown:
            from bench.engine.timing.step_breakdown import measure_breakdown

            results["breakdown"] = measure_breakdown(config)
    results["cases"] = [asdict(figure) for figure in figures]
    known = msgspec.json.decode(_REFERENCES.read_bytes(), type=dict[str, dict[str, Reference]])
    references = known.get(f"{arguments.shape}{suffix}", {})
    print_table(figures, references)
    print(write_result(name, results))


if __name__ == "__main__":
    main()
