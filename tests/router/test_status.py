"""The status page and the admin port."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from router.config import RouterSettings
from router.edge.api_keys import ApiKeys
from router.edge.key_file import digest_of
from router.nodes.address import NodeRole
from router.nodes.registry import NodeRegistry
from router.observe.decision_log import DecisionLog
from router.observe.metrics import RouterMetrics
from router.observe.status_page import RouterView, render_status
from router.observe.traffic_meter import TrafficMeter
from router.placement.policy import Placement
from tests.router.cluster import TIMEOUT_S, Cluster
from tests.router.factories import Fleet, address, report, request
from tests.router.processes import ready_line, router_process
from tests.router.token_server import TokenHandler

BODY = {"model": "demo", "prompt": "hello", "seed": 7, "max_tokens": 3, "stream": True}


def view(**parts: Any) -> RouterView:
    bare: dict[str, Any] = {
        "state": "ready", "registry": NodeRegistry(), "decisions": DecisionLog(), "rates": {},
        "totals": {"requests": 1.0}, "tenants": [],
    }  # fmt: skip
    return RouterView(**(bare | parts))


class Page(HTMLParser):
    """Cells by table, and every tag that a page of ours has no use for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.titles: list[str] = []
        self.rows: list[list[str]] = []
        self.strange: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert not self._open, self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "img", "iframe", "link", "a", "form", "b"):
            self.strange.append(tag)
        if any(name.startswith("on") for name, _ in attrs):
            self.strange.append(f"{tag} {attrs}")
        if tag == "tr":
            self.rows.append([])
        if tag != "meta":
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in ("td", "th"):
            self.rows[-1].append(data)
        if self._open and self._open[-1] == "h2":
            self.titles.append(data)


async def test_the_page_shows_nodes_traffic_tenants_and_decisions(cluster: Cluster) -> None:
    prefill, decode = await cluster.prefill(), await cluster.decode(handler=TokenHandler())
    router = await cluster.router(prefill, decode)
    await router.text(BODY, x_request_id="request-7")
    async with router.client.get(router.url + "/status") as response:
        assert response.status == 200
        assert response.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in response.headers["content-security-policy"]
        page = Page(await response.text())
    assert page.titles == [
        "Traffic", "Prefill nodes", "Decode nodes", "Tenants", "Recent placements",
    ]  # fmt: skip
    assert not page.strange
    cells = [cell for row in page.rows for cell in row]
    assert "request-7" in cells
    assert any(prefill.target in cell for cell in cells)
    assert any(decode.target in cell for cell in cells)
    assert ["default", "1", "200: 1"] in page.rows


def test_what_nodes_say_of_themselves_is_only_text() -> None:
    evil = '"><script>alert(1)</script><b onclick=x>'
    registry = NodeRegistry()
    node = address("a")
    registry.set_members([node])
    registry.apply_report(node, report(model_name=evil, fingerprint=evil))
    page = Page(render_status(view(registry=registry, tenants=[(evil, {evil: 1})])))
    assert not page.strange
    assert sum(cell.count("<script>") for row in page.rows for cell in row) >= 3


def test_numbers_are_set_to_the_right_and_ids_are_not() -> None:
    """Half of all request ids begin with a digit."""
    log, fleet = DecisionLog(), Fleet()
    fleet.add("d")
    info = request(request_id="899102f458d14f2f")
    log.note(info, Placement(fleet.node("d"), num_new_tokens=5), 0, "4a31717be86117a4")
    page = render_status(view(decisions=log))
    assert "<td>899102f458d14f2f</td><td>4a31717be86117a4</td>" in page
    assert '<td class="n">≈5</td>' in page
    assert '<th class="n">new</th>' in page


