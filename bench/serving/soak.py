#!/usr/bin/env python3
"""A cluster under load that is hurt on purpose, until every counter must be zero again.

    python -m bench.serving.soak                            10 000 requests, the demo checkpoint
    python -m bench.serving.soak --requests 300 --kill-every-s 5 a short look
    python -m bench.serving.soak --all-tiers --prefill 2 --name soak_all_tiers

Requests of random lengths come from --clients clients; one in five is left at a random moment of
the time that its prompt takes. A transfer process, in turn of the nodes, is killed every
--kill-every-s. Requests that were not left are asked again when the cluster is too busy, and must
end in full, with the tokens that their prompt had the first time. At the end nothing may be held:
no block, row, lease, staged byte, pull or open request on any node. What each process holds of
memory and open files is reported at ten moments and at the end. Writes bench/results/NAME.json; the
exit status says whether all of it was so.

With --all-tiers prompts are turns of conversations, and caches are small: what they forget comes
from host memory and from disk, which hold more but not all, from other prefill nodes, and from the
decode node that gave the answer.

With --everything there are adapters, drafts, grammars and data-parallel groups besides, and a node
that changes its role (`soak_everything`). With --record FILE the run saves where it is, and one
that was interrupted goes on there; memory's growth in MiB an hour is in the result, its plot in
NAME.svg.

    python -m bench.serving.soak --everything --kill-every-s 10 --requests 100000 --record /tmp/r
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp

from bench.arguments import parser_of
from bench.record import RESULTS, write_result
from bench.serving.node_metrics import held, read_metrics
from bench.serving.pd_cluster import supervised
from bench.serving.process_tree import transfer_processes
from bench.serving.soak_everything import (
    DECODE_ARGS,
    NODE_ARGS,
    Operator,
    request_of,
    text_of,
    write_adapters,
)
from bench.serving.soak_record import Record, plot, told
from cli.local_cluster.cluster import DEMO_CHECKPOINT, UpSettings, cluster_specs
from cli.local_cluster.supervisor import Service, ServiceSpec

_LEFT_PART = 0.2
_NUM_PROMPTS = 40
_SETTLE_S = 60.0
_ASK_AGAIN = (429, 503)
_ASK_AGAIN_S = 0.5
_PROGRESS_EVERY_S = 15.0
_LOOK_EVERY_S = 10.0
_TOLD_AT_THE_END = (
    "vllm:num_preemptions_total",
    "tandem_prefill_attempt_failures_total",
    "tandem_local_prefill_fallbacks_total",
    "tandem_kv_transfer_transfers",
    "tandem_kv_transfer_failures",
    "tandem_kv_transfer_aborts",
    "tandem_kv_transfer_bytes_moved",
    "tandem_kv_transfer_process_restarts",
    "tandem_kv_transfer_corrupt_chunks",
    "tandem_kv_transfer_reclaimed_released",
    "tandem_kv_transfer_reclaimed_given_up",
    "tandem_kv_transfer_reclaimed_aborted",
    "tandem_kv_transfer_reclaimed_lease_ended",
    "tandem_kv_transfer_reclaimed_error",
    "tandem_kv_transfer_host_tier_loaded_blocks",
    "tandem_kv_transfer_host_tier_spilled_blocks",
    "tandem_kv_transfer_host_tier_fetched_blocks",
    "tandem_kv_transfer_host_tier_damaged_blocks",
    "tandem_kv_transfer_disk_tier_evicted_blocks",
    "tandem_kv_transfer_disk_tier_damaged_files",
    "tandem_kv_transfer_prefix_pulled_tokens",
    "tandem_kv_transfer_prefix_pull_failures",
    "tandem_kv_transfer_prefix_misses",
    "tandem_kv_transfer_prefix_offered_tokens",
    "tandem_kv_transfer_prefix_offered_tokens_loaded",
)
_ALL_TIERS = (
    "--enable-prefix-caching",
    "--kv-cache-memory-bytes", str(12 << 20),
    "--kv-host-memory-bytes", str(8 << 20),
    "--kv-disk-bytes", str(64 << 20),
    "--kv-share-prefixes", "always",
)  # fmt: skip


class Soak:
    """One run against one cluster."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, seed: int, *, tiers: bool, everything: bool
    ) -> None:
        self._has_turns = tiers
        self._has_all = everything
        self._session = session
        self._url = url
        self._random = random.Random(seed)
        self.texts: dict[str, str] = {}
        self._took_s: dict[int, float] = {}
        """The seconds of the last request with a prompt that was not left."""
        self.outcomes: Counter[str] = Counter()
        self.asked_to_wait = 0
        """Answers that the cluster is too busy: asked again a little later."""
        self.kills: Counter[str] = Counter()

    @property
    def num_done(self) -> int:
        return self.outcomes.total()

    async def run(self, num_requests: int, num_clients: int) -> None:
        numbers = iter(range(num_requests))
        await asyncio.gather(*(self._client(numbers) for _ in range(num_clients)))

    async def _client(self, numbers: Iterator[int]) -> None:
        for _ in numbers:
            is_left = self._random.random() < _LEFT_PART
            prompt = self._random.randrange(_NUM_PROMPTS)
            limit_s = self._random.random() * self._took_s.get(prompt, 1.0)
            started = time.monotonic()
            try:
                async with asyncio.timeout(limit_s if is_left else 300.0):
                    self.outcomes[await self._ask(prompt)] += 1
                self._took_s[prompt] = time.monotonic() - started
            except TimeoutError:
                self.outcomes["left" if is_left else "stuck"] += 1
            except aiohttp.ClientError as error:
                self.outcomes[f"failed: {type(error).__name__}"] += 1

    async def _ask(self, prompt: int) -> str:
        tokens = [(7 * i + prompt) % 400 + 10 for i in range(3 + 9 * prompt)]
        if self._has_turns:
            tokens = self._turn(prompt)
        body = {
            "prompt": tokens,
            "max_tokens": 4 + prompt,
            "temperature": 0.7 * (prompt % 2),
            "seed": prompt,
            "ignore_eos": True,
        }
        path = "/v1/completions"
        if self._has_all:
            path, body = request_of(prompt, body)
        while True:
            async with self._session.post(f"{self._url}{path}", json=body) as response:
                answer: dict[str, Any] = await response.json()
            if response.status not in _ASK_AGAIN:
                break
            self.asked_to_wait += 1
            await asyncio.sleep(_ASK_AGAIN_S)
        if response.status != 200:
            return f"status {response.status}: {answer['error']['message'][:120]}"
        text = text_of(answer)
        known = self.texts.setdefault(str(prompt), text)
        return "complete" if text == known else "other tokens than before"

    @staticmethod
    def _turn(prompt: int) -> list[int]:
        """Returns the prompt of a turn: of eight conversations, each five turns long."""
        conversation, turn = prompt % 8, prompt // 8
        return [(7 * i * i + conversation) % 400 + 10 for i in range(900 + 150 * turn)]

    async def kill_forever(self, nodes: list[Service], every_s: float) -> None:
        """Kills transfer processes of `nodes`, in turn."""
        while True:
            for node in nodes:
                await asyncio.sleep(every_s)
                victims = transfer_processes(node.pid) if node.pid else []
                with suppress(ProcessLookupError):
                    if victims:
                        os.kill(self._random.choice(victims), signal.SIGKILL)
                        self.kills[node.spec.name] += 1

    async def tell_progress(self, num_requests: int) -> None:
        started = time.monotonic()
        while True:
            await asyncio.sleep(_PROGRESS_EVERY_S)
            seconds = time.monotonic() - started
            print(
                f"{seconds:.0f} s: {self.num_done} of {num_requests} "
                f"({self.num_done / seconds:.1f}/s), {dict(self.outcomes)}, "
                f"{self.kills.total()} killed",
                file=sys.stderr,
                flush=True,
            )


