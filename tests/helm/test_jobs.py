"""Jobs and the pod of `helm test` run where the pods that they stand for do."""

from __future__ import annotations

from typing import Any

import pytest

from engine.speed.__main__ import make_parser
from tests.helm.helm_engine import HelmSdk, Manifest, Rendered
from tests.helm.kube_schemas import errors
from tests.helm.scenarios import overlay, pods, rendered, serving_pod, values_of
from tests.helm.test_pod_options import MINIMAL, engine_of, port_rules

PROXY = [{"name": "HTTPS_PROXY", "value": "http://proxy.corp:3128"}]
CALIBRATED = overlay(MINIMAL, {"calibration": {"enabled": True}})
PLACED: dict[str, Any] = {
    "env": PROXY,
    "envFrom": [{"configMapRef": {"name": "corporate"}}],
    "extraVolumes": [{"name": "authority", "configMap": {"name": "authority"}}],
    "extraVolumeMounts": [{"name": "authority", "mountPath": "/etc/authority"}],
    "nodeSelector": {"pool": "gpu"},
    "priorityClassName": "online",
    "runtimeClassName": "nvidia",
}
"""Holds what nodes may need to have their GPU, and to reach the hub."""


def calibration_of(**over: Any) -> Manifest:
    return HelmSdk.shared().render(overlay(CALIBRATED, over)).one("Job", "calibration")


def test_the_calibration_has_its_gpu_as_nodes_have_theirs() -> None:
    spec = calibration_of(decode=PLACED)["spec"]["template"]["spec"]
    assert {key: spec[key] for key in PLACED if key in spec} == {
        "nodeSelector": {"pool": "gpu"},
        "priorityClassName": "online",
        "runtimeClassName": "nvidia",
    }
    (container,) = spec["containers"]
    assert PROXY[0] in container["env"]
    assert PLACED["extraVolumeMounts"][0] in container["volumeMounts"]
    assert PLACED["extraVolumes"][0] in spec["volumes"]


def test_a_calibration_runs_only_what_brings_its_model() -> None:
    models = {"name": "models", "mountPath": "/models"}
    brings = {"name": "fetch", "image": "i", "args": ["x"], "volumeMounts": [models]}
    tier = {
        "settings": {"enablePrefixCaching": True},
        "kvTiers": {
            "hostGiB": 1,
            "diskGiB": 9,
            "disk": {"type": "hostPath", "hostPath": "/nvme"},
        },
        "initContainers": [
            {"name": "bare", "image": "i"},
            brings,
            {
                "name": "clear",
                "image": "i",
                "volumeMounts": [{"name": "kv-disk", "mountPath": "/kv"}],
            },
        ],
    }
    found = HelmSdk.shared().render(overlay(CALIBRATED, {"decode": tier}))
    names = [one["name"] for one in serving_pod(found, "decode")["spec"]["initContainers"]]
    assert names == ["bare", "fetch", "clear"]
    spec = found.one("Job", "calibration")["spec"]["template"]["spec"]
    assert spec["initContainers"] == [brings]
    volumes = {volume["name"] for volume in spec["volumes"]}
    for container in [*spec["initContainers"], *spec["containers"]]:
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    assert "initContainers" not in calibration_of()["spec"]["template"]["spec"]


def test_a_calibration_measures_the_model_that_nodes_have_as_they_have_it() -> None:
    """Also where it is downloaded meanwhile: before that, its tries would end without it."""
    settings = {"maxNumBatchedTokens": 1_000_000, "gpuMemoryUtilization": 0.85, "blockSize": None}
    model = {"kvCacheDtype": "fp8", "dtype": "bfloat16"}
    over = {"calibration": {"enabled": True}, "model": model, "decode": {"settings": settings}}
    found = HelmSdk.shared().render(overlay(PRELOADED, over))
    spec = found.one("Job", "calibration")["spec"]
    assert spec["activeDeadlineSeconds"] == 3600 + 14400
    pod = spec["template"]["spec"]
    assert pod["initContainers"] == serving_pod(found, "decode")["spec"]["initContainers"]
    taken = make_parser().parse_args(pod["containers"][0]["args"])
    assert (taken.model, taken.revision) == ("org/model", PRELOADED["model"]["revision"])
    assert (taken.kv_cache_dtype, taken.dtype) == ("fp8", "bfloat16")
    assert (taken.max_num_batched_tokens, taken.gpu_memory_utilization) == (1_000_000, 0.85)
    alone = calibration_of()["spec"]
    assert alone["activeDeadlineSeconds"] == 3600
    args = make_parser().parse_args(alone["template"]["spec"]["containers"][0]["args"])
    assert (args.revision, args.dtype, args.block_size) == (None, "auto", 128)


