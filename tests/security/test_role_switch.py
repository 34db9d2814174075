"""A node that changes its role is believed in both, or refuses before anything changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cli.switch_role import main as switch_role
from edge.security.config import Role, SecurityError, TlsIdentity
from edge.security.credentials import Credentials
from engine.node.grpc_server import NodeGrpcServer
from engine.node.services.role_switch import RoleSwitch
from engine.node.status import NodeStatus
from role_node.certificate import certificate_obstacle
from role_node.config import RoleNodeSettings
from role_node.server import serve
from tandem_pb import node_pb2
from tests.engine.frontend.test_node_status import StillEngine
from tests.security.authority import LOOPBACK, Authority, move_service, tls_config
from tests.security.test_node_services import DENIED, MISFIT, OK, outcomes, prefill_node

PREFILL, DECODE = node_pb2.NODE_ROLE_PREFILL, node_pb2.NODE_ROLE_DECODE


def both(authority: Authority) -> Path:
    return authority.service("both", Role.PREFILL, LOOPBACK, (Role.DECODE,))


@pytest.mark.parametrize(
    ("identity", "roles", "told"),
    [
        ("role", (Role.PREFILL, Role.DECODE), ""),
        ("role", (Role.PREFILL, Role.DECODE, Role.ROUTER), ""),
        ("role", (Role.DECODE,), "names tandem-decode,"),
        ("role", (Role.ROUTER, Role.PREFILL), "names tandem-prefill and tandem-router,"),
        ("role", (), "names no role,"),
        ("address", (Role.PREFILL,), "names tandem-prefill,"),
        ("address", (), ""),
    ],
)
def test_a_certificate_must_be_believed_in_both_roles(
    authority: Authority, identity: TlsIdentity, roles: tuple[Role, ...], told: str
) -> None:
    folder = authority.service("node", None, LOOPBACK, roles)
    obstacle = certificate_obstacle(Credentials(tls_config(folder, identity)))
    assert bool(obstacle) == bool(told) and told in obstacle
    if told:
        assert str(folder / "tls.crt") in obstacle
        assert "with the DNS names tandem-prefill and tandem-decode" in obstacle
    assert certificate_obstacle(Credentials()) == ""


async def test_a_node_with_a_certificate_of_one_role_does_not_start(
    authority: Authority, tmp_path: Path
) -> None:
    """It says so before it looks for its model, which is not there."""
    settings = RoleNodeSettings(
        model=str(tmp_path / "nowhere"), **files_of(authority.service("node", Role.DECODE))
    )
    with pytest.raises(SecurityError, match=r"names tandem-decode, .* give it one with"):
        await serve(settings)


def files_of(folder: Path) -> dict[str, Path]:
    names = {"cert": "tls.crt", "key": "tls.key", "ca": "ca.crt"}
    return {f"tls_{name}_file": folder / file for name, file in names.items()}


@asynccontextmanager
async def node(credentials: Credentials) -> AsyncIterator[tuple[str, RoleSwitch]]:
    """Yields the address of a prefill node, and what is asked of it."""
    switch = RoleSwitch(PREFILL, 9.0, 8100, obstacle=lambda: certificate_obstacle(credentials))
    status = NodeStatus(StillEngine(), PREFILL, 5.0, switch=switch)
    server = NodeGrpcServer("127.0.0.1", 0, credentials)
    await server.start(status)
    try:
        yield f"127.0.0.1:{server.port}", switch
    finally:
        await server.stop()


async def ask(address: str, folder: Path, identity: TlsIdentity) -> int:
    """Asks as `tandem switch-role` does, and does not wait for what becomes of it."""
    files = files_of(folder).items()
    shown = [f"--{name.replace('_', '-')}={file}" for name, file in files]
    flags = ["--node", address, "--to", "decode", "--wait-s", "0.01", "--tls-identity", identity]
    return await asyncio.to_thread(switch_role, [*flags, *shown])


@pytest.mark.parametrize("identity", ["role", "address"])
async def test_a_node_of_one_certified_role_refuses_before_it_drains(
    authority: Authority, capsys: pytest.CaptureFixture[str], identity: TlsIdentity
) -> None:
    """A certificate that was renewed in the meantime is the one that counts."""
    folder, router = both(authority), authority.service("router", Role.ROUTER)
    async with node(Credentials(tls_config(folder, identity))) as (address, switch):
        move_service(authority.service("narrow", Role.PREFILL), folder)
        assert await ask(address, router, identity) == 1
        assert "names tandem-prefill, and peers would refuse it" in capsys.readouterr().err
        assert switch.request is None
        decode = authority.service("decode", Role.DECODE)
        assert await ask(address, decode, identity) == 1
        assert "this is for tandem-router only" in capsys.readouterr().err
        assert switch.request is None
        both(authority)
        assert await ask(address, router, identity) == 1
        assert "is not a decode node after" in capsys.readouterr().err
        assert switch.request is not None and switch.request.role == DECODE


async def test_prefill_nodes_take_prompts_of_a_node_that_may_be_decode(
    authority: Authority,
) -> None:
    """A node that only prefills may not send any."""
    async with prefill_node(authority.credentials(Role.PREFILL, "role")) as address:
        changing = Credentials(tls_config(both(authority), "role"))
        assert await outcomes(address, changing) == [DENIED, MISFIT, OK]
        assert await outcomes(address, authority.credentials(Role.PREFILL, "role")) == [
            DENIED, DENIED, OK,
        ]  # fmt: skip
    async with prefill_node(changing) as address:
        decode = authority.credentials(Role.DECODE, "role")
        assert await outcomes(address, decode) == [DENIED, MISFIT, OK]
