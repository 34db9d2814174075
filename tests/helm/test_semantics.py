"""Tests what no schema sees: that objects fit each other, and that pods are safe and drain
in time.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kv_transfer.control.sizing import MOST_PROCESSES
from tests.helm.helm_engine import HelmCli, HelmSdk, Manifest, Rendered
from tests.helm.scenarios import (
    SCENARIOS,
    overlay,
    pods,
    rendered,
    serving_pod,
    templates_of,
    values_of,
    version_of,
    workload,
    workloads,
)
from tests.helm.service_settings import POD_IP, containers, settings_of
from tests.quick_imports import HIDE

TIERS = ("prefill", "decode")
ENGINES = (*TIERS, "node")
each_scenario = pytest.mark.parametrize("name", SCENARIOS)


def labels_of_pods(found: Rendered) -> list[Mapping[str, str]]:
    return [pod["metadata"]["labels"] for pod in pods(found).values()]


def selected(found: Rendered, labels: Mapping[str, str]) -> list[Mapping[str, str]]:
    return [pod for pod in labels_of_pods(found) if labels.items() <= pod.items()]


def component(manifest: Manifest) -> str:
    return str(manifest["metadata"]["labels"]["app.kubernetes.io/component"])


def ports_of(found: Rendered, name: str) -> dict[str, int]:
    pod = serving_pod(found, name)["spec"]
    ports = [port for container in pod["containers"] for port in container.get("ports", ())]
    return {port["name"]: port["containerPort"] for port in ports}


def all_containers(pod: Manifest) -> list[Manifest]:
    return [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]


# Objects fit each other ---------------------------------------------------------------------------


@each_scenario
def test_workloads_and_services_select_the_pods_of_their_component_alone(name: str) -> None:
    found = rendered(name)
    for deployment in found.all("Deployment"):
        chosen = selected(found, deployment["spec"]["selector"]["matchLabels"])
        assert chosen == [deployment["spec"]["template"]["metadata"]["labels"]]
    for service in found.all("Service"):
        chosen = selected(found, service["spec"]["selector"])
        assert [pod["app.kubernetes.io/component"] for pod in chosen] == [component(service)]
    for budget in found.all("PodDisruptionBudget"):
        # Of a node that spans hosts, leader and workers: each takes the node along.
        chosen = selected(found, budget["spec"]["selector"]["matchLabels"])
        of_component = templates_of(workload(found, component(budget))).values()
        assert chosen == [pod["metadata"]["labels"] for pod in of_component]


@each_scenario
def test_selectors_never_name_a_version(name: str) -> None:
    for deployment in rendered(name).all("Deployment"):
        named = set(deployment["spec"]["selector"]["matchLabels"])
        # Of an entry of `models`, its name.
        assert named - {"tandem.dev/model"} == {
            f"app.kubernetes.io/{key}" for key in ("name", "instance", "component")
        }


@each_scenario
def test_services_routes_and_pools_lead_to_ports_that_are_open(name: str) -> None:
    found = rendered(name)
    for service in found.all("Service"):
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in ports_of(found, component(service))
            if service["spec"].get("clusterIP") == "None":
                # Without an address of its own, nothing translates the port.
                assert port["port"] == ports_of(found, component(service))[port["targetPort"]]
    services = {s["metadata"]["name"]: s["spec"]["ports"] for s in found.all("Service")}
    for route in found.all("HTTPRoute"):
        for backend in route["spec"]["rules"][0]["backendRefs"]:
            assert backend["port"] in [port["port"] for port in services[backend["name"]]]
    for ingress in found.all("Ingress"):
        backend = ingress["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]
        assert backend["port"]["name"] in [port["name"] for port in services[backend["name"]]]
    for pool in found.all("InferencePool"):
        (target,) = pool["spec"]["targetPorts"]
        assert target["number"] == ports_of(found, "decode")["http"]
        assert target["number"] == ports_of(found, "prefill")["grpc"]
        roles = {
            pod["llm-d.ai/role"] for pod in selected(found, pool["spec"]["selector"]["matchLabels"])
        }
        assert roles == set(TIERS)


@each_scenario
def test_mounts_have_volumes_and_volumes_are_mounted(name: str) -> None:
    for pod in pods(rendered(name)).values():
        volumes = [volume["name"] for volume in pod["spec"].get("volumes", ())]
        mounts = [m for c in all_containers(pod) for m in c.get("volumeMounts", ())]
        assert len(volumes) == len(set(volumes))
        assert {mount["name"] for mount in mounts} == set(volumes)
        for container in all_containers(pod):
            paths = [mount["mountPath"] for mount in container.get("volumeMounts", ())]
            assert len(paths) == len(set(paths))


@each_scenario
def test_claims_secrets_and_accounts_exist_or_were_named_by_the_user(name: str) -> None:
    found, text = rendered(name), str(values_of(name))
    made = {(o["kind"], o["metadata"]["name"]) for o in found.objects}
    made |= {("Secret", one["spec"]["secretName"]) for one in found.all("Certificate")}
    for pod in pods(found).values():
        account = pod["spec"].get("serviceAccountName")
        needed = [("ServiceAccount", account)] if account else []
        for volume in pod["spec"].get("volumes", ()):
            if "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                needed.append(("PersistentVolumeClaim", claim))
            if "secret" in volume:
                needed.append(("Secret", volume["secret"]["secretName"]))
            if "configMap" in volume:
                needed.append(("ConfigMap", volume["configMap"]["name"]))
        for variable in (v for c in all_containers(pod) for v in c.get("env", ())):
            if "secretKeyRef" in variable.get("valueFrom", {}):
                needed.append(("Secret", variable["valueFrom"]["secretKeyRef"]["name"]))
        for kind, wanted in needed:
            assert (kind, wanted) in made or f"'{wanted}'" in text, (kind, wanted)


@each_scenario
def test_probes_ask_ports_that_are_open(name: str) -> None:
    for pod in pods(rendered(name)).values():
        for container in pod["spec"]["containers"]:
            ports = container.get("ports", ())
            known = {p["name"] for p in ports} | {p["containerPort"] for p in ports}
            for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
                probe = container.get(kind, {})
                for how in ("grpc", "httpGet", "tcpSocket"):
                    if how in probe:
                        assert probe[how]["port"] in known


@each_scenario
def test_names_are_unique_and_everything_is_in_the_namespace(name: str) -> None:
    found = HelmSdk.shared().render(
        values_of(name), namespace="elsewhere", kube_version=version_of(name)
    )
    names = [(o["kind"], o["metadata"]["name"]) for o in found.objects]
    assert len(names) == len(set(names))
    user_made = len(values_of(name).get("extraObjects", ()))
    inside = [o for o in found.objects if o["metadata"].get("namespace") == "elsewhere"]
    assert len(inside) == len(found.objects) - user_made
    assert not [kind for kind, _ in names if kind.startswith("Cluster")]


@each_scenario
def test_names_fit_with_the_longest_release_name(name: str) -> None:
    release = "r" + "e" * 51 + "d"
    found = HelmSdk.shared().render(values_of(name), release=release, kube_version=version_of(name))
    for manifest in found.objects:
        metadata = manifest["metadata"]
        # A pod of a Deployment is called name-<10 characters>-<5>.
        limit = 63 - 17 if manifest["kind"] == "Deployment" else 63
        assert len(metadata["name"]) <= limit
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", metadata["name"])
        assert all(len(value) <= 63 for value in metadata.get("labels", {}).values())
    for pod in pods(found).values():
        for container in all_containers(pod):
            assert all(len(port["name"]) <= 15 for port in container.get("ports", ()))


def test_two_releases_in_one_namespace_share_no_name() -> None:
    def names(release: str) -> set[tuple[str, str]]:
        found = HelmSdk.shared().render(values_of("default"), release=release)
        return {(o["kind"], o["metadata"]["name"]) for o in found.objects}

    assert not names("one") & names("two")


# Lifecycle ----------------------------------------------------------------------------------------


@each_scenario
def test_the_kubelet_waits_for_the_whole_drain(name: str) -> None:
    found = rendered(name)
    graces = {}
    for service, container in containers(found).items():
        pod = serving_pod(found, service)["spec"]
        settings = settings_of(name)[service]
        hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
        slept = int(hook[1]) if hook else 0
        spent = slept + settings.get("drain_delay_s", 0) + settings["drain_timeout_s"]
        graces[service] = pod["terminationGracePeriodSeconds"]
        assert graces[service] >= spent + 5
    assert graces["router"] >= max(graces.values())


@each_scenario
def test_slow_loads_are_not_killed(name: str) -> None:
    budget = overlay(values_of("default"), values_of(name)).get("tierDefaults", {})
    seconds = budget.get("probes", {}).get("startup", {}).get("budgetSeconds", 1800)
    for service, container in containers(rendered(name)).items():
        probe = container["startupProbe"]
        if service in ENGINES:
            assert probe["failureThreshold"] * probe["periodSeconds"] >= seconds
            for deployment in rendered(name).all("Deployment", service):
                assert deployment["spec"]["progressDeadlineSeconds"] > seconds


@each_scenario
def test_rollouts_on_a_full_cluster_can_begin(name: str) -> None:
    """A GPU tier must free a GPU before it needs another, unless the user has spares."""
    for service in ENGINES:
        for deployment in rendered(name).all("Deployment", service):
            strategy = deployment["spec"]["strategy"]["rollingUpdate"]
            if "strategy" not in values_of(name).get(service, {}):
                assert strategy == {"maxSurge": 0, "maxUnavailable": 1}


@each_scenario
def test_budgets_protect_what_has_more_than_one_pod(name: str) -> None:
    found = rendered(name)
    protected = {component(pdb) for pdb in found.all("PodDisruptionBudget")}
    for deployment in workloads(found):
        scaled = found.all("HorizontalPodAutoscaler", component(deployment)) + found.all(
            "ScaledObject", component(deployment)
        )
        if not scaled:
            assert (component(deployment) in protected) == (deployment["spec"]["replicas"] > 1)
        else:
            (scaling,) = (s["spec"] for s in scaled)
            # Without a number Kubernetes takes one.
            least = scaling.get("minReplicas", scaling.get("minReplicaCount"))
            in_a_set = found.all("DisaggregatedSet")
            if in_a_set:
                assert "replicas" not in deployment["spec"], "the role's scaler has the number"
            else:
                assert deployment["spec"]["replicas"] >= least
            target = scaling["scaleTargetRef"]
            kind = "DisaggregatedSetRoleScaler" if in_a_set else deployment["kind"]
            api = "disaggregatedset.x-k8s.io/v1" if in_a_set else deployment["apiVersion"]
            assert (target["kind"], target["name"]) == (kind, deployment["metadata"]["name"])
            assert target["apiVersion"] == api
            assert component(deployment) in protected


def test_only_tests_are_hooks() -> None:
    for name in SCENARIOS:
        for manifest in rendered(name).objects:
            hook = manifest["metadata"].get("annotations", {}).get("helm.sh/hook")
            assert hook in (None, "test")


# Safety -------------------------------------------------------------------------------------------


def restricted_violations(pod: Manifest) -> Iterator[str]:
    """Lists what the Pod Security Standard "restricted" forbids, and a root file system to write
    to.
    """
    spec = pod["spec"]
    for field in ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"):
        if spec.get(field):
            yield field
    security = spec.get("securityContext", {})
    if security.get("runAsNonRoot") is not True or security.get("runAsUser") == 0:
        yield "root"
    if security.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield "seccomp"
    for container in all_containers(pod):
        own = container.get("securityContext", {})
        if own.get("allowPrivilegeEscalation") is not False or own.get("privileged"):
            yield f"{container['name']}: privileges"
        if own.get("capabilities", {}).get("drop") != ["ALL"] or own["capabilities"].get("add"):
            yield f"{container['name']}: capabilities"
        if own.get("readOnlyRootFilesystem") is not True:
            yield f"{container['name']}: root file system"
        if any("hostPort" in port for port in container.get("ports", ())):
            yield f"{container['name']}: host port"
    allowed = {
        "configMap",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
        "image",
    }
    for volume in spec.get("volumes", ()):
        if not set(volume) - {"name"} <= allowed:
            yield f"volume {volume['name']}"


_TIER_VALUES = ("tierDefaults", *ENGINES)


@each_scenario
def test_pods_are_restricted(name: str) -> None:
    values = values_of(name)
    expected = set()
    for volume, storage in {
        "models": values["model"].get("storage", {}),
        "compiled": values.get("compileCache", {}),
    }.items():
        if storage.get("type") == "hostPath":
            expected.add(f"volume {volume}")
    disks = (values.get(part, {}).get("kvTiers", {}).get("disk") for part in _TIER_VALUES)
    if any(disk and disk.get("type") == "hostPath" for disk in disks):
        expected.add("volume kv-disk")
    if values.get("tierDefaults", {}).get("network", {}).get("ipcLock"):
        expected.add("engine: capabilities")
    if values.get("prefill", {}).get("network", {}).get("hostNetwork"):
        expected.add("hostNetwork")
    for pod in pods(rendered(name)).values():
        assert set(restricted_violations(pod)) <= expected


@each_scenario
def test_caches_are_where_containers_may_write(name: str) -> None:
    for service, container in containers(rendered(name)).items():
        writable = [m["mountPath"] for m in container["volumeMounts"] if not m.get("readOnly")]
        variables = {v["name"]: v.get("value", "") for v in container["env"]}
        if service in ENGINES:
            for variable in ("HF_HOME", "TRITON_CACHE_DIR"):
                path = variables[variable]
                assert any(path == w or path.startswith(f"{w}/") for w in writable)


@each_scenario
def test_service_variables_cannot_become_settings(name: str) -> None:
    """A Service called tandem-router would set TANDEM_ROUTER_PORT=tcp://… in every pod."""
    for pod in pods(rendered(name)).values():
        assert pod["spec"]["enableServiceLinks"] is False