def test_what_containers_claim_their_pods_claim() -> None:
    found = HelmSdk.shared().render(
        overlay(values_of("devices"), {"calibration": {"enabled": True}})
    )
    claiming = 0
    for pod in pods(found).values():
        claimed = {claim["name"] for claim in pod["spec"].get("resourceClaims", ())}
        for container in pod["spec"]["containers"]:
            used = {claim["name"] for claim in container["resources"].get("claims", ())}
            assert used == claimed
            claiming += bool(used)
    assert claiming == 3, "prefill, decode and the calibration"
    job = found.one("Job", "calibration")
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "inference"


def test_a_calibration_for_another_queue_is_another_job() -> None:
    """Kueue refuses to change the queue of a Job that has started."""
    names = {calibration_of()["metadata"]["name"]}
    for queue in ({"queue": "a"}, {"queue": "b"}, {"queue": "b", "priorityClass": "low"}):
        names.add(calibration_of(scheduling={"kind": "kueue", **queue})["metadata"]["name"])
    assert len(names) == 4


@pytest.mark.parametrize(
    "over",
    [
        {"decode": {"resources": {"requests": {"cpu": "3"}}}},
        {"decode": {"nodeSelector": {"pool": "gpu"}}},
        {"model": {"hub": {"endpoint": "https://mirror"}}},
        {"jobs": {"podLabels": {"sidecar.istio.io/inject": "false"}}},
    ],
)
def test_a_calibration_that_would_have_to_change_is_another_one(over: dict[str, Any]) -> None:
    base, other = calibration_of(), calibration_of(**over)
    assert other["spec"] != base["spec"]
    assert other["metadata"]["name"] != base["metadata"]["name"]
    assert calibration_of(router={"replicas": 3}) == base


def test_a_download_goes_the_way_that_nodes_would() -> None:
    found = HelmSdk.shared().render(overlay(PRELOADED, {"tierDefaults": PLACED}))
    spec = found.one("Job", "preload")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert PROXY[0] in container["env"] and container["envFrom"] == PLACED["envFrom"]
    assert PLACED["extraVolumeMounts"][0] in container["volumeMounts"]
    assert PLACED["extraVolumes"][0] in spec["volumes"]
    assert not {"nodeSelector", "runtimeClassName"} & spec.keys(), "it needs no GPU"
    (policy,) = found.all("NetworkPolicy", "preload")
    assert 3128 in {port["port"] for port, _ in port_rules(policy["spec"]["egress"])}


def test_a_mesh_leaves_pods_alone_that_must_end() -> None:
    jobs = {"podLabels": {"a": "b"}, "podAnnotations": {"linkerd.io/inject": "disabled"}}
    values = overlay(PRELOADED, {"calibration": {"enabled": True}, "jobs": jobs})
    found = HelmSdk.shared().render(values)
    assert not [error for one in found.objects for error in errors(one, "1.34")]
    for where, pod in pods(found).items():
        ends = not where.startswith("Deployment/")
        metadata = pod["metadata"]
        assert (metadata["labels"].get("a") == "b") is ends, where
        assert ("linkerd.io/inject" in metadata.get("annotations", {})) is ends, where


def test_a_calibration_has_the_account_that_the_user_names() -> None:
    account = {"create": False, "name": "shared"}
    found = HelmSdk.shared().render(overlay(CALIBRATED, {"serviceAccount": account}))
    spec = found.one("Job", "calibration")["spec"]["template"]["spec"]
    assert spec["serviceAccountName"] == "shared" and not found.all("ServiceAccount")
    assert found.one("RoleBinding", "calibration")["subjects"][0]["name"] == "shared"


# The download of a model --------------------------------------------------------------------------


PRELOADED = values_of("preload")


def job_of(**over: Any) -> Manifest:
    return HelmSdk.shared().render(overlay(PRELOADED, over)).one("Job")


