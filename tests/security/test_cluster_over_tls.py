"""A router, a prefill node and a decode node that only talk over mutual TLS, and show a token; also
when the two have changed places."""

from __future__ import annotations

import asyncio
import re
import socket
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from cli.local_cluster.cluster import free_ports
from cli.switch_role import main as switch_role
from edge.security.config import Role
from router.config import RouterSettings
from tests.decode_node.node_processes import TIMEOUT_S, NodeProcess, node_process
from tests.router.cluster import run_router
from tests.security.authority import Authority

COMPUTED = re.compile(r"^vllm:time_to_first_token_seconds_count.* 1\.0$", re.MULTILINE)
PULLED = re.compile(r"^tandem_kv_transfer_seconds_count.* 1\.0$", re.MULTILINE)

EXPIRY = re.compile(r"^tandem_tls_certificate_expiry_timestamp_seconds [0-9.e+]+$", re.MULTILINE)


def files(authority: Authority, token: Path, *roles: Role) -> dict[str, str]:
    folder = authority.service("-".join(roles), None, ("10.9.9.9",), roles)
    return {
        "tls_cert_file": str(folder / "tls.crt"),
        "tls_key_file": str(folder / "tls.key"),
        "tls_ca_file": str(folder / "ca.crt"),
        "tls_identity": "role",
        "cluster_token_file": str(token),
    }


def flags(authority: Authority, token: Path) -> list[str]:
    settings = files(authority, token, Role.PREFILL, Role.DECODE)
    return [
        *(f"--{name.replace('_', '-')}={value}" for name, value in settings.items()),
        "--served-model-name=demo",
        "--metrics-port=0",
        "--grpc-port=0",
    ]


@pytest.mark.e2e
async def test_an_answer_comes_over_tls_alone(
    authority: Authority,
    token_file,
    demo_checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    token, [kv_port] = token_file("s" * 32), free_ports(1)
    async with (
        node_process(
            *("role_node", demo_checkpoint, "--role=prefill", f"--kv-port={kv_port}"),
            *flags(authority, token),
        ) as prefill,
        node_process(
            "role_node", demo_checkpoint, "--role=decode", *flags(authority, token)
        ) as decode,
    ):
        await asyncio.gather(prefill.wait_ready(), decode.wait_ready())
        assert decode.ready["url"].startswith("https://")
        grpc_port = decode.ready["grpc_address"].rpartition(":")[2]
        settings = RouterSettings(
            port=0,
            prefill=prefill.ready["address"],
            decode=f"{decode.ready['address']}/{grpc_port}",
            **(shown := files(authority, token, Role.ROUTER)),
        )
        async with run_router(settings) as router:
            await router.wait_usable(decode=1, prefill=1)
            await check_an_answer(router, prefill, decode)
            assert is_open(kv_port), "KV is not fetched where settings say"
            await check_others_are_refused(router.client, decode.ready["address"])
            change = [f"--{name.replace('_', '-')}={value}" for name, value in shown.items()]
            for node, role, num_decode in ((prefill, "decode", 2), (decode, "prefill", 1)):
                _, _, at = node.ready.get("grpc_address", node.ready["address"]).rpartition("/")
                asked = [f"--node={at}", f"--to={role}", *change]
                assert await asyncio.to_thread(switch_role, asked) == 0
                await router.wait_usable(decode=num_decode, prefill=2 - num_decode)
            await check_an_answer(router, decode, prefill)
            # Renewed with one role by mistake: the node that runs refuses, and goes on as it was.
            authority.service("prefill-decode", None, ("10.9.9.9",), (Role.PREFILL,))
            asked = [f"--node={at}", "--to=decode", *change]
            assert await asyncio.to_thread(switch_role, asked) == 1
            assert "names tandem-prefill, and peers would refuse it" in capsys.readouterr().err


async def check_an_answer(router: Any, prefill: NodeProcess, decode: NodeProcess) -> None:
    """Has a prompt computed by the one and answered by the other: the first of these roles."""
    body = {"model": "demo", "prompt": "Ada " * 30, "max_tokens": 8, "stream": True}
    async with router.client.post(f"{router.url}/v1/completions", json=body) as answer:
        assert answer.status == 200
        text = await answer.text()
    assert text.endswith("data: [DONE]\n\n"), text
    await scrape_until(router.client, prefill.ready["metrics_port"], COMPUTED, EXPIRY)
    await scrape_until(router.client, decode.ready["metrics_port"], PULLED, EXPIRY)


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def scrape_until(client: aiohttp.ClientSession, port: int, *wanted: re.Pattern[str]) -> None:
    """Scrapes until it is there: requests are counted a moment after their answers have ended."""
    url = f"http://127.0.0.1:{port}"
    for path in ("health", "ready"):
        async with client.get(f"{url}/{path}") as probe:
            assert probe.status == 200
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            async with client.get(f"{url}/metrics") as answer:
                text = await answer.text()
            if all(pattern.search(text) for pattern in wanted):
                return
            await asyncio.sleep(0.02)


async def check_others_are_refused(client: aiohttp.ClientSession, address: str) -> None:
    """Without TLS, and without a certificate."""
    for scheme in ("http", "https"):
        with pytest.raises(aiohttp.ClientError):
            async with client.get(f"{scheme}://{address}/v1/models", ssl=False) as answer:
                await answer.read()
