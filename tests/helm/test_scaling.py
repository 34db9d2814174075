"""Tests how large tiers are: by a ratio, by several metrics, and what their ranks ask for."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.helm.helm_engine import HelmCli, HelmError, HelmSdk, Manifest, Rendered
from tests.helm.kube_schemas import errors
from tests.helm.scenarios import overlay, reproducible, serving_pod

MODEL: dict[str, Any] = {"model": {"name": "org/model"}}
KEDA: dict[str, Any] = {"monitoring": {"prometheusUrl": "http://prometheus:9090"}}
FOLLOWS = {"autoscaling": {"kind": "keda", "metric": "ratio"}}


def render(*overs: dict[str, Any]) -> Rendered:
    values = MODEL
    for over in overs:
        values = overlay(values, over)
    return HelmSdk.shared().render(values)


def triggers(found: Rendered, tier: str) -> list[tuple[str, str]]:
    scaler = found.one("ScaledObject", tier)
    given = [trigger["metadata"] for trigger in scaler["spec"]["triggers"]]
    return [(one["query"], one["threshold"]) for one in given]


@pytest.mark.parametrize(
    ("ratio", "decode", "prefill"), [("1:2", 4, 2), ("1:2", 5, 3), ("3:2", 3, 5), ("2:1", 0, 0)]
)
def test_prefill_follows_decode_by_its_ratio(ratio: str, decode: int, prefill: int) -> None:
    found = render({"prefill": {"ratio": ratio}, "decode": {"replicas": decode}})
    assert found.one("Deployment", "prefill")["spec"]["replicas"] == prefill


def test_each_model_has_a_ratio_of_its_own() -> None:
    found = render({
        "prefill": {"ratio": "1:1"},
        "models": [{"name": "large", "model": {"name": "org/large"},
                    "prefill": {"ratio": "2:1"}, "decode": {"replicas": 3}}],
    })  # fmt: skip
    assert found.one("Deployment", "prefill")["spec"]["replicas"] == 1
    assert found.one("Deployment", "large-prefill")["spec"]["replicas"] == 6


def test_an_autoscaler_keeps_the_ratio_and_adds_what_other_metrics_ask_for() -> None:
    more = {"autoscaling": {"moreMetrics": [{"metric": "backlog", "target": 2}]}}
    found = render(KEDA, {
        "prefill": overlay({"ratio": "3:2"}, overlay(FOLLOWS, more)),
        "decode": {"autoscaling": {"kind": "keda"}},
    })  # fmt: skip
    (follows, one), (backlog, two) = triggers(found, "prefill")
    series = '{namespace="default",release="tandem",component="decode"}'
    assert follows == f"count(tandem_engine_up{series} == 1) * 3 / 2" and one == "1"
    assert "tandem_waiting_tokens" in backlog and two == "2"
    scaler = found.one("ScaledObject", "prefill")
    assert scaler["spec"]["fallback"]["replicas"] == 2, "decode's one pod, by the ratio"


def test_both_helms_compute_alike() -> None:
    values = overlay(overlay(MODEL, KEDA), {
        "prefill": {"ratio": "3:2", **FOLLOWS, "parallelism": {"tensor": 8}},
        "decode": {"autoscaling": {"kind": "hpa", "metric": "running", "target": 0.5}},
    })  # fmt: skip
    new, old = HelmSdk.shared().render(values), HelmCli().render(values)
    assert reproducible(new) == reproducible(old)


def test_several_metrics_are_several_triggers_or_metrics() -> None:
    both = {"metric": "kvUtilization", "target": 0.8,
            "moreMetrics": [{"metric": "running", "target": 64}]}  # fmt: skip
    found = render(KEDA, {"decode": {"autoscaling": {"kind": "keda", **both}}})
    assert [(query.partition("{")[0], most) for query, most in triggers(found, "decode")] == [
        ("sum(vllm:kv_cache_usage_perc", "0.8"),
        ("sum(vllm:num_requests_running", "64"),
    ]
    found = render({"decode": {"autoscaling": {"kind": "hpa", **both}}})
    metrics = found.one("HorizontalPodAutoscaler", "decode")["spec"]["metrics"]
    assert [one["pods"]["metric"]["name"] for one in metrics] == [
        "vllm:kv_cache_usage_perc",
        "vllm:num_requests_running",
    ]
    assert [one["pods"]["target"]["averageValue"] for one in metrics] == ["800m", "64000m"]


@pytest.mark.parametrize(
    ("ratio", "average"), [("1:2", "2000m"), ("3:1", "334m"), ("1:1", "1000m")]
)
def test_an_hpa_divides_the_decode_pods_that_are_up(ratio: str, average: str) -> None:
    """The average never asks for one pod too many: 1 pod by 334m is 2.99, rounded up."""
    found = render({
        "prefill": {"ratio": ratio, "autoscaling": {"kind": "hpa", "metric": "ratio"}},
        "monitoring": {"adapterRules": {"enabled": True}},
    })  # fmt: skip
    (metric,) = found.one("HorizontalPodAutoscaler", "prefill")["spec"]["metrics"]
    external = metric["external"]
    assert external["metric"]["selector"]["matchLabels"]["component"] == "decode"
    assert external["target"]["averageValue"] == average
    rules = yaml.safe_load(found.one("ConfigMap", "adapter-rules")["data"]["config.yaml"])
    served = {rule["seriesQuery"].partition("{")[0] for rule in rules["externalRules"]}
    assert served == {external["metric"]["name"], "tandem_router_desired_replicas"}


def test_keda_shows_itself_to_prometheus_at_each_trigger() -> None:
    trigger = {
        "authenticationRef": {"name": "thanos", "kind": "ClusterTriggerAuthentication"},
        "metadata": {"authModes": "bearer", "namespace": "llm"},
    }
    both = {"kind": "keda", "moreMetrics": [{"metric": "running", "target": 64}]}
    asked = {"monitoring": {"prometheusTrigger": trigger}}
    found = render(KEDA, asked, {"decode": {"autoscaling": both}})
    assert not [fault for manifest in found.objects for fault in errors(manifest, "1.34")]
    scaler = found.one("ScaledObject", "decode")["spec"]
    assert len(scaler["triggers"]) == 2
    for one in scaler["triggers"]:
        assert one["authenticationRef"] == trigger["authenticationRef"]
        assert trigger["metadata"].items() <= one["metadata"].items()
        assert one["metadata"]["serverAddress"] == "http://prometheus:9090"
    plain = render(KEDA, {"decode": {"autoscaling": {"kind": "keda"}}})
    assert "authenticationRef" not in str(plain.one("ScaledObject", "decode"))


def test_routers_scale_by_the_cpus_of_our_own_container() -> None:
    """A container beside it that asks for no CPU would leave the pod's share unknown."""
    found = render({"router": {
        "autoscaling": {"kind": "hpa"}, "extraContainers": [{"name": "log", "image": "log:1"}],
    }})  # fmt: skip
    (metric,) = found.one("HorizontalPodAutoscaler", "router")["spec"]["metrics"]
    assert metric["containerResource"]["container"] == "router"
    names = [c["name"] for c in serving_pod(found, "router")["spec"]["containers"]]
    assert names == ["router", "log"]
    assert not [fault for manifest in found.objects for fault in errors(manifest, "1.34")]


