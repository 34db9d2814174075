"""Several models in one release: each has tiers, names and selectors of its own, none touches those
of the plain model, and the router's rules are what the router reads."""

from __future__ import annotations

import re
from typing import Any

import pytest

from router.models.model_rules import read_rules
from tests.helm.helm_engine import CHART, HelmError, HelmSdk, Manifest, Rendered
from tests.helm.scenarios import overlay, rendered, templates_of, values_of, workloads

PLAIN: dict[str, Any] = {"model": {"name": "org/model"}}
TWO: dict[str, Any] = {
    "models": [
        {"name": "a", "model": {"name": "org/a"}},
        {"name": "b", "model": {"name": "org/b"}},
    ]
}


def render(*values: dict[str, Any], **options: Any) -> Rendered:
    joined: dict[str, Any] = {}
    for each in values:
        joined = overlay(joined, each)
    return HelmSdk.shared().render(joined, **options)


def by_name(found: Rendered) -> dict[tuple[str, str], Manifest]:
    return {(one["kind"], one["metadata"]["name"]): one for one in found.objects}


def labels_of(found: Rendered) -> dict[str, dict[str, str]]:
    """Maps the names of workloads to the labels of their pods."""
    return {
        one["metadata"]["name"]: template["metadata"]["labels"]
        for one in workloads(found)
        for template in templates_of(one).values()
    }


def selectors(manifest: Manifest) -> list[dict[str, str]]:
    """Returns what an object selects its own pods by."""
    spec = manifest.get("spec", {})
    if manifest["kind"] == "Service":
        return [spec["selector"]]
    if manifest["kind"] == "NetworkPolicy":
        return [spec["podSelector"]["matchLabels"]]
    if manifest["kind"] in ("Deployment", "PodDisruptionBudget", "PodMonitor"):
        return [spec["selector"]["matchLabels"]]
    return []


@pytest.mark.parametrize("values", [values_of("models"), {**PLAIN, **TWO}], ids=["list", "beside"])
def test_what_selects_pods_selects_those_of_one_tier_of_one_model(values: dict[str, Any]) -> None:
    found = render(values, {"monitoring": {"podMonitor": {"enabled": True}}})
    pods = labels_of(found)
    assert len(pods) >= 6
    for manifest in found.objects:
        for selector in selectors(manifest):
            chosen = [name for name, labels in pods.items() if selector.items() <= labels.items()]
            assert chosen == [manifest["metadata"]["name"]], manifest["kind"]


def test_a_model_that_comes_changes_nothing_of_the_plain_one_but_its_router() -> None:
    before, after = by_name(render(PLAIN)), by_name(render(PLAIN, TWO))
    router = ("Deployment", "tandem-router")
    policy = ("NetworkPolicy", "tandem-router")
    random = ("Secret", "tandem-cluster-token")
    for key in before.keys() - {router, policy, random}:
        assert after[key] == before[key], key
    assert before[router]["spec"]["selector"] == after[router]["spec"]["selector"]
    assert {name for _, name in after.keys() - before.keys()} == {
        "tandem-model-rules",
        *(f"tandem-{key}-{tier}" for key in "ab" for tier in ("prefill", "decode")),
    }


@pytest.mark.parametrize("plain", [{}, PLAIN])
def test_dashboards_show_the_tiers_of_every_model(plain: dict[str, Any]) -> None:
    """A tier's component has the model's name before it."""
    shown = {"monitoring": {"dashboards": {"enabled": True}, "podMonitor": {"enabled": True}}}
    found = render(plain, TWO, shown)
    scraped = [
        monitor["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"]
        for monitor in found.all("PodMonitor")
    ]
    boards = "".join(found.one("ConfigMap", component="dashboards")["data"].values())
    asked = set(re.findall(r'component(=~?)\\"([^"\\]+)\\"', boards))
    chosen: dict[str, list[str]] = {}
    for operator, name in asked:
        pattern = name if operator == "=~" else re.escape(name)
        chosen[name] = [one for one in scraped if re.fullmatch(pattern, one)]
    for tier in ("router", "prefill", "decode"):
        of_all = [one for one in scraped if one == tier or one.endswith(f"-{tier}")]
        assert len(of_all) >= 1 and of_all in chosen.values(), tier
    assert len(chosen) == 3


