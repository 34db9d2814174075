"""The chart on clusters whose pods have IPv4 or IPv6 addresses."""

from __future__ import annotations

from functools import cache

import msgspec
import pytest

from router.kubernetes.endpoint_slices import EndpointSlice, EndpointSlices
from router.nodes.address import NodeRole, parse_node_entry
from tests.helm.helm_engine import HelmSdk, Rendered
from tests.helm.scenarios import overlay, values_of
from tests.helm.service_settings import check, containers

POD_IPS = {"IPv4": "10.1.2.3", "IPv6": "fd00::1:2"}
EVERY = {"IPv4": "0.0.0.0", "IPv6": "::"}
each_family = pytest.mark.parametrize("family", POD_IPS)


@cache
def rendered(family: str) -> Rendered:
    return HelmSdk.shared().render(overlay(values_of("multi-host"), {"ipFamily": family}))


@each_family
def test_services_take_addresses_of_the_family(family: str) -> None:
    address = POD_IPS[family]
    for service, container in containers(rendered(family)).items():
        settings = check(service, container, address)
        if service == "router":
            # kubectl port-forward comes by the loopback.
            assert settings["host"] == settings["admin_host"] == EVERY[family]
        else:
            assert settings["host"] == address
        if service == "decode":
            host, _, port = settings["ray_address"].rpartition(":")
            assert (host, port) == (f"[{address}]" if ":" in address else address, "6379")


@each_family
@pytest.mark.parametrize("policy", ["SingleStack", "PreferDualStack", "RequireDualStack"])
def test_each_node_has_one_address_in_a_service(family: str, policy: str) -> None:
    """Nodes listen on one. With both in its slices, a pod would be two nodes. Clients of the router
    may come by both."""
    over = {"ipFamily": family, "router": {"service": {"ipFamilyPolicy": policy}}}
    found = HelmSdk.shared().render(overlay(values_of("multi-host"), over))
    router = found.one("Service", "router")
    assert router["spec"]["ipFamilyPolicy"] == policy
    for service in found.all("Service"):
        assert service["spec"]["ipFamilies"] == [family]
        assert service is router or service["spec"]["ipFamilyPolicy"] == "SingleStack"
    settings = check("router", containers(found)["router"], POD_IPS[family])
    every = EVERY[family] if policy == "SingleStack" else "::"
    assert settings["host"] == settings["admin_host"] == every


@each_family
def test_the_router_dials_what_endpoint_slices_say(family: str) -> None:
    written = check("router", containers(rendered(family))["router"])["decode"]
    said = {
        "metadata": {"name": "tandem-decode-abc"},
        "addressType": family,
        "endpoints": [{"addresses": [POD_IPS[family]], "conditions": {"ready": True}}],
    }
    slices = EndpointSlices()
    slices.put(msgspec.convert(said, EndpointSlice))
    (address,) = slices.endpoints().present
    dialled = {"IPv4": "10.1.2.3:8100", "IPv6": "[fd00::1:2]:8100"}
    assert parse_node_entry(NodeRole.DECODE, written).address(address).target == dialled[family]