@each_scenario
def test_no_pod_has_rights_that_it_does_not_use(name: str) -> None:
    found = rendered(name)
    for role in found.all("Role"):
        if component(role) == "calibration":
            continue  # Has a test of its own below.
        assert component(role) == "router"
        for rule in role["rules"]:
            assert set(rule["verbs"]) <= {"get", "list", "watch"}
            assert rule["apiGroups"] == ["discovery.k8s.io"]
            assert rule["resources"] == ["endpointslices"]
    with_rights = {component(role) for role in found.all("Role")}
    for deployment in workloads(found):
        for pod in templates_of(deployment).values():
            token = pod["spec"]["automountServiceAccountToken"]
            assert token == (component(deployment) in with_rights)


def test_the_calibration_may_patch_one_config_map_and_nothing_else() -> None:
    found = rendered("calibration")
    (role,) = [role for role in found.all("Role") if component(role) == "calibration"]
    (config_map,) = [c for c in found.all("ConfigMap") if component(c) == "calibration"]
    name = config_map["metadata"]["name"]
    assert "data" not in config_map, "an upgrade would empty it"
    assert role["rules"] == [
        {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": [name],
         "verbs": ["patch"]}
    ]  # fmt: skip
    (job,) = [job for job in found.all("Job") if component(job) == "calibration"]
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["serviceAccountName"] == name and f"--config-map={name}" in container["args"]
    assert "nvidia.com/gpu" in container["resources"]["limits"]
    default = rendered("default")
    assert not [job for job in default.all("Job") if component(job) == "calibration"]


