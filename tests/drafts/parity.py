#!/usr/bin/env python3
"""Counts tokens that differ with and without drafts, on the CPU in deterministic mode.

Rounds of requests with every kind of sampling (greedy, filters, penalties, log probabilities of
output and prompt, allowed tokens, bad words, grammars, several answers to one prompt) run on an
engine without drafts, and with each drafter and 2, 4 and 8 tokens a step, or as many as pay:

    one node          with few blocks, so that requests are preempted
    killed            the node dies in the middle: what clients have goes on at another one, whose
                      steps have other sizes, twice
    P/D               a prefill engine computes prompts; a decode engine, which has few blocks too,
                      pulls their KV over the wire
    P/D, killed       both
    comes back        conversations go on behind their answers, whose prefixes are cached; also
                      through P/D

Models keep keys and values of all tokens (`attention`), or a state in three layers of four: of the
delta rule, with one decay for each head or for each channel, of Mamba 2, of a short convolution, or
of lightning attention (`gated_delta`, `kimi_delta`, `mamba`, `short_conv`, `lightning`). Tokens,
ends and log probabilities must be equal to the last bit. `ling` and `nemotron` are models with
layers that predict ahead; `kimi_k3` has layers in blocks besides. Weights are random: heads are
nearly always wrong, planted drafts right four times in five, n-grams in between.

    python tests/drafts/parity.py                     # 10^6 tokens
    python tests/drafts/parity.py --tokens 20000 --methods ngram eagle3
    python tests/drafts/parity.py --targets mamba --methods planted --first-round 500 --add

The exit status is 1 if anything differs. Results: bench/results/parity.json, after each drafter.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from bench.record import RESULTS, write_result
from engine.contracts.messages import EngineCoreRequest
from tests.drafts.draft_engines import (
    Engine,
    Node,
    Pair,
    PlantedAnswers,
    base_config,
    decode_engine,
    decoding_config,
    prefill_engine,
    speculative_config,
    write_models,
)
from tests.drafts.draft_requests import (
    MAX_TOKENS,
    PER_ROUND,
    Answers,
    continued,
    names_of,
    requests_of,
    resumed,
)
from tests.drafts.draft_targets import TARGETS, fits

_UNKNOWN = ("none", "planted")
"""Drafters that no setting names."""
METHODS = (*_UNKNOWN, "ngram", "eagle", "eagle3", "medusa", "mtp", "draft_model")
_WITH_LAYERS = ("eagle", "eagle3", "mtp", "draft_model")
_NUM_DEATHS = 2

Counts = dict[str, int]
Found = dict[str, Any]


@dataclass(frozen=True)
class Limits:
    """Says when a drafter has been tried enough. `until`: a time of `time.monotonic`."""

    num_tokens: int
    until: float = float("inf")
    num_rounds: float = float("inf")
    per_round: int = PER_ROUND
    max_tokens: int = MAX_TOKENS
    first_round: int = 0


@dataclass
class Drafting:
    """A node with drafts, the tokens of a step that it may compute of a row, and what was counted
    of it by way: `one node` or `killed`, or the same through P/D."""

    name: str
    node: Node
    planted: PlantedAnswers | None
    num_tokens: Counts = field(default_factory=dict)
    num_differing: int = 0

    def facts(self) -> dict[str, object]:
        stats = self.node.core.stats()
        drafts = stats.drafts
        return {
            "tokens": self.num_tokens,
            "differing": self.num_differing,
            "accepted of drafts": f"{drafts.num_accepted_tokens} of {drafts.num_draft_tokens}",
            "preemptions": stats.num_preemptions,
            "prompt tokens from the cache": stats.prefix_cache_hits,
            "prompt tokens from another node": stats.prompt_tokens_transferred,
        }


def run(node: Node, requests: list[EngineCoreRequest], found: Answers) -> None:
    """Runs requests that all come at once."""
    for request in requests:
        node.submit(request)
    found.take(node.step())
    while not node.is_idle:
        found.take(node.step())
    node.core.check_empty()


def run_until_death(
    node: Node, requests: list[EngineCoreRequest], found: Answers, num_steps: int
) -> None:
    """Runs requests for some steps, and then throws away what the node still gives."""
    for request in requests:
        node.submit(request)
    for _ in range(num_steps):
        found.take(node.step())
    names = [name for request in requests for name in names_of(request)]
    node.abort([name for name in names if name not in found.ends])
    while not node.is_idle:
        node.step()
    node.core.check_empty()


class Expected:
    """Answers of an engine without drafts, by round; each is computed once."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        self._engine = Engine(base_config(folder))
        self._limits = limits
        self._known: dict[int, Answers] = {}

    def of(self, seed: int) -> Answers:
        """Returns the answers of a round, and those of its conversations' next turns."""
        if seed not in self._known:
            found = self._known[seed] = Answers()
            requests = requests_of(seed, self._limits.per_round, self._limits.max_tokens)
            run(self._engine, requests, found)
            run(self._engine, continued(requests, found), found)
        return self._known[seed]

    def close(self) -> None:
        self._engine.close()


