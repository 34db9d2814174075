"""The token is turned on in a running cluster: no call between old and new services fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from prometheus_client import CollectorRegistry

from decode_node.http.callers import Caller, CallerCheck, CallerKeys
from edge.http.errors import Unauthorized
from edge.http.request_head import RequestHead
from edge.security.cluster_token import TOKEN_HEADER
from edge.security.config import Role, SecurityConfig, SecurityError
from edge.security.credentials import CallerRefused, Credentials
from edge.security.metrics import CredentialsCollector
from tests.security.test_node_services import outcomes, prefill_node

TOKEN = "t" * 32
TokenFile = Callable[[str], Path]


@pytest.fixture
def stages(token_file: TokenFile) -> list[Credentials]:
    """Without a token, with one that may be missing, and for good."""
    path = str(token_file(TOKEN))
    return [
        Credentials(),
        Credentials(SecurityConfig(cluster_token_file=path, accept_missing_token=True)),
        Credentials(SecurityConfig(cluster_token_file=path)),
    ]


@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 2)])
async def test_neighbours_of_a_roll_serve_each_other(
    stages: list[Credentials], first: int, second: int
) -> None:
    """Both directions, and those that are equal: a roll passes through all of them."""
    both = (stages[first], stages[second])
    for server in both:
        async with prefill_node(server) as address:
            for caller in both:
                found = await outcomes(address, caller)
                assert grpc.StatusCode.UNAUTHENTICATED not in found, (first, second)
                assert found[0] is grpc.StatusCode.OK


async def test_all_at_once_is_an_outage(stages: list[Credentials]) -> None:
    async with prefill_node(stages[2]) as address:
        assert (await outcomes(address, stages[0]))[0] is grpc.StatusCode.UNAUTHENTICATED


def test_a_wrong_token_is_refused_in_between(stages: list[Credentials]) -> None:
    stages[1].check_caller({Role.ROUTER}, None, {})
    stages[1].check_caller({Role.ROUTER}, None, {TOKEN_HEADER: TOKEN})
    for wrong in ("", "another"):
        with pytest.raises(CallerRefused):
            stages[1].check_caller({Role.ROUTER}, None, {TOKEN_HEADER: wrong})
    registry = CollectorRegistry()
    registry.register(CredentialsCollector(stages[1]))
    assert registry.get_sample_value("tandem_missing_tokens_total") == 1
    registry = CollectorRegistry()
    registry.register(CredentialsCollector(stages[2]))
    assert registry.get_sample_value("tandem_missing_tokens_total") is None


def test_api_clients_need_their_key_in_between(stages: list[Credentials]) -> None:
    """They show no token either, and must not be taken for a router because of that."""
    check = CallerCheck(CallerKeys(["key"]), stages[1])
    with pytest.raises(Unauthorized):
        check.admit(RequestHead(path="/v1/completions", headers={}))
    key = {"authorization": "Bearer key"}
    assert check.admit(RequestHead(path="/v1/completions", headers=key)) is Caller.TRUSTED, (
        "as without any token"
    )
    assert (
        check.admit(RequestHead(path="/v1/completions", headers={TOKEN_HEADER: TOKEN}))
        is Caller.TRUSTED
    )


def test_without_a_token_the_setting_means_nothing() -> None:
    with pytest.raises(SecurityError, match="--cluster-token-file"):
        Credentials(SecurityConfig(accept_missing_token=True))