def test_the_router_may_watch_what_it_discovers_by() -> None:
    found = rendered("default")
    (binding,) = found.all("RoleBinding")
    account = serving_pod(found, "router")["spec"]["serviceAccountName"]
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": account, "namespace": "default"}
    ]
    assert binding["roleRef"]["name"] == found.one("Role")["metadata"]["name"]
    # Where the token is mounted is where the router looks for it.
    folder = settings_of("default")["router"]["kubernetes_credentials"]
    assert folder == "/var/run/secrets/kubernetes.io/serviceaccount"
    for scenario in ("decode-only", "static"):
        assert not rendered(scenario).all("Role")


@each_scenario
def test_images_are_pinned(name: str) -> None:
    for pod in pods(rendered(name)).values():
        for container in all_containers(pod):
            tag = container["image"].rpartition("/")[2].partition("@")[0].partition(":")[2]
            assert tag != "latest" and (tag or "@sha256:" in container["image"])


@each_scenario
def test_secrets_are_referred_to_never_written(name: str) -> None:
    for pod in pods(rendered(name)).values():
        for variable in (v for c in all_containers(pod) for v in c.get("env", ())):
            if re.search("(KEY|TOKEN|SECRET|PASSWORD)$", variable["name"]):
                assert "secretKeyRef" in variable["valueFrom"]


