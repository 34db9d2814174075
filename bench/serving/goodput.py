#!/usr/bin/env python3
"""Goodput: how many requests a second clients get within an objective, and what explains the rest.

    # three prefill nodes and a decode node on four GPUs, then two and two
    python -m bench.serving.goodput --nodes 3p1d --load 2000/150@24,48,55,60
    python -m bench.serving.goodput --nodes 2p2d --load 1000/300@30,60 --kv-transports stream

    # clusters one after the other, at several rates; KV by gRPC
    python -m bench.serving.goodput --nodes 1p1d,1p1d-stream,0p1d --load 2000/150@1,4,8,16

    # what router, node servers and client add, without a GPU: a token each 5 ms, 45,000 tokens/s
    python -m bench.serving.goodput --nodes 1p1d --imitate 5/45000 --device cpu --load 2000/150@15

    # four undivided nodes behind a router; any other server, at its URLs in turn
    python -m bench.serving.goodput --nodes 0p4d --load 2000/150@24,48 --load 1000/300@30,60
    python -m bench.serving.goodput --url http://a:8000,http://b:8000 --tag peer-rep2 --gpus 2

    # a node dies in the middle of the last rate; each rate alone, then beside a batch
    python -m bench.serving.goodput --nodes 3p1d --load 2000/150@24 --kill prefill
    python -m bench.serving.goodput --nodes 1p1d --load 2000/150@8,12 --batch 1000/150

Open loop: prompts of random token ids arrive as a Poisson process, however slow the answers are,
sent by processes of their own. Each workload begins with a warm-up, which is not counted. For each
rate: TTFT, ITL, TPOT, errors, how late the client was, and of tandem's nodes what they did
meanwhile (`figures/node_history.py`): prompts and queues by prefill node, where the time to the
first token went, steps, joins, late steps with their causes, pauses for garbage; how late the event
loops of router, nodes and clients were, and which part of a token's way made a gap long
(`bench.serving.figures.token_times`). A line of JSON for each rate on standard output; at the end
bench/results/NAME.json with the goodput, and a table with the rows of `--beside` files.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace

import aiohttp
import uvloop

from bench.figures import Figures
from bench.record import RESULTS, write_result
from bench.serving.batch_beside import BatchBeside, running_batch
from bench.serving.clusters.pd_cluster import Cluster, Setup, model_folder, probes_url, running
from bench.serving.clusters.processes import ProcessLoad, lateness_figures
from bench.serving.figures.node_history import (
    decode_figures,
    prefill_figures,
    prompt_figures,
    read_history,
)
from bench.serving.figures.report import (
    Slo,
    Span,
    goodput,
    read_rows,
    request_row,
    summarize,
    tables,
)
from bench.serving.figures.simulated import SimulatedNodes, StepTimesSeen, simulated
from bench.serving.figures.token_times import token_figures
from bench.serving.goodput_arguments import (
    Workload,
    engine_of,
    itl_objective_s,
    node_args,
    parse_arguments,
)
from bench.serving.load import LoadProcesses, LoadSpec, first_model
from bench.serving.openai_stream import Outcome
from cli.local_cluster.cluster import UpSettings
from cli.local_cluster.supervisor import Service
from engine.contracts.steps.step_launches import StepLaunches
from engine.frontend.step_history import HistoryReport
from engine.models.recorded_steps import LONG_PROMPT_TOKENS, prompt_keys

_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Target:
    """Is measured. `cluster`: None for another's server, of which nothing but answers is
    seen."""

    engine: str
    urls: list[str]
    model: str
    gpus: int | None
    cluster: Cluster | None = None

    def services(self, tier: str) -> list[Service]:
        services = self.cluster.services if self.cluster is not None else []
        return [one for one in services if one.spec.name.startswith(tier)]


@asynccontextmanager
async def target_of(args: argparse.Namespace, model: str) -> AsyncIterator[Target]:
    """Starts the cluster, or finds the server."""
    if args.url:
        urls = [url.rstrip("/") for url in args.url.split(",")]
        async with aiohttp.ClientSession() as client:
            name = args.model or await first_model(client, urls[0])
        yield Target(args.tag or "server", urls, name, args.gpus)
        return
    setup = Setup.parse(args.nodes)
    if args.kv_transports != "auto":
        setup = replace(setup, transport=args.kv_transports)
    settings = UpSettings(model=model, device=args.device, tp=args.tp, _cli_parse_args=[])
    with batch_store(args.batch is not None):
        flags, timeout_s = node_args(args), args.start_timeout_s
        async with running(setup, settings, flags, timeout_s, args.imitate) as cluster:
            yield await target_of_cluster(args, setup, cluster)


async def target_of_cluster(args: argparse.Namespace, setup: Setup, cluster: Cluster) -> Target:
    gpus = (setup.num_prefill + setup.num_decode) * args.tp
    async with aiohttp.ClientSession() as client:
        name = await first_model(client, cluster.url)
    return Target(engine_of(args), [cluster.url], name, gpus, cluster)


@contextmanager
def batch_store(is_wanted: bool) -> Iterator[None]:
    """Gives routers that start now a place for batches, if they need one."""
    if not is_wanted:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TANDEM_ROUTER_BATCH_STORE"] = f"sqlite:///{folder}/batches.db"
        yield


def specs(args: argparse.Namespace, target: Target, index: int) -> tuple[LoadSpec, list[LoadSpec]]:
    """Returns the warm-up of a workload, and its loads."""
    workload: Workload = args.load[index]
    low, high = (int(bound) for bound in args.vocab.split(":"))
    warm_up = LoadSpec(
        urls=target.urls,
        model=target.model,
        n_in=workload.n_in,
        n_out=workload.n_out,
        rate=max(min(workload.rates) / 2, 2.0 * len(target.urls)),
        duration_s=args.warmup_s,
        drain_s=60.0,
        seed=args.seed + 100_000 * index - 1,
        vocabulary=(low, high),
        extra=json.loads(args.extra) if target.cluster is not None else {},
        headers={"x-tandem-timeline": "1"} if target.cluster is not None else {},
    )
    loads = [
        replace(
            warm_up,
            rate=rate,
            duration_s=args.duration,
            drain_s=args.drain,
            seed=args.seed + 100_000 * index + 1000 * number,
        )
        for number, rate in enumerate(workload.rates)
    ]
    return warm_up, loads


async def kill_amid(target: Target, tier: str, after_s: float) -> Figures:
    """Kills the first node of the tier, as a crash would. Returns what was done."""
    await asyncio.sleep(after_s)
    victim = target.services(tier)[0]
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    return {"service": victim.spec.name, "at": time.perf_counter()}


async def read_histories(target: Target, since: float) -> dict[str, HistoryReport]:
    """Returns what nodes tell of their steps, by name; one that does not answer is left out."""
    found: dict[str, HistoryReport] = {}
    timeout = aiohttp.ClientTimeout(total=10)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        for service in target.services("decode") + target.services("prefill"):
            try:
                found[service.spec.name] = await read_history(session, probes_url(service), since)
            except (aiohttp.ClientError, TimeoutError) as error:
                print(f"{service.spec.name} tells nothing: {error!r}", file=sys.stderr)
    return found


def node_figures(
    histories: Mapping[str, HistoryReport], span: Span, outcomes: list[Outcome]
) -> Figures:
    """Returns what nodes did in the span."""
    if not histories:
        return {}
    busy_s = span.last_arrival - span.start
    tiers: dict[str, Figures] = {"decode_nodes": {}, "prefill_nodes": {}}
    tokens: list[Figures] = []
    for name, report in histories.items():
        if name.startswith("decode"):
            nodes = tiers["decode_nodes"][name] = decode_figures(report, span.start)
            if nodes["step_ms"]:
                tokens.append(token_figures(outcomes, report, nodes["step_ms"]["p50"] / 1e3))
        else:
            tiers["prefill_nodes"][name] = prefill_figures(report, busy_s)
    # Of several nodes, nothing says which of them a token is from.
    return {**prompt_figures(outcomes), **(tokens[0] if len(tokens) == 1 else {}), **tiers}


def simulated_nodes(args: argparse.Namespace, target: Target) -> SimulatedNodes:
    decodes = target.services("decode")
    tokens = min(int(one.ready_info["kv_cache_tokens"]) for one in decodes)
    num_prefill = len(target.services("prefill"))
    launches = None
    if args.device != "cpu":
        launches = StepLaunches(
            prompts=tuple(prompt_keys(256, LONG_PROMPT_TOKENS[-1], any_context=True))
        )
    return SimulatedNodes(
        prefill=num_prefill,
        decode=len(decodes),
        kv_tokens=tokens,
        itl_objective_s=itl_objective_s(node_args(args)),
        launches=launches,
    )


async def measure(
    args: argparse.Namespace, target: Target, clients: LoadProcesses, spec: LoadSpec, kill: str
) -> Figures:
    """Runs one load and returns its row."""
    await read_histories(target, time.perf_counter())  # the watch of event loops begins
    services = target.cluster.services if target.cluster is not None else []
    load = ProcessLoad(services, clients.pids)
    await load.begin()
    killing = asyncio.create_task(kill_amid(target, kill, spec.duration_s / 2)) if kill else None
    outcomes, span = await clients.run(spec)
    slo = Slo(args.slo_ttft_ms, args.slo_itl_ms)
    row: Figures = {
        "engine": target.engine,
        "kind": "load",
        "gpus": target.gpus,
        "qps": spec.rate,
        "n_in": spec.n_in,
        "n_out": spec.n_out,
        **summarize(outcomes, span, slo),
        **await load.figures(),
    }
    row["event_loops"]["clients"] = lateness_figures({}, clients.lateness)
    if args.dump:
        row["load"] = f"{spec.n_in}/{spec.n_out}@{spec.rate:g}"
        row["requests"] = [request_row(outcome, span.start) for outcome in outcomes]
    histories = await read_histories(target, span.start)
    row |= node_figures(histories, span, outcomes)
    if histories and not kill:
        times = StepTimesSeen.of(list(histories.values()))
        row |= simulated(row, outcomes, span.start, times, simulated_nodes(args, target))
    if killing is not None:
        killed = await killing
        row["killed"] = {
            "service": killed["service"], "at_s": round(killed["at"] - span.start, 3),
        }  # fmt: skip
    return row


async def run(args: argparse.Namespace, model: str) -> list[Figures]:
    rows: list[Figures] = []
    slo = Slo(args.slo_ttft_ms, args.slo_itl_ms)
    with closing(LoadProcesses(args.client_processes)) as clients:
        for nodes in args.nodes.split(","):
            one = argparse.Namespace(**{**vars(args), "nodes": nodes})
            async with target_of(one, model) as target:
                async for row in rows_of(one, target, clients):
                    rows.append(row)
                    print(json.dumps(row), flush=True)
                    write(args, rows, slo)
    return rows


async def rows_of(
    args: argparse.Namespace, target: Target, clients: LoadProcesses
) -> AsyncIterator[Figures]:
    """Yields the rows of all loads. Raises `SystemExit` where every request of a warm-up fails."""
    for index in range(len(args.load)):
        warm_up, loads = specs(args, target, index)
        if args.warmup_s:
            outcomes, _ = await clients.run(warm_up)
            if outcomes and all(outcome.error for outcome in outcomes):
                raise SystemExit(f"error: every request failed: {outcomes[0].error}")
        for spec in loads:
            await asyncio.sleep(_PAUSE_S)
            is_last = index == len(args.load) - 1 and spec is loads[-1]
            kill = args.kill if args.kill and is_last else ""
            async for row in measured(args, target, clients, spec, kill):
                yield row


async def measured(
    args: argparse.Namespace, target: Target, clients: LoadProcesses, spec: LoadSpec, kill: str
) -> AsyncIterator[Figures]:
    """Yields the row of a load, and that beside a batch."""
    yield await measure(args, target, clients, spec, kill)
    if args.batch is not None:
        yield await measure_beside_batch(args, target, clients, spec)


async def measure_beside_batch(
    args: argparse.Namespace, target: Target, clients: LoadProcesses, spec: LoadSpec
) -> Figures:
    """Runs the load again while a batch runs."""
    batch: BatchBeside = replace(args.batch)
    async with running_batch(target.urls[0], target.model, spec.vocabulary, batch):
        row = await measure(args, target, clients, spec, "")
    return {**row, "engine": f"{target.engine}-batch", "batch": asdict(batch)}


def write(args: argparse.Namespace, rows: list[Figures], slo: Slo) -> None:
    """Writes the result after each rate, so that a later failure loses nothing."""
    name = args.name or f"goodput-{rows[0]['engine']}"
    settings = {key: value for key, value in vars(args).items() if key not in ("beside", "load")}
    settings["load"] = [f"{w.n_in}/{w.n_out}@{w.rates}" for w in args.load]
    settings["batch"] = args.batch and f"{args.batch.n_in}/{args.batch.n_out}"
    figures = {"settings": settings, "loads": rows, "goodput": goodput(rows, slo)}
    path = write_result(name, figures)
    print(f"written: {path.relative_to(RESULTS.parent.parent)}", file=sys.stderr)


def main() -> int:
    args = parse_arguments(__doc__)
    folder = model_folder(args.shape) if not (args.checkpoint or args.url) else nullcontext("")
    with folder as made:
        rows = uvloop.run(run(args, args.checkpoint or str(made)))
    beside = [row for path in args.beside for row in read_rows(path)]
    slo = Slo(args.slo_ttft_ms, args.slo_itl_ms)
    print("\n".join(tables(rows, slo, beside)), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
