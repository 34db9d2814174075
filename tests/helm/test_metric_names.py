"""Dashboards, alerts and scalers ask for series that the services have, in PromQL that parses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import promql_parser
import pytest

from engine.node.metrics.kv_transfer_metrics import BY_TRANSPORT, COUNTERS, GAUGES
from tests.helm.helm_engine import CHART, ROOT
from tests.helm.registered_metrics import labels_of, series_of, transfer_figures
from tests.helm.scenarios import SCENARIOS, rendered, serving_pod

COMPONENTS = ("router", "prefill", "decode")
EXPORTER = "DCGM_FI_"
"""Begins series of the GPUs, which the exporter of another project has."""


def selectors(node: Any) -> Iterator[Any]:
    """Returns the vector selectors of a parsed query."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
    for name in ("expr", "lhs", "rhs", "vector_selector", "param"):
        child = getattr(node, name, None)
        if child is not None:
            yield from selectors(child)
    for child in getattr(node, "args", None) or ():
        yield from selectors(child)


def unknown_series(query: str) -> list[str]:
    """Series that their component does not have. Every selector must say the component, or ask
    for what all nodes have."""
    wrong = []
    for selector in selectors(promql_parser.parse(query)):
        if selector.name.startswith(EXPORTER):
            continue
        labels = {matcher.name: matcher.value for matcher in selector.matchers.matchers}
        assert {"namespace", "release"} <= set(labels), f"{query} mixes releases"
        among = re.compile(labels.get("component", "prefill|decode"))
        asked = [name for name in ("router", "prefill", "decode") if among.fullmatch(name)]
        assert asked, f"{query} asks for no component"
        wrong += [selector.name for name in asked if selector.name not in series_of(name)]
    return wrong


SCRAPED = {"namespace", "release", "component", "pod", "le"}
"""Holds labels that PodMonitors and Prometheus give; `le` is a histogram's own."""


def series_labels(selector: Any) -> set[str]:
    """Returns the labels of a selector's series: all that any component gives them."""
    family = re.sub("_(total|bucket|sum|count)$", "", selector.name)
    kinds = [labels_of(component) for component in COMPONENTS]
    found = [labels.get(name, set()) for labels in kinds for name in (family, selector.name)]
    return SCRAPED.union(*found)


def unknown_labels(node: Any) -> set[str]:
    """Returns labels by which a parsed query selects or sums, and which its series do not have."""
    found = set()
    for selector in selectors(node):
        if not selector.name.startswith(EXPORTER):
            asked = {matcher.name for matcher in selector.matchers.matchers}
            found |= asked - series_labels(selector)
    if isinstance(node, promql_parser.AggregateExpr) and node.modifier:
        found |= set(node.modifier.labels).difference(*map(series_labels, selectors(node)))
    for name in ("expr", "lhs", "rhs", "param"):
        child = getattr(node, name, None)
        found |= unknown_labels(child) if child is not None else set()
    for child in getattr(node, "args", None) or ():
        found |= unknown_labels(child)
    return found


def units_of(query: str) -> set[str]:
    """Returns the units of Grafana in which a query's result may be shown."""
    names = [one.name for one in selectors(promql_parser.parse(query))]
    name = names[0]
    if name.startswith(EXPORTER):
        # The exporter's own: MiB, bytes a second, percent or a part of 1.
        ends = {"FB_USED": "mbytes", "_TX_BYTES": "Bps", "GPU_UTIL": "percent",
                "_ACTIVE": "percentunit", "POWER_USAGE": "watt"}  # fmt: skip
        return {unit for end, unit in ends.items() if name.endswith(end)} or {"short"}
    if re.search("_seconds(_bucket|_total)?$", name):
        return {"s"}
    if re.search("_bytes_(per_second_bucket|total)$", name):
        return {"Bps"}
    if name.endswith("_perc") or (len(names) > 1 and name.endswith("_bytes")):
        return {"percentunit"}
    if name.endswith("_bytes"):
        return {"bytes"}
    return {"percentunit", "short"} if len(names) > 1 else {"short", "reqps", "ops"}


def dashboard_queries() -> Iterator[tuple[str, str, str]]:
    """Yields title, unit and query of each panel."""
    for path in sorted((CHART / "files" / "dashboards").glob("*.json")):
        board = json.loads(path.read_text(encoding="utf-8"))
        for panel in board["panels"]:
            for target in panel.get("targets", ()):
                query = target["expr"].replace("$__rate_interval", "5m")
                query = query.replace("$namespace", "n").replace("$release", "r")
                yield panel["title"], panel["fieldConfig"]["defaults"]["unit"], query


def rules(name: str) -> list[dict[str, Any]]:
    found = rendered(name).one("PrometheusRule")
    return [rule for group in found["spec"]["groups"] for rule in group["rules"]]


@pytest.mark.parametrize(("title", "unit", "query"), list(dashboard_queries()))
def test_panels_show_series_that_exist(title: str, unit: str, query: str) -> None:
    assert unknown_series(query) == []
    assert unknown_labels(promql_parser.parse(query)) == set()
    assert unit in units_of(query)


@pytest.mark.parametrize("name", ["production", "decode-only"])
def test_alerts_watch_series_that_exist(name: str) -> None:
    for rule in rules(name):
        assert unknown_series(rule["expr"]) == [], rule["alert"]
        assert unknown_labels(promql_parser.parse(rule["expr"])) == set(), rule["alert"]