@each_scenario
def test_gpus_follow_from_the_ranks(name: str) -> None:
    for service, container in containers(rendered(name)).items():
        settings, resources = settings_of(name)[service], container["resources"]
        hosts = workload(rendered(name), service)["spec"].get("leaderWorkerTemplate", {})
        gpus = resources.get("limits", {}).get("nvidia.com/gpu", 0)
        assert gpus == resources.get("requests", {}).get("nvidia.com/gpu", 0)
        on_gpu = service in ENGINES and settings["device"] == "cuda"
        ranks = 0
        if on_gpu:
            ranks = settings["tensor_parallel_size"] * settings["pipeline_parallel_size"]
            ranks = ranks * settings["data_parallel_size"] // hosts.get("size", 1)
        for template in rendered(name).all("ResourceClaimTemplate", service):
            (request,) = template["spec"]["spec"]["devices"]["requests"]
            gpus += request["exactly"]["count"]
        assert gpus == ranks


Flow = tuple[str, str, int | str | None]
"""From, to, port. `"8400-8407"`: a range; None: every port."""


def ports_in(rule: Manifest) -> list[int | str | None]:
    found = [f"{p['port']}-{p['endPort']}" if "endPort" in p else p["port"] for p in rule["ports"]]
    return found or [None]


def flows(found: Rendered) -> set[Flow]:
    """Returns the flows between components, by ingress rules."""
    allowed: set[Flow] = set()
    for policy in found.all("NetworkPolicy"):
        for rule in policy["spec"]["ingress"]:
            peers = [
                peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
                for peer in rule.get("from", ())
                if "podSelector" in peer
            ]
            for port in ports_in({"ports": (), **rule}):
                allowed |= {(peer, component(policy), port) for peer in peers}
    return allowed


