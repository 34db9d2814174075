"""Network policies allow what Kubernetes says that they do."""

from __future__ import annotations

from typing import Any

from tests.kubernetes_stand_in.cluster import NAMESPACE, new_store
from tests.kubernetes_stand_in.network import Network
from tests.kubernetes_stand_in.network_policies import allows
from tests.kubernetes_stand_in.object_store import ObjectStore
from tests.kubernetes_stand_in.resources import Object


def pod(app: str, namespace: str = NAMESPACE, ip: str = "10.0.0.1") -> Object:
    ports = [{"name": "web", "containerPort": 80}]
    return {
        "metadata": {"namespace": namespace, "labels": {"app": app}},
        "spec": {"containers": [{"ports": ports}]},
        "status": {"podIP": ip},
    }


A, B, ELSEWHERE = pod("a"), pod("b"), pod("b", "default", "10.9.0.1")


def store(*specs: dict[str, Any]) -> ObjectStore:
    """Makes a cluster with policies for pods `a`."""
    made = new_store(0, Network())
    for number, spec in enumerate(specs):
        meta = {"name": f"p{number}", "namespace": NAMESPACE}
        full = {"podSelector": {"matchLabels": {"app": "a"}}, **spec}
        made.create({"kind": "NetworkPolicy", "metadata": meta, "spec": full})
    return made


def to_b(**rule: Any) -> dict[str, Any]:
    return {"policyTypes": ["Ingress"], "ingress": [rule]}


def test_without_a_policy_everything_is_open() -> None:
    assert allows(store(), A, B, 80) and allows(store(), ELSEWHERE, A, 80)


def test_a_policy_closes_what_no_rule_opens() -> None:
    closed = store({"policyTypes": ["Ingress"]})
    assert not allows(closed, B, A, 80) and allows(closed, A, B, 80)
    closed = store({"policyTypes": ["Egress"], "egress": []})
    assert not allows(closed, A, B, 80) and allows(closed, B, A, 80)


def test_rules_of_several_policies_add_up() -> None:
    both = store(to_b(ports=[{"port": 80}]), to_b(ports=[{"port": 90, "endPort": 95}]))
    opened = [port for port in (79, 80, 81, 89, 90, 95, 96) if allows(both, B, A, port)]
    assert opened == [80, 90, 95]
    assert allows(store(to_b(ports=[{"port": "web"}])), B, A, 80)
    assert not allows(store(to_b(ports=[{"port": 80, "protocol": "UDP"}])), B, A, 80)


def test_peers_are_of_the_own_namespace_unless_one_is_selected() -> None:
    selector = {"podSelector": {"matchLabels": {"app": "b"}}}
    own = store(to_b(**{"from": [selector]}))
    assert allows(own, B, A, 1) and not allows(own, ELSEWHERE, A, 1)
    named = {"matchLabels": {"kubernetes.io/metadata.name": "default"}}
    other = store(to_b(**{"from": [{"namespaceSelector": named}]}))
    assert allows(other, ELSEWHERE, A, 1) and not allows(other, B, A, 1)
    both = store(to_b(**{"from": [{"namespaceSelector": named, **selector}]}))
    assert allows(both, ELSEWHERE, A, 1) and not allows(both, pod("c", "default"), A, 1)


def test_blocks_of_addresses_have_holes() -> None:
    block = {"cidr": "10.9.0.0/16", "except": ["10.9.1.0/24"]}
    found = store(to_b(**{"from": [{"ipBlock": block}]}))
    assert allows(found, ELSEWHERE, A, 1) and not allows(found, B, A, 1)
    assert not allows(found, pod("b", "default", "10.9.1.7"), A, 1)
