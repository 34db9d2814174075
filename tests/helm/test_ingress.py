"""An Ingress lets through what a router takes."""

from __future__ import annotations

from typing import Any

import pytest

from router.config import RouterSettings
from tests.helm.helm_engine import HelmCli, HelmSdk
from tests.helm.scenarios import overlay, values_of

SIZE = "nginx.ingress.kubernetes.io/proxy-body-size"
FILE = {"replicas": 1, "batchStore": {"size": "5Gi"}}
MIB = 1 << 20


def largest_body(router: dict[str, Any], helm: HelmSdk | HelmCli) -> str:
    shown = overlay(values_of("default"), {"router": {"ingress": {"enabled": True}}})
    (ingress,) = helm.render(overlay(shown, {"router": router})).all("Ingress")
    annotations = ingress["metadata"]["annotations"]
    assert annotations["nginx.ingress.kubernetes.io/proxy-buffering"] == "off"
    return str(annotations[SIZE])


@pytest.mark.parametrize(
    ("router", "size"),
    [
        ({}, "8m"),
        ({"settings": {"maxBodyBytes": 20_000_000}}, "20m"),
        (FILE, "513m"),
        ({**FILE, "settings": {"batchMaxFileMib": 2048}}, "2049m"),
        ({**FILE, "ingress": {"annotations": {SIZE: "1g"}}}, "1g"),
    ],
)
def test_bodies_that_a_router_takes_are_let_through(router: dict[str, Any], size: str) -> None:
    assert largest_body(router, HelmSdk.shared()) == largest_body(router, HelmCli()) == size


def test_the_chart_knows_the_defaults() -> None:
    defaults = RouterSettings(_cli_parse_args=[])
    assert (defaults.max_body_bytes, defaults.batch_max_file_mib) == (8 * MIB, 512)
