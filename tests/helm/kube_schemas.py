"""Strict schemas of Kubernetes objects: unknown fields are errors, and all errors are told.

Kubernetes' own kinds come from the package kubernetes-validate, which has those of each version;
`CUSTOM` holds what the chart uses of other projects' kinds. A kind without a schema is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from tests.helm.helm_engine import Manifest

KUBE_VERSIONS = ("1.28", "1.30", "1.34", "1.37")


def errors(manifest: Manifest, kube_version: str) -> Iterator[str]:
    """Lists what is wrong with an object, each with the place."""
    name = f"{manifest['kind']}/{manifest['metadata']['name']}"
    found = sorted(
        _validator(manifest["apiVersion"], manifest["kind"], kube_version).iter_errors(manifest),
        key=lambda error: list(map(str, error.path)),
    )
    for error in found:
        yield f"{name} {'.'.join(map(str, error.path))}: {error.message}"
    yield from (f"{name} {place}: is null" for place in _nulls(manifest))
    for owner, group in _groups(manifest):
        for part in ("leaderTemplate", "workerTemplate"):
            if part in group:
                # What an object of Kubernetes that holds the same template would be told.
                pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": owner}}
                yield from errors({**pod, "template": group[part]}, kube_version)


def _groups(manifest: Manifest) -> Iterator[tuple[str, Manifest]]:
    """Yields the templates of groups, and whose they are."""
    name = manifest["metadata"]["name"]
    if manifest["kind"] == "LeaderWorkerSet":
        yield name, manifest["spec"]["leaderWorkerTemplate"]
    if manifest["kind"] == "DisaggregatedSet":
        for role in manifest["spec"]["roles"]:
            yield f"{name}-{role['name']}", role["spec"]["leaderWorkerTemplate"]


def _nulls(node: Any, place: str = "") -> Iterator[str]:
    """Kubernetes drops nulls silently; in a chart each is a value that got lost."""
    if node is None:
        yield place
    elif isinstance(node, dict):
        for key, value in node.items():
            yield from _nulls(value, f"{place}.{key}")
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _nulls(value, f"{place}[{index}]")


@cache
def _validator(api_version: str, kind: str, kube_version: str) -> Draft202012Validator:
    if (api_version, kind) in CUSTOM:
        return Draft202012Validator(_custom(api_version, kind))
    folder = files("kubernetes_validate").joinpath(
        "kubernetes-json-schema", f"v{kube_version}.0-local-strict"
    )
    short = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    schema = json.loads(folder.joinpath(f"{kind.lower()}-{short}.json").read_text("utf-8"))
    return Draft202012Validator(schema, registry=_definitions(kube_version))


@cache
def _definitions(kube_version: str) -> Registry[Any]:
    path = files("kubernetes_validate").joinpath(
        "kubernetes-json-schema", f"v{kube_version}.0-local-strict", "_definitions.json"
    )
    return Resource.from_contents(json.loads(path.read_text("utf-8"))) @ Registry()


def _object(required: str = "", **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": required.split(),
        "properties": properties,
    }


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": items}


TEXT = {"type": "string", "minLength": 1}
NUMBER = {"type": "integer", "minimum": 0}
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
SELECTOR = _object("matchLabels", matchLabels=TEXTS)
DURATION = {"type": "string", "pattern": "^([0-9]+(ms|s|m|h))+$"}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}

_BEHAVIOR = _object(
    stabilizationWindowSeconds=NUMBER,
    policies=_list(
        _object(
            "type value periodSeconds",
            type={"enum": ["Pods", "Percent"]},
            value=NUMBER,
            periodSeconds=NUMBER,
        )
    ),
)
_SCALED_OBJECT = _object(
    "scaleTargetRef triggers",
    scaleTargetRef=_object("name", apiVersion=TEXT, kind=TEXT, name=TEXT),
    minReplicaCount=NUMBER,
    maxReplicaCount=NUMBER,
    fallback=_object(
        "failureThreshold replicas",
        failureThreshold=NUMBER,
        replicas=NUMBER,
        behavior={"enum": ["static", "currentReplicas", "currentReplicasIfHigher"]},
    ),
    advanced=_object(
        horizontalPodAutoscalerConfig=_object(
            behavior=_object(scaleUp=_BEHAVIOR, scaleDown=_BEHAVIOR)
        )
    ),
    triggers=_list(
        _object(
            "type metadata",
            type={"const": "prometheus"},
            metricType={"enum": ["AverageValue", "Value", "Utilization"]},
            authenticationRef=_object(
                "name",
                name=TEXT,
                kind={"enum": ["TriggerAuthentication", "ClusterTriggerAuthentication"]},
            ),
            metadata=_object(
                "serverAddress query threshold",
                serverAddress=TEXT,
                query=TEXT,
                threshold=TEXT,
                ignoreNullValues={"enum": ["true", "false"]},
                authModes=TEXT,
                namespace=TEXT,
            ),
        )
    ),
)
_RELABELING = _object(
    sourceLabels=_list(TEXT),
    separator={"type": "string"},
    targetLabel=TEXT,
    regex={"type": "string"},
    modulus=NUMBER,
    replacement={"type": "string"},
    action=TEXT,
)
_POD_MONITOR = _object(
    "selector podMetricsEndpoints",
    selector=SELECTOR,
    podMetricsEndpoints=_list(
        _object(
            "port",
            port=TEXT,
            path=TEXT,
            interval=DURATION,
            relabelings=_list(_RELABELING),
            metricRelabelings=_list(_RELABELING),
        )
    ),
)
_PROMETHEUS_RULE = _object(
    "groups",
    groups=_list(
        _object(
            "name rules",
            name=TEXT,
            rules=_list(
                {
                    **_object("alert expr", alert=TEXT, expr=TEXT, labels=TEXTS, annotations=TEXTS),
                    "patternProperties": {"^for$": DURATION},
                }
            ),
        )
    ),
)
_HTTP_ROUTE = _object(
    "parentRefs rules",
    parentRefs=_list(
        _object("name", name=TEXT, namespace=TEXT, sectionName=TEXT, group=TEXT, kind=TEXT)
    ),
    hostnames=_list(TEXT),
    rules=_list(
        _object(
            backendRefs=_list(_object("name port", name=TEXT, port=PORT)),
            timeouts=_object(request=DURATION),
        )
    ),
)
_INFERENCE_POOL = _object(
    "selector targetPorts endpointPickerRef",
    selector=SELECTOR,
    targetPorts={**_list(_object("number", number=PORT)), "maxItems": 8},
    endpointPickerRef=_object(
        "name",
        name=TEXT,
        port=_object("number", number=PORT),
        failureMode={"enum": ["FailOpen", "FailClose"]},
    ),
)

_CERTIFICATE = _object(
    "secretName issuerRef",
    secretName=TEXT,
    issuerRef=_object("name", name=TEXT, kind=TEXT, group=TEXT),
    dnsNames=_list({"type": "string", "pattern": r"^(\*\.)?[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"}),
    usages=_list({"enum": ["digital signature", "server auth", "client auth"]}),
    privateKey=_object(
        algorithm={"enum": ["RSA", "ECDSA", "Ed25519"]},
        size={"enum": [256, 384, 521]},
        encoding={"enum": ["PKCS1", "PKCS8"]},
        rotationPolicy={"enum": ["Never", "Always"]},
    ),
    duration=DURATION,
    renewBefore=DURATION,
)

_COUNT_OR_PERCENT = {"anyOf": [NUMBER, {"type": "string", "pattern": "^[0-9]+%$"}]}
_LEADER_WORKER_SET = _object(
    "leaderWorkerTemplate",
    replicas=NUMBER,
    startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
    networkConfig=_object(
        "subdomainPolicy", subdomainPolicy={"enum": ["Shared", "UniquePerReplica"]}
    ),
    rolloutStrategy=_object(
        "type",
        type={"const": "RollingUpdate"},
        rollingUpdateConfiguration=_object(
            maxSurge=_COUNT_OR_PERCENT, maxUnavailable=_COUNT_OR_PERCENT
        ),
    ),
    leaderWorkerTemplate=_object(
        "size workerTemplate",
        size=NUMBER,
        restartPolicy={"enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
        leaderTemplate={"type": "object"},
        workerTemplate={"type": "object"},
    ),
)

_DISAGGREGATED_SET = _object(
    "roles",
    roles={
        "type": "array",
        "minItems": 2,
        "maxItems": 10,
        "items": _object(
            "name spec",
            name={"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"},
            metadata=_object(labels=TEXTS, annotations=TEXTS),
            scaling=_object("mode", mode={"enum": ["Static", "External"]}),
            spec=_LEADER_WORKER_SET,
        ),
    },
)
_POD_GROUP = _object(
    "minMember", minMember=NUMBER, queue=TEXT, priorityClassName=TEXT, minTaskMember=NUMBER
)

CUSTOM = {
    ("disaggregatedset.x-k8s.io/v1", "DisaggregatedSet"): _DISAGGREGATED_SET,
    ("scheduling.volcano.sh/v1beta1", "PodGroup"): _POD_GROUP,
    ("cert-manager.io/v1", "Certificate"): _CERTIFICATE,
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): _LEADER_WORKER_SET,
    ("keda.sh/v1alpha1", "ScaledObject"): _SCALED_OBJECT,
    ("monitoring.coreos.com/v1", "PodMonitor"): _POD_MONITOR,
    ("monitoring.coreos.com/v1", "PrometheusRule"): _PROMETHEUS_RULE,
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): _HTTP_ROUTE,
    ("inference.networking.k8s.io/v1", "InferencePool"): _INFERENCE_POOL,
}
"""The specs. Written down from the projects' references; only fields that the chart uses."""


def _custom(api_version: str, kind: str) -> dict[str, Any]:
    return _object(
        "apiVersion kind metadata spec",
        apiVersion={"const": api_version},
        kind={"const": kind},
        metadata=_object(
            "name namespace labels", name=TEXT, namespace=TEXT, labels=TEXTS, annotations=TEXTS
        ),
        spec=CUSTOM[api_version, kind],
    )
