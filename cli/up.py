"""Runs `tandem up`: a local cluster, from start to clean stop.

1. loading    bars; Ctrl-C already stops everything
2. serving    until Ctrl-C or SIGTERM
3. stopping   the router first, so that nothing new comes in; open answers may end.
              A second Ctrl-C does not wait for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import aiohttp
from rich.console import Console

from cli.local_cluster.cluster import UpSettings, cluster_specs
from cli.local_cluster.display import ClusterDisplay
from cli.local_cluster.memory_check import check_memory
from cli.local_cluster.node_args import NodeArgs, UsageError, read_args
from cli.local_cluster.service_checks import check_services
from cli.local_cluster.supervisor import ServiceFailed, Supervisor
from edge.command_line import parse_settings
from engine.contracts.errors import CannotStartError
from engine.models.checkpoint import check_architecture, check_name
from kv_transfer.memory.devices.device import DeviceError

_ROUTABLE_POLL_S = 0.05
_KILL_AGAIN_S = 0.1


@dataclass(frozen=True, slots=True)
class StopRequest:
    """Notes Ctrl-C and SIGTERM: the first asks to `stop`, the next to `hurry`."""

    stop: asyncio.Event = field(default_factory=asyncio.Event)
    hurry: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    def from_signals(cls) -> StopRequest:
        stop_request = cls()
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, stop_request._ask)
        return stop_request

    def _ask(self) -> None:
        (self.hurry if self.stop.is_set() else self.stop).set()


@contextlib.asynccontextmanager
async def running_cluster(
    settings: UpSettings, node_args: NodeArgs, console: Console, stop_request: StopRequest
) -> AsyncIterator[Supervisor]:
    """Yields a cluster that is ready; it is stopped cleanly on the way out, whatever happens.

    Raises:
        ServiceFailed: a process ended before it was ready.
        DeviceError: nodes shall compute on GPUs, but the driver does not answer.
    """
    display = ClusterDisplay(console, verbose=settings.verbose)
    supervisor = Supervisor(
        cluster_specs(settings, node_args.common, node_args.decode), display.listener()
    )
    display.start(supervisor.services)
    try:
        await supervisor.start()
        await wait_routable(supervisor.services[0].spec.endpoint, settings)
        display.show_endpoints(supervisor.services)
        yield supervisor
    finally:
        display.end_loading()
        await _stop(supervisor, stop_request)


async def _stop(supervisor: Supervisor, stop_request: StopRequest) -> None:
    stopping = asyncio.create_task(supervisor.stop())
    hurry = asyncio.create_task(stop_request.hurry.wait())
    await asyncio.wait({stopping, hurry}, return_when=asyncio.FIRST_COMPLETED)
    hurry.cancel()
    while not stopping.done():
        supervisor.kill()
        await asyncio.wait({stopping}, timeout=_KILL_AGAIN_S)
    await stopping


async def wait_routable(url: str, settings: UpSettings) -> None:
    """Waits until the router has learnt of every node."""
    prefills = settings.prefill + settings.switchable
    wanted = {"prefill_nodes": prefills, "decode_nodes": settings.decode}
    async with aiohttp.ClientSession() as session:
        while True:
            with contextlib.suppress(aiohttp.ClientConnectionError):
                async with session.get(f"{url}/ready") as response:
                    known = await response.json()
                if all(known.get(name, 0) >= count for name, count in wanted.items()):
                    return
            await asyncio.sleep(_ROUTABLE_POLL_S)


async def _up(settings: UpSettings, node_args: NodeArgs, console: Console) -> None:
    stop_request = StopRequest.from_signals()
    stop_wanted = asyncio.create_task(stop_request.stop.wait())
    cluster = asyncio.create_task(_serve(settings, node_args, console, stop_request))
    await asyncio.wait({stop_wanted, cluster}, return_when=asyncio.FIRST_COMPLETED)
    if not cluster.done():
        console.print("stopping ... (once more to stop at once)")
        cluster.cancel()
    stop_wanted.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await cluster


async def _serve(
    settings: UpSettings, node_args: NodeArgs, console: Console, stop_request: StopRequest
) -> None:
    async with running_cluster(settings, node_args, console, stop_request) as supervisor:
        url = supervisor.services[0].spec.endpoint
        console.print(f"serving at [bold]{url}/v1[/] (OpenAI API). Stop with Ctrl-C.")
        if settings.switchable:
            change = "tandem switch-role --node ENDPOINT --to decode"
            console.print(f"node-N changes its role by [bold]{change}[/]")
        await supervisor.wait_failed()


def main(args: list[str]) -> int:
    """Runs a cluster. `args` are settings of the cluster and flags of its nodes."""
    console = Console(stderr=True)
    try:
        own, node_args = read_args(args)
        settings = parse_settings(UpSettings, "tandem up", own)
        asyncio.run(_checked_up(settings, node_args, console))
    except UsageError as error:
        print(f"tandem up: {error}", file=sys.stderr)
        return 2
    except (ServiceFailed, DeviceError, CannotStartError) as error:
        print(error, file=sys.stderr)
        return 2 if settings.check else 1
    return 0


async def _checked_up(settings: UpSettings, node_args: NodeArgs, console: Console) -> None:
    """Finds what cannot work before anything is started."""
    await node_args.check(settings.switchable > 0)
    check_name(settings.model)
    check_architecture(settings.model)
    check_memory(settings, node_args.common)
    if settings.check:
        await check_services(cluster_specs(settings, node_args.common, node_args.decode))
        print(settings.model_dump_json(indent=2))
        return
    await _up(settings, node_args, console)
