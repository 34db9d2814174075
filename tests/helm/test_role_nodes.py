"""Pods that change their role: they may do what either tier may, and the tiers stay as they are."""

from __future__ import annotations

from tests.helm.helm_engine import HelmSdk
from tests.helm.scenarios import overlay, rendered, serving_pod, values_of
from tests.helm.service_settings import POD_IP, containers, settings_of
from tests.helm.test_semantics import ENGINES, TIERS, egress_flows, flows, ports_of


def test_policies_let_nodes_be_either_and_agree_on_both_ends() -> None:
    """A node calls whom either kind calls, and is called by whoever calls them."""
    found = rendered("roles")
    prefill, decode, node = (ports_of(found, name) for name in ENGINES)
    kv = {"prefill": "8400-8401", "decode": "8500-8501", "node": "8600-8601"}
    grpc = {"prefill": prefill["grpc"], "decode": decode["grpc"], "node": node["grpc"]}
    needed = {("router", name, port) for name, port in grpc.items()}
    needed |= {("router", "decode", decode["http"]), ("router", "node", node["http"])}
    for caller in ENGINES:
        for called in ENGINES:
            # Decode nodes fetch nothing from each other.
            if (caller, called) != ("decode", "decode"):
                needed |= {(caller, called, grpc[called]), (caller, called, kv[called])}
    assert flows(found) - {("test", "router", 8000)} == needed == egress_flows(found)
    alone = overlay(values_of("roles"), {"tierDefaults": {"settings": {"kvSharePrefixes": "off"}}})
    without = HelmSdk.shared().render(alone)
    between = {flow[:2] for flow in flows(without) if flow[0] in ENGINES}
    assert between == {(a, b) for a in ("decode", "node") for b in ("prefill", "node")}
    assert flows(without) - {("test", "router", 8000)} == egress_flows(without)


def test_a_pod_that_changes_its_role_is_found_by_both_and_not_restarted_while_it_drains() -> None:
    found = rendered("roles")
    settings = settings_of("roles")
    node, router = settings["node"], settings["router"]
    assert (node["role"], node["port"], node["grpc_port"], node["kv_port"]) == (
        "prefill", 8110, 8210, 8600,
    )  # fmt: skip
    assert node["kv_host"] == POD_IP and node["api_key_file"]
    assert router["prefill"] == "k8s://tandem-prefill.default:8200"
    assert router["decode"].split(",")[1] == "k8s://tandem-node.default:8110/8210"
    (service,) = found.all("Service", "node")
    assert service["spec"]["publishNotReadyAddresses"], "it is not ready while it changes"
    container = containers(found)["node"]
    for kind, path in {"readiness": "/ready", "startup": "/ready", "liveness": "/health"}.items():
        asked = container[f"{kind}Probe"]["httpGet"]
        assert (asked["path"], asked["port"]) == (path, "metrics")
    labels = serving_pod(found, "node")["metadata"]["labels"]
    assert not [label for label in labels if label.startswith("llm-d.ai/")], "a role that stays"


def test_without_such_nodes_nothing_of_them_is_there_and_with_them_the_tiers_stay() -> None:
    before = {(o["kind"], o["metadata"]["name"]): o for o in rendered("default").objects}
    values = overlay(values_of("default"), {"node": {"replicas": 1, "role": "decode"}})
    found = HelmSdk.shared().render(values)
    after = {(o["kind"], o["metadata"]["name"]): o for o in found.objects}
    assert {name for _, name in after.keys() - before.keys()} == {"tandem-node"}
    assert not [key for key in before if "node" in key[1].removeprefix("tandem-").split("-")]
    for tier in TIERS:
        key = ("Deployment", f"tandem-{tier}")
        assert before[key] == after[key], "it would restart"
    assert "--role=decode" in containers(found)["node"]["args"]
    assert "node: 1 pods, 1 GPUs each" in found.notes
