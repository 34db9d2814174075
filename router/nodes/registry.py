"""Knows all nodes, by address. Only here do nodes appear, change and vanish.

discovery  ── set_members ──▶ ┐
watches    ── apply_report ─▶ ├─ NodeRegistry ──▶ policy, metrics
requests   ── record_* ─────▶ ┘
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from edge.adapter_call import AdapterCall
from router.nodes.adapter_ledger import AdapterLedger
from router.nodes.address import NodeAddress, NodeRole
from router.nodes.health import EjectionPolicy
from router.nodes.node import Node, NodeState, Patience
from router.nodes.report import MAX_ADAPTERS, NodeReport

logger = logging.getLogger(__name__)

Clock = Callable[[], float]
PrefixListener = Callable[[Node, tuple[int, ...]], None]

_MAX_RETIRED_EPOCHS = 8
_IN_USE = (NodeState.READY, NodeState.HALF_OPEN)
_IN_DOUBT = (NodeState.SUSPECT, NodeState.LEAVING, NodeState.EJECTED)


Life = tuple[str, int]
"""Is a node's id and epoch: one start of it."""


def life_of(report: NodeReport) -> Life:
    return report.node_id, report.epoch


class ReportOutcome(StrEnum):
    """Says what became of a report."""

    APPLIED = "applied"
    RESTARTED = "restarted"
    OUTDATED = "outdated"
    WRONG_ROLE = "wrong_role"
    LISTED_TWICE = "listed_twice"
    UNKNOWN_NODE = "unknown_node"


