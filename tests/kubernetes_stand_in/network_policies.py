"""Says whether NetworkPolicies let one pod reach another, as a CNI that enforces them would.

A pod that no policy selects for a direction is open in it; else some rule of some policy must fit.
A connection must be let out by the one side and in by the other.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Any

from tests.kubernetes_stand_in.object_store import ObjectStore
from tests.kubernetes_stand_in.resources import Object, matches_labels

_NAME = "kubernetes.io/metadata.name"


def allows(store: ObjectStore, source: Object, target: Object, port: int) -> bool:
    """Returns whether `source` may open a TCP connection to this port of `target`."""
    out = _lets(store, source, target, target, port, "Egress")
    return out and _lets(store, target, source, target, port, "Ingress")


def _lets(
    store: ObjectStore, owner: Object, peer: Object, target: Object, port: int, way: str
) -> bool:
    policies = list(_policies(store, owner, way))
    if not policies:
        return True
    field, side = ("egress", "to") if way == "Egress" else ("ingress", "from")
    return any(
        _fits_peer(store, owner, peer, rule.get(side)) and _fits_port(rule, target, port)
        for policy in policies
        for rule in policy["spec"].get(field) or ()
    )


def _policies(store: ObjectStore, pod: Object, way: str) -> Iterator[Object]:
    for policy in store.list_kind("NetworkPolicy", pod["metadata"]["namespace"]):
        spec = policy["spec"]
        implied = ["Ingress", *(["Egress"] if "egress" in spec else [])]
        if way in spec.get("policyTypes", implied) and matches_labels(pod, spec["podSelector"]):
            yield policy


def _fits_peer(
    store: ObjectStore, owner: Object, peer: Object, wanted: list[dict[str, Any]] | None
) -> bool:
    """No list means everybody, an empty one too."""
    if not wanted:
        return True
    namespace = peer["metadata"]["namespace"]
    for one in wanted:
        if "ipBlock" in one:
            address = peer.get("status", {}).get("podIP")
            if address and _is_in(address, one["ipBlock"]):
                return True
            continue
        if "namespaceSelector" in one:
            if not matches_labels(_namespace(store, namespace), one["namespaceSelector"]):
                continue
        elif namespace != owner["metadata"]["namespace"]:
            continue
        if matches_labels(peer, one.get("podSelector", {})):
            return True
    return False


def _namespace(store: ObjectStore, name: str) -> Object:
    """Returns the namespace with the label that every one has."""
    found = store.find("Namespace", "", name) or {"metadata": {"name": name}}
    found["metadata"].setdefault("labels", {})[_NAME] = name
    return found


def _is_in(address: str, block: dict[str, Any]) -> bool:
    ip = ipaddress.ip_address(address)
    return ip in ipaddress.ip_network(block["cidr"]) and not any(
        ip in ipaddress.ip_network(hole) for hole in block.get("except", ())
    )


def _fits_port(rule: dict[str, Any], target: Object, port: int) -> bool:
    if not rule.get("ports"):
        return True
    return any(_covers(one, target, port) for one in rule["ports"])


def _covers(wanted: dict[str, Any], target: Object, port: int) -> bool:
    if wanted.get("protocol", "TCP") != "TCP":
        return False
    first = wanted.get("port")
    if first is None:
        return True
    if isinstance(first, str):
        named = [
            entry["containerPort"]
            for container in target["spec"]["containers"]
            for entry in container.get("ports", ())
            if entry.get("name") == first
        ]
        return port in named
    return bool(first <= port <= wanted.get("endPort", first))