def metrics_url(node: Service) -> str:
    argv = node.spec.argv
    name = "--metrics-port" if "--metrics-port" in argv else "--port"
    return f"http://127.0.0.1:{argv[argv.index(name) + 1]}/metrics"


async def all_held(session: aiohttp.ClientSession, nodes: list[Service]) -> dict[str, float]:
    """Returns what is not zero, or not free, by node and name."""
    found: dict[str, float] = {}
    for node in nodes:
        left = held(await read_metrics(session, metrics_url(node)))
        found |= {f"{node.spec.name} {key}": value for key, value in left.items()}
    return found


async def until_nothing_is_held(
    session: aiohttp.ClientSession, nodes: list[Service]
) -> tuple[float, dict[str, float]]:
    """Returns (seconds that it took, what is left after the last of them)."""
    started = time.monotonic()
    while True:
        left = await all_held(session, nodes)
        elapsed = time.monotonic() - started
        if not left or elapsed > _SETTLE_S:
            return round(elapsed, 2), left
        await asyncio.sleep(0.2)


async def look_forever(soak: Soak, nodes: list[Service], record: Record, path: Path | None) -> None:
    """Notes what the nodes hold, and where the run is, every `_LOOK_EVERY_S`."""
    started = time.monotonic()
    while True:
        record.look(round(time.monotonic() - started, 1), [node.pid for node in nodes],
                    [node.spec.name for node in nodes])  # fmt: skip
        record.num_done = soak.num_done
        record.outcomes, record.kills = dict(soak.outcomes), dict(soak.kills)
        if path is not None:
            record.save(path)
        await asyncio.sleep(_LOOK_EVERY_S)


def operated(operator: Operator, nodes: list[Service]) -> Iterator[Coroutine[Any, Any, None]]:
    """Yields what an operator does beside requests, for ever."""
    yield operator.churn_forever()
    for node in nodes:
        if node.spec.name.startswith("node-"):
            yield operator.switch_forever(node.spec.endpoint.removeprefix("grpc://"))