def egress_flows(found: Rendered) -> set[Flow]:
    allowed: set[Flow] = set()
    for policy in found.all("NetworkPolicy"):
        for rule in policy["spec"]["egress"]:
            for peer in rule.get("to", ()):
                if "podSelector" in peer:
                    to = peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
                    for port in ports_in({"ports": (), **rule}):
                        allowed.add((component(policy), to, port))
    return allowed


def test_policies_let_through_what_the_services_need_and_agree_on_both_ends() -> None:
    found = rendered("production")
    prefill, decode = ports_of(found, "prefill"), ports_of(found, "decode")
    needed = {
        ("router", "decode", decode["http"]),
        ("router", "decode", decode["grpc"]),
        ("router", "prefill", prefill["grpc"]),
        ("decode", "prefill", prefill["grpc"]),
        ("decode", "prefill", "8400-8407"),
    }
    # Four ranks with two transfer processes each.
    settings = settings_of("production")["prefill"]
    assert settings["kv_port"] == 8400
    assert settings["tensor_parallel_size"] * settings["kv_processes"] == 8
    assert flows(found) - {("test", "router", 8000)} == needed == egress_flows(found)


def test_policies_let_shared_prefixes_through() -> None:
    shared = {"kvSharePrefixes": "auto", "enablePrefixCaching": True, "kvProcesses": 2}
    before = rendered("production")
    values = overlay(
        values_of("production"),
        {"prefill": {"settings": shared}, "decode": {"settings": shared}},
    )
    found = HelmSdk.shared().render(values)
    prefill, decode = ports_of(found, "prefill"), ports_of(found, "decode")
    more = {
        ("prefill", "prefill", prefill["grpc"]),
        ("prefill", "prefill", "8400-8407"),
        ("prefill", "decode", decode["grpc"]),
        ("prefill", "decode", "8500-8507"),
    }
    assert flows(found) - flows(before) == more == egress_flows(found) - egress_flows(before)
    args = [arg for one in containers(found).values() for arg in one["args"]]
    assert "--kv-port=8500" in args


