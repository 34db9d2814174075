"""Runs `tandem demo`: the whole system in one minute, on any machine.

1. starts a router, one prefill node and one decode node with the demo checkpoint
2. streams one chat completion, then a session of two turns, each with its timeline
3. stops everything, also on Ctrl-C
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

from rich.console import Console

from cli.chat import ChatSettings, Conversation, client_session
from cli.local_cluster.cluster import UpSettings
from cli.local_cluster.node_args import NodeArgs, UsageError, read_args
from cli.local_cluster.supervisor import ServiceFailed
from cli.openai_client import ApiError, first_model
from cli.up import StopRequest, running_cluster
from kv_transfer.memory.devices.device import DeviceError

_SYSTEM = "You are a friendly guide to a small village."
_SINGLE = "Tell me a story about Ada."
_SESSION = ("Where is the boat?", "And who owns it?")


async def _talk(url: str, console: Console) -> None:
    settings = ChatSettings(url=url, max_tokens=160, temperature=0.0)
    async with client_session() as session:
        model = await first_model(session, url)
        for title, turns in (("one request", (_SINGLE,)), ("a session of two turns", _SESSION)):
            console.rule(title)
            conversation = Conversation(console, session, settings, model, _SYSTEM)
            for text in turns:
                console.print(f"[bold]user:[/] {text}")
                console.print("[bold]assistant:[/] ", end="")
                await conversation.say(text)


async def _run(console: Console, node_args: NodeArgs, stop_request: StopRequest) -> None:
    settings = UpSettings(port=0)
    async with running_cluster(settings, node_args, console, stop_request) as supervisor:
        await _talk(supervisor.services[0].spec.endpoint, console)
        console.rule("stopping")


async def _until_stopped(console: Console, node_args: NodeArgs) -> int:
    await node_args.check()
    stop_request = StopRequest.from_signals()
    stop_wanted = asyncio.create_task(stop_request.stop.wait())
    demo = asyncio.create_task(_run(console, node_args, stop_request))
    await asyncio.wait({stop_wanted, demo}, return_when=asyncio.FIRST_COMPLETED)
    interrupted = not demo.done()
    demo.cancel()
    stop_wanted.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await demo
    return 130 if interrupted else 0


def main(args: list[str]) -> int:
    """Runs the demo. `args` are flags for every node, after `--`."""
    if "--help" in args:
        print(__doc__)
        return 0
    _, node_args = read_args(["--", *(arg for arg in args if arg != "--")])
    try:
        return asyncio.run(_until_stopped(Console(), node_args))
    except UsageError as error:
        print(f"tandem demo: {error}", file=sys.stderr)
        return 2
    except (ServiceFailed, DeviceError, ApiError) as error:
        print(error, file=sys.stderr)
        return 1