async def hurt(
    session: aiohttp.ClientSession, url: str, nodes: list[Service], args: argparse.Namespace
) -> dict[str, Any]:
    """Does the whole run against a cluster that is ready."""
    record = Record.read(args.record) if args.record else Record()
    record.runs.append([])
    soak = Soak(session, url, args.seed, tiers=args.all_tiers, everything=args.everything)
    soak.texts = record.texts
    soak.outcomes.update(record.outcomes)
    soak.kills.update(record.kills)
    operator = Operator(session, url, args.seed)
    beside = [
        soak.kill_forever(nodes, args.kill_every_s),
        soak.tell_progress(args.requests),
        look_forever(soak, nodes, record, args.record),
    ]
    if args.everything:
        await operator.load_all()
        beside += operated(operator, nodes)
    tasks = [asyncio.create_task(one) for one in beside]
    started = time.monotonic()
    try:
        async with asyncio.timeout(args.seconds or None):
            await soak.run(max(0, args.requests - record.num_done), args.clients)
    except TimeoutError:
        print(f"{args.seconds:g} s are over", file=sys.stderr)
    finally:
        for task in tasks:
            task.cancel()
    seconds = time.monotonic() - started
    settled_s, left = await until_nothing_is_held(session, nodes)
    at_the_end = {node.spec.name: await read_metrics(session, metrics_url(node)) for node in nodes}
    if args.name:
        (RESULTS / f"{args.name}.svg").write_text(plot(record.runs[-1]))
    return {
        "outcomes": dict(soak.outcomes),
        "asked_to_wait": soak.asked_to_wait,
        "operator": dict(operator.outcomes),
        "kills": dict(soak.kills),
        "restarts_of_nodes": sum(node.restarts for node in nodes),
        "seconds": round(seconds, 1),
        "settled_s": settled_s,
        "left": left,
        "counted": {
            name: {key: values[key] for key in _TOLD_AT_THE_END if key in values}
            for name, values in at_the_end.items()
        },
        **told(record),
    }


def with_disk(spec: ServiceSpec, folder: Path) -> ServiceSpec:
    """Gives a node a folder of its own."""
    return replace(spec, argv=(*spec.argv, "--kv-disk-path", str(folder / spec.name)))


def always_decoding(spec: ServiceSpec) -> ServiceSpec:
    """Gives a node that always decodes drafts and data-parallel groups."""
    if not spec.name.startswith("decode"):
        return spec
    return replace(spec, argv=(*spec.argv, *DECODE_ARGS))


async def run(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return await run_in(Path(folder), args)


async def run_in(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    settings = UpSettings(
        model=args.model or str(DEMO_CHECKPOINT),
        prefill=args.prefill,
        decode=args.decode,
        device=args.device,
        switchable=int(args.everything),
        port=0,
        _cli_parse_args=[],
    )
    caching = list(_ALL_TIERS) if args.all_tiers else ["--no-enable-prefix-caching"]
    node_args = ["--kv-transports", args.kv_transports, *caching]
    if args.everything:
        write_adapters(folder / "adapters", Path(settings.model))
        node_args += [*NODE_ARGS, "--lora-dir", str(folder / "adapters")]
    router, *nodes = cluster_specs(settings, [*node_args, *args.node_args.split()])
    if args.everything:
        nodes = [always_decoding(one) for one in nodes]
    specs = [router, *(with_disk(one, folder) if args.all_tiers else one for one in nodes)]
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        supervised(specs, settings, log_lines=args.log_lines, always_logs=True) as supervisor,
        aiohttp.ClientSession(timeout=timeout, connector=connector) as session,
    ):
        return await hurt(session, specs[0].endpoint, supervisor.services[1:], args)


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="", help="default: the demo checkpoint")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=1)
    parser.add_argument("--kv-transports", default="auto")
    parser.add_argument("--node-args", default="", help="more flags for every node, in one word")
    parser.add_argument("--all-tiers", action="store_true", help="KV from everywhere")
    parser.add_argument("--everything", action="store_true", help="with all features, and tiers")
    parser.add_argument("--record", type=Path, help="file of a run that may be interrupted")
    parser.add_argument("--seconds", type=float, default=0.0, help="the longest; 0: no limit")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--kill-every-s", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-lines", type=int, default=0, help="last of the nodes' logs to show")
    parser.add_argument("--name", default="soak", help="of the result file; empty: none")
    args = parser.parse_args()
    args.all_tiers |= args.everything
    return args


def main() -> int:
    args = parse_arguments()
    figures = asyncio.run(run(args))
    print(json.dumps(figures, indent=1))
    if args.name:
        settings = {**vars(args), "record": str(args.record or "")}
        print("written:", write_result(args.name, {"settings": settings, **figures}))
    is_good = not figures["left"] and set(figures["outcomes"]) <= {"complete", "left"}
    return 0 if is_good and not figures["restarts_of_nodes"] else 1


if __name__ == "__main__":
    sys.exit(main())
