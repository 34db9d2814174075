"""The downward API: fields of a pod that its containers may read."""

from __future__ import annotations

import re

from tests.kubernetes_stand_in.resources import Object


def read_field(pod: Object, path: str) -> str:
    """Reads `metadata.name`, `metadata.labels['app']`, `status.podIP`, `spec.nodeName` and the
    like.
    """
    if found := re.fullmatch(r"metadata\.(labels|annotations)\['([^']+)'\]", path):
        return str(pod["metadata"].get(found[1], {}).get(found[2], ""))
    if path in ("metadata.labels", "metadata.annotations"):
        fields = pod["metadata"].get(path.partition(".")[2], {})
        return "\n".join(f'{k}="{v}"' for k, v in sorted(fields.items()))
    if path == "status.podIPs":
        path = "status.podIP"
    value: object = pod
    for part in path.split("."):
        value = value.get(part, "") if isinstance(value, dict) else ""
    return str(value)
