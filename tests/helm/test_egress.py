"""Policies let pods reach names, hubs, mirrors and proxies, and meshes reach pods; some need
no hub."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helm.helm_engine import HelmSdk
from tests.helm.scenarios import overlay, pods, rendered, serving_pod, values_of
from tests.helm.service_settings import environment

MINIMAL: dict[str, Any] = {"model": {"name": "org/model"}}
PROXY = [{"name": "HTTPS_PROXY", "value": "http://proxy.corp:3128"}]
PRELOADED = {
    "preload": {"kind": "job"},
    "storage": {"type": "pvc", "pvc": {"accessModes": ["ReadWriteMany"]}},
}


def ports_of(values: dict[str, Any], component: str) -> list[set[tuple[int, str]]]:
    """Returns the ports of each egress rule to everywhere."""
    found = HelmSdk.shared().render(overlay(MINIMAL, values))
    (policy,) = found.all("NetworkPolicy", component)
    return [
        {(port["port"], port.get("protocol", "TCP")) for port in rule["ports"]}
        for rule in policy["spec"]["egress"]
        if "to" not in rule
    ]


@pytest.mark.parametrize("component", ["router", "prefill", "decode"])
def test_names_are_asked_for_on_both_ports(component: str) -> None:
    """OpenShift's DNS pods listen on 5353, and policies are about pods."""
    dns = {(port, protocol) for port in (53, 5353) for protocol in ("UDP", "TCP")}
    assert dns in ports_of({}, component)


@pytest.mark.parametrize(
    ("values", "ports"),
    [
        ({}, {443}),
        ({"model": {"hub": {"endpoint": "http://hf.corp:8080"}}}, {8080}),
        ({"model": {"hub": {"endpoint": "http://hf.corp"}}}, {80}),
        ({"model": {"hub": {"endpoint": "https://hf.corp/path"}}}, {443}),
        ({"tierDefaults": {"env": PROXY}}, {443, 3128}),
        ({"decode": {"env": [{"name": "HF_ENDPOINT", "value": "http://m:99"}]}}, {443, 99}),
    ],
)
def test_a_node_that_downloads_reaches_its_hub(values: dict[str, Any], ports: set[int]) -> None:
    assert {(port, "TCP") for port in ports} in ports_of(values, "decode")


def test_a_job_that_downloads_reaches_a_mirror() -> None:
    hub = {"endpoint": "http://hf.corp:8080"}
    assert {(8080, "TCP")} in ports_of({"model": {**PRELOADED, "hub": hub}}, "preload")
    assert {(8080, "TCP")} not in ports_of({"model": {**PRELOADED, "hub": hub}}, "decode")


def test_what_a_user_adds_to_policies_each_of_them_has() -> None:
    tunnel = {"ports": [{"port": 15008}]}
    rules = {"networkPolicy": {"extraIngress": [tunnel], "extraEgress": [tunnel]}}
    found = HelmSdk.shared().render(overlay(values_of("roles"), rules))
    kinds = {p["metadata"]["labels"]["app.kubernetes.io/component"]: p["spec"]
             for p in found.all("NetworkPolicy")}  # fmt: skip
    assert kinds.keys() >= {"router", "prefill", "decode", "node"}
    store = HelmSdk.shared().render(overlay(values_of("kv-store"), rules))
    for spec in [*kinds.values(), *(p["spec"] for p in store.all("NetworkPolicy"))]:
        assert tunnel in spec["ingress"]
        assert "Egress" not in spec["policyTypes"] or tunnel in spec["egress"]


def test_a_complete_cache_of_the_hub_may_be_a_claim_that_none_can_write_to() -> None:
    """Pods keep what they make of a checkpoint, such as GGUF converted, where they may write."""
    offline = values_of("offline")
    assert offline["model"]["storage"]["pvc"]["accessModes"] == ["ReadOnlyMany"]
    (container,) = serving_pod(rendered("offline"), "decode")["spec"]["containers"]
    (mount,) = (one for one in container["volumeMounts"] if one["name"] == "models")
    assert mount["readOnly"] is True
    variables = environment(container)
    assert variables["HF_HUB_OFFLINE"] == "1"
    assert variables["HF_HUB_CACHE"] == f"{mount['mountPath']}/hub"
    assert variables["HF_HOME"].startswith("/cache/")
    assert {(443, "TCP")} not in ports_of(offline, "decode"), "who asks nobody needs no way there"
    for pod in pods(rendered("offline")).values():
        for volume in pod["spec"].get("volumes", ()):
            if volume["name"] == "models":
                assert volume["persistentVolumeClaim"]["readOnly"] is True
    modes = {"model": {"storage": {"pvc": {"accessModes": ["ReadOnlyMany", "ReadWriteMany"]}}}}
    written = HelmSdk.shared().render(overlay(offline, modes))
    (container,) = serving_pod(written, "decode")["spec"]["containers"]
    assert environment(container)["HF_HOME"] == "/models", "where pods find it again"
