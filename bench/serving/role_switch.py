#!/usr/bin/env python3
"""Measures how long a node is neither prefill nor decode when it changes its role.

    python -m bench.serving.role_switch                          the demo checkpoint, on CPU
    python -m bench.serving.role_switch --model M --name role_switch_gpu -- --device cuda

One node of `tandem node`, without requests: what they need to end is theirs. A round is a change
from prefill to decode and one back. Of each: the seconds from the call to the first report of the
new role, which is when routers use it, and those of them that the engine took. Beside them: the
seconds that the node took to start, which is what a change costs where weights are loaded again.
The ids of the workers' processes must not change. Flags behind `--` are the node's. Writes
bench/results/NAME.json.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import statistics
import sys
import time
from typing import Any

import grpc

from bench.record import write_result
from bench.serving.process_tree import below, module_of
from cli.cluster import DEMO_CHECKPOINT, free_ports
from cli.supervisor import Listener, ServiceSpec, Supervisor
from tandem_pb import node_pb2, node_pb2_grpc

_WORKER = "engine.executor.worker_proc"
_ENGINE_TOOK = re.compile(r"the engine is that of a (\w+) node after ([0-9.]+) s")
_ROLES = {"decode": node_pb2.NODE_ROLE_DECODE, "prefill": node_pb2.NODE_ROLE_PREFILL}
_PATIENCE_S = 120.0
_PAUSE_S = 0.02


class Node:
    """The node, as a router sees it."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def change(self, role: node_pb2.NodeRole) -> float:
        """Returns the seconds until the node reports in another role."""
        started_at = time.monotonic()
        async with asyncio.timeout(_PATIENCE_S):
            async with grpc.aio.insecure_channel(self._address) as channel:
                stub = node_pb2_grpc.NodeStatusStub(channel)  # type: ignore[no-untyped-call]
                await stub.SwitchRole(node_pb2.SwitchRoleRequest(role=role))
            while True:
                if await self._reports(role):
                    return time.monotonic() - started_at
                await asyncio.sleep(_PAUSE_S)

    async def _reports(self, role: node_pb2.NodeRole) -> bool:
        async with grpc.aio.insecure_channel(self._address) as channel:
            stub = node_pb2_grpc.NodeStatusStub(channel)  # type: ignore[no-untyped-call]
            try:
                async for load in stub.Watch(node_pb2.WatchRequest()):
                    if load.role == role:
                        return True
            except grpc.aio.AioRpcError:
                return False
        return False


def workers(pid: int | None) -> list[int]:
    """Returns the worker processes of a node."""
    assert pid is not None, "the node runs"
    return sorted(child for child in below(pid) if module_of(child) == _WORKER)


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures. Raises AssertionError where a worker is another."""
    port, grpc_port = free_ports(2)
    ports = ["--port", str(port), "--grpc-port", str(grpc_port)]
    argv = [sys.executable, "-m", "role_node", "--model", args.model, *ports, *args.node]
    engine_s: list[float] = []

    def on_log(_: object, line: str) -> None:
        if found := _ENGINE_TOOK.search(line):
            engine_s.append(float(found[2]))

    spec = ServiceSpec("node", tuple(argv), f"127.0.0.1:{grpc_port}")
    supervisor = Supervisor([spec], Listener(on_log=on_log))
    took: dict[str, list[float]] = {role: [] for role in _ROLES}
    started_at = time.monotonic()
    try:
        await supervisor.start()
        start_s = time.monotonic() - started_at
        service = supervisor.services[0]
        before, node = workers(service.pid), Node(spec.endpoint)
        for _ in range(args.rounds):
            for name, role in _ROLES.items():
                took[name].append(await node.change(role))
        assert before and workers(service.pid) == before, "the workers are others"
    finally:
        await supervisor.stop()
    return {
        "start_s": round(start_s, 2),
        "engine_s": summary(engine_s),
        **{f"to_{name}_s": summary(seconds) for name, seconds in took.items()},
    }


def summary(seconds: list[float]) -> dict[str, float]:
    return {"p50": round(statistics.median(seconds), 2), "longest": round(max(seconds), 2)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=str(DEMO_CHECKPOINT))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--limit-s", type=float, default=5.0, help="for the longest change")
    parser.add_argument("--name", default="role_switch")
    parser.add_argument("node", nargs="*", help="flags of the node, behind --")
    args = parser.parse_args()
    figures = asyncio.run(measure(args))
    print(write_result(args.name, figures).name, figures)
    return int(max(figures[f"to_{name}_s"]["longest"] for name in _ROLES) > args.limit_s)


if __name__ == "__main__":
    sys.exit(main())
