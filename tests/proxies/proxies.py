"""Runs nginx, haproxy and caddy from Debian, and Envoy, in front of a router.

`make proxies` unpacks them below the virtual environment; else they are the machine's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import yaml

from cli.local_cluster.cluster import free_ports
from host.termination import bound

ROOT = Path(__file__).resolve().parents[2]
NAMES = "nginx", "haproxy", "caddy"
"""Those whose limits are about silence."""
ENVOY = "envoy"
"""Its limit is for a whole answer."""
_LANGUAGES = {"nginx": "nginx", "haproxy": "haproxy", "caddy": "caddyfile", "envoy": "yaml"}
_START_S = 30.0

DEFAULTS = {
    "nginx": "server {{ listen {port}; {patience}location / {{ proxy_pass {router}; }} }}",
    "haproxy": """
defaults
    mode http
    timeout connect 5000
    timeout client  {silence_ms}
    timeout server  {silence_ms}
frontend llm
    bind 127.0.0.1:{port}
    default_backend tandem
backend tandem
    server router {address}
""",
    "caddy": ":{port} {{\n    reverse_proxy {address}\n}}\n",
    "envoy": '- match: {{prefix: "/"}}\n  route: {{cluster: tandem{whole}}}\n',
}
"""Holds the least that makes each a proxy. haproxy's time limits are those of Debian's file; the
others have theirs built in. Of Envoy it is the routes."""

PATIENCE_S = {"nginx": 60.0, "haproxy": 50.0}
"""Seconds of silence that each bears by default; caddy bears any."""
WHOLE_ANSWER_S = 15.0
"""Envoy's limit for a whole answer, whatever comes meanwhile."""


def find_proxy(name: str) -> str | None:
    unpacked = Path(sys.prefix) / "proxies" / name
    machine_path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])
    return str(unpacked) if unpacked.exists() else shutil.which(name, path=machine_path)


def default_config(name: str, port: int, router: str, scale: float = 1.0) -> str:
    """Returns a configuration with the proxy's own limits, shortened by `scale`."""
    own_ms = {name: round(1000 * scale * patience_s) for name, patience_s in PATIENCE_S.items()}
    return DEFAULTS[name].format(
        port=port,
        router=router,
        address=router.removeprefix("http://"),
        patience=f"proxy_read_timeout {own_ms['nginx']}ms; " if scale < 1 else "",
        silence_ms=own_ms["haproxy"],
        whole=f", timeout: {scale * WHOLE_ANSWER_S}s" if scale < 1 else "",
    )


def documented_config(name: str, port: int, router: str) -> str:
    """Returns what docs/proxies.md advises, for these addresses."""
    page = (ROOT / "docs/proxies.md").read_text(encoding="utf-8")
    [block] = re.findall(rf"```{_LANGUAGES[name]}\n(.*?)```", page, re.DOTALL)
    if name == ENVOY:
        return block
    block, num_router = re.subn(r"127\.0\.0\.1:8000", router.removeprefix("http://"), block)
    block, num_port = re.subn(r"(listen |bind :|^:)80\b", rf"\g<1>{port}", block, flags=re.M)
    assert (num_router, num_port) == (1, 1), "the page has another form"
    return block


@contextlib.asynccontextmanager
async def running_proxy(
    name: str, folder: Path, router: str, *, scale: float = 1.0, is_documented: bool = False
) -> AsyncIterator[str]:
    """Gives the URL of a proxy in front of `router`."""
    binary = find_proxy(name)
    assert binary is not None, f"there is no {name}"
    [port] = free_ports(1)
    if is_documented:
        config = documented_config(name, port, router)
    else:
        config = default_config(name, port, router, scale)
    folder = folder / f"{name}-{port}"
    folder.mkdir()
    process = await asyncio.create_subprocess_exec(
        *bound([binary, *_arguments(name, config, folder, port, router)]),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=(folder / "errors").open("wb"),
        env={**os.environ, "XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)},
    )
    try:
        await _listens(process, port, folder / "errors")
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _arguments(name: str, config: str, folder: Path, port: int, router: str) -> list[str]:
    """Writes the configuration; returns how the proxy is started in the foreground."""
    file = folder / "config"
    if name == "nginx":
        kinds = "client_body", "proxy", "fastcgi", "uwsgi", "scgi"
        temporary = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
        config = (
            f"daemon off; master_process off; pid {folder}/pid; error_log stderr;\n"
            f"events {{}}\nhttp {{ access_log off; {temporary}\n{config}\n}}\n"
        )
    if name == "caddy":
        config = "{\n    admin off\n    auto_https off\n}\n" + config
    if name == ENVOY:
        config = _envoy(yaml.safe_load(config), port, router)
    file.write_text(config, encoding="utf-8")
    return {
        "envoy": ["--config-yaml", config, "--concurrency", "1", "--disable-hot-restart"],
        "nginx": ["-p", str(folder), "-e", "stderr", "-c", str(file)],
        "haproxy": ["-db", "-f", str(file)],
        "caddy": ["run", "--adapter", "caddyfile", "--config", str(file)],
    }[name]


def _envoy(routes: list[dict[str, Any]], port: int, router: str) -> str:
    """Returns a whole configuration with these routes."""
    host, router_port = router.removeprefix("http://").split(":")

    def kind(name: str) -> dict[str, str]:
        return {"@type": f"type.googleapis.com/envoy.extensions.filters.{name}"}

    def address(port: int) -> dict[str, Any]:
        return {"address": {"socket_address": {"address": host, "port_value": port}}}

    manager = {
        **kind("network.http_connection_manager.v3.HttpConnectionManager"),
        "stat_prefix": "llm",
        "route_config": {"virtual_hosts": [{"name": "llm", "domains": ["*"], "routes": routes}]},
        "http_filters": [
            {"name": "envoy.filters.http.router", "typed_config": kind("http.router.v3.Router")}
        ],
    }
    chain = {
        "filters": [
            {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}
        ]
    }
    endpoints = [{"lb_endpoints": [{"endpoint": address(int(router_port))}]}]
    cluster = {
        "name": "tandem",
        "type": "STATIC",
        "load_assignment": {"cluster_name": "tandem", "endpoints": endpoints},
    }
    resources = {"listeners": [{**address(port), "filter_chains": [chain]}], "clusters": [cluster]}
    return json.dumps({"static_resources": resources})


async def _listens(process: asyncio.subprocess.Process, port: int, errors: Path) -> None:
    async with asyncio.timeout(_START_S):
        while True:
            assert process.returncode is None, errors.read_text()
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.02)
                continue
            writer.close()
            return