def test_the_router_finds_the_nodes_of_every_model_and_reads_its_rules() -> None:
    found = rendered("models")
    args = found.one("Deployment", component="router")["spec"]["template"]["spec"]["containers"][0][
        "args"
    ]
    lists = {arg.partition("=")[0]: arg.partition("=")[2].split(",") for arg in args}
    services = {
        f"k8s://{one['metadata']['name']}.default": one
        for one in found.all("Service")
        if one["spec"].get("clusterIP") == "None"
    }
    listed = [
        entry.rpartition(":")[0] for tier in ("--prefill", "--decode") for entry in lists[tier]
    ]
    assert sorted(listed) == sorted(services)
    rules = read_rules(found.one("ConfigMap", component="model-rules")["data"]["rules.toml"])
    assert rules.models == ("llama-8b-v1", "llama-8b-v2", "qwen-32b")
    assert rules.aliases == {"gpt-4o": "llama-8b"}
    assert rules.splits == {"llama-8b": (("llama-8b-v1", 95.0), ("llama-8b-v2", 5.0))}


def test_a_weight_restarts_no_pod() -> None:
    values = values_of("models")
    moved = overlay(
        values, {"modelRules": {"splits": {"llama-8b": {"llama-8b-v1": 80, "llama-8b-v2": 20}}}}
    )
    before, after = by_name(render(values)), by_name(render(moved))
    changed = {key for key in before if before[key] != after[key]}
    assert changed - {("Secret", "tandem-cluster-token")} == {("ConfigMap", "tandem-model-rules")}


def test_names_stay_short_and_apart() -> None:
    long = "x" * 44
    models = [{"name": f"{long}-{end}", "model": {"name": "org/m"}} for end in ("one", "two")]
    found = render({"models": models, "fullnameOverride": "r" * 60})
    names = [one["metadata"]["name"] for one in found.objects if one["kind"] == "Deployment"]
    assert len(set(names)) == 5
    assert max(map(len, names)) <= 46
    for labels in labels_of(found).values():
        assert max(map(len, labels.values())) <= 63


def test_each_model_has_an_inference_pool_of_its_own() -> None:
    pool = {
        "inferencePool": {"enabled": True, "endpointPicker": {"name": "epp"}},
        "auth": {"clusterToken": {"enabled": False}},
        "prefill": {"ports": {"grpc": 8100}},
        "decode": {"ports": {"grpc": 8200}},
    }
    with pytest.raises(HelmError, match="the endpoint picker epp would choose for two pools"):
        render(TWO, pool)
    named = {"models": [{**one, "endpointPicker": f"epp-{one['name']}"} for one in TWO["models"]]}
    found = render(pool, named)
    pods = labels_of(found)
    for manifest in found.all("InferencePool"):
        picker = manifest["spec"]["endpointPickerRef"]["name"]
        assert picker == f"epp-{manifest['metadata']['labels']['tandem.dev/model']}"
        selector = manifest["spec"]["selector"]["matchLabels"]
        chosen = {name for name, labels in pods.items() if selector.items() <= labels.items()}
        name = manifest["metadata"]["name"].removesuffix("-pool")
        assert chosen == {f"{name}-prefill", f"{name}-decode"}
    assert len(found.all("InferencePool")) == 2
    with pytest.raises(HelmError, match="move it into the list of models"):
        render(PLAIN, TWO, pool)


def test_scalers_and_alerts_look_at_their_own_model() -> None:
    scaling = {
        "prefill": {"autoscaling": {"kind": "keda"}},
        "monitoring": {
            "prometheusUrl": "http://p:9090",
            "podMonitor": {"enabled": True},
            "prometheusRule": {"enabled": True},
        },
    }
    found = render(PLAIN, TWO, scaling)
    queries = {
        one["spec"]["scaleTargetRef"]["name"]: one["spec"]["triggers"][0]["metadata"]["query"]
        for one in found.all("ScaledObject")
    }
    for name, query in queries.items():
        component = name.removeprefix("tandem-")
        assert f'component="{component}"' in query
    assert len(queries) == 3
    groups = {g["name"]: g["rules"] for g in found.all("PrometheusRule")[0]["spec"]["groups"]}
    assert list(groups) == ["tandem", "tandem-a", "tandem-b"]
    everywhere = {rule["alert"] for rule in groups["tandem"]}
    of_tiers = {rule["alert"] for rule in groups["tandem-b"]}
    assert {"TandemKvCacheFull", "TandemPrefillBacklog"} <= of_tiers < everywhere
    assert "TandemErrors" not in of_tiers
    page = (CHART.parent / "docs" / "monitoring.md").read_text(encoding="utf-8")
    for alert in ("TandemModelRulesBroken", "TandemModelWithoutNodes"):
        assert alert in everywhere - of_tiers
        assert f"</a>{alert} |" in page
    for rule in groups["tandem-b"]:
        assert 'component="b-' in rule["expr"]
        assert rule["labels"]["model"] == "b"