async def test_a_real_browser_shows_the_page_and_has_nothing_to_complain_of(
    cluster: Cluster, tmp_path: Path
) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no browser here (Debian: chromium); the parser's tests remain")
    router = await cluster.router(await cluster.decode(handler=TokenHandler()))
    await router.text(BODY, x_request_id="request-7")
    browser = await asyncio.create_subprocess_exec(
        chromium, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        f"--user-data-dir={tmp_path}", "--enable-logging=stderr", "--dump-dom",
        router.url + "/status",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(TIMEOUT_S):
            shown, said = await browser.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            browser.kill()
        await browser.wait()
    page = Page(shown.decode())
    assert not page.strange
    assert ["default", "1", "200: 1"] in page.rows
    assert any("request-7" in row for row in page.rows)
    assert b"CONSOLE" not in said, said


def test_rates_are_those_of_the_last_minute() -> None:
    totals = {"requests": 0.0}
    meter = TrafficMeter(lambda: totals)
    assert meter.per_second() == {"requests": 0.0}
    for second in range(100):
        meter.sample(float(second))
        totals["requests"] += 2.0 if second < 30 else 5.0
    assert meter.per_second() == {"requests": pytest.approx(5.0)}


async def test_metrics_of_a_node_go_with_it(cluster: Cluster) -> None:
    stays, goes = await cluster.decode("a"), await cluster.decode("b")
    router = await cluster.router(stays, goes)
    while not (stays.requests and goes.requests):
        await router.text(BODY)
    registry = router.services.registry
    assert goes.target in router.services.metrics.render().decode()
    registry.set_members(
        [n.address for n in registry.all_nodes() if n.address.target == stays.target]
    )
    text = router.services.metrics.render().decode()
    assert stays.target in text
    assert goes.target not in text


def test_metrics_of_a_tenant_go_with_its_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    entry = '[[tenants]]\nname = "{}"\nkeys = ["{}"]\n'
    digests = {name: f"sha256:{digest_of(name).hex()}" for name in ("acme", "gone")}
    entries = [entry.format(name, digest) for name, digest in digests.items()]
    file.write_text("".join(entries))
    keys = ApiKeys(file=file)
    metrics = RouterMetrics(NodeRegistry(), lambda: [tenant.name for tenant in keys.tenants])
    for name in ("acme", "gone"):
        metrics.by_tenant.add((name,), "200")
    assert 'tenant="gone"' in metrics.render().decode()
    file.write_text(entries[0])
    assert keys.reload()
    text = metrics.render().decode()
    assert 'tenant="acme"' in text
    assert 'tenant="gone"' not in text


async def test_the_page_needs_a_key_where_clients_are(cluster: Cluster) -> None:
    router = await cluster.router(api_keys="secret")
    for path, status in (("/status", 401), ("/metrics", 200)):
        async with router.client.get(router.url + path) as response:
            assert response.status == status


async def test_operators_reset_the_caches_of_all_nodes(cluster: Cluster) -> None:
    nodes = [await cluster.decode("a"), await cluster.prefill("p"), await cluster.prefill("q")]
    router = await cluster.router(*nodes)
    known = router.services.registry.nodes(NodeRole.PREFILL)[0]
    learnt = router.services.forwarder.attempts.policy.knowledge(known).index
    learnt.learn(known, (1, 2, 3), 100)
    assert learnt.match((1, 2, 3)).num_blocks(known) == 3
    async with router.client.post(router.url + "/reset_prefix_cache") as response:
        assert response.status == 200
        assert set((await response.json())["nodes"].values()) == {"reset"}
    assert [node.status.num_resets for node in nodes] == [1, 1, 1]
    assert learnt.match((1, 2, 3)).num_blocks(known) == 0
    await nodes[1].status.change(num_running_requests=1)
    await nodes[2].stop()
    async with router.client.post(router.url + "/reset_prefix_cache") as response:
        assert response.status == 503
        told = sorted((await response.json())["nodes"].values())
    assert [text.split(":")[0] for text in told] == ["failed", "in use", "reset"]


async def test_keys_of_clients_reset_no_caches(cluster: Cluster) -> None:
    node = await cluster.decode()
    router = await cluster.router(node, api_keys="secret")
    headers = {"authorization": "Bearer secret"}
    url = router.url + "/reset_prefix_cache"
    async with router.client.post(url, headers=headers) as response:
        assert response.status == 403
        assert "--admin-port" in (await response.json())["error"]["message"]
    assert node.status.num_resets == 0


async def test_an_admin_port_has_what_the_api_s_port_has_not() -> None:
    async with (
        router_process("--decode", "127.0.0.1:1/2", "--admin-port", "0") as process,
        aiohttp.ClientSession() as client,
    ):
        ready = await ready_line(process)
        api, admin = (f"http://127.0.0.1:{ready[name]}" for name in ("port", "admin_port"))
        for path in ("/metrics", "/status"):
            async with client.get(admin + path) as response:
                assert response.status == 200
            async with client.get(api + path) as response:
                assert response.status == 404
        for path, status in (("/health", 200), ("/ready", 503)):
            for base in (api, admin):
                async with client.get(base + path) as response:
                    assert response.status == status
        async with client.post(admin + "/v1/completions", json=BODY) as response:
            assert response.status == 404


def test_the_admin_port_is_off_unless_it_is_asked_for() -> None:
    settings = RouterSettings()
    assert settings.admin_port is None
    assert settings.admin_host == "127.0.0.1"
