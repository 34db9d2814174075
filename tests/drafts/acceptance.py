#!/usr/bin/env python3
"""Measures how many drafts of trained heads are right, on the demo model and the CPU.

Chats that the heads never saw, half of them greedy, run three ways, which give the same tokens to
the bit:

    one node, cold        no prefix cache
    after a prefix hit    the prompt is in the cache, and the drafter's part of it
    through P/D           a prefill engine computes prompts and what drafters keep of them

A hit and a hand-over must not cost drafts: at least 0.98 of the tokens that drafts save cold.

    python -m demo_model.drafters --out drafters    # once, some minutes
    python tests/drafts/acceptance.py --drafters drafters

Results: bench/results/acceptance.json. The exit status is 1 below 0.98, or if tokens differ.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import torch
from tokenizers import Tokenizer

from bench.record import write_result
from demo_model.corpus import ASSISTANT, documents
from engine.config import (
    CacheConfig,
    DeviceConfig,
    DrafterName,
    EngineConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from engine.contracts.messages import EngineCoreRequest
from engine.contracts.outputs import DraftStats
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from engine.models.checkpoint import load_model_config
from engine.models.draft_checkpoint import read_draft
from tests.drafts.draft_engines import Engine, Node, Pair, with_transfers
from tests.drafts.draft_requests import Answers
from tests.drafts.parity import run

DEMO = Path("cli/demo_checkpoint")
METHODS: tuple[DrafterName, ...] = ("eagle3", "medusa", "ngram")
GOAL = 0.98
_BLOCK_SIZE, _MAX_LEN = 16, 640
_SEED = 977
"""Makes documents that no training has used."""


@dataclass(frozen=True, slots=True)
class Chats:
    """Says what is asked: this many requests with prompts of some length, and how much is
    answered."""

    count: int = 48
    shortest: int = 100
    longest: int = 400
    num_tokens: int = 96
    num_drafts: int = 3


def prompts(demo: Path, chats: Chats) -> list[list[int]]:
    """Returns chats up to where the model is to answer."""
    tokenizer = Tokenizer.from_file(str(demo / "tokenizer.json"))

    def found() -> Iterator[list[int]]:
        for text in documents(_SEED, long=True):
            before = text.split(ASSISTANT)
            for turns in range(len(before) - 1, 0, -1):
                whole = ASSISTANT.join(before[:turns]) + ASSISTANT
                ids = tokenizer.encode(whole, add_special_tokens=False).ids
                if chats.shortest <= len(ids) <= chats.longest:
                    yield ids
                    break

    return list(islice(found(), chats.count))


def requests_of(demo: Path, chats: Chats) -> list[EngineCoreRequest]:
    return [
        EngineCoreRequest(
            request_id=f"chat-{index}",
            spec=RequestSpec(
                prompt,
                SamplingParams(
                    temperature=0.8 * (index % 2),
                    seed=index,
                    max_tokens=chats.num_tokens,
                    ignore_eos=True,
                ),
            ),
        )
        for index, prompt in enumerate(prompts(demo, chats))
    ]


def config_of(demo: Path, drafters: Path, method: DrafterName, chats: Chats) -> EngineConfig:
    """Returns an engine without a prefix cache, deterministic, so that all ways give one text."""
    model = load_model_config(demo, max_model_len=_MAX_LEN)
    draft = None
    if method != "ngram":
        draft = read_draft(method, str(drafters / method), model, chats.num_drafts)
    return EngineConfig(
        engine_id=f"acceptance-{method}",
        epoch=1,
        model=model,
        cache=CacheConfig(
            block_size=_BLOCK_SIZE,
            num_blocks=(chats.count + 1) * (_MAX_LEN // _BLOCK_SIZE),
            enable_prefix_caching=False,
        ),
        scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=512),
        device=DeviceConfig(deterministic=True),
        speculative=SpeculativeConfig(
            method=method,
            num_speculative_tokens=chats.num_drafts,
            prompt_lookup_max=4,
            prompt_lookup_min=3,
            draft=draft,
        ),
        decode_query_len=chats.num_drafts + 1,
    )


def ways(config: EngineConfig, requests: list[EngineCoreRequest]) -> Iterator[tuple[str, Node]]:
    """Yields each way's name and a node that is ready for the requests; it is closed behind."""
    cold = Engine(config)
    yield "one node, cold", cold
    cold.close()
    caching = replace(config, cache=replace(config.cache, enable_prefix_caching=True))
    warm = Engine(caching)
    first = [
        msgspec.structs.replace(one, request_id=f"first-{one.request_id}", spec=_shortest(one.spec))
        for one in requests
    ]
    run(warm, first, Answers())
    yield "after a prefix hit", warm
    if warm.core.stats().prefix_cache_hits == 0:
        raise RuntimeError("no prompt was in the cache: nothing was measured")
    warm.close()
    prefill = Engine(with_transfers(replace(config, decode_query_len=1), is_producer=True))
    pair = Pair(prefill, Engine(with_transfers(config, is_producer=False)))
    yield "through P/D", pair
    if pair.core.stats().prompt_tokens_transferred == 0:
        raise RuntimeError("no KV came over the wire: nothing was measured")
    pair.close()
    prefill.close()


def _shortest(spec: RequestSpec) -> RequestSpec:
    return spec.for_one_token()


def measure(demo: Path, drafters: Path, method: DrafterName, chats: Chats) -> dict[str, Any]:
    """Returns what each way accepted, and its part of what the first did."""
    requests = requests_of(demo, chats)
    found: dict[str, Any] = {}
    tokens: dict[str, list[int]] | None = None
    cold = 0.0
    for way, node in ways(config_of(demo, drafters, method, chats), requests):
        before, answers = node.core.stats().drafts, Answers()
        run(node, requests, answers)
        saved = accepted(before, node.core.stats().drafts)
        cold = cold or saved["tokens saved per step"]
        saved["of one node, cold"] = round(saved["tokens saved per step"] / cold, 4)
        tokens = tokens or answers.tokens
        saved["same tokens"] = answers.tokens == tokens
        found[way] = saved
    return found


def accepted(before: DraftStats, after: DraftStats) -> dict[str, Any]:
    """Returns what was accepted in between."""
    num_drafts = after.num_drafts - before.num_drafts
    earlier = [*before.num_accepted_per_pos, *[0] * len(after.num_accepted_per_pos)]
    by_position = [
        round((count - was) / num_drafts, 3)
        for count, was in zip(after.num_accepted_per_pos, earlier, strict=False)
    ]
    saved = after.num_accepted_tokens - before.num_accepted_tokens
    return {
        "steps of rows with drafts": num_drafts,
        "accepted by position": by_position,
        "tokens saved per step": round(saved / num_drafts, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--drafters", type=Path, required=True)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--count", type=int, default=Chats().count)
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    for method in args.methods:
        figures[method] = measure(args.model, args.drafters, method, Chats(count=args.count))
        print(json.dumps({method: figures[method]}, indent=1), flush=True)
    print(write_result("acceptance", figures))
    every = [one for ways_found in figures.values() for one in ways_found.values()]
    sys.exit(not all(one["same tokens"] and one["of one node, cold"] >= GOAL for one in every))


if __name__ == "__main__":
    main()
