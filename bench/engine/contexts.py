#!/usr/bin/env python3
"""Long contexts: decode steps behind 32k and 128k tokens beside the floor of their bytes, and
prompts of 64k and 128k tokens, in chunks, beside what their FLOPs would take at the speed of the
first chunk.

    python -m bench.engine.contexts                               # all engines
    python -m bench.engine.contexts --engines 8b,gpt-oss-20b --contexts 131072 --rows 1,8
    python -m bench.engine.contexts --engines v2-lite --prompts ''

The floor of a decode step: the model's own bytes (`engine.models.step_costs`) at 4.3 TB/s. Batches
for which the card has no room have as many rows as fit, and the table says how many. Weights are
random, experts are chosen uniformly, contexts of decodes are not computed (`timing.bare_steps`).
Results: bench/results/NAME.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from bench.arguments import names_among, numbers, parser_of
from bench.engine.sweep import BUDGET, ENGINES
from bench.engine.timing.bare_steps import BareSteps, bare_steps
from bench.record import write_result
from engine.contracts.steps.step_work import ModelCost, StepWork
from engine.models.step_costs import cost_of

_BANDWIDTH = 4.3e12
_SPARE = 64
"""Tokens that timed steps add to the longest context: cases are shorter by this many than they are
called, since models end at 131,072."""


@dataclass(frozen=True, slots=True)
class Figure:
    """Holds a case. `expected_ms`: a decode's floor, or what the prompt's FLOPs take at the speed
    of its first chunk. `share`: of that in what it took, at most 1 where nothing is lost."""

    engine: str
    case: str
    ms: float
    expected_ms: float
    share: float
    wanted_rows: int = 1


def measure(
    name: str, contexts: Sequence[int], rows: Sequence[int], prompts: Sequence[int]
) -> list[Figure]:
    """Starts an engine and times its cases."""
    config = ENGINES[name].config(max([*contexts, *prompts]), max_num_seqs=max(rows))
    cost = cost_of(config)
    assert cost is not None
    figures: list[Figure] = []
    with bare_steps(config) as steps:
        for context in contexts:
            for wanted in rows:
                figures.append(_decode(name, steps, cost, context - _SPARE, wanted))
                print(figures[-1], flush=True)
        for length in prompts:
            figures.append(_prompt(name, steps, cost, length - _SPARE))
            print(figures[-1], flush=True)
    return figures


def _decode(name: str, steps: BareSteps, cost: ModelCost, context: int, wanted: int) -> Figure:
    count = next(n for n in range(wanted, 0, -1) if steps.fits([context] * n))
    seconds = steps.decode_s([context] * count)
    work = StepWork(cost.windows)
    work.add_decodes([context] * count, 1)
    floor = cost.bytes_read(work) / _BANDWIDTH
    return _figure(name, f"decode {count} x {context}", seconds, floor, wanted)


def _prompt(name: str, steps: BareSteps, cost: ModelCost, length: int) -> Figure:
    """The second run counts: in the first libraries choose their algorithms."""
    ends = [steps.prompt_ends([(length, 0)]) for _ in range(2)][1]
    chunk = min(length, BUDGET)
    expected = ends[0] * _flops(cost, length, length) / _flops(cost, chunk, chunk)
    return _figure(name, f"prompt {length}", ends[-1], expected, 1)


def _flops(cost: ModelCost, end: int, count: int) -> float:
    work = StepWork(cost.windows)
    work.add_chunk(end, count, samples=True)
    return cost.flops(work)


def _figure(name: str, case: str, seconds: float, expected: float, wanted: int) -> Figure:
    ms, expected_ms = round(1e3 * seconds, 3), round(1e3 * expected, 3)
    return Figure(name, case, ms, expected_ms, round(expected / seconds, 3), wanted)


def main() -> None:
    parser = parser_of(__doc__, "contexts")
    default = ["8b", "8b-fp8", "gpt-oss-20b", "v2-lite"]
    parser.add_argument("--engines", type=names_among(ENGINES), default=default)
    parser.add_argument("--contexts", type=numbers, default=[32_768, 131_072])
    parser.add_argument("--rows", type=numbers, default=[1, 8, 32])
    parser.add_argument("--prompts", type=numbers, default=[65_536, 131_072], help="tokens of each")
    arguments = parser.parse_args()
    figures: list[Figure] = []
    for name in arguments.engines:
        figures += measure(name, arguments.contexts, arguments.rows, arguments.prompts)
        path = write_result(arguments.name, [asdict(one) for one in figures])
    print(path)


if __name__ == "__main__":
    main()
