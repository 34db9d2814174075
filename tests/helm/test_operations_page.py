"""The pages for operators and NOTES say what is true: commands, values, files, alerts."""

from __future__ import annotations

import re
import shlex

import pytest
import yaml

from tests.helm.helm_engine import CHART, ROOT, HelmCli, HelmSdk
from tests.helm.scenarios import SCENARIOS, overlay, pods, rendered, values_of
from tests.helm.value_strategies import referred, schema

PAGES = ("operations.md", "platform.md", "security.md", "monitoring.md", "kubernetes.md")
PAGE = "\n".join((ROOT / "docs" / page).read_text(encoding="utf-8") for page in PAGES)
TOP = {"image", "model", "tierDefaults", "prefill", "decode", "router", "auth", "networkPolicy"} | {
    "monitoring", "inferencePool", "tests", "global", "serviceAccount", "rbac", "compileCache",
    "scheduling", "crashReports", "node", "tls",
}  # fmt: skip
TIER = {"settings", "parallelism", "topology", "autoscaling", "strategy", "probes", "shm"} | {
    "network", "nccl", "gpu", "resources", "drain",
}  # fmt: skip


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def helm_commands() -> list[list[str]]:
    """Words of each `helm` line, lines that go on joined, comments left out."""
    text = "\n".join(blocks("sh")).replace("\\\n", " ")
    return [
        shlex.split(line, comments=True) for line in text.splitlines() if line.startswith("helm")
    ]


def is_value(path: str) -> bool:
    node = schema()
    for key in path.split("."):
        while "$ref" in node:
            node = referred(node["$ref"])
        if key not in node.get("properties", {}):
            return False
        node = node["properties"][key]
    return True


def test_values_that_the_page_names_exist() -> None:
    named = set(re.findall(r"`([a-zA-Z]+(?:\.[a-zA-Z]+)+)`", PAGE))
    of_tiers = {path for path in named if path.partition(".")[0] in TIER}
    whole = {path for path in named if path.partition(".")[0] in TOP}
    assert len(whole) > 10 and len(of_tiers) > 4
    assert not {path for path in whole if not is_value(path)}
    assert not {path for path in of_tiers if not is_value(f"decode.{path}")}


def test_helm_commands_of_the_page_render() -> None:
    commands = helm_commands()
    assert {command[3] for command in commands} >= {"install", "upgrade", "rollback", "test"}
    for command in commands:
        assert command[:3] == ["helm", "-n", "llm"]
        if command[3] in ("install", "upgrade"):
            sets = [
                w for i, word in enumerate(command) if word == "--set" for w in command[i : i + 2]
            ]
            flags = sets if "model.name" in str(sets) else [*sets, "--set", "model.name=org/model"]
            text = HelmCli().run(
                "template", command[4], CHART, "--kube-version", "1.34.0", "-n", "llm", *flags
            )
            assert "kind: Deployment" in text


def test_yaml_of_the_page_renders() -> None:
    """Values, that is: what is an object of Argo CD or Flux, `test_platform_page.py` looks into,
    and what Prometheus reads, the next test."""
    others = {"kind", "scrape_configs"}
    values = [block for block in map(yaml.safe_load, blocks("yaml")) if not others & set(block)]
    assert len(values) > 5
    for block in values:
        HelmSdk.shared().render(overlay(values_of("default"), block))


@pytest.mark.parametrize("name", ["production", "multi-host", "models", "kv-store", "roles"])
def test_prometheus_alone_scrapes_what_its_operator_would(name: str) -> None:
    """As far as its rules go, they choose the same ports, and give the same labels."""
    (job,) = next(
        block["scrape_configs"]
        for block in map(yaml.safe_load, blocks("yaml"))
        if "scrape_configs" in block
    )
    (keep, *copies) = job["relabel_configs"]
    meta = "__meta_kubernetes_pod_label_app_kubernetes_io_"
    given = {rule["target_label"]: rule["source_labels"] for rule in copies}
    assert given["release"] == [f"{meta}instance"] and given["component"] == [f"{meta}component"]
    assert given["namespace"] == ["__meta_kubernetes_namespace"]
    assert given["pod"] == ["__meta_kubernetes_pod_name"]
    found = HelmSdk.shared().render(
        overlay(values_of(name), {"monitoring": {"podMonitor": {"enabled": True}}})
    )
    scraped, monitored = set(), set()
    for label, pod in pods(found).items():
        labels = pod["metadata"]["labels"]
        for container in pod["spec"]["containers"]:
            for port in container.get("ports", ()):
                key = (label, port["name"])
                text = f"{labels['app.kubernetes.io/name']};{port['name']}"
                if re.fullmatch(keep["regex"], text):
                    scraped.add(key)
                for monitor in found.all("PodMonitor"):
                    asked = monitor["spec"]["selector"]["matchLabels"].items()
                    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
                    if asked <= labels.items() and endpoint["port"] == port["name"]:
                        monitored.add(key)
    assert scraped == monitored and len(scraped) > 2


def test_scenarios_are_listed_and_exist() -> None:
    """Each with what it shows."""
    readme = (CHART / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| `ci/([a-z-]+)-values\.yaml` \| \w", readme, re.MULTILINE)
    assert sorted(named) == sorted(SCENARIOS)
    assert set(re.findall(r"`([a-z-]+)-values\.yaml`", PAGE)) <= set(SCENARIOS)


def test_objects_that_the_page_and_the_notes_name_are_made() -> None:
    found = HelmSdk.shared().render(values_of("default"), release="tandem", namespace="llm")
    made = {f"{o['kind'].lower()}/{o['metadata']['name']}" for o in found.objects}
    for text in (PAGE, found.notes):
        named = set(re.findall(r"\b((?:deployment|service)/[a-z0-9-]+)", text))
        assert named and named <= made
    notes = rendered("multi-host").notes
    assert "leaderworkerset/tandem-decode" in notes


@pytest.mark.parametrize("kind", ["install", "upgrade"])
def test_defaults_that_the_page_shows_are_those_of_the_chart(kind: str) -> None:
    """Compares the table of components."""
    found = HelmSdk.shared().render(values_of("default"), upgrade=kind == "upgrade")
    for component, row in re.findall(r"^\| (router|prefill|decode) \|(.*)$", PAGE, re.MULTILINE):
        pod = found.one("Deployment", component)["spec"]["template"]["spec"]
        ports = {str(port["containerPort"]) for port in pod["containers"][0]["ports"]}
        assert ports <= set(re.findall(r"\d{4}", row)), component


def test_the_comparison_says_of_each_neighbour_when_it_was_looked_at() -> None:
    page = (ROOT / "docs" / "neighbours.md").read_text(encoding="utf-8")
    section = page.partition("\n\nMooncake")[0]
    rows = [row.strip("| ").split(" | ") for row in section.splitlines() if row.startswith("| ")]
    head, read, *others = rows
    assert len(others) > 12 and {len(row) for row in others} == {len(read)} == {len(head) + 1}
    for neighbour in ("production-stack", "llm-d", "Dynamo", "SGLang", "KServe", "AIBrix", "Ray"):
        assert neighbour in str(head)
    assert all(re.search(r"\b20\d\d-\d\d-\d\d\b", cell) for cell in read[1:])
    assert all(cell.strip() for row in others for cell in row)
