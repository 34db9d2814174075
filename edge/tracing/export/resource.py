"""Says which process spans come from, in OpenTelemetry's words: service.*, k8s.*, and what
`OTEL_RESOURCE_ATTRIBUTES` adds."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import unquote

from edge.installed_version import installed_version

KUBERNETES_VARIABLES = {
    "K8S_POD_NAME": "k8s.pod.name",
    "K8S_POD_UID": "k8s.pod.uid",
    "K8S_NAMESPACE_NAME": "k8s.namespace.name",
    "K8S_NODE_NAME": "k8s.node.name",
    "K8S_CONTAINER_NAME": "k8s.container.name",
}
"""Variables that the chart fills by the downward API."""


def resource_attributes(service: str, instance: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the attributes. What operators say in the variables of OpenTelemetry wins over our
    own names."""
    found = {
        "service.name": service,
        "service.instance.id": instance,
        "service.version": installed_version(),
    }
    found |= {name: environ[key] for key, name in KUBERNETES_VARIABLES.items() if environ.get(key)}
    if namespace := found.get("k8s.namespace.name"):
        found["service.namespace"] = namespace
    found |= _given(environ.get("OTEL_RESOURCE_ATTRIBUTES", ""))
    if name := environ.get("OTEL_SERVICE_NAME"):
        found["service.name"] = name
    return found


def _given(text: str) -> dict[str, str]:
    """Reads `key=value` pairs, comma separated, values percent-encoded."""
    pairs = (part.partition("=") for part in text.split(","))
    return {key.strip(): unquote(value.strip()) for key, equals, value in pairs if equals}