def test_gateways_and_pickers_reach_the_nodes_of_a_pool() -> None:
    found = rendered("gateway")
    for service, names in {"decode": ("http", "metrics"), "prefill": ("metrics",)}.items():
        (policy,) = found.all("NetworkPolicy", service)
        open_to_all = [r["ports"] for r in policy["spec"]["ingress"] if "from" not in r]
        ports = ports_of(found, service)
        assert open_to_all == [[{"port": ports[name]} for name in names]]


def test_nodes_that_choose_how_many_kv_processes_to_take_have_ports_for_the_most() -> None:
    (wide,) = [port for *_, port in flows(rendered("default")) if isinstance(port, str)]
    assert wide == f"8400-{8400 + MOST_PROCESSES - 1}"
    assert settings_of("default")["prefill"]["kv_processes"] is None


def test_a_node_over_several_hosts_talks_within_its_tier_and_answers_by_its_leader() -> None:
    found = rendered("multi-host")
    assert ("decode", "decode", None) in flows(found) & egress_flows(found)
    assert ("prefill", "prefill", None) not in flows(found) | egress_flows(found)
    group = workload(found, "decode")["spec"]["leaderWorkerTemplate"]
    assert group["size"] == 2
    # The operator would make a Service of its own called as ours, if there were none, and workers
    # find a leader that is not ready by that one alone.
    policy = workload(found, "decode")["spec"]["networkConfig"]["subdomainPolicy"]
    assert policy == "UniquePerReplica"
    leader, worker = (templates_of(workload(found, "decode"))[p] for p in ("leader", "worker"))
    grace = leader["spec"]["terminationGracePeriodSeconds"]
    assert worker["spec"]["terminationGracePeriodSeconds"] == grace
    for part in (leader, worker):
        variables = {v["name"]: v.get("value") for v in part["spec"]["containers"][0]["env"]}
        mounts = {m["name"]: m["mountPath"] for m in part["spec"]["containers"][0]["volumeMounts"]}
        assert variables["RAY_AUTH_MODE"] == "token"
        assert str(Path(variables["RAY_AUTH_TOKEN_PATH"]).parent) == mounts["ray-token"]
    assert "RAY_AUTH_MODE" not in str(workload(found, "prefill"))
    # Workers stay until the leader has drained; Ray's first port is the leader's.
    (stay,) = [c["lifecycle"]["preStop"]["exec"]["command"] for c in worker["spec"]["containers"]]
    assert "ray health-check" in stay[-1]
    settings = settings_of("multi-host")["decode"]
    assert (settings["distributed_executor_backend"], settings["ray_address"]) == (
        "ray",
        f"{POD_IP}:6379",
    )


def ray_lines(name: str) -> list[list[str]]:
    """Calls of the ray command in the shell of a group's containers."""
    found = []
    for pod in templates_of(workload(rendered(name), "decode")).values():
        shell = pod["spec"]["containers"][0]["command"][2]
        for line in re.findall(r"\bray (?:start|health-check) [^;&\n]*", shell):
            found.append(shlex.split(line.replace('"$(cat /tmp/leader):6379"', "10.0.0.1:6379")))
    return found


