"""Whole clusters for measurements: started, ready, and gone afterwards."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.engine.models.shapes import config_json
from bench.serving.clusters.imitated_core import Imitation
from cli.local_cluster.cluster import UpSettings, cluster_specs
from cli.local_cluster.supervisor import Listener, Service, ServiceSpec, Supervisor
from cli.up import wait_routable

_PROGRESS_EVERY_S = 15.0
_KV_TRANSPORTS = {"auto": "auto", "stream": "stream", "cuda_ipc": "cuda_ipc,stream"}


@dataclass(frozen=True, slots=True)
class Setup:
    """A cluster to measure. `name`: NpMd with or without the transport of KV, like 1p1d-cuda_ipc;
    0pNd are undivided nodes."""

    name: str
    num_prefill: int
    num_decode: int
    transport: str

    @classmethod
    def parse(cls, name: str) -> Setup:
        """Reads a setup; raises ValueError."""
        tiers, _, transport = name.partition("-")
        prefill, _, decode = tiers.partition("p")
        if not (prefill.isdigit() and decode[:-1].isdigit() and decode.endswith("d")):
            raise ValueError(f"{name!r} is not like 1p1d or 1p1d-stream")
        if transport and transport not in _KV_TRANSPORTS:
            raise ValueError(f"{name!r}: the transport is one of {', '.join(_KV_TRANSPORTS)}")
        return cls(name, int(prefill), int(decode[:-1]), transport or "auto")


@contextmanager
def model_folder(shape: str) -> Iterator[Path]:
    """Returns a folder with what random weights need: the shape."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / shape
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config_json(shape)))
        yield folder


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running cluster. `url`: the router's. `decode_metrics`, `prefill_metrics`: where each node
    tells what it counts. `services`: the router, decode nodes, prefill nodes.
    """

    url: str
    decode_metrics: list[str]
    prefill_metrics: list[str]
    services: list[Service]


@asynccontextmanager
async def supervised(
    specs: list[ServiceSpec],
    settings: UpSettings,
    *,
    start_timeout_s: float = 600.0,
    log_lines: int = 60,
    always_logs: bool = False,
    max_pause_s: float = 15.0,
) -> AsyncIterator[Supervisor]:
    """Runs services until the router, the first of them, has its nodes; stops them at the end.
    Their last lines go to standard error where something fails, or always."""
    lines: deque[str] = deque(maxlen=log_lines)
    listener = Listener(on_log=lambda service, line: lines.append(f"{service.spec.name}: {line}"))
    supervisor = Supervisor(specs, listener, max_pause_s)
    failed = True
    try:
        async with _limit(start_timeout_s):
            await supervisor.start()
            await wait_routable(specs[0].endpoint, settings)
        yield supervisor
        failed = False
    finally:
        await supervisor.stop()
        if failed or always_logs:
            print("\n".join(lines), file=sys.stderr)


@asynccontextmanager
async def running(
    setup: Setup,
    settings: UpSettings,
    node_args: list[str],
    start_timeout_s: float,
    imitation: Imitation | None = None,
) -> AsyncIterator[Cluster]:
    """Runs the cluster; what the services say goes to standard error when one fails. `imitation`:
    of the engines; None: they are real."""
    settings = settings.model_copy(
        update={"prefill": setup.num_prefill, "decode": setup.num_decode, "port": 0}
    )
    transports = _KV_TRANSPORTS[setup.transport]
    specs = cluster_specs(
        settings, [*node_args, "--kv-transports", transports], ["--metrics-port", "0"]
    )
    if imitation is not None:
        specs = [imitation.of_node(spec) for spec in specs]
    started = time.monotonic()
    async with supervised(specs, settings, start_timeout_s=start_timeout_s) as supervisor:
        print(f"{setup.name}: ready after {time.monotonic() - started:.0f} s", file=sys.stderr)
        services = supervisor.services
        yield Cluster(
            specs[0].endpoint,
            [f"{probes_url(one)}/metrics" for one in services if _is_of(one, "decode")],
            [f"{probes_url(one)}/metrics" for one in services if _is_of(one, "prefill")],
            services,
        )


async def tell_progress(line_at: Callable[[float], str]) -> None:
    """Writes to standard error, for ever, what `line_at` says after this many seconds."""
    started = time.monotonic()
    while True:
        await asyncio.sleep(_PROGRESS_EVERY_S)
        seconds = time.monotonic() - started
        print(f"{seconds:.0f} s: {line_at(seconds)}", file=sys.stderr, flush=True)


def add_cluster(parser: argparse.ArgumentParser, prefill: int) -> None:
    """Adds which model it has, and which nodes. `prefill`: of them by default."""
    parser.add_argument("--model", default="", help="default: the demo checkpoint")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prefill", type=int, default=prefill)
    parser.add_argument("--decode", type=int, default=1)
    parser.add_argument("--node-args", default="", help="more flags for every node, in one word")


def probes_url(service: Service) -> str:
    """Returns where a node that is ready answers probes, scrapers and operators."""
    return f"http://127.0.0.1:{service.ready_info['metrics_port']}"


def metrics_url(service: Service) -> str:
    """Returns where a service that is ready tells what it counts."""
    if "metrics_port" in service.ready_info:
        return f"{probes_url(service)}/metrics"
    return f"http://127.0.0.1:{service.ready_info['port']}/metrics"


def _is_of(service: Service, tier: str) -> bool:
    return service.spec.name.startswith(tier)


@asynccontextmanager
async def _limit(seconds: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise SystemExit(f"error: the cluster was not ready within {seconds:.0f} s") from None
