"""Pods that change their role: they may do what either tier may, and the tiers stay as they are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
from prometheus_client import CollectorRegistry

from engine.node.metrics.engine_metrics import EngineCollector
from kv_transfer.config import KVRole, KVTransferConfig
from tests.helm.helm_engine import HelmSdk
from tests.helm.registered_metrics import measured_engine
from tests.helm.scenarios import overlay, rendered, serving_pod, values_of
from tests.helm.service_settings import POD_IP, containers, settings_of
from tests.helm.test_alerts_fire import judge, needs_promtool, rule_of
from tests.helm.test_metric_names import selectors, unknown_series
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


# What watches them -------------------------------------------------------------------------------

WATCHED = {"dashboards": {"enabled": True}, "prometheusRule": {"enabled": True}}


def queries_of(values: dict[str, Any]) -> dict[str, list[str]]:
    """Returns the queries of panels and alerts."""
    found = HelmSdk.shared().render(overlay(values, {"monitoring": WATCHED}))
    boards = found.one("ConfigMap", "dashboards")["data"].values()
    panels = [panel for board in boards for panel in json.loads(board)["panels"]]
    targets = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    groups = found.one("PrometheusRule")["spec"]["groups"]
    known = (("$__rate_interval", "5m"), ("$namespace", "n"), ("$release", "r"))
    for word, value in known:
        targets = [query.replace(word, value) for query in targets]
    return {"panels": targets, "alerts": [r["expr"] for group in groups for r in group["rules"]]}


def components_of(query: str) -> Iterator[re.Pattern[str]]:
    for selector in selectors(promql_parser.parse(query)):
        for matcher in selector.matchers.matchers:
            if matcher.name == "component" and matcher.value != "router":
                yield re.compile(matcher.value)


@pytest.mark.parametrize(
    ("kv_role", "role"), [("kv_producer", "prefill"), ("kv_consumer", "decode")]
)
def test_a_node_tells_what_it_is(kv_role: KVRole, role: str) -> None:
    engine, registry = measured_engine(), CollectorRegistry()
    engine.config.kv_transfer = KVTransferConfig(kv_role=kv_role)
    registry.register(EngineCollector(engine))
    labels = {"engine": "0", "model_name": "m", "role": role}
    assert registry.get_sample_value("tandem_node_role", labels) == 1


@pytest.mark.parametrize("kind", ["panels", "alerts"])
def test_what_is_said_of_a_tier_has_the_nodes_that_are_of_it_now(kind: str) -> None:
    queries = queries_of(values_of("roles"))[kind]
    asking = [query for query in queries if list(components_of(query))]
    assert len(asking) > 5
    for query in asking:
        assert unknown_series(query) == []
        assert all(pattern.fullmatch("node") for pattern in components_of(query)), query
    of_one_role = [query for query in asking if "unless" not in query]
    for query in of_one_role:
        roles = re.findall(r'tandem_node_role\{[^}]*role="(\w+)"', query)
        tiers = re.findall(r'component=~"(?:\(\.\+-\)\?)?\((\w+)\|node\)"', query)
        assert roles == tiers and tiers, query


def test_models_have_nodes_of_their_own() -> None:
    entry = {"name": "small", "model": {"name": "org/small"}, "node": {"replicas": 1}}
    queries = queries_of({"model": {"name": "org/large"}, "models": [entry]})
    for query in queries["panels"]:
        for pattern in components_of(query):
            assert pattern.fullmatch("small-node") and pattern.fullmatch("node"), query
            assert pattern.fullmatch("decode") or pattern.fullmatch("prefill")
    alerts = {q for q in queries["alerts"] if "kv_cache_usage" in q and "waiting" not in q}
    large, small = sorted(alerts, key=len)
    assert [p.pattern for p in components_of(small)] == ["small-(decode|node)"]
    assert [p.pattern for p in components_of(large)] == ["decode"], "it has none"


@needs_promtool
@pytest.mark.parametrize(("role", "fires"), [("prefill", True), ("decode", False)])
def test_prompts_that_wait_at_such_a_node_are_a_backlog(
    role: str, fires: bool, tmp_path: Path
) -> None:
    found = HelmSdk.shared().render(overlay(values_of("roles"), {"monitoring": WATCHED}))
    groups = found.one("PrometheusRule")["spec"]["groups"]
    rule = rule_of("TandemPrefillBacklog", [rule for group in groups for rule in group["rules"]])
    series = {}
    for component, is_now, tokens in (("prefill", "prefill", 0), ("node", role, 10**6)):
        given = f'namespace="default",release="tandem",component="{component}",pod="{component}"'
        series[f"tandem_waiting_tokens{{{given}}}"] = f"{tokens}x30"
        series[f'tandem_node_role{{{given},role="{is_now}"}}'] = "1x30"
    judge(rule, series, [{}] if fires else [], tmp_path)