@pytest.mark.parametrize("kind", ["keda", "hpa"])
def test_tiers_that_scale_by_objectives_hear_what_routers_say_of_their_model(kind: str) -> None:
    scaling = {
        "decode": {"autoscaling": {"kind": kind, "metric": "slo"}},
        "router": {"settings": {"sloItlMs": 20}},
        "monitoring": {"prometheusUrl": "http://p:9090", "podMonitor": {"enabled": True}},
    }
    alone = str(render(PLAIN, scaling).objects)
    assert "model=" not in alone.partition("desired_replicas")[2].partition("'")[0]
    found = render({"model": {"name": "org/model", "servedName": "main"}}, TWO, scaling)
    told = {
        one["spec"]["scaleTargetRef"]["name"]: str(one["spec"])
        for one in found.all("ScaledObject" if kind == "keda" else "HorizontalPodAutoscaler")
    }
    for target, model in (("decode", "main"), ("a-decode", "a"), ("b-decode", "b")):
        label = f'model="{model}"' if kind == "keda" else f"'model': '{model}'"
        assert label in told[f"tandem-{target}"]
    if kind == "hpa":
        with pytest.raises(HelmError, match="by a label, which org/model cannot be"):
            render(PLAIN, TWO, scaling)


SPLIT = {"m": {"a": 90, "b": 10}}


@pytest.mark.parametrize(
    ("values", "cure"),
    [
        ({"models": [*TWO["models"], TWO["models"][0]]}, "two entries called a"),
        (
            {
                "models": [
                    {"name": "a", "model": {"name": "x", "servedName": "b"}},
                    TWO["models"][1],
                ]
            },
            "two models are served as b",
        ),
        ({"model": {"name": "x", "servedName": "a"}}, "two models are served as a"),
        ({"modelRules": {"aliases": {"a": "b"}}}, "aliases has a, which would hide the model"),
        ({"modelRules": {"aliases": {"x": "y"}}}, "leads to y, which is no model here"),
        ({"modelRules": {"aliases": {"x": "a", "y": "x"}}}, "leads to x, which is an alias"),
        (
            {"modelRules": {"aliases": {"m": "a"}, "splits": SPLIT}},
            "both as an alias and as a split",
        ),
        ({"modelRules": {"splits": {"m": {"c": 1}}}}, "the version c, which is no model here"),
        ({"modelRules": {"splits": {**SPLIT, "n": {"m": 1}}}}, "version m, which is a rule itself"),
        ({"modelRules": {"splits": {"m": {"a": 0}}}}, "exclusive|greater than 0"),
        ({"modelRules": {"splits": {"m": {"a": -5}}}}, "exclusive|greater than 0"),
        ({"modelRules": {"splits": {"m": {}}}}, "minProperties|at least 1"),
        ({"models": [{"name": "A/b"}]}, "does not match pattern|Does not match pattern"),
        ({"models": [{"name": "a", "weight": 5}]}, "weight"),
        ({"models": [{"name": "a"}]}, r"models \(a\): model.name is empty"),
        (
            {
                "models": [
                    {"name": "a", "model": {"name": "x"}, "decode": {"ports": {"grpc": 8100}}}
                ]
            },
            r"models \(a\): decode.ports.grpc and decode.ports.http",
        ),
        (
            {"models": [{**TWO["models"][0], "endpointPicker": "e"}]},
            r"models \(a\) has an endpointPicker",
        ),
        ({"router": {"settings": {"modelRulesFile": "/x"}}}, "set one of them"),
    ],
)
def test_models_that_cannot_be_are_refused_by_name(values: dict[str, Any], cure: str) -> None:
    with pytest.raises(HelmError, match=cure):
        render(TWO, values)


def test_no_template_forgets_the_other_models() -> None:
    """`tandem.tiers` of the chart's own root are those of `model` alone: templates go over
    `tandem.tierScopes` or `tandem.models`."""
    found = [
        f"{path.name}: {line.strip()}"
        for path in sorted((CHART / "templates").rglob("*"))
        if path.is_file()
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r'include "tandem\.tiers" \(dict "root" (\$|\.|\.root) ', line)
    ]
    assert not found


def test_each_model_is_measured_by_a_job_of_its_own() -> None:
    found = render(TWO, {"calibration": {"enabled": True}})
    measured = set()
    for kind in ("Job", "ConfigMap", "ServiceAccount", "Role", "RoleBinding"):
        objects = [
            o["metadata"]["name"] for o in found.all(kind) if "calibration" in o["metadata"]["name"]
        ]
        assert len(objects) == len(set(objects)) == len(TWO["models"]), kind
    for job in found.all("Job"):
        (container,) = job["spec"]["template"]["spec"]["containers"]
        if container["command"] == ["tandem", "bench"]:
            measured.add(next(arg for arg in container["args"] if arg.startswith("--model=")))
    assert len(measured) == len(TWO["models"])
