"""Values of `monitoring` reach every service; what alerts ask of histograms is there."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from engine.node.metrics.engine_metrics import ITL_BUCKETS
from router.observe.first_byte_times import FIRST_BYTE_BUCKETS
from tests.helm.helm_engine import HelmSdk, Rendered
from tests.helm.registered_metrics import series_of
from tests.helm.scenarios import rendered, values_of
from tests.helm.service_settings import containers, environment

SERVICES = ("router", "prefill", "decode")


def render(monitoring: dict[str, Any], **values: Any) -> Rendered:
    given = {**values_of("default"), **values, "monitoring": monitoring}
    return HelmSdk.shared().render(given, kube_version="1.34.0")


def test_every_service_pushes_its_traces_and_says_where_it_runs() -> None:
    found = containers(render({"traces": {"endpoint": "http://c.o:4318", "sampleRatio": 0.1}}))
    for service in SERVICES:
        args, env = found[service]["args"], environment(found[service])
        assert {"--otlp-traces-endpoint=http://c.o:4318", "--trace-sample-ratio=0.1"} <= set(args)
        assert {"K8S_POD_NAME", "K8S_POD_UID", "K8S_NAMESPACE_NAME", "K8S_NODE_NAME"} <= set(env)
        assert env["K8S_CONTAINER_NAME"] == found[service]["name"]


def test_nothing_is_said_unless_asked_for() -> None:
    for container in containers(rendered("default")).values():
        text = " ".join(container["args"])
        assert "otlp" not in text and "--log" not in text and "trace" not in text
        assert not any(name.startswith("K8S_") for name in environment(container))


@pytest.mark.parametrize(
    ("endpoint", "port"),
    [
        ("http://c.o:4318/v1/traces", 4318),
        ("grpc://c.o:4317", 4317),
        ("https://c.o", 443),
        ("http://c.o/x", 80),
        ("http://[fd00::1]:4318", 4318),
    ],
)
def test_the_way_to_the_collector_is_open(endpoint: str, port: int) -> None:
    peer = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "o"}}}
    found = render({"traces": {"endpoint": endpoint, "collector": [peer]}})
    policies = found.all("NetworkPolicy")
    assert len(policies) == 3
    for policy in policies:
        rule = {"ports": [{"port": port}], "to": [peer]}
        assert rule in policy["spec"]["egress"]


def test_logs_are_in_one_form_unless_a_tier_wants_another() -> None:
    found = containers(
        render(
            {"logs": {"format": "json", "requests": True}},
            decode={"settings": {"logRequests": False, "logFormat": "text"}},
        )
    )
    for service, flags in (
        ("router", {"--log-format=json", "--log-requests"}),
        ("prefill", {"--log-format=json", "--log-requests"}),
        ("decode", {"--log-format=text", "--no-log-requests"}),
    ):
        assert {arg for arg in found[service]["args"] if "log-" in arg} == flags


def test_the_adapter_serves_what_autoscalers_ask_for() -> None:
    found = rendered("production").one("ConfigMap", "adapter-rules")
    asked = {
        metric["pods"]["metric"]["name"]
        for scaler in rendered("hpa").all("HorizontalPodAutoscaler")
        for metric in scaler["spec"]["metrics"]
        if metric["type"] == "Pods"
    }
    served = {}
    for rule in yaml.safe_load(found["data"]["config.yaml"])["rules"]:
        name = rule["seriesQuery"].partition("{")[0]
        assert re.fullmatch(rule["name"]["matches"], name)
        assert 'release="tandem"' in rule["metricsQuery"] and "<<.GroupBy>>" in rule["metricsQuery"]
        served[name] = rule
    assert asked and asked <= set(served) <= series_of("decode") & series_of("prefill")


# Shares of a histogram ---------------------------------------------------------------------------


def bounds_in(expression: str) -> set[str]:
    return set(re.findall(r'le="([^"]+)"', expression))


@pytest.mark.parametrize(
    ("seconds", "ttft", "itl"),
    [(0.1, "0.1", "0.1"), (0.011, "0.02", "0.0125"), (3, "5.0", "5.0"), (60, "80.0", "80.0")],
)
def test_a_share_is_read_at_a_bound_that_the_histogram_has(
    seconds: float, ttft: str, itl: str
) -> None:
    rule = {"enabled": True, "ttftSeconds": seconds, "itlSeconds": seconds}
    found = render({"prometheusRule": rule}).one("PrometheusRule")
    asked = {
        rule["alert"]: bounds_in(rule["expr"])
        for rule in found["spec"]["groups"][0]["rules"]
        if "TokenBudget" in rule["alert"] or "TokenTimeBudget" in rule["alert"]
    }
    assert asked == {
        "TandemFirstTokenBudgetFast": {ttft},
        "TandemFirstTokenBudgetSlow": {ttft},
        "TandemTokenTimeBudgetFast": {itl},
        "TandemTokenTimeBudgetSlow": {itl},
    }
    assert float(ttft) in FIRST_BYTE_BUCKETS and float(itl) in ITL_BUCKETS


def test_the_chart_knows_every_bound() -> None:
    for buckets, alert in (
        (FIRST_BYTE_BUCKETS, "TandemFirstTokenBudgetFast"),
        (ITL_BUCKETS, "TandemTokenTimeBudgetFast"),
    ):
        for bound in buckets[::7]:
            rule = {"enabled": True, "ttftSeconds": bound, "itlSeconds": bound}
            groups = render({"prometheusRule": rule}).one("PrometheusRule")["spec"]["groups"]
            (found,) = (r["expr"] for r in groups[0]["rules"] if r["alert"] == alert)
            assert bounds_in(found) == {str(float(bound))}


def test_a_lax_objective_still_wakes_somebody() -> None:
    groups = render({"prometheusRule": {"enabled": True, "objective": 0.5}}).one("PrometheusRule")
    (found,) = (
        r["expr"]
        for r in groups["spec"]["groups"][0]["rules"]
        if r["alert"] == "TandemFirstTokenBudgetFast"
    )
    assert set(re.findall(r"> ([0-9.]+) and", found)) == {"0.9"}
