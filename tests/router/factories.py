"""Nodes, reports and requests for tests of the router's logic, without any network."""

from __future__ import annotations

from typing import Any

from router.nodes.address import NodeAddress, NodeRole
from router.nodes.node import Node
from router.nodes.registry import NodeRegistry
from router.nodes.report import NodeReport
from router.placement.prefill_outcome import PrefillOutcome
from router.request.info import RequestInfo


class ManualClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def address(name: str, role: NodeRole = NodeRole.DECODE) -> NodeAddress:
    return NodeAddress(role, f"{name}:80", f"{name}:90")


def report(role: NodeRole = NodeRole.DECODE, **fields: Any) -> NodeReport:
    defaults = {"node_id": "", "role": role, "epoch": 1, "sequence": 1, "model_name": "demo"}
    return NodeReport(**{**defaults, **fields})


def request(**fields: Any) -> RequestInfo:
    return RequestInfo(**{"path": "/v1/completions", "request_id": "r", **fields})


def served(target: Node, prompt: int, cached: int, seconds: float) -> PrefillOutcome:
    return PrefillOutcome(
        node=target.address.target,
        num_prompt_tokens=prompt,
        num_cached_tokens=cached,
        compute_s=seconds,
    )


class Fleet:
    """A registry under a manual clock."""

    def __init__(self, **settings: Any) -> None:
        self.clock = ManualClock()
        self.registry = NodeRegistry(clock=self.clock, **settings)
        self._addresses: list[NodeAddress] = []

    def add(self, name: str, role: NodeRole = NodeRole.DECODE, **fields: Any) -> Node:
        where = address(name, role)
        self._addresses.append(where)
        self.registry.set_members(self._addresses)
        self.registry.apply_report(where, report(role, **fields))
        return self.node(name)

    def node(self, name: str) -> Node:
        [found] = [n for n in self.registry.all_nodes() if n.address.target == f"{name}:80"]
        return found
