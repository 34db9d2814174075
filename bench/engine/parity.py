#!/usr/bin/env python3
"""Counts tokens that differ with and without drafts, on the CPU in deterministic mode.

Rounds of requests with every kind of sampling (greedy, filters, penalties, log probabilities,
allowed tokens, bad words, several answers to one prompt, answers that another node began) run on an
engine without drafts and on engines with each drafter and 2, 4 and 8 tokens a step. Those have few
blocks, so that requests are preempted, and steps of few tokens, so that prompts come in chunks.
Tokens, ends and log probabilities must be equal to the last bit. Weights are random: heads are
nearly always wrong, planted drafts right four times in five, n-grams in between.

    python -m bench.engine.parity                     # 10^6 tokens
    python -m bench.engine.parity --tokens 20000

Grammars, P/D and nodes that die are in the tests. The exit status is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from engine.config import (
    CacheConfig,
    DeviceConfig,
    DrafterName,
    EngineConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from engine.core.core import EngineCore
from engine.executor.uniproc_executor import UniprocExecutor
from engine.messages import EngineCoreOutput, EngineCoreRequest
from engine.models.checkpoint import load_model_config
from engine.models.draft_checkpoint import read_draft
from engine.outputs import TokenLogprobs
from engine.request_spec import RequestSpec
from engine.sampling_params import SamplingParams
from tandem_kernels.batch.batch_tables import RowTables

_VOCAB, _MAX_LEN, _PER_ROUND = 211, 160, 16
_LAYER = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": _VOCAB,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": _MAX_LEN,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "eos_token_id": 3,
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "target": {**_LAYER, "num_hidden_layers": 3},
    "draft_model": {**_LAYER, "num_hidden_layers": 1},
    "eagle": {**_LAYER, "num_hidden_layers": 1},
    "eagle3": {
        **_LAYER,
        "num_hidden_layers": 1,
        "draft_vocab_size": _VOCAB,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
    },
    "medusa": {"hidden_size": 48, "vocab_size": _VOCAB, "num_heads": 7},
}
_KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "bad_words": ((5,), (6, 6), (7, 8))},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "logprobs": 3},
    {"min_tokens": 10, "min_p": 0.02, "logit_bias": {5: 1.5}, "stop_token_ids": (8, 9, 10)},
    {"temperature": 0.7, "allowed_token_ids": (5, 6, 7), "ignore_eos": True, "logprobs": 1},
    {"temperature": 1.0, "top_k": 3, "ignore_eos": True},
    {"temperature": 0.3, "logprobs": 5, "prompt_logprobs": 1, "presence_penalty": 1.5},
]

Answer = tuple[list[int], str, list[TokenLogprobs]]


@dataclass
class Answers:
    """Collects what requests get, by name."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, str] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)

    def __call__(self, outputs: list[EngineCoreOutput]) -> None:
        for output in outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            self.logprobs.setdefault(output.request_id, []).extend(output.logprobs or [])
            if output.finish_reason:
                self.ends[output.request_id] = output.finish_reason

    def of(self, name: str) -> Answer:
        return self.tokens.get(name, []), self.ends.get(name, ""), self.logprobs.get(name, [])


class Engine:
    """An engine in this process."""

    def __init__(self, config: EngineConfig) -> None:
        self.executor = PlantingExecutor(config)
        self.core = EngineCore(config, self.executor, lambda stage, fraction, total=0: None)

    def run(self, requests: list[EngineCoreRequest]) -> Answers:
        """Returns what requests get that all come at once."""
        for request in requests:
            self.core.handle(request)
        found = Answers()
        found(self.core.step().outputs)
        while not self.core.is_idle:
            found(self.core.step().outputs)
        return found


class PlantedAnswers:
    """Proposes what a run without drafts gave, wrong one time in five."""

    def __init__(self) -> None:
        self.known: list[list[int]] = []
        self._rng = random.Random(0)

    def propose(self, idx_mapping: torch.Tensor, rows: RowTables) -> torch.Tensor:
        found = torch.full((len(idx_mapping), rows.max_drafts), -1, dtype=torch.int64)
        for index, row in enumerate(idx_mapping.tolist()):
            length = int(rows.total_len[row])
            tokens = rows.token_ids[row, :length].tolist()
            answer = next((one for one in self.known if one[:length] == tokens), [])
            drafts = answer[length : length + rows.max_drafts]
            told = [t if self._rng.random() < 0.8 else t ^ 1 for t in drafts]
            found[index, : len(told)] = torch.tensor(told, dtype=torch.int64)
        return found


@dataclass
class Drafting:
    """One engine with drafts, and what was counted of it."""

    name: str
    engine: Engine
    planted: PlantedAnswers | None
    num_tokens: int = 0
    num_differing: int = 0


def base_config(folder: Path) -> EngineConfig:
    return EngineConfig(
        engine_id="parity",
        epoch=1,
        model=load_model_config(folder / "target", load_format="dummy", dtype="float32"),
        cache=CacheConfig(block_size=8, num_blocks=400),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=96),
        device=DeviceConfig(deterministic=True),
    )