def test_ray_takes_the_flags_it_is_given() -> None:
    """Asks Ray's own parser, which runs nothing here."""
    lines = ray_lines("multi-host")
    assert [line[1] for line in lines] == ["start", "health-check", "start"]
    code = (
        f"{HIDE}import json\n"
        "from ray.scripts.scripts import cli\n"
        "for line in json.load(sys.stdin):\n"
        "    command = cli.commands[line[1]]\n"
        "    command.make_context(line[1], line[2:])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("part", ["leader", "worker"])
def test_the_shell_of_a_group_parses(part: str) -> None:
    pod = templates_of(workload(rendered("multi-host"), "decode"))[part]
    shell = pod["spec"]["containers"][0]["command"][2]
    assert subprocess.run(["sh", "-n", "-c", shell], check=False).returncode == 0


def test_the_node_key_is_made_once_per_render_and_never_shown() -> None:
    values: dict[str, Any] = overlay(values_of("default"), {"auth": {"nodeKey": {"enabled": True}}})
    for engine in (HelmSdk.shared(), HelmCli()):
        found = engine.render(values)
        secret = found.one("Secret", "node-key")
        value = secret["data"]["node-key"]
        assert len(value) == 60
        others = [manifest for manifest in found.objects if manifest["kind"] != "Secret"]
        assert value not in str(others) and value not in found.notes


def test_the_router_reads_its_keys_where_the_secret_is_mounted() -> None:
    found = rendered("production")
    container = containers(found)["router"]
    file = Path(settings_of("production")["router"]["api_key_file"])
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    # A mount of one file (subPath) would never change.
    assert "subPath" not in mounts[str(file.parent)]
    volumes = {v["name"]: v for v in serving_pod(found, "router")["spec"]["volumes"]}
    assert volumes[mounts[str(file.parent)]["name"]]["secret"]["secretName"] == "tandem-api-keys"
    decode = settings_of("production")["decode"]
    mounted = [m["mountPath"] for m in containers(found)["decode"]["volumeMounts"]]
    assert str(Path(decode["api_key_file"]).parent) in mounted


def test_the_router_reads_its_store_s_url_from_a_secret_or_keeps_a_file_on_a_claim() -> None:
    def router(**store: str) -> tuple[dict[str, Any], dict[str, Any]]:
        own = {"router": {"replicas": 1, "responseStore": store}}
        found = HelmSdk.shared().render(overlay(values_of("default"), own))
        container = containers(found)["router"]
        env = {one["name"]: one for one in container["env"]}
        return env["TANDEM_ROUTER_RESPONSE_STORE"], container

    env, container = router(existingSecret="database", secretKey="dsn")
    assert env["valueFrom"]["secretKeyRef"] == {"name": "database", "key": "dsn"}
    assert "database" not in str(container["args"])
    env, container = router(existingClaim="claim")
    folder = str(Path(str(env["value"]).removeprefix("sqlite:///")).parent)
    assert folder in [mount["mountPath"] for mount in container["volumeMounts"]]


def test_batches_are_kept_on_a_volume_that_outlives_the_release() -> None:
    """One router has it at a time: the next one starts when the last one has ended."""

    def router(**store: str) -> tuple[Rendered, str]:
        own = {"router": {"replicas": 1, "batchStore": store}}
        found = HelmSdk.shared().render(overlay(values_of("default"), own))
        [env] = [
            one
            for one in containers(found)["router"]["env"]
            if one["name"] == "TANDEM_ROUTER_BATCH_STORE"
        ]
        return found, str(env.get("value", ""))

    found, url = router(size="5Gi")
    folder = str(Path(url.removeprefix("sqlite:///")).parent)
    mounts = {m["mountPath"]: m["name"] for m in containers(found)["router"]["volumeMounts"]}
    spec = serving_pod(found, "router")["spec"]
    [volume] = [one for one in spec["volumes"] if one["name"] == mounts[folder]]
    claim = found.one("PersistentVolumeClaim", "batches")
    assert claim["metadata"]["name"] == volume["persistentVolumeClaim"]["claimName"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "5Gi"
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    deployment = found.one("Deployment", "router")
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    found, url = router(existingSecret="database")
    assert not url
    assert not [one for one in found.objects if one["kind"] == "PersistentVolumeClaim"]
