"""Services are told about each other by settings, and what they refuse."""

from __future__ import annotations

from base64 import b64encode
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from edge.address import is_loopback, join_address, split_address
from edge.security.certificate import dns_names, expires_at
from edge.security.cluster_token import TOKEN_HEADER
from edge.security.config import PlaintextRefused, Role, SecurityConfig, SecurityError
from edge.security.credentials import CallerRefused, Credentials
from edge.security.metrics import CredentialsCollector
from router.config import RouterSettings
from router.main import tell_who_operates
from tests.security.authority import Authority, move_service, tls_config

SECRET, OTHER = "a" * 32, "b" * 32


@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.7", "node-1.example", "::1", "fe80::1"])
def test_an_address_is_read_as_it_was_written(host):
    assert split_address(join_address(host, 8100)) == (host, 8100)


@pytest.mark.parametrize(
    "text", ["", "host", ":80", "host:", "host:x", "::1:80", "[]:80", "h:-1", "h:65536"]
)
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ValueError, match="host:port"):
        split_address(text)


def test_loopback_is_nobody_else():
    assert all(map(is_loopback, ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost"]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "", "10.0.0.1", "localhost.example", "node"]))


def test_plaintext_beyond_this_host_needs_to_be_wanted():
    nothing = SecurityConfig()
    nothing.check_plaintext("listening", "127.0.0.1")
    with pytest.raises(PlaintextRefused) as refused:
        nothing.check_plaintext("listening", "0.0.0.0")
    for cure in ("--tls-cert-file", "--cluster-token-file", "--allow-plaintext"):
        assert cure in str(refused.value)
    SecurityConfig(allow_plaintext=True).check_plaintext("listening", "0.0.0.0")
    SecurityConfig(cluster_token_file="x").check_plaintext("listening", "0.0.0.0")


async def test_a_channel_beyond_this_host_is_not_opened():
    with pytest.raises(PlaintextRefused):
        Credentials().channel("10.1.2.3:5000", Role.PREFILL, [])


def test_tls_needs_all_three_files():
    with pytest.raises(SecurityError, match="--tls-ca-file not given"):
        Credentials(SecurityConfig(tls_cert_file="a", tls_key_file="b"))


def test_files_that_cannot_be_used_are_named(tmp_path, authority: Authority):
    folder = authority.service("ours")
    with pytest.raises(SecurityError, match=r"tls\.crt"):
        Credentials(tls_config(tmp_path / "nowhere"))
    other = authority.service("other")
    (other / "tls.key").replace(folder / "tls.key")
    with pytest.raises(SecurityError, match=r"tls\.key"):
        Credentials(tls_config(folder))
    folder = authority.service("ours")
    (folder / "ca.crt").write_text("nothing")
    with pytest.raises(SecurityError, match=r"ca\.crt"):
        Credentials(tls_config(folder))


def test_renewed_files_that_do_not_fit_leave_the_former_ones_in_use(authority, caplog):
    folder, new = authority.service("ours"), authority.service("new")
    credentials = Credentials(tls_config(folder))
    before = credentials.client_context("a:1")
    (new / "tls.crt").replace(folder / "tls.crt")
    assert credentials.client_context("a:1") is before
    assert credentials.version("a:1") == (0, False)
    assert "former" in caplog.text
    (new / "tls.key").replace(folder / "tls.key")
    assert credentials.client_context("a:1") is not before
    assert credentials.version("a:1") == (1, False)
    assert credentials.client_context("a:1") is credentials.client_context("a:1")


def judge(credentials: Credentials, names=(), token="") -> None:
    credentials.check_caller({Role.ROUTER}, names, {TOKEN_HEADER: token})


def test_a_token_is_demanded_and_renewed_without_a_gap(token_file):
    config = SecurityConfig(cluster_token_file=str(token_file(SECRET)))
    credentials = Credentials(config)
    assert credentials.metadata() == ((TOKEN_HEADER, SECRET),)
    judge(credentials, token=SECRET)
    for wrong in ("", OTHER, SECRET + "a", SECRET[:-1], "ü"):
        with pytest.raises(CallerRefused, match="cluster token"):
            judge(credentials, token=wrong)
    token_file(SECRET, OTHER)
    judge(credentials, token=SECRET)
    judge(credentials, token=OTHER)
    token_file(OTHER)
    assert credentials.metadata() == ((TOKEN_HEADER, OTHER),)
    with pytest.raises(CallerRefused):
        judge(credentials, token=SECRET)


@pytest.mark.parametrize("secrets", [(), ("short",), (SECRET, "short"), ("ü" * 20,), (" \n ",)])
def test_a_token_that_could_be_guessed_is_refused(token_file, secrets):
    with pytest.raises(SecurityError, match="token"):
        Credentials(SecurityConfig(cluster_token_file=str(token_file(*secrets))))


def test_a_role_must_be_the_right_one(authority: Authority):
    by_address = authority.credentials(Role.DECODE)
    judge(by_address, ["tandem-router", "127.0.0.1"])
    judge(by_address, ["node-1"])
    by_role = authority.credentials(Role.DECODE, "role")
    judge(by_role, ["tandem-router"])
    for credentials, names in (
        (by_address, ["tandem-prefill"]),
        (by_role, ["tandem-prefill"]),
        (by_role, ["node-1"]),
        (by_role, ["tandem-router.evil"]),
        (by_role, []),
    ):
        with pytest.raises(CallerRefused, match="tandem-router only"):
            judge(credentials, names)


def test_tls_and_token_are_both_demanded(authority: Authority, token_file):
    folder = authority.service("ours")
    config = tls_config(folder)
    both = Credentials(
        SecurityConfig(
            tls_cert_file=config.tls_cert_file,
            tls_key_file=config.tls_key_file,
            tls_ca_file=config.tls_ca_file,
            cluster_token_file=str(token_file(SECRET)),
        )
    )
    judge(both, ["tandem-router"], SECRET)
    with pytest.raises(CallerRefused, match="only"):
        judge(both, ["tandem-prefill"], SECRET)
    with pytest.raises(CallerRefused, match="token"):
        judge(both, ["tandem-router"])


def test_certificates_of_another_service_can_take_over(authority: Authority, foreign: Authority):
    folder = authority.service("ours")
    credentials = Credentials(tls_config(folder))
    move_service(foreign.service("theirs"), folder)
    assert credentials.version("a:1") == (1, False)


@pytest.mark.parametrize("until", [datetime(2049, 12, 31, 23, 59, 59), datetime(2050, 1, 1)])
def test_the_end_of_a_certificate_is_known(until):
    """On both sides of the year in which its form changes."""
    authority = trustme.CA(key_type=trustme.KeyType.ECDSA)
    issued = authority.issue_cert("node", not_after=until, key_type=trustme.KeyType.ECDSA)
    pem = b"a comment\n" + issued.cert_chain_pems[0].bytes() + authority.cert_pem.bytes()
    assert expires_at(pem) == until.replace(tzinfo=UTC).timestamp()


@pytest.mark.parametrize("names", [["127.0.0.1", "*.node.example", "tandem-decode"], ["::1"]])
def test_the_names_of_our_certificate_are_known(names: list[str]):
    """It names addresses, too, which are no names."""
    authority = trustme.CA(key_type=trustme.KeyType.ECDSA)
    issued = authority.issue_cert(*names, key_type=trustme.KeyType.ECDSA)
    assert dns_names(issued.cert_chain_pems[0].bytes()) == names[1:]
    assert dns_names(authority.cert_pem.bytes()) == []
    assert Credentials().own_names() is None


@given(st.binary(max_size=40))
def test_what_is_no_certificate_is_refused(content):
    pem = f"-----BEGIN CERTIFICATE-----\n{b64encode(content).decode()}\n-----END CERTIFICATE-----\n"
    for text in (pem.encode(), content):
        with pytest.raises(SecurityError):
            expires_at(text)
        with suppress(SecurityError):
            assert dns_names(text) == []


def test_the_end_of_the_certificate_in_use_is_a_metric(authority: Authority):
    def metric() -> float | None:
        registry = CollectorRegistry()
        registry.register(CredentialsCollector(credentials))
        return registry.get_sample_value("tandem_tls_certificate_expiry_timestamp_seconds")

    folder = authority.service("ours")
    credentials = Credentials(tls_config(folder))
    assert metric() == expires_at((folder / "tls.crt").read_bytes())
    credentials = Credentials()
    assert metric() is None


@pytest.mark.parametrize(
    ("made", "identity", "words"),
    [
        ({"role": Role.PREFILL}, "address", ""),
        ({"role": Role.PREFILL}, "role", ""),
        ({"role": Role.ROUTER, "other_roles": (Role.PREFILL,)}, "role", ""),
        ({}, "address", ""),
        ({}, "role", "and not for tandem-prefill"),
        ({"role": Role.DECODE}, "address", "tandem-decode, and not for tandem-prefill"),
        ({"role": Role.PREFILL, "days": (-9, -2)}, "address", "has expired on 20"),
        ({"role": Role.PREFILL, "days": (2, 9)}, "address", "is not valid before 20"),
    ],
    ids=["good", "by role", "two roles", "address alone", "no role", "other", "expired", "early"],
)
def test_a_service_knows_why_others_refuse_it(made, identity, words, tmp_path, caplog):
    folder = Authority(tmp_path).service("it", **made)
    fault = Credentials(tls_config(folder, identity)).watched_fault(Role.PREFILL)
    assert fault() == "" if not words else words in fault()
    assert len(caplog.records) == bool(words)
    assert Credentials().watched_fault(Role.PREFILL)() == ""


@pytest.mark.parametrize(
    ("settings", "warns"),
    [
        ({"host": "0.0.0.0"}, True),
        ({"host": "127.0.0.1"}, False),
        ({"host": "0.0.0.0", "admin_port": 0}, False),
        ({"host": "0.0.0.0", "api_keys": "secret"}, False),
        ({"host": "::", "api_key_file": Path("keys.toml")}, False),
    ],
)
def test_a_router_that_everyone_may_operate_says_so(
    settings: dict[str, Any], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    tell_who_operates(RouterSettings(**settings))
    said = "everyone who reaches" in caplog.text and "--admin-port" in caplog.text
    assert said == warns