def test_summaries_use_labels_that_the_alerts_have() -> None:
    used = 0
    for rule in rules("production"):
        result = promql_parser.parse(rule["expr"])
        while isinstance(result, promql_parser.BinaryExpr):
            result = result.lhs
        summed = isinstance(result, promql_parser.AggregateExpr)
        kept = set(result.modifier.labels if result.modifier else ()) if summed else SCRAPED
        asked = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert asked <= kept, rule["alert"]
        used += bool(asked)
    assert used > 5


def test_alerts_without_a_prefill_tier_ask_for_none() -> None:
    text = json.dumps(rules("decode-only"))
    assert 'component=\\"prefill\\"' not in text


def test_scalers_ask_for_series_that_exist() -> None:
    for scaled in rendered("keda").all("ScaledObject"):
        component = scaled["metadata"]["labels"]["app.kubernetes.io/component"]
        for trigger in scaled["spec"]["triggers"]:
            query = trigger["metadata"]["query"]
            assert unknown_series(query) == [] and f'component="{component}"' in query
    for scaler in rendered("hpa").all("HorizontalPodAutoscaler"):
        component = scaler["metadata"]["labels"]["app.kubernetes.io/component"]
        for metric in scaler["spec"]["metrics"]:
            if metric["type"] == "Pods":
                assert metric["pods"]["metric"]["name"] in series_of(component)


def test_targets_are_what_the_values_say() -> None:
    def metric(component: str) -> dict[str, Any]:
        return rendered("hpa").one("HorizontalPodAutoscaler", component)["spec"]["metrics"][0]

    # 2 seconds of 8000 tokens; three quarters of the KV cache.
    assert metric("prefill")["pods"]["target"]["averageValue"] == "16000"
    assert metric("decode")["pods"]["target"]["averageValue"] == "750m"
    triggers = rendered("keda").one("ScaledObject", "prefill")["spec"]["triggers"][0]["metadata"]
    assert triggers["query"].endswith("/ 15928") and triggers["threshold"] == "1.5"
    # A zero for lost series would scale a loaded tier down; an error leads to the fallback.
    for component in ("prefill", "decode"):
        (trigger,) = rendered("keda").one("ScaledObject", component)["spec"]["triggers"]
        assert "vector" not in trigger["metadata"]["query"]
        assert trigger["metadata"]["ignoreNullValues"] == "false"


def test_panels_of_gpus_show_those_of_one_release() -> None:
    """An exporter knows no release: each of its series is joined with one that does."""
    for title, _, query in dashboard_queries():
        found = [selector.name for selector in selectors(promql_parser.parse(query))]
        assert sum(name.startswith(EXPORTER) for name in found) in (0, len(found) - 1), title
        if EXPORTER in query:
            assert "on (namespace, pod)" in query and "tandem_engine_up" in found, title


def test_an_unknown_series_would_be_found() -> None:
    labels = '{namespace="n",release="r",component="decode"}'
    assert unknown_series(f"rate(vllm:no_such_total{labels}[5m])") == ["vllm:no_such_total"]
    assert unknown_series(f"tandem_router_nodes{labels}") == ["tandem_router_nodes"]
    query = f'sum by (host) (rate(tandem_disagg_decision_total{{reason="x",{labels[1:]}[5m]))'
    assert unknown_labels(promql_parser.parse(query)) == {"host", "reason"}


def test_labels_that_queries_use_are_given_by_the_monitors() -> None:
    for monitor in rendered("production").all("PodMonitor"):
        endpoint = monitor["spec"]["podMetricsEndpoints"][0]
        assert {rule["targetLabel"] for rule in endpoint["relabelings"]} == {"release", "component"}


def test_certificates_are_watched_where_there_are_any() -> None:
    watched = {rule["alert"]: rule["expr"] for rule in rules("production")}
    # cert-manager begins 720 hours before the end; half of it is late.
    assert watched["TandemCertificateEnds"].endswith("- time() < 1296000")
    assert "TandemCertificateEnds" not in {rule["alert"] for rule in rules("decode-only")}


def _alert_rows() -> list[tuple[str, str, str]]:
    """Returns anchor, name and severity of each alert that the page has."""
    text = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    return re.findall(r'^\| <a id="(\w+)"></a>(\w+) \| (\w+) \| \w', text, re.MULTILINE)


def test_the_page_has_the_severity_of_each_alert() -> None:
    found = {name: severity for _, name, severity in _alert_rows()}
    templates = "".join(path.read_text() for path in (ROOT / "helm/templates").glob("*.tpl"))
    alerts = re.findall(r"- alert: (\w+).*?severity: (\w+)", templates, re.DOTALL)
    assert len(alerts) > 30
    assert found == dict(alerts)


def test_every_alert_has_a_runbook() -> None:
    anchors = {name: anchor for anchor, name, _ in _alert_rows()}
    for rule in rules("production"):
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert page == "https://wiki.example.com/tandem/monitoring"
        assert anchor == rule["alert"].lower() == anchors[rule["alert"]]
    # A link that leads nowhere is worse than none.
    assert all("runbook_url" not in rule["annotations"] for rule in rules("decode-only"))


@pytest.mark.parametrize("name", SCENARIOS)
def test_scrapers_find_the_port_they_name(name: str) -> None:
    found = rendered(name)
    for monitor in found.all("PodMonitor"):
        component = monitor["metadata"]["labels"]["app.kubernetes.io/component"]
        pod = serving_pod(found, component)["spec"]
        ports = {port["name"] for port in pod["containers"][0]["ports"]}
        assert {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]} <= ports


def test_each_figure_of_the_data_plane_is_a_counter_or_a_gauge_by_name() -> None:
    counted = transfer_figures()
    assert counted <= COUNTERS.keys() | GAUGES.keys() | BY_TRANSPORT.keys()
    assert not COUNTERS.keys() & GAUGES.keys()
