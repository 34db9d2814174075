#!/usr/bin/env python3
"""A cluster under load that is hurt on purpose, until every counter must be zero again.

    python -m bench.serving.soak                            10 000 requests, the demo checkpoint
    python -m bench.serving.soak --requests 300 --kill-every-s 5     a short look
    python -m bench.serving.soak --all-tiers --prefill 2 --name soak_all_tiers
    python -m bench.serving.soak --streams --prefill 2 --decode 3 --kill-node-every-s 10

Requests of random lengths come from --clients clients; one in five is left at a random moment of
the time that its prompt takes. A transfer process, or one that reads grammars or images, is killed
every --kill-every-s, in turn of the nodes, and with --kill-node-every-s a whole node of each tier
that has others. Requests that were not left are asked again when the cluster is too busy, and must
end in full, with the tokens that their prompt had the first time. At the end nothing may be held:
no block, row, lease, staged byte, pull or open request on any node. Failed prefill attempts are
counted by cause. Memory and open files of each process are in the result for forty moments, and
its growth with an interval of confidence. With --streams all answers are streams, whose longest
silences are in the result. It writes bench/results/NAME.json (--name '': nothing); the exit status
says whether all of it was so.

With --all-tiers prompts are turns of conversations, and caches are small: what they forget comes
from host memory and from disk, which hold more but not all, from other prefill nodes, and from the
decode node that gave the answer.

With --everything there are adapters, drafts, grammars, images and data-parallel groups besides, and
a node that changes its role (`soak_everything`). With --record FILE the run saves where it is, and
one that was interrupted goes on there; the plot of memory is NAME.svg.

    python -m bench.serving.soak --everything --prefill 2 --decode 2 --kill-every-s 10 \
        --kill-node-every-s 30 --requests 100000 --seconds 1200 --name soak_everything
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from bench.arguments import parser_of
from bench.figures import distribution
from bench.record import RESULTS, write_result
from bench.serving.clusters.node_metrics import by_label, held, read_metrics
from bench.serving.clusters.pd_cluster import add_cluster, supervised, tell_progress
from bench.serving.soaks.soak_cluster import Harm, Wanted, mortal
from bench.serving.soaks.soak_everything import Operator
from bench.serving.soaks.soak_load import Soak
from bench.serving.soaks.soak_record import Record, plot, record_figures
from cli.local_cluster.supervisor import Service

_SETTLE_S = 60.0
_MOST_PAUSE_S = 0.5
"""Is the longest pause before a node that was killed is started again."""
_LOOK_EVERY_S = 10.0
_CAUSES = ("tandem_prefill_attempt_failures_total", "tandem_prefill_nodes_passed_over_total")
_TOLD_AT_THE_END = (
    "vllm:num_preemptions_total",
    "tandem_local_prefill_fallbacks_total",
    "tandem_kv_transfer_",
)
"""Begin the names of the counters that a result has."""


def metrics_url(node: Service) -> str:
    argv = node.spec.argv
    name = "--metrics-port" if "--metrics-port" in argv else "--port"
    return f"http://127.0.0.1:{argv[argv.index(name) + 1]}/metrics"


async def all_held(session: aiohttp.ClientSession, nodes: list[Service]) -> dict[str, float]:
    """Returns what is not zero, or not free, by node and name."""
    found: dict[str, float] = {}
    for node in nodes:
        try:
            left = held(await read_metrics(session, metrics_url(node)))
        except aiohttp.ClientError:
            left = {"is starting": 1.0}
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


class Causes:
    """Sums counters with reasons over the lives of nodes that are started again.

    Attributes:
        found: The numbers by node, counter and reason.
    """

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}
        self.found: Counter[str] = Counter()

    async def look(self, session: aiohttp.ClientSession, nodes: Sequence[Service]) -> None:
        for node in nodes:
            for name in _CAUSES:
                with suppress(aiohttp.ClientError):
                    values = await by_label(session, metrics_url(node), name, "reason")
                    self._take(f"{node.spec.name} {name}", values)

    def _take(self, name: str, values: dict[str, float]) -> None:
        for reason, value in values.items():
            key = f"{name} {reason}"
            before = self._seen.get(key, 0.0)
            self._seen[key] = value
            if more := value - before if value >= before else value:
                self.found[key] += int(more)


@dataclass(frozen=True, slots=True)
class Run:
    """One cluster's life under load."""

    session: aiohttp.ClientSession
    soak: Soak
    harm: Harm
    operator: Operator
    record: Record
    router: Service
    nodes: list[Service]
    args: argparse.Namespace
    causes: Causes = field(default_factory=Causes)

    async def look_forever(self) -> None:
        """Notes what processes hold, and where the run is, every `_LOOK_EVERY_S`."""
        started = time.monotonic()
        services = [self.router, *self.nodes]
        record = self.record
        while True:
            record.look(round(time.monotonic() - started, 1), [one.pid for one in services],
                        [one.spec.name for one in services])  # fmt: skip
            record.num_done = self.soak.num_done
            record.outcomes, record.kills = dict(self.soak.outcomes), dict(self.harm.kills)
            if self.args.record is not None:
                record.save(self.args.record)
            await self.causes.look(self.session, self.nodes)
            await asyncio.sleep(_LOOK_EVERY_S)

    def progress(self, seconds: float) -> str:
        done, killed = self.soak.num_done, self.harm.kills.total()
        outcomes = dict(self.soak.outcomes)
        return f"{done} ({done / seconds:.1f}/s), {outcomes}, {killed} killed"

    def beside(self) -> Iterator[Coroutine[Any, Any, None]]:
        """Yields what goes on beside requests, for ever."""
        yield self.harm.processes_forever(self.args.kill_every_s)
        if self.args.kill_node_every_s:
            yield self.harm.nodes_forever(self.args.kill_node_every_s)
        yield tell_progress(self.progress)
        yield self.look_forever()
        if self.args.everything:
            yield self.operator.churn_forever()
            for node in self.nodes:
                if node.spec.name.startswith("node-"):
                    yield self.operator.switch_forever(node.spec.endpoint.removeprefix("grpc://"))

    async def whole(self) -> dict[str, Any]:
        """Does all of it against a cluster that is ready."""
        args, record = self.args, self.record
        if args.everything:
            await self.operator.load_all()
        tasks = [asyncio.create_task(one) for one in self.beside()]
        started = time.monotonic()
        try:
            async with asyncio.timeout(args.seconds or None):
                await self.soak.run(max(0, args.requests - record.num_done), args.clients)
        except TimeoutError:
            print(f"{args.seconds:g} s are over", file=sys.stderr)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        seconds = time.monotonic() - started
        settled_s, left = await until_nothing_is_held(self.session, self.nodes)
        await self.causes.look(self.session, self.nodes)
        return {
            "outcomes": dict(self.soak.outcomes),
            "asked_to_wait": dict(self.soak.asked_to_wait),
            "others": self.soak.others,
            "longest_silence_s": distribution(self.soak.silences_s),
            "operator": dict(self.operator.outcomes),
            "kills": dict(self.harm.kills),
            "restarts_of_nodes": {n.spec.name: n.restarts for n in self.nodes if n.restarts},
            "seconds": round(seconds, 1),
            "settled_s": settled_s,
            "left": left,
            "causes": dict(sorted(self.causes.found.items())),
            "counted": await counted(self.session, self.nodes),
            **record_figures(record),
        }