def test_pods_wait_for_the_download_and_need_no_hub() -> None:
    found = rendered("preload")
    job = found.one("Job")
    (download,) = job["spec"]["template"]["spec"]["containers"]
    assert download["command"] == ["tandem", "download"]
    assert download["args"][:2] == ["org/model", "--revision=0a1b2c3"]
    mark = download["args"][2].removeprefix("--mark=")
    for component in ("prefill", "decode"):
        spec = serving_pod(found, component)["spec"]
        (wait,) = spec["initContainers"]
        assert {"name": "MARK", "value": mark} in wait["env"]
        claims = [v for v in spec["volumes"] if v["name"] == "models"]
        assert claims == [
            v for v in job["spec"]["template"]["spec"]["volumes"] if v["name"] == "models"
        ]
        variables = {v["name"]: v.get("value") for v in engine_of({"spec": spec})["env"]}
        assert variables["HF_HUB_OFFLINE"] == "1"
        assert variables["HF_HOME"] == "/models"
        assert not hub_is_open(found, component), "who asks nobody needs no way there"
    assert hub_is_open(found, "preload")
    assert "HF_HUB_OFFLINE" not in str(download["env"])


def test_a_rollout_may_wait_for_the_download() -> None:
    """Else Helm calls it failed while the download goes on as it may."""
    limit = {"model": {"preload": {"timeoutSeconds": 7200}}}
    found = HelmSdk.shared().render(overlay(PRELOADED, limit))
    for component in ("prefill", "decode"):
        assert found.one("Deployment", component)["spec"]["progressDeadlineSeconds"] >= 7200 + 1800
    assert "--timeout=9600s deployment/tandem-decode" in found.notes
    hook = {"preload": {"kind": "hook"}, "storage": {"pvc": {"existingClaim": "c"}}}
    before = HelmSdk.shared().render(overlay(PRELOADED, {"model": hook}))
    assert before.one("Deployment", "decode")["spec"]["progressDeadlineSeconds"] == 2400


@pytest.mark.parametrize("over", [{}, {"preload": {"kind": "none"}, "hub": {"offline": True}}])
def test_who_asks_no_hub_has_no_token_of_it(over: dict[str, Any]) -> None:
    hub = {"existingSecret": "hub-token", "endpoint": "https://mirror.corp"}
    found = HelmSdk.shared().render(
        overlay(overlay(PRELOADED, {"model": {"hub": hub}}), {"model": over})
    )
    for component in ("prefill", "decode"):
        assert "hub-token" not in str(serving_pod(found, component))
    for job in found.all("Job"):
        names = {v["name"] for v in job["spec"]["template"]["spec"]["containers"][0]["env"]}
        assert {"HF_TOKEN", "HF_ENDPOINT"} <= names


def hub_is_open(found: Rendered, component: str) -> bool:
    (policy,) = found.all("NetworkPolicy", component)
    return any(port["port"] == 443 for port, _ in port_rules(policy["spec"]["egress"]))


def test_a_job_that_would_have_to_change_is_another_one() -> None:
    """Kubernetes refuses to change a Job's pods."""
    base = job_of()
    for over in (
        {"model": {"revision": "ffff"}},
        {"model": {"preload": {"resources": {"requests": {"cpu": "1"}}}}},
        {"model": {"hub": {"endpoint": "https://mirror"}}},
        {"image": {"engine": {"tag": "2"}}},
        {"tierDefaults": {"podSecurityContext": {"runAsUser": 5}}},
        {"global": {"imagePullSecrets": [{"name": "s"}]}},
        {"tierDefaults": {"env": PROXY}},
        {"jobs": {"podAnnotations": {"linkerd.io/inject": "disabled"}}},
    ):
        other = job_of(**over)
        assert other["metadata"]["name"] != base["metadata"]["name"], over
        assert other["spec"] != base["spec"], over
    for over in ({"model": {"maxModelLen": 4096}}, {"decode": {"replicas": 3}}):
        assert job_of(**over) == base


def test_a_hook_runs_before_anything_changes() -> None:
    storage = {"pvc": {"existingClaim": "models"}}
    job = job_of(model={"preload": {"kind": "hook"}, "storage": storage})
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    assert "helm.sh/hook" not in str(job_of()["metadata"])


def test_a_hook_that_failed_makes_room_for_the_next_one() -> None:
    """Helm deletes the hook before only by its name, and a download that failed is asked for anew
    with other values."""
    hook = {"preload": {"kind": "hook"}, "storage": {"pvc": {"existingClaim": "models"}}}
    jobs = [job_of(model={**hook, "revision": revision}) for revision in ("a", "b")]
    assert jobs[0]["spec"] != jobs[1]["spec"]
    assert {job["metadata"]["name"] for job in jobs} == {"tandem-preload"}
    policy = jobs[0]["metadata"]["annotations"]["helm.sh/hook-delete-policy"]
    assert "before-hook-creation" in policy.split(",")