def test_a_fallback_has_no_more_pods_than_the_autoscaler_may_make() -> None:
    found = render(KEDA, {"decode": {"replicas": 9, "autoscaling": {"kind": "keda"}}})
    spec = found.one("ScaledObject", "decode")["spec"]
    assert spec["fallback"]["replicas"] == spec["maxReplicaCount"] == 4


SCALED = {"decode": {"autoscaling": {"kind": "keda"}}}
MISTAKES = [
    ({"prefill": {"ratio": "1:2", "replicas": 3}}, "prefill.ratio and prefill.replicas both say"),
    ({"prefill": {"ratio": "1:2", "enabled": False}}, "but prefill.enabled is false"),
    ({"prefill": {"ratio": "2"}}, "ratio"),
    ({"prefill": {"ratio": "0:1"}}, "ratio"),
    ({"decode": {"ratio": "1:2"}}, "ratio"),
    (overlay(SCALED, {"prefill": {"ratio": "1:2"}}), "set prefill.autoscaling.kind, too"),
    ({"prefill": {"ratio": "1:2", "autoscaling": {"kind": "keda"}}}, "goes by other metrics"),
    ({"prefill": FOLLOWS}, "set prefill.ratio"),
    ({"decode": FOLLOWS}, "choose another"),
    (
        overlay(SCALED, {"decode": {"autoscaling": {"moreMetrics": [{"metric": "running"}]}}}),
        "say the target of running",
    ),
    (
        overlay(SCALED, {
            "decode": {"autoscaling": {"moreMetrics": [{"metric": "kvUtilization", "target": 0.5}]}}
        }),
        "names the metric kvUtilization twice",
    ),
    (
        overlay(SCALED, {"decode": {"autoscaling": {"moreMetrics": [{"metric": "slo"}]}}}),
        "set router.settings.sloItlMs",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("over", "cure"), MISTAKES)
def test_ratios_and_metrics_that_cannot_be_are_refused(over: dict[str, Any], cure: str) -> None:
    with pytest.raises(HelmError) as told:
        HelmSdk.shared().render(overlay(overlay(MODEL, KEDA), over))
    assert cure in str(told.value), told.value


# Ranks -------------------------------------------------------------------------------------------


def resources(found: Rendered, component: str = "decode") -> Manifest:
    pod = found.one("Deployment", component)["spec"]["template"]["spec"]
    return dict(pod["containers"][0]["resources"])


def test_cpus_and_memory_follow_the_ranks() -> None:
    eight = {"decode": {"parallelism": {"tensor": 8}}}
    found = resources(render(eight))
    assert found["requests"] == {"cpu": "18", "memory": f"{88 * 1024}Mi", "nvidia.com/gpu": 8}
    assert found["limits"] == {"memory": f"{184 * 1024}Mi", "nvidia.com/gpu": 8}
    assert resources(render(eight), "prefill")["requests"]["cpu"] == "4"
    own = {
        "decode": {
            "resources": {"requests": {"cpu": 1.5, "memory": 2**35}, "limits": {"cpu": "9"}},
            "resourcesPerRank": {"requests": {"cpu": "250m"}, "limits": {"cpu": 1}},
        }
    }
    found = resources(render(eight, own))
    assert found["requests"]["cpu"] == "3250m" and found["limits"]["cpu"] == "16"
    assert found["requests"]["memory"] == f"{32 * 1024 + 7 * 8 * 1024}Mi"


def test_requests_above_limits_are_refused_before_the_api_does() -> None:
    over = {
        "decode": {"parallelism": {"tensor": 8}, "resources": {"requests": {"memory": "256Gi"}}}
    }
    with pytest.raises(HelmError, match=r"raise decode\.resources\.limits\.memory"):
        render(over)
    render(over, {"decode": {"resources": {"limits": {"memory": "256Gi"}}}})
    with pytest.raises(HelmError, match=r"raise router\.resources\.limits\.memory"):
        render({"router": {"resources": {"requests": {"memory": "2Gi"}}}})


def test_what_ranks_add_may_be_taken_away() -> None:
    for nothing in (None, {"requests": None, "limits": None}):
        over = {"parallelism": {"tensor": 8}, "resourcesPerRank": nothing}
        found = resources(render({"tierDefaults": over}))
        assert found["requests"]["cpu"] == "4" and found["requests"]["memory"] == "32Gi"


def test_a_pod_of_a_group_asks_for_the_ranks_that_it_has() -> None:
    found = render({
        "model": {"storage": {"type": "pvc", "path": "m"}},
        "decode": {"parallelism": {"tensor": 8, "hosts": 4}, "kvTiers": {"hostGiB": 3},
                   "settings": {"enablePrefixCaching": True}},
    })  # fmt: skip
    group = found.one("LeaderWorkerSet", "decode")["spec"]["leaderWorkerTemplate"]
    for part in ("leaderTemplate", "workerTemplate"):
        asked = group[part]["spec"]["containers"][0]["resources"]["requests"]
        assert asked["cpu"] == "6" and asked["memory"] == f"{(40 + 2 * 3) * 1024}Mi"


@pytest.mark.parametrize(
    "resources",
    [
        {"requests": None, "limits": {"cpu": "2"}},
        {"requests": {"cpu": None}, "limits": {"cpu": "2"}},
        {"requests": {"cpu": "2"}, "limits": None},
    ],
)
def test_a_router_with_a_limit_of_cpus_asks_for_as_many(resources: dict[str, Any]) -> None:
    found = render({"router": {"autoscaling": {"kind": "hpa"}, "resources": resources}})
    assert found.one("HorizontalPodAutoscaler", "router")


@pytest.mark.parametrize(
    "resources", [None, {"requests": None, "limits": None}, {"requests": {"cpu": None}}]
)
def test_a_router_that_asks_for_no_cpus_has_no_share_of_them(resources: Any) -> None:
    with pytest.raises(HelmError, match=r"set router\.resources\.requests\.cpu"):
        render({"router": {"autoscaling": {"kind": "hpa"}, "resources": resources}})