async def counted(
    session: aiohttp.ClientSession, nodes: Sequence[Service]
) -> dict[str, dict[str, float]]:
    found = {}
    for node in nodes:
        values = await read_metrics(session, metrics_url(node))
        found[node.spec.name] = {k: v for k, v in values.items() if k.startswith(_TOLD_AT_THE_END)}
    return found


async def run(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return await run_in(Path(folder), args)


async def run_in(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    wanted = Wanted(**{name: getattr(args, name) for name in Wanted.__slots__})
    record = Record.read(args.record) if args.record else Record()
    record.runs.append([])
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        supervised(
            wanted.specs(folder),
            wanted.routable,
            log_lines=args.log_lines,
            always_logs=True,
            max_pause_s=_MOST_PAUSE_S,
        ) as supervisor,
        aiohttp.ClientSession(timeout=timeout, connector=connector) as session,
    ):
        router, *nodes = supervisor.services
        dying = mortal([node.spec.name for node in nodes])
        harm = Harm(nodes, [node for node in nodes if node.spec.name in dying], args.seed)
        harm.kills.update(record.kills)
        url = router.spec.endpoint
        soak = Soak(
            session, url, args.seed,
            tiers=args.all_tiers, everything=args.everything, streams=args.streams,
        )  # fmt: skip
        soak.texts = record.texts
        soak.outcomes.update(record.outcomes)
        operator = Operator(session, url, args.seed)
        figures = await Run(session, soak, harm, operator, record, router, nodes, args).whole()
    if args.name and args.record:
        plot(record.runs[-1], RESULTS / f"{args.name}.svg")
    return figures


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, "soak")
    add_cluster(parser, prefill=1)
    parser.add_argument("--kv-transports", default="auto")
    parser.add_argument("--all-tiers", action="store_true", help="KV from everywhere")
    parser.add_argument("--streams", action="store_true", help="all answers are streams")
    parser.add_argument("--everything", action="store_true", help="with all features, and tiers")
    parser.add_argument("--record", type=Path, help="file of a run that may be interrupted")
    parser.add_argument("--seconds", type=float, default=0.0, help="the longest; 0: no limit")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--kill-every-s", type=float, default=30.0)
    parser.add_argument("--kill-node-every-s", type=float, default=0.0, help="0: no whole node")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-lines", type=int, default=0, help="last of the nodes' logs to show")
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
    is_calm = args.kill_node_every_s or not figures["restarts_of_nodes"]
    return 0 if is_good and is_calm else 1


if __name__ == "__main__":
    sys.exit(main())