def run_round(
    way: str, nodes: list[Drafting], expected: Answers, seed: int, limits: Limits
) -> None:
    """Runs a round on each node and counts. One that dies leaves what it began to the next."""
    for index, one in enumerate(nodes):
        requests, found = requests_of(seed, limits.per_round, limits.max_tokens), Answers()
        turns = [requests]
        if "comes back" in way:
            turns.append(continued(requests, expected))
        every = [request for turn in turns for request in turn]
        names = [name for request in every for name in names_of(request)]
        known = [
            [*request.spec.prompt_token_ids, *expected.tokens.get(name, [])]
            for request in every
            for name in names_of(request)
        ]
        for each in nodes:
            if each.planted is not None:
                each.planted.learn(known)
        rng, node = random.Random(seed + index), one.node
        if "killed" in way:
            for death in range(_NUM_DEATHS):
                run_until_death(node, requests, found, rng.randrange(1, 40))
                requests = resumed(requests, found)
                node = nodes[(index + death + 1) % len(nodes)].node
            turns = [requests]
        for turn in turns:
            run(node, turn, found)
        for name in names:
            wanted, got = expected.of(name), found.of(name)
            one.num_tokens[way] = one.num_tokens.get(way, 0) + len(wanted[0])
            if wanted != got:
                pairs = zip(wanted[0], got[0], strict=False)
                differing = sum(a != b for a, b in pairs) + abs(len(wanted[0]) - len(got[0]))
                one.num_differing += max(1, differing)
                print(f"{one.name}: {name} {way} differs: {wanted} {got}", file=sys.stderr)


def sizes_of(method: str, query_lens: list[int]) -> list[tuple[int, bool]]:
    """Returns the pairs (most tokens a step, whether there are as many as pay) of a drafter. Only
    one that the scheduler knows of has a number of drafts that pays."""
    if method == "none":
        return [(1, False)]
    pays = [(max(query_lens), True)] if method not in _UNKNOWN else []
    return [(query_len, False) for query_len in query_lens] + pays


def nodes_of(
    folder: Path, method: str, query_lens: list[int], prefill: Engine | None
) -> list[Drafting]:
    """Starts a node for each size of steps; with `prefill`, pairs that share it."""
    made = []
    for query_len, is_adaptive in sizes_of(method, query_lens):
        speculative = None
        if method != "none":
            # Planted drafts replace those by n-grams, with which kernels were compiled.
            known = "ngram" if method == "planted" else method
            speculative = speculative_config(folder, known, query_len - 1)
            speculative = replace(speculative, adaptive=is_adaptive)
        config = decoding_config(folder, speculative, query_len)
        engine = Engine(config) if prefill is None else decode_engine(config)
        planted = PlantedAnswers() if method == "planted" else None
        if planted is not None:
            engine.plant(planted)
        name = f"{method}, {f'up to {query_len}' if is_adaptive else query_len} a step"
        if prefill is None:
            made.append(Drafting(name, engine, planted))
        else:
            made.append(Drafting(f"{name}, P/D", Pair(prefill, engine), planted))
    return made