def drafting_engine(folder: Path, method: str, query_len: int) -> Drafting:
    """Starts an engine with few blocks whose rows compute `query_len` tokens a step."""
    config = base_config(folder)
    blocks = -(-(_MAX_LEN + query_len) // 8)
    config = replace(config, cache=replace(config.cache, num_blocks=2 * blocks))
    planted = PlantedAnswers() if method == "planted" else None
    if planted is None:
        name: DrafterName = method  # type: ignore[assignment]
        draft = None
        if method != "ngram":
            draft = read_draft(name, str(folder / method), config.model)
        speculative = SpeculativeConfig(
            method=name,
            num_speculative_tokens=query_len - 1,
            prompt_lookup_max=3,
            prompt_lookup_min=1,
            draft=draft,
        )
        config = replace(config, speculative=speculative)
    config = replace(config, decode_query_len=query_len)
    engine = Engine(config)
    if planted is not None:
        engine.executor.plant(planted)
    return Drafting(f"{method}, {query_len} a step", engine, planted)


class PlantingExecutor(UniprocExecutor):
    def plant(self, drafter: PlantedAnswers) -> None:
        self._worker.runner.drafts.drafter = drafter


def requests_of(seed: int) -> list[EngineCoreRequest]:
    """Returns the requests of a round, whose prompts repeat themselves and partly begin alike."""
    rng = random.Random(seed)
    shared = [rng.randrange(5, _VOCAB) for _ in range(16)]
    made = []
    for index in range(_PER_ROUND):
        part = [rng.randrange(5, _VOCAB) for _ in range(rng.choice([1, 3, 7]))]
        prompt = (shared if rng.random() < 0.5 else []) + part * rng.choice([2, 3])
        kind = _KINDS[(seed + index) % len(_KINDS)]
        sampling = SamplingParams(
            seed=rng.randrange(2**64), max_tokens=rng.choice([1, 40, 80, 110]), **kind
        )
        spec, name = RequestSpec(prompt, sampling), f"{seed}-{index}"
        choices: tuple[str, ...] = ()
        if index % 8 == 3 and "prompt_logprobs" not in kind:
            spec = replace_seeds(spec, rng)
            choices = tuple(f"{name}.{i}" for i in range(3))
        elif index % 8 == 5 and sampling.max_tokens > 1:
            spec = spec.resumed_after([rng.randrange(5, _VOCAB)] * 3)
        made.append(
            EngineCoreRequest(request_id=name, spec=spec, eos_token_ids=(3,), choice_ids=choices)
        )
    return made


def replace_seeds(spec: RequestSpec, rng: random.Random) -> RequestSpec:
    """Returns a copy that asks for two more answers."""
    others = [spec.with_sampling(seed=rng.randrange(2**64)) for _ in range(2)]
    return spec.with_siblings(others)


def run_round(plain: Engine, drafting: list[Drafting], seed: int) -> None:
    """Runs a round on all engines and counts."""
    requests = requests_of(seed)
    expected = plain.run(requests_of(seed))
    prompts = {
        name: list(request.spec.prompt_token_ids)
        for request in requests
        for name in request.choice_ids or (request.request_id,)
    }
    for one in drafting:
        if one.planted is not None:
            one.planted.known = [
                prompt + expected.tokens.get(name, []) for name, prompt in prompts.items()
            ]
        found = one.engine.run(requests_of(seed))
        for name in prompts:
            wanted, got = expected.of(name), found.of(name)
            one.num_tokens += len(wanted[0])
            if wanted != got:
                pairs = zip(wanted[0], got[0], strict=False)
                differing = sum(a != b for a, b in pairs) + abs(len(wanted[0]) - len(got[0]))
                one.num_differing += max(1, differing)
                print(f"{one.name}: {name} differs: {wanted[:2]} {got[:2]}", file=sys.stderr)


def measure(
    num_tokens: int, seconds: float, methods: list[str], query_lens: list[int]
) -> dict[str, Any]:
    """Runs rounds until so many tokens were compared, of all drafters together, or time is up."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind, config in _CONFIGS.items():
            (folder / kind).mkdir()
            (folder / kind / "config.json").write_text(json.dumps(config))
        plain = Engine(base_config(folder))
        drafting = [drafting_engine(folder, m, q) for m in methods for q in query_lens]
        seed = 0
        while (
            sum(one.num_tokens for one in drafting) < num_tokens
            and time.perf_counter() - started < seconds
        ):
            run_round(plain, drafting, seed)
            seed += 1
            if sys.stderr.isatty():
                compared = sum(one.num_tokens for one in drafting)
                print(f"\r{compared} tokens", end="", file=sys.stderr)
        found = {"rounds": seed, "seconds": round(time.perf_counter() - started)} | {
            one.name: facts(one) for one in drafting
        }
        for engine in (plain, *(one.engine for one in drafting)):
            engine.executor.shutdown()
    return found


def facts(one: Drafting) -> dict[str, object]:
    stats = one.engine.core.stats()
    drafts = stats.drafts
    return {
        "tokens": one.num_tokens,
        "differing": one.num_differing,
        "accepted of drafts": f"{drafts.num_accepted_tokens} of {drafts.num_draft_tokens}",
        "preemptions": stats.num_preemptions,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    every = ["ngram", "planted", "eagle", "eagle3", "medusa", "draft_model"]
    parser.add_argument("--methods", nargs="+", choices=every, default=every)
    parser.add_argument("--query-lens", nargs="+", type=int, default=[2, 4, 8])
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(args.tokens, args.seconds, args.methods, args.query_lens)
    print(json.dumps(found, indent=1))
    differing = sum(one["differing"] for one in found.values() if isinstance(one, dict))
    print(f"{differing} tokens differ")
    sys.exit(differing > 0)


if __name__ == "__main__":
    main()
