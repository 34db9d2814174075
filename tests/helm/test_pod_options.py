"""Pods have what values add to them: networks, devices, containers, queues, caches."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helm.helm_engine import API_VERSIONS, HelmSdk, Manifest
from tests.helm.kube_schemas import errors
from tests.helm.scenarios import (
    SCENARIOS,
    overlay,
    rendered,
    serving_pod,
    templates_of,
    values_of,
    version_of,
    workload,
)
from tests.helm.service_settings import check, containers, environment, settings_of

MINIMAL: dict[str, Any] = {"model": {"name": "org/model"}}
ADDED = ("log-shipper", "watcher", "fetch", "wait")
"""Names containers that scenarios add to ours."""
MULTUS = "k8s.v1.cni.cncf.io/networks"


def pod_of(component: str, **over: Any) -> Manifest:
    return serving_pod(HelmSdk.shared().render(overlay(MINIMAL, over)), component)


def engine_of(pod: Manifest) -> Manifest:
    return next(c for c in pod["spec"]["containers"] if c["name"] in ("engine", "router"))


# Networks -----------------------------------------------------------------------------------------


def test_pods_on_the_network_of_their_hosts_resolve_names_and_keep_apart() -> None:
    """The scheduler keeps pods apart by the ports that they name, hidden ones would collide."""
    for part, pod in templates_of(workload(rendered("fabric"), "prefill")).items():
        assert pod["spec"]["hostNetwork"] is True
        assert pod["spec"]["dnsPolicy"] == "ClusterFirstWithHostNet"
        ports = {p["name"]: p["containerPort"] for p in engine_of(pod)["ports"]}
        assert ports["ray"] == 6380
        if part == "leader":
            assert ports["kv"] == settings_of("fabric")["prefill"]["kv_port"]
        named = [v for v in engine_of(pod)["env"] if v["name"] == "K8S_POD_NAME"]
        assert [v["valueFrom"]["fieldRef"]["fieldPath"] for v in named] == ["metadata.name"]
    for component in ("decode", "router"):
        assert "hostNetwork" not in serving_pod(rendered("fabric"), component)["spec"]


def test_policies_do_not_name_pods_that_have_the_address_of_their_host() -> None:
    found = rendered("fabric")
    policies = {p["metadata"]["name"]: p["spec"] for p in found.all("NetworkPolicy")}
    assert set(policies) == {"tandem-router", "tandem-decode"}, "one for prefill would do nothing"
    ports = {p["port"]: rule for p, rule in port_rules(policies["tandem-router"]["egress"])}
    assert "to" not in ports[8300] and "to" in ports[8100]
    ports = {p["port"]: rule for p, rule in port_rules(policies["tandem-decode"]["egress"])}
    assert "to" not in ports[8400]
    assert "which network policies do not cover" in found.notes


def port_rules(rules: list[Manifest]) -> list[tuple[Manifest, Manifest]]:
    return [(port, rule) for rule in rules for port in rule.get("ports", ())]


def test_a_tier_on_the_hosts_network_is_let_in_by_its_ports() -> None:
    found = HelmSdk.shared().render(
        overlay(MINIMAL, {"decode": {"network": {"hostNetwork": True}}})
    )
    (policy,) = found.all("NetworkPolicy", "prefill")
    ports = {p["port"]: rule for p, rule in port_rules(policy["spec"]["ingress"])}
    assert "from" not in ports[8400]
    assert not found.all("NetworkPolicy", "decode")


def test_kv_travels_where_it_is_told_to() -> None:
    for service, wanted in {"prefill": "interface:ens*", "decode": "network:fabric/rail*"}.items():
        settings = settings_of("fabric")[service]
        assert settings["kv_host"] == wanted and settings["host"] == "10.1.2.3"
    pod = serving_pod(rendered("fabric"), "decode")
    assert pod["metadata"]["annotations"][MULTUS] == "fabric/rail0"
    (mount,) = [m for m in engine_of(pod)["volumeMounts"] if m["name"] == "pod-info"]
    (volume,) = [v for v in pod["spec"]["volumes"] if v["name"] == "pod-info"]
    (item,) = volume["downwardAPI"]["items"]
    file = f"{mount['mountPath']}/{item['path']}"
    assert file == settings_of("fabric")["decode"]["kv_network_status"]
    assert "network-status" in item["fieldRef"]["fieldPath"]
    assert settings_of("default")["prefill"]["kv_host"] == "10.1.2.3"
    assert settings_of("default")["decode"]["kv_host"] is None


def test_rdma_devices_and_locked_memory() -> None:
    for part in templates_of(workload(rendered("fabric"), "decode")).values():
        engine = engine_of(part)
        for side in ("limits", "requests"):
            assert engine["resources"][side]["rdma/hca_shared_devices_a"] == 1
            assert engine["resources"][side]["nvidia.com/gpu"] == 8
        assert engine["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert "memlock" in rendered("fabric").notes
    root = {"network": {"ipcLock": True}, "podSecurityContext": {"runAsUser": 0}}
    found = HelmSdk.shared().render(overlay(MINIMAL, {"decode": root}))
    assert "memlock" not in found.notes


@pytest.mark.parametrize(
    ("nccl", "wanted"),
    [
        ({}, {}),
        (
            {"preset": "tcp", "interface": "eth0"},
            {"NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "eth0"},
        ),
        (
            {"preset": "infiniband", "hca": "mlx5_0,mlx5_1"},
            {"NCCL_NET": "IB", "NCCL_IB_DISABLE": "0", "NCCL_IB_HCA": "mlx5_0,mlx5_1"},
        ),
        (
            {"preset": "roce", "gidIndex": 0, "trafficClass": 106},
            {
                "NCCL_NET": "IB", "NCCL_IB_DISABLE": "0", "NCCL_IB_ROCE_VERSION_NUM": "2",
                "NCCL_IB_GID_INDEX": "0", "NCCL_IB_TC": "106",
            },
        ),
    ],
)  # fmt: skip
def test_nccl_presets(nccl: dict[str, Any], wanted: dict[str, str]) -> None:
    pod = pod_of("decode", decode={"nccl": nccl, "network": {"rdma": {"rdma/hca": 1}}})
    given = environment(engine_of(pod))
    assert {name: value for name, value in given.items() if "NCCL" in name} == wanted


# Devices by claims --------------------------------------------------------------------------------


def test_each_pod_claims_its_gpus_and_what_the_user_names() -> None:
    pod = serving_pod(rendered("devices"), "prefill")
    claims = [
        {"name": "gpus", "resourceClaimTemplateName": "tandem-prefill"},
        {"name": "nic", "resourceClaimTemplateName": "nic"},
    ]
    assert pod["spec"]["resourceClaims"] == claims
    resources = engine_of(pod)["resources"]
    assert resources["claims"] == [{"name": "gpus"}, {"name": "nic"}]
    assert "nvidia.com/gpu" not in resources["limits"]
    template = rendered("devices").one("ResourceClaimTemplate", "prefill")
    (request,) = template["spec"]["spec"]["devices"]["requests"]
    assert request["exactly"]["deviceClassName"] == "gpu.nvidia.com"


# Containers, arguments, variables -----------------------------------------------------------------


def test_what_users_add_is_beside_ours() -> None:
    pod = serving_pod(rendered("fabric"), "decode")
    assert [c["name"] for c in pod["spec"]["containers"]] == ["engine"]
    (sidecar,) = pod["spec"]["initContainers"]
    assert (sidecar["name"], sidecar["restartPolicy"]) == ("log-shipper", "Always")
    assert engine_of(pod)["envFrom"] == [{"configMapRef": {"name": "site"}}]
    router = serving_pod(rendered("fabric"), "router")
    assert [c["name"] for c in router["spec"]["containers"]] == ["router", "watcher"]
    assert settings_of("fabric")["router"]["log_level"] == "warning"


def test_init_containers_come_before_sidecars() -> None:
    first, beside = {"name": "first", "image": "i:1"}, {"name": "beside", "image": "i:1"}
    for component in ("router", "prefill"):
        pod = pod_of(component, **{component: {"initContainers": [first], "sidecars": [beside]}})
        assert pod["spec"]["initContainers"] == [first, {**beside, "restartPolicy": "Always"}]


# Storage ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fabric", "volcano"])
def test_compiled_kernels_are_kept_where_they_are_looked_for(name: str) -> None:
    for service in ("prefill", "decode"):
        container = containers(rendered(name))[service]
        variables = environment(container)
        (mount,) = [m for m in container["volumeMounts"] if m["name"] == "compiled"]
        for variable in ("TRITON_CACHE_DIR", "CUDA_CACHE_PATH"):
            assert variables[variable].startswith(f"{mount['mountPath']}/")


def test_a_claim_for_compiled_kernels_is_made_once_for_both_tiers() -> None:
    found = HelmSdk.shared().render(overlay(MINIMAL, {"compileCache": {"type": "pvc"}}))
    (claim,) = found.all("PersistentVolumeClaim")
    for component in ("prefill", "decode"):
        (volume,) = [
            v for v in serving_pod(found, component)["spec"]["volumes"] if v["name"] == "compiled"
        ]
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


@pytest.mark.parametrize("claim", ["", "reports"])
def test_a_report_of_a_dead_engine_outlives_its_container(claim: str) -> None:
    found = HelmSdk.shared().render(overlay(MINIMAL, {"crashReports": {"existingClaim": claim}}))
    for component in ("prefill", "decode"):
        spec = serving_pod(found, component)["spec"]
        (volume,) = [v for v in spec["volumes"] if v["name"] == "crash-reports"]
        if claim:
            assert volume["persistentVolumeClaim"] == {"claimName": claim}
        else:
            assert volume["emptyDir"] == {"sizeLimit": "64Mi"}
        (engine,) = [one for one in spec["containers"] if one["name"] == "engine"]
        (mount,) = [m for m in engine["volumeMounts"] if m["name"] == "crash-reports"]
        assert f"--crash-report-dir={mount['mountPath']}" in engine["args"]
    without = HelmSdk.shared().render(overlay(MINIMAL, {"crashReports": {"enabled": False}}))
    assert "crash" not in str(serving_pod(without, "decode"))


def test_room_for_a_download_is_asked_for() -> None:
    def asked(**over: Any) -> str | None:
        requests = engine_of(pod_of("decode", **over))["resources"]["requests"]
        found: str | None = requests.get("ephemeral-storage")
        return found

    sized = {"name": "org/model", "storage": {"emptyDir": {"sizeLimit": "200Gi"}}}
    assert asked(model=sized) == "200Gi"
    own = {"resources": {"requests": {"ephemeral-storage": "1Gi"}}}
    assert asked(model=sized, decode=own) == "1Gi"
    assert asked() is None
    assert "model.storage.emptyDir.sizeLimit" in HelmSdk.shared().render(MINIMAL).notes
    assert "evict" not in rendered("devices").notes


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_quota_may_want_limits_of_every_container(name: str) -> None:
    """A container that values say nothing of has limits of its own."""
    given = {"resources": {"limits": {"cpu": "64"}}}
    tiers = dict.fromkeys(("tierDefaults", "router", "kvStore"), given)
    own = {"model": {"preload": given}, **tiers}
    found = HelmSdk.shared().render(overlay(values_of(name), own), kube_version=version_of(name))
    for manifest in found.objects:
        for pod in templates_of(manifest).values():
            for kind in ("initContainers", "containers"):
                for container in pod["spec"].get(kind, []):
                    limits = container.get("resources", {}).get("limits", {})
                    is_ours = container["name"] not in ADDED
                    assert not is_ours or {"cpu", "memory"} <= limits.keys(), container["name"]


@pytest.mark.parametrize("component", ["router", "prefill"])
def test_pods_spread_over_domains_of_several_labels(component: str) -> None:
    zone, host = "topology.kubernetes.io/zone", "kubernetes.io/hostname"
    for keys in ([zone, host], host, "", []):
        over = {component: {"topology": {"spreadKey": keys}}}
        spread = pod_of(component, **over)["spec"].get("topologySpreadConstraints", [])
        wanted = keys if isinstance(keys, list) else [keys] if keys else []
        assert [one["topologyKey"] for one in spread] == wanted
        assert all(one["matchLabelKeys"] == ["pod-template-hash"] for one in spread)
        assert len({str(one["labelSelector"]) for one in spread}) <= 1


# Queues and gangs ---------------------------------------------------------------------------------


def test_kueue_queues_the_tiers_and_not_the_router() -> None:
    wanted = {"kueue.x-k8s.io/queue-name": "inference", "kueue.x-k8s.io/priority-class": "online"}
    found = rendered("devices")
    for component in ("prefill", "decode"):
        assert wanted.items() <= workload(found, component)["metadata"]["labels"].items()
    assert not wanted.keys() & workload(found, "router")["metadata"]["labels"].keys()
    group = HelmSdk.shared().render(
        overlay(values_of("multi-host"), {"scheduling": {"kind": "kueue", "queue": "q"}})
    )
    labels = group.one("LeaderWorkerSet", "decode")["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "q"


def test_a_cluster_may_serve_any_version_of_kueue() -> None:
    def notes(*served: str) -> str:
        others = [api for api in API_VERSIONS if "kueue" not in api]
        return HelmSdk.shared().render(values_of("devices"), api_versions=[*others, *served]).notes

    for version in ("v1beta1", "v1beta2"):
        assert "kueue" not in notes(f"kueue.x-k8s.io/{version}")
    assert "needs kueue.x-k8s.io/v1beta2 or kueue.x-k8s.io/v1beta1" in notes()


def test_volcano_places_both_tiers_together() -> None:
    found = rendered("volcano")
    group = found.one("PodGroup")
    assert group["spec"] == {"minMember": 4, "queue": "inference"}
    for component in ("prefill", "decode"):
        pod = serving_pod(found, component)
        assert pod["spec"]["schedulerName"] == "volcano"
        assert pod["metadata"]["annotations"] == {
            "scheduling.k8s.io/group-name": group["metadata"]["name"],
            "scheduling.volcano.sh/queue-name": "inference",
        }
    assert "schedulerName" not in serving_pod(found, "router")["spec"]


def test_kubernetes_places_both_tiers_together() -> None:
    found = rendered("gang", "1.37")
    group = found.one("PodGroup")
    assert group["apiVersion"] == "scheduling.k8s.io/v1beta1"
    assert group["spec"] == {
        "schedulingPolicy": {"gang": {"minCount": 4}},
        "priorityClassName": "online",
    }
    for component in ("prefill", "decode"):
        spec = serving_pod(found, component)["spec"]
        assert spec["schedulingGroup"] == {"podGroupName": group["metadata"]["name"]}
        assert "schedulerName" not in spec
    assert "schedulingGroup" not in serving_pod(found, "router")["spec"]


def test_groups_of_hosts_are_gangs_of_their_operator() -> None:
    """It makes a PodGroup for each: another one would be at odds with it."""
    volcano = {"scheduling": {"kind": "volcano", "queue": "q", "minMember": 1}}
    found = HelmSdk.shared().render(overlay(values_of("multi-host"), volcano))
    groups = found.one("LeaderWorkerSet", "decode")
    assert groups["metadata"]["annotations"]["scheduling.volcano.sh/queue-name"] == "q"
    for pod in templates_of(groups).values():
        assert "annotations" not in pod["metadata"]
        assert pod["spec"]["schedulerName"] == "volcano"


# Both tiers in one set ----------------------------------------------------------------------------


def test_a_set_has_both_tiers_as_roles_and_nothing_besides_makes_their_pods() -> None:
    found = rendered("disaggregated-set")
    roles = {role["name"]: role for role in found.one("DisaggregatedSet")["spec"]["roles"]}
    assert set(roles) == {"prefill", "decode"}
    assert not found.all("LeaderWorkerSet")
    assert [one["metadata"]["name"] for one in found.all("Deployment")] == ["tandem-router"]
    assert roles["prefill"]["spec"]["replicas"] == 1
    assert roles["prefill"]["spec"]["leaderWorkerTemplate"]["size"] == 2
    single = roles["decode"]["spec"]["leaderWorkerTemplate"]
    assert single["size"] == 1 and "leaderTemplate" not in single
    assert "app.kubernetes.io/component=decode" in found.notes
    assert settings_of("disaggregated-set")["prefill"]["distributed_executor_backend"] == "ray"


def test_an_autoscaler_changes_the_scaler_that_the_operator_makes_of_a_role() -> None:
    """It is called as the set and the role; the set itself names no number then."""
    found = rendered("disaggregated-set")
    the_set = found.one("DisaggregatedSet")
    (role,) = [r for r in the_set["spec"]["roles"] if r.get("scaling") == {"mode": "External"}]
    assert "replicas" not in role["spec"]
    assert found.one("ScaledObject", "decode")["spec"]["scaleTargetRef"] == {
        "apiVersion": "disaggregatedset.x-k8s.io/v1",
        "kind": "DisaggregatedSetRoleScaler",
        "name": f"{the_set['metadata']['name']}-{role['name']}",
    }


def test_a_set_has_a_name_that_what_is_made_of_it_fits_behind() -> None:
    """-0-<revision>-prefill, and behind that a group, a worker and the hash of a StatefulSet."""
    found = HelmSdk.shared().render(values_of("disaggregated-set"), release="r" * 53)
    name = found.one("DisaggregatedSet")["metadata"]["name"]
    assert len(f"{name}-0-{'0' * 8}-prefill-0-0123456789") <= 63
    target = found.one("ScaledObject", "decode")["spec"]["scaleTargetRef"]["name"]
    assert target == f"{name}-decode"
    other = HelmSdk.shared().render(values_of("disaggregated-set"), release="r" * 52)
    assert other.one("DisaggregatedSet")["metadata"]["name"] != name


def test_pods_of_a_set_do_not_spread_by_a_label_that_they_lack() -> None:
    for component in ("prefill", "decode"):
        pod = serving_pod(rendered("disaggregated-set"), component)
        (rule,) = pod["spec"]["topologySpreadConstraints"]
        assert "matchLabelKeys" not in rule


# Adapters -----------------------------------------------------------------------------------------


def test_thousands_of_adapters_are_no_argument_that_is_too_long() -> None:
    """Linux starts no program that has one of 128 KiB: the pods would end at once."""
    modules = {f"customer-{i:05}-support": f"customers/{i:05}/support-v1" for i in range(3000)}
    volume = {"type": "pvc", "claim": "adapters"}
    adapters = {"enabled": True, "modules": modules, "volume": volume}
    over = {"model": {"adapters": adapters}}
    found = containers(HelmSdk.shared().render(overlay(MINIMAL, over)))
    for service in ("prefill", "decode"):
        assert max(map(len, found[service]["args"])) < 1 << 12
        served = check(service, found[service])["lora_modules"]
        assert served == [f"{name}=/adapters/{folder}" for name, folder in modules.items()]


# Who reaches the nodes besides the router --------------------------------------------------------


def test_a_gateway_that_shows_token_and_certificate_leaves_both_on() -> None:
    over = {
        "inferencePool": {"gatewayShowsToken": True, "gatewayShowsCertificate": True},
        "auth": {"clusterToken": {"enabled": True}},
        "tls": {"mode": "generated"},
    }
    found = HelmSdk.shared().render(overlay(values_of("gateway"), over))
    assert found.one("InferencePool")
    for component in ("prefill", "decode"):
        args = engine_of(serving_pod(found, component))["args"]
        assert any(arg.startswith("--cluster-token-file=") for arg in args)
        assert "--tls-identity=role" in args and "--allow-plaintext" not in args


def test_relabelings_come_after_ours() -> None:
    mine = {"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "node"}
    drop = {"sourceLabels": ["__name__"], "regex": "python_gc_.*", "action": "drop"}
    monitor = {"enabled": True, "relabelings": [mine], "metricRelabelings": [drop]}
    found = HelmSdk.shared().render(overlay(MINIMAL, {"monitoring": {"podMonitor": monitor}}))
    for one in found.all("PodMonitor"):
        (endpoint,) = one["spec"]["podMetricsEndpoints"]
        targets = [rule["targetLabel"] for rule in endpoint["relabelings"]]
        assert targets == ["release", "component", "node"]
        assert endpoint["metricRelabelings"] == [drop]
        assert not list(errors(one, "1.34"))
