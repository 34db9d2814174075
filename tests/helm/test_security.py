"""Tests how services authenticate each other: certificates, token, or neither, and then it
is said.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID

from edge.security.config import Role, roles_of
from tests.helm.helm_engine import HelmCli, HelmSdk, Manifest, Rendered
from tests.helm.scenarios import (
    SCENARIOS,
    overlay,
    pods,
    rendered,
    serving_pod,
    templates_of,
    values_of,
    workload,
)
from tests.helm.service_settings import containers, settings_of

ROLES = ("router", "prefill", "decode")
MODES = {"tls-certmanager": "certManager", "tls-existing": "existing", "tls-generated": "generated"}
each_mode = pytest.mark.parametrize("name", MODES)


def secret_of(found: Rendered, service: str, mount_path: str) -> str:
    """Returns the name of the secret that a service has at a folder. Raises `StopIteration`."""
    pod = serving_pod(found, service)["spec"]
    (mount,) = [
        m
        for c in pod["containers"]
        for m in c.get("volumeMounts", ())
        if m["mountPath"] == mount_path
    ]
    # A mount of one file (subPath) would never change.
    assert mount["readOnly"] is True and "subPath" not in mount
    volume = next(v for v in pod["volumes"] if v["name"] == mount["name"])
    return str(volume["secret"]["secretName"])


def data_of(found: Rendered, name: str) -> dict[str, bytes]:
    (secret,) = [o for o in found.all("Secret") if o["metadata"]["name"] == name]
    return {key: base64.b64decode(value) for key, value in secret["data"].items()}


@pytest.mark.parametrize("name", SCENARIOS)
def test_each_service_is_told_how_to_be_sure_of_others_and_all_the_same(name: str) -> None:
    """Given nothing, a service refuses to serve beyond its host."""
    for service, settings in settings_of(name).items():
        has_tls = "mode" in values_of(name).get("tls", {})
        assert (settings["tls_cert_file"] is not None) == has_tls
        assert settings["tls_identity"] == ("role" if has_tls else "address")
        has_token = settings["cluster_token_file"] is not None
        assert settings["allow_plaintext"] == (not has_tls and not has_token)
        if has_token:
            folder = str(Path(settings["cluster_token_file"]).parent)
            secrets = {secret_of(rendered(name), one, folder) for one in settings_of(name)}
            assert len(secrets) == 1, service


def test_the_token_is_made_unless_it_is_there_or_not_wanted() -> None:
    assert rendered("default").all("Secret", "cluster-token")
    values: dict[str, Any] = {"auth": {"clusterToken": {"existingSecret": "mine"}}}
    found = HelmSdk.shared().render(overlay(values_of("default"), values))
    assert not found.all("Secret")
    assert secret_of(found, "decode", "/etc/tandem/cluster-token") == "mine"
    assert not rendered("tls-existing").all("Secret")


def test_a_token_that_is_being_turned_on_may_be_missing() -> None:
    """It may be missing for one upgrade: every service is told so, and none without being
    asked to.
    """
    values: dict[str, Any] = {"auth": {"clusterToken": {"acceptMissing": True}}}
    found = HelmSdk.shared().render(overlay(values_of("default"), values))
    for service in ("router", "prefill", "decode"):
        args = [arg for c in serving_pod(found, service)["spec"]["containers"] for arg in c["args"]]
        assert "--accept-missing-token" in args
    for settings in settings_of("default").values():
        assert settings["accept_missing_token"] is False


def test_tls_that_is_being_turned_on_may_be_missing() -> None:
    """It may be missing for one upgrade: every service is told so, none without being asked to,
    and the operator is reminded.
    """
    values: dict[str, Any] = {"tls": {"mode": "generated", "acceptMissing": True}}
    found = HelmSdk.shared().render(overlay(values_of("default"), values))
    for service in ("router", "prefill", "decode"):
        args = [arg for c in serving_pod(found, service)["spec"]["containers"] for arg in c["args"]]
        assert {"--accept-missing-tls", "--tls-identity=role"} <= set(args)
    assert "upgrade with it set to false" in found.notes
    for name in ("default", "tls-generated"):
        for settings in settings_of(name).values():
            assert settings["accept_missing_tls"] is False


@each_mode
def test_every_container_has_its_own_certificate(name: str) -> None:
    found = rendered(name)
    names = {role: secret_of(found, role, "/etc/tandem/tls") for role in ROLES}
    assert len(set(names.values())) == 3
    if MODES[name] == "certManager":
        made = {one["spec"]["secretName"] for one in found.all("Certificate")}
        assert set(names.values()) == made
    elif MODES[name] == "existing":
        assert names["router"] == "router-identity"
    for settings in settings_of(name).values():
        files = {settings[f"tls_{one}_file"] for one in ("cert", "key", "ca")}
        assert files == {f"/etc/tandem/tls/{one}" for one in ("tls.crt", "tls.key", "ca.crt")}


def test_ranks_on_other_hosts_have_the_files_at_the_same_place() -> None:
    values = overlay(values_of("multi-host"), {"tls": {"mode": "generated"}})
    group = templates_of(workload(HelmSdk.shared().render(values), "decode"))
    for part in group.values():
        mounts = {m["mountPath"] for m in part["spec"]["containers"][0]["volumeMounts"]}
        assert mounts >= {"/etc/tandem/tls", "/etc/tandem/cluster-token"}


@each_mode
def test_the_kubelet_asks_over_plain_http(name: str) -> None:
    """It cannot speak TLS with gRPC, nor show a certificate."""
    for service in ("prefill", "decode"):
        container = containers(rendered(name))[service]
        paths = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness")]
        assert paths == [{"path": "/ready", "port": "metrics"}] * 2
        alive = container["livenessProbe"]["httpGet"]
        assert alive == {"path": "/health", "port": "metrics"}
        ports = {p["name"]: p["containerPort"] for p in container["ports"]}
        assert settings_of(name)[service]["metrics_port"] == ports["metrics"]


def test_without_tls_the_kubelet_asks_the_health_service() -> None:
    for service in ("prefill", "decode"):
        container = containers(rendered("default"))[service]
        for kind in ("readiness", "liveness"):
            assert container[f"{kind}Probe"]["grpc"] == {"port": 8200}
        assert container["startupProbe"]["httpGet"] == {"path": "/ready", "port": "metrics"}


def test_routers_that_speak_https_are_asked_on_their_plain_port() -> None:
    for name, folder in {"tls-certmanager": "tls", "tls-existing": "https"}.items():
        container = containers(rendered(name))["router"]
        for kind in ("startup", "readiness", "liveness"):
            assert container[f"{kind}Probe"]["httpGet"]["port"] == "admin"
        settings = settings_of(name)["router"]
        assert settings["https_cert_file"] == f"/etc/tandem/{folder}/tls.crt"
        assert settings["https_key_file"] == f"/etc/tandem/{folder}/tls.key"
        assert secret_of(rendered(name), "router", f"/etc/tandem/{folder}")
    (port,) = rendered("tls-existing").one("Service", "router")["spec"]["ports"]
    assert port["appProtocol"] == "https"


def test_the_releases_own_test_checks_the_certificate_of_the_chart() -> None:
    (pod,) = rendered("tls-certmanager").all("Pod")
    variables = {v["name"]: v.get("value") for v in pod["spec"]["containers"][0]["env"]}
    host = str(variables["URL"]).removeprefix("https://").removesuffix(":443")
    names = rendered("tls-certmanager").one("Certificate", "router")["spec"]["dnsNames"]
    assert host in names and variables["CA_FILE"] == "/etc/tandem/ca/ca.crt"
    # The key stays with the router.
    assert pod["spec"]["volumes"][0]["secret"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}]
    (pod,) = rendered("tls-existing").all("Pod")
    assert "CA_FILE" not in str(pod["spec"]["containers"][0]["env"])


def test_certificates_of_an_issuer_name_the_role_and_the_services() -> None:
    for role in ROLES:
        spec = rendered("tls-certmanager").one("Certificate", role)["spec"]
        assert spec["dnsNames"][0] == Role(role).certificate_name
        host = f"tandem-{role}.default.svc.cluster.local"
        assert host in spec["dnsNames"] and (f"*.{host}" in spec["dnsNames"]) == (role != "router")
        assert {"server auth", "client auth"} <= set(spec["usages"])
        assert spec["issuerRef"]["name"] == "tandem-ca"
        assert (spec["duration"], spec["renewBefore"]) == ("720h", "240h")


@pytest.mark.parametrize("mode", ["tls-certmanager", "tls-generated"])
def test_certificates_of_nodes_that_change_their_role_name_both(mode: str) -> None:
    found = HelmSdk.shared().render(overlay(values_of(mode), {"node": {"replicas": 1}}))
    if mode == "tls-certmanager":
        names = found.one("Certificate", "node")["spec"]["dnsNames"]
    else:
        data = data_of(found, secret_of(found, "node", "/etc/tandem/tls"))
        certificate = x509.load_pem_x509_certificate(data["tls.crt"])
        told = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        names = told.get_values_for_type(x509.DNSName)
    assert roles_of(names) == {Role.PREFILL, Role.DECODE}
    assert "*.tandem-node.default.svc.cluster.local" in names


@pytest.mark.parametrize("engine", ["helm-4", "helm-3"])
def test_made_certificates_are_good_for_their_role(engine: str) -> None:
    helm = HelmSdk.shared() if engine == "helm-4" else HelmCli()
    found = helm.render(values_of("tls-generated"))
    authority = x509.load_pem_x509_certificate(data_of(found, "tandem-ca")["tls.crt"])
    for role in ROLES:
        data = data_of(found, f"tandem-{role}-tls")
        assert x509.load_pem_x509_certificate(data["ca.crt"]) == authority
        certificate = x509.load_pem_x509_certificate(data["tls.crt"])
        certificate.verify_directly_issued_by(authority)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        dns = names.get_values_for_type(x509.DNSName)
        assert [one for one in Role if one.certificate_name in dns] == [Role(role)]
        usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH} <= set(usage)
        key = load_pem_private_key(data["tls.key"], None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        assert key.public_key() == certificate.public_key()
        lifetime = certificate.not_valid_after_utc - certificate.not_valid_before_utc
        assert lifetime.days == 365
        assert authority.not_valid_after_utc - certificate.not_valid_after_utc > 50 * lifetime


def mounted_secrets(pod: Manifest) -> set[str]:
    volumes = pod["spec"].get("volumes", ())
    return {volume["secret"]["secretName"] for volume in volumes if "secret" in volume}


def test_no_pod_has_the_key_of_the_authority() -> None:
    for pod in pods(rendered("tls-generated")).values():
        assert "tandem-ca" not in mounted_secrets(pod)
        assert len({name for name in mounted_secrets(pod) if name.endswith("-tls")}) <= 1


def test_operators_are_told_what_is_open() -> None:
    clear = "in the clear"
    assert clear in rendered("default").notes and clear not in rendered("tls-generated").notes
    assert "services trust whoever reaches them" in rendered("gateway").notes
    assert "backend speaks HTTPS" not in rendered("tls-existing").notes
    assert "curl --insecure https://127.0.0.1:8000" in rendered("tls-existing").notes
