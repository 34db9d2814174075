#!/usr/bin/env python3
"""Measures what drafts save and cost: tokens per second with drafts of known quality, the time of
looking n-grams up, and an answer that copies its prompt.

Planted drafts: the answers of all requests are known from a run before; each draft is right with
the chosen probability. Tokens per second of a batch, all requests decoding, beside those of an
engine without drafts. Each step drafts as many as pay, or always all with `--fixed`. The share that
was in fact accepted is told, too: where logits nearly tie, an answer may go another way than in the
run before, and what is planted is wrong from there on. Prompts are cached after the first run.
Lookup: 256 rows of 8k tokens, the last of which came before.
Copying: one stream through a prefill and a decode engine on one GPU (`drafts/copying.py`).

    python -m bench.engine.speculative                    # Llama 3.1 8B's shape on one GPU
    python -m bench.engine.speculative --device cpu       # a tiny model
    python -m bench.engine.speculative --only lookup copying

Goals, against no drafts: acceptance 0.8: 2.5 times the tokens per second at 1 row, 2.2 at 16, 1.7
at 64, 0.98 at 256; acceptance 0: 0.97. Lookup: 20 us. Copying: 2 times.
Results: bench/results/speculative.json, unless a part is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass, field, replace

import msgspec
import torch

from bench.engine.drafts.copying import Copying, CopyingExecutor, measure_copying
from bench.engine.models.shapes import SHAPES, shape_config
from bench.engine.timing.device_time import graph_us
from bench.record import write_result
from engine.config import EngineConfig, SpeculativeConfig
from engine.contracts.messages import EngineCoreOutput, EngineCoreRequest
from engine.contracts.request_spec import RequestSpec
from engine.speed.offline_engine import OfflineEngine, offline_engine
from engine.worker.drafter import Drafter
from tandem_kernels import ops
from tandem_kernels.batch.batch_tables import RowTables

_LOOKUP_ROWS, _LOOKUP_TOKENS, _LOOKUP_LENGTHS = 256, 8192, (2, 4)


@dataclass(frozen=True, slots=True)
class Plan:
    """Says what is measured on a device. `context`: prompt tokens of each request."""

    batches: tuple[int, ...]
    context: int
    num_tokens: int
    num_rounds: int


PLANS = {"cuda": Plan((1, 16, 64, 256), 1024, 224, 2), "cpu": Plan((1, 8), 16, 40, 1)}
COPYING = {"cuda": Copying(2000, 512, 3), "cpu": Copying(60, 40, 1)}
PARTS = ("lookup", "planted", "copying")
ACCEPTANCES = (0.8, 0.0)
Rows = list[dict[str, float]]


class PlantedDrafter:
    """Proposes what `answers` [N, L] say, but something else where `lies` [N, L]. A row's first
    token, less 1, is its answer."""

    def __init__(self, answers: torch.Tensor, lies: torch.Tensor) -> None:
        self._drafts = torch.where(lies, answers ^ 1, answers)

    def propose(self, idx_mapping: torch.Tensor, rows: RowTables) -> torch.Tensor:
        row = idx_mapping.long()
        answer = (rows.token_ids[row, 0].long() - 1).clamp(0, len(self._drafts) - 1)
        ahead = torch.arange(rows.max_drafts, device=row.device)
        place = rows.total_len[row].long().unsqueeze(1) + ahead
        return self._drafts[answer.unsqueeze(1), place.clamp(max=self._drafts.shape[1] - 1)]


class PlantedExecutor(CopyingExecutor):
    """Runs a model whose answers are known, and do not depend on how many tokens a step computes:
    those of random weights soon differ, as two tokens are often equally likely."""

    def plant(self, drafter: Drafter) -> None:
        """Replaces who drafts, from the next step on. There must be somebody: without, nothing that
        writes drafts was compiled while the engine started."""
        assert self._worker.runner.drafts.drafter is not None
        self._worker.runner.drafts.drafter = drafter


@dataclass
class Watch:
    """Sees the outputs of a run: `tokens` by request, and the speed while all of them decode."""

    num_requests: int
    tokens: dict[str, list[int]] = field(default_factory=dict)
    window: list[tuple[float, int]] = field(default_factory=list)
    """Holds (when, tokens) of the steps after all had begun and before any had ended."""
    has_ended: bool = False

    def __call__(self, outputs: list[EngineCoreOutput]) -> None:
        for output in outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            self.has_ended |= bool(output.finish_reason)
        if len(self.tokens) == self.num_requests and not self.has_ended and outputs:
            count = sum(len(output.new_token_ids) for output in outputs)
            self.window.append((time.perf_counter(), count))

    @property
    def tokens_per_s(self) -> float:
        (started, _), *others = self.window
        return sum(count for _, count in others) / (others[-1][0] - started)


def requests_of(engine: OfflineEngine, count: int, plan: Plan) -> list[EngineCoreRequest]:
    """Returns requests with prompts of their own, the same in every call but for their names."""
    generator = torch.Generator().manual_seed(count)
    made = []
    for index in range(count):
        request = engine.request(plan.context, plan.num_tokens)
        prompt = torch.randint(1, engine.vocab_size, (plan.context,), generator=generator).tolist()
        spec = RequestSpec([index + 1, *prompt[1:]], request.spec.sampling)
        made.append(msgspec.structs.replace(request, spec=spec))
    return made


def watched(engine: OfflineEngine, count: int, plan: Plan) -> Watch:
    """Runs a batch."""
    watch = Watch(count)
    engine.run(requests_of(engine, count, plan), on_outputs=watch)
    return watch


def known_answers(engine: OfflineEngine, count: int, plan: Plan) -> torch.Tensor:
    """Returns prompts with their answers, [count, L]."""
    ahead = torch.arange(1, plan.num_tokens + 1)
    prompts = [list(one.spec.prompt_token_ids) for one in requests_of(engine, count, plan)]
    known = torch.tensor(prompts)
    return torch.cat((known, (known[:, -1:] + ahead) % engine.vocab_size), dim=1)


def measure_plain(config: EngineConfig, plan: Plan) -> dict[int, float]:
    """Returns tokens per second of each batch, without drafts."""
    with offline_engine(config, PlantedExecutor(config)) as engine:
        watched(engine, plan.batches[0], plan)
        return {
            batch: statistics.median(
                watched(engine, batch, plan).tokens_per_s for _ in range(plan.num_rounds)
            )
            for batch in plan.batches
        }


def measure_planted(config: EngineConfig, plan: Plan, plain: dict[int, float]) -> Rows:
    """Compares each batch and quality of drafts with `plain`."""
    executor = PlantedExecutor(config)
    device = config.device.device
    found: Rows = []
    with offline_engine(config, executor) as engine:
        for batch in plan.batches:
            answers = known_answers(engine, batch, plan)
            for acceptance in ACCEPTANCES:
                lies = torch.rand(answers.shape) >= acceptance
                executor.plant(PlantedDrafter(answers.to(device), lies.to(device)))
                watched(engine, batch, plan)
                before = engine.core.stats().drafts
                speeds = [watched(engine, batch, plan).tokens_per_s for _ in range(plan.num_rounds)]
                after = engine.core.stats().drafts
                first = sum(after.num_accepted_per_pos[:1]) - sum(before.num_accepted_per_pos[:1])
                num_drafts = after.num_drafts - before.num_drafts
                found.append(
                    {
                        "rows": batch,
                        "planted": acceptance,
                        "first draft accepted": round(first / max(num_drafts, 1), 3),
                        "rows with drafts": num_drafts,
                        "tokens_per_s": round(statistics.median(speeds), 1),
                        "plain_tokens_per_s": round(plain[batch], 1),
                        "ratio": round(statistics.median(speeds) / plain[batch], 3),
                    }
                )
    return found


def lookup_tables(num_rows: int, num_tokens: int, num_drafts: int, device: str) -> RowTables:
    """Returns full rows of random tokens, whose last ones came before in the middle."""
    token_ids = torch.randint(0, 128_256, (num_rows, num_tokens), dtype=torch.int32, device=device)
    token_ids[:, num_tokens // 2 : num_tokens // 2 + 4] = token_ids[:, -4:]
    full = torch.full((num_rows,), num_tokens, dtype=torch.int32, device=device)
    empty = torch.zeros((num_rows, 1), dtype=torch.int32, device=device)
    return RowTables(token_ids, full, full, full, empty, num_tokens, num_drafts)


def measure_lookup(num_drafts: int) -> float:
    """Returns the microseconds of a lookup, from tables that no cache holds whole."""
    sets = [lookup_tables(_LOOKUP_ROWS, _LOOKUP_TOKENS, num_drafts, "cuda") for _ in range(16)]
    rows = torch.arange(_LOOKUP_ROWS, dtype=torch.int32, device="cuda")
    return graph_us(
        [lambda tables=tables: ops.lookup_ngrams(rows, tables, *_LOOKUP_LENGTHS) for tables in sets]
    )


def drafts_of(num_drafts: int, *, adaptive: bool) -> SpeculativeConfig:
    """Returns the setting of drafts by n-grams, which planted ones replace."""
    shortest, longest = _LOOKUP_LENGTHS
    return SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=num_drafts,
        prompt_lookup_max=longest,
        prompt_lookup_min=shortest,
        adaptive=adaptive,
    )


def measure_all_planted(config: EngineConfig, plan: Plan, speculative: SpeculativeConfig) -> Rows:
    """Measures an engine without drafts, and then one with planted ones."""
    config = replace(config, cache=replace(config.cache, enable_prefix_caching=True))
    plain = measure_plain(config, plan)
    length = speculative.num_speculative_tokens + 1
    drafting = replace(config, speculative=speculative, decode_query_len=length)
    return measure_planted(drafting, plan, plain)


def copying_config(shape: str, device: str) -> EngineConfig:
    """Returns an engine for one stream, so small that three fit on a GPU."""
    on_gpu = device == "cuda"
    config = shape_config(
        shape,
        device=device,
        max_model_len=4096 if on_gpu else 256,
        max_num_seqs=4,
        max_num_batched_tokens=4096 if on_gpu else 256,
        capture_sizes=(1,),
    )
    return replace(config, cache=replace(config.cache, num_blocks=64))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=sorted(SHAPES))
    parser.add_argument("--drafts", type=int, default=7, help="most of a step")
    parser.add_argument("--fixed", action="store_true", help="all drafts in each step")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    args = parser.parse_args()
    on_gpu, started = args.device == "cuda", time.perf_counter()
    shape = args.shape or ("llama-3.1-8b" if on_gpu else "tiny")
    plan, adaptive = PLANS[args.device], not args.fixed
    figures: dict[str, object] = {"shape": shape, "drafts": args.drafts, "adaptive": adaptive}
    if on_gpu and "lookup" in args.only:
        figures["lookup of 256 rows of 8192 tokens, us"] = round(measure_lookup(args.drafts), 2)
        _tell(started, figures)
    if "copying" in args.only:
        drafts = drafts_of(args.drafts, adaptive=False)
        figures["copying through P/D"] = measure_copying(
            copying_config(shape, args.device), drafts, COPYING[args.device]
        )
        _tell(started, figures)
    if "planted" in args.only:
        limits = {"capture_sizes": plan.batches} if on_gpu else {"max_model_len": 128}
        config = shape_config(shape, device=args.device, **limits)  # type: ignore[arg-type]
        drafts = drafts_of(args.drafts, adaptive=adaptive)
        figures["planted"] = measure_all_planted(config, plan, drafts)
    figures["seconds"] = round(time.perf_counter() - started)
    print(json.dumps(figures, indent=1))
    if on_gpu and set(args.only) == set(PARTS):
        print(write_result("speculative", figures))


def _tell(started: float, figures: dict[str, object]) -> None:
    print(f"{time.perf_counter() - started:.0f} s: {json.dumps(figures)}", flush=True)


if __name__ == "__main__":
    main()