@dataclass(slots=True)
class NodeRegistry:
    """Holds the nodes. `clock` gives monotonic seconds. `version` grows whenever something happens
    that changes which nodes may be used; what only time changes (silence, the end of an ejection)
    does not. `members_version` grows when a node comes, goes or is another one now: a node that
    flaps is the same, with all that it has."""

    patience: Patience = field(default_factory=Patience)
    ejection: EjectionPolicy = field(default_factory=EjectionPolicy)
    clock: Clock = time.monotonic
    version: int = 0
    members_version: int = 0
    adapters: AdapterLedger = field(default_factory=AdapterLedger)
    """Knows the calls about adapters that any node has reported."""
    on_prefixes: PrefixListener | None = None
    """Records prompts that nodes say they have the KV of."""
    _nodes: dict[NodeAddress, Node] = field(default_factory=dict)
    _listed_of: dict[Life, NodeAddress] = field(default_factory=dict)
    """Says where the node list has each node that reports, by one start of it."""

    def set_members(
        self, addresses: Iterable[NodeAddress], leaving: Collection[NodeAddress] = ()
    ) -> None:
        """Makes `addresses` the members. Those that stay keep all that is known of them.
        `leaving`: those of them that are about to go."""
        self._nodes = {address: self._nodes.get(address) or Node(address) for address in addresses}
        for address, node in self._nodes.items():
            node.leaving = address in leaving
        self._listed_of = {
            life_of(node.report): address
            for address, node in self._nodes.items()
            if node.report is not None
        }
        self.version += 1
        self.members_version += 1

    def nodes(self, role: NodeRole) -> list[Node]:
        return [node for node in self._nodes.values() if node.address.role is role]

    def all_nodes(self) -> list[Node]:
        return list(self._nodes.values())

    def state(self, node: Node) -> NodeState:
        return node.state(self.clock(), self.patience)

    def usable(self, role: NodeRole) -> list[Node]:
        """Returns the usable nodes of `role`, as `usable_of` says."""
        return self.usable_of(self.nodes(role))

    def usable_of(self, nodes: Iterable[Node]) -> list[Node]:
        """Returns those that are ready; with none, those whose state is only in doubt."""
        ready, suspects = self.sorted_out(nodes)
        return list(ready or suspects)

    def sorted_out(self, nodes: Iterable[Node]) -> tuple[dict[Node, None], dict[Node, None]]:
        """Returns those that are ready, and those whose state is only in doubt, in order."""
        now, patience = self.clock(), self.patience
        by_state = [(node, node.state(now, patience)) for node in nodes]
        ready = {node: None for node, state in by_state if state in _IN_USE}
        return ready, {node: None for node, state in by_state if state in _IN_DOUBT}

    def is_member(self, node: Node) -> bool:
        """Returns whether the node list has it, in the role that it has now."""
        return self._nodes.get(node.listed) is node

    def is_connected(self, address: NodeAddress) -> bool:
        node = self._nodes.get(address)
        return node is not None and node.connected

    def model_names(self) -> set[str]:
        """Returns the models of all decode nodes that ever reported, whatever their state, by every
        name."""
        reports = (node.report for node in self.nodes(NodeRole.DECODE))
        return {name for report in reports if report for name in report.model_names}

    def take_report(self, address: NodeAddress, report: NodeReport) -> ReportOutcome:
        """Applies a report, and tells the listener what it says of prefixes."""
        outcome = self.apply_report(address, report)
        applied = outcome in (ReportOutcome.APPLIED, ReportOutcome.RESTARTED)
        if applied and report.recent_prefixes and self.on_prefixes is not None:
            self.on_prefixes(self._nodes[address], report.recent_prefixes)
        return outcome

    def apply_report(self, address: NodeAddress, report: NodeReport) -> ReportOutcome:
        """Takes in a report if it is newer than what is known: (epoch, sequence) decides.

        An epoch is a random number, so which of two is newer is not in the numbers: a new one
        replaces the current one, and one that was replaced never comes back. A node that changes
        its role is followed to where it serves in the one that it reports. One that the list has by
        two addresses, as names with both families of IP do, is one node: that of the first address
        that it reports from, and of the other once nothing has come from there for so long that
        it is suspect: what is known of it, its prefixes above all, stays behind.

        `address`: as the node list has it.
        """
        node = self._nodes.get(address)
        if node is None:
            return ReportOutcome.UNKNOWN_NODE
        if report.role is None or (report.role is not address.role and not report.http_port):
            logger.error(
                "%s is listed as a %s node but says it is %s: correct the node list",
                address.status_target,
                address.role,
                report.role or "of an unknown role",
            )
            return ReportOutcome.WRONG_ROLE
        if report.epoch in node.retired_epochs:
            return ReportOutcome.OUTDATED
        place = address.in_role(report.role, report.http_port)
        if place != address and place in self._nodes:
            return self._is_listed_twice(node, place)
        if (first := self._counts_elsewhere(node, report)) is not None:
            return self._is_listed_twice(node, first)
        known = node.report
        self.learn_calls(report.model_name, *report.adapter_calls)
        if place != node.address or (known is not None and known.epoch != report.epoch):
            self._replace(node, place).apply(report, self.clock())
            self._check_partners(place, report)
            return ReportOutcome.RESTARTED if known is not None else ReportOutcome.APPLIED
        if known is not None and report.sequence <= known.sequence:
            return ReportOutcome.OUTDATED
        if self._changes_use(node, report):
            self.version += 1
        node.apply(report, self.clock())
        if known is None:
            self._check_partners(place, report)
        if report.has_more_adapters and not node.lacks_adapters:
            node.lacks_adapters = True
            logger.warning(
                "%s node %s has more than %d adapters: this router knows no others of it",
                place.role,
                place,
                MAX_ADAPTERS,
            )
        return ReportOutcome.APPLIED

    def _counts_elsewhere(self, node: Node, report: NodeReport) -> NodeAddress | None:
        """Returns another address that a node reports from as well, and which is in use."""
        if not report.node_id:
            return None
        life = life_of(report)
        first = self._nodes.get(self._listed_of.get(life, node.listed))
        if (
            first is None
            or first is node
            or first.report is None
            or life_of(first.report) != life
            or self.clock() - first.reported_at > self.patience.stale_after_s
        ):
            self._listed_of[life] = node.listed
            return None
        if node.counts_at is None:
            logger.warning(
                "%s and %s are one %s node: it counts once, by the first address",
                first.address,
                node.listed,
                first.address.role,
            )
        return first.listed

    def learn_calls(self, model: str, *calls: AdapterCall) -> None:
        """Notes calls about adapters of a model: names of models follow at once."""
        if self.adapters.learn(model, calls):
            self.version += 1

    def _changes_use(self, node: Node, new: NodeReport) -> bool:
        """Returns whether `new` may change for what `node` can be used."""
        old = node.report
        if old is None or not node.connected:
            return True
        stall_s = self.patience.stall_after_s
        return (
            (old.draining, old.drained, old.model_names, old.fingerprint, old.adapters)
            != (new.draining, new.drained, new.model_names, new.fingerprint, new.adapters)
        ) or (old.seconds_since_progress > stall_s) != (new.seconds_since_progress > stall_s)

    def _check_partners(self, address: NodeAddress, report: NodeReport) -> None:
        """Says once, when a node appears, that no node of the other tier can work with it, though
        some serve its model, or have no partner either: everything is answered then, but prompts
        are computed on the decode nodes."""
        reporting = [node for node in self._nodes.values() if node.report is not None]
        others = [node for node in reporting if node.address.role is not address.role]
        if report.fingerprint in {node.fingerprint for node in others}:
            return
        paired = {node.fingerprint for node in reporting if node.address.role is address.role}
        odd = {
            node.fingerprint
            for node in others
            if node.model == report.model_name or node.fingerprint not in paired
        }
        if odd:
            logger.warning(
                "%s node %s fits no node of the other tier: its protocol-dtype-model is %s, "
                "theirs %s; start all nodes of a model with the same checkpoint and dtype",
                address.role,
                address,
                report.fingerprint,
                ", ".join(sorted(odd)),
            )

    def _replace(self, node: Node, place: NodeAddress) -> Node:
        """Makes a new node of one that has restarted, or changed its role and serves at `place`."""
        old = node.address
        if place == old:
            logger.info("%s node %s was restarted", place.role, place)
        else:
            logger.info("%s node %s is %s node %s now", old.role, old, place.role, place)
        epochs = (*node.retired_epochs, *([node.report.epoch] if node.report else []))
        if node.report is not None and self._listed_of.get(life_of(node.report)) == node.listed:
            del self._listed_of[life_of(node.report)]
        listed_as = node.listed if node.listed != place else None
        new = Node(
            place,
            retired_epochs=epochs[-_MAX_RETIRED_EPOCHS:],
            leaving=node.leaving,
            listed_as=listed_as,
        )
        self._nodes[node.listed] = new
        self.version += 1
        self.members_version += 1
        return new

    def _is_listed_twice(self, node: Node, other: NodeAddress) -> ReportOutcome:
        """Leaves a node to the other entry of the list that it is."""
        if node.report is not None:
            node = self._replace(node, node.listed)
        node.counts_at = other
        return ReportOutcome.LISTED_TWICE

    def mark_draining(self, node: Node) -> None:
        """Gives a node nothing new from now on: it has just been asked to change its role."""
        if node.report is not None:
            node.report = replace(node.report, draining=True, drained=False)
            self.version += 1

    def mark_disconnected(self, address: NodeAddress) -> None:
        node = self._nodes.get(address)
        if node is None:
            return
        node.counts_at = None
        if node.connected:
            node.connected = False
            self.version += 1

    def find(self, role: NodeRole, target: str) -> Node | None:
        """Returns the node of `role` at `target` (`host:port`)."""
        places = ((node, node.address) for node in self._nodes.values())
        return next((n for n, a in places if (a.role, a.target) == (role, target)), None)

    def record_success(self, node: Node) -> None:
        self.ejection.record_success(node.health)

    def record_failure(self, node: Node) -> bool:
        """Counts a failed request against `node`. Returns whether it was ejected."""
        peers = self.nodes(node.address.role)
        tier = [other.health for other in peers if other.model == node.model]
        if node.health not in tier:
            return False
        ejected = self.ejection.record_failure(node.health, tier, self.clock())
        if ejected:
            self.version += 1
            logger.warning("%s node %s keeps failing: left out", node.address.role, node.address)
        return ejected