def measure_method(
    method: str, query_lens: list[int], limits: Limits, target: str = TARGETS[0]
) -> Found:
    """Runs rounds on one node and through P/D until there are enough."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_models(folder, target)
        of_prefill = speculative_config(folder, method, 1) if method in _WITH_LAYERS else None
        prefill = prefill_engine(folder, of_prefill)
        expected = Expected(folder, limits)
        alone = nodes_of(folder, method, query_lens, None)
        wired = nodes_of(folder, method, query_lens, prefill)
        found = _rounds(method, alone, wired, expected, limits)
        for one in (*alone, *wired):
            one.node.close()
        expected.close()
        prefill.close()
    return found


def _rounds(
    method: str, alone: list[Drafting], wired: list[Drafting], expected: Expected, limits: Limits
) -> Found:
    every, started = [*alone, *wired], time.monotonic()
    ways = cycle(
        (f"P/D, {way}".removesuffix(", one node") if nodes is wired else way, nodes)
        for way in ("one node", "killed", "comes back")
        for nodes in (alone, wired)
    )
    seed, count = limits.first_round, 0
    while (
        count < limits.num_tokens
        and seed < limits.first_round + limits.num_rounds
        and time.monotonic() < limits.until
    ):
        way, nodes = next(ways)
        run_round(way, nodes, expected.of(seed), seed, limits)
        seed += 1
        count = sum(sum(one.num_tokens.values()) for one in every)
        print(f"{method}: {count} tokens", file=sys.stderr, flush=True)
    return {
        "tokens": count,
        "differing": sum(one.num_differing for one in every),
        "rounds": seed - limits.first_round,
        "seconds": round(time.monotonic() - started),
        "engines": {one.name: one.facts() for one in every},
    }


def measure(
    methods: Sequence[str],
    query_lens: list[int],
    limits: Limits,
    num_processes: int,
    report: Callable[[Found], None],
    targets: Sequence[str] = TARGETS,
) -> Found:
    """Measures drafters, each with its share of `limits`, this many at a time. `report` is called
    after each of them with what is known so far."""
    found: Found = {"tokens": 0, "differing": 0}
    pairs = [(target, method) for target in targets for method in methods if fits(target, method)]
    share = replace(limits, num_tokens=-(-limits.num_tokens // len(pairs)))
    tasks = [
        (target, method, query_lens, share, len(pairs) - index, num_processes)
        for index, (target, method) in enumerate(pairs)
    ]
    with multiprocessing.get_context("spawn").Pool(num_processes, maxtasksperchild=1) as pool:
        for method, one in pool.imap_unordered(_measured, tasks):
            found[method] = one
            for key in ("tokens", "differing"):
                found[key] += one[key]
            report(found)
    return found


def _measured(task: tuple[str, str, list[int], Limits, int, int]) -> tuple[str, Found]:
    """Measures one of several that are left, with its part of the time that is left."""
    target, method, query_lens, limits, num_left, num_processes = task
    now = time.monotonic()
    part = min(1.0, num_processes / num_left)
    until = now + (limits.until - now) * part
    name = method if target == TARGETS[0] else f"{method}, {target}"
    if limits.first_round:
        name += f", rounds from {limits.first_round}"
    return name, measure_method(method, query_lens, replace(limits, until=until), target)


def known_figures() -> Found:
    """Returns what was measured before."""
    figures: Found = json.loads((RESULTS / "parity.json").read_text())["figures"]
    return figures


def with_known(found: Found, known: Found) -> Found:
    """Returns both, where they are of different drafters or rounds; the newer of others."""
    methods = {name: one for name, one in {**known, **found}.items() if isinstance(one, dict)}
    totals = {key: sum(one[key] for one in methods.values()) for key in ("tokens", "differing")}
    return totals | methods


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--processes", type=int, default=2, help="drafters at a time")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=TARGETS)
    parser.add_argument("--query-lens", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--first-round", type=int, default=0)
    parser.add_argument("--add", action="store_true", help="keep what is known of others")
    args = parser.parse_args()
    limits = Limits(args.tokens, time.monotonic() + args.seconds, first_round=args.first_round)

    known = known_figures() if args.add else {}

    def report(found: Found) -> None:
        write_result("parity", with_known(found, known))

    found = measure(args.methods, args.query_lens, limits, args.processes, report, args.targets)
    print(json.dumps(found, indent=1))
    print(f"{found['differing']} of {found['tokens']} tokens differ")
    sys.exit(bool(found["differing"]))


if __name__ == "__main__":
    main()
