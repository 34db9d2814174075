"""The status page's data and files, and the admin port. A browser opens it in tests/browser."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hatchling.builders.wheel import WheelBuilder
from prometheus_client import generate_latest

from edge.http.answers.answer_times import AnswerTimes, read_answer_times
from edge.tracing.context import TraceContext
from router.config import RouterSettings
from router.edge.api_keys import ApiKeys
from router.edge.key_file import digest_of
from router.nodes.address import NodeRole
from router.nodes.registry import NodeRegistry
from router.nodes.report import NodeTotals
from router.observe.metrics import RouterMetrics
from router.observe.status import status_feed
from router.observe.status.log_histogram import LogHistogram
from router.observe.status.node_rates import NodeRates, Rates
from router.observe.status.page_files import page_files
from router.observe.status.recent_figures import Gauges
from router.observe.status.recent_requests import RecentRequests
from router.observe.status.snapshot import Snapshot
from router.observe.status.status_feed import StatusFeed
from router.request.trace import RequestTrace
from tests.router.cluster import Cluster, RunningRouter, eventually
from tests.router.factories import Fleet, ManualClock, address, report
from tests.router.processes import ready_line, router_process
from tests.router.test_migration import die_at, once
from tests.router.token_server import TokenHandler, expected, texts

ROOT = Path(__file__).resolve().parents[2]
BODY = {"model": "demo", "prompt": "hello", "seed": 7, "max_tokens": 3, "stream": True}


async def snapshot(router: RunningRouter) -> Any:
    async with router.client.get(router.url + "/status?format=json") as response:
        assert response.status == 200
        assert response.headers["content-type"] == "application/json"
        return await response.json()


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    """Yields what the page would hear."""
    async for line in response.content:
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


async def test_a_snapshot_has_nodes_figures_tenants_and_requests(cluster: Cluster) -> None:
    prefill, decode = await cluster.prefill(), await cluster.decode(handler=TokenHandler())
    router = await cluster.router(prefill, decode)
    await router.text(BODY, x_request_id="request-7", x_session_id="somebody")
    told = await snapshot(router)
    assert told["router"]["state"] == "ready"
    assert told["router"]["models"] == ["demo"]
    by_tier = {node["tier"]: node for node in told["nodes"]}
    assert by_tier["prefill"]["node"] == prefill.target
    assert by_tier["decode"]["node"] == decode.target
    assert by_tier["decode"]["sessions"] == 1
    assert by_tier["decode"]["host"].startswith("host-of-")
    assert {node["state"] for node in told["nodes"]} == {"ready"}
    cluster_now = told["cluster"]
    assert (cluster_now["requests"], cluster_now["failed"], cluster_now["ttft"]["n"]) == (1, 0, 1)
    assert cluster_now["ttft"]["p50"] > 0
    assert told["tenants"][0]["by_status"]["200"] == 1
    [request] = told["ended"]
    assert (request["id"], request["status"], request["decode"]) == (
        "request-7",
        200,
        decode.target,
    )
    assert request["tokens"] >= BODY["max_tokens"]
    [session] = told["sessions"]["shown"]
    assert session["id"] == request["session"]
    assert "somebody" not in json.dumps(told)


async def test_a_snapshot_says_which_drafts_of_a_node_were_right(cluster: Cluster) -> None:
    """It says so by position in a step; a node without drafts says nothing."""
    plain, drafting = await cluster.decode(), await cluster.decode()
    router = await cluster.router(plain, drafting)

    async def accepted() -> dict[str, list[float]]:
        return {node["node"]: node["accepted"] for node in (await snapshot(router))["nodes"]}

    assert await accepted() == {plain.target: [], drafting.target: []}
    await router.services.sources.sample()
    drafting.status.load.num_accepted_per_pos.extend([80, 50, 8])
    await drafting.status.change(num_drafts=100)
    nodes = router.services.registry.all_nodes()
    node = next(node for node in nodes if str(node.address) == drafting.target)
    await eventually(lambda: node.report is not None and node.report.totals.num_drafts == 100)
    await router.services.sources.sample()
    assert await accepted() == {plain.target: [], drafting.target: [0.8, 0.5, 0.08]}


async def test_a_timeline_has_what_nodes_tell_of_the_way(cluster: Cluster) -> None:
    times = AnswerTimes(
        prompt=34, cached=8, tokens=3, path="remote", queue=0.01, prefill=0.02, first=0.03,
        second=0.06, kv_first=0.02, kv_last=0.05, kv_bytes=4096, total=0.08,
    )  # fmt: skip
    node = await cluster.decode(handler=TokenHandler(end=times.line() + b"data: [DONE]\n\n"))
    router = await cluster.router(node)
    answer = await router.text(BODY)
    assert texts(answer) == [expected(BODY)], "what nodes tell routers is not for clients"
    told = await snapshot(router)
    [request] = told["ended"]
    assert (request["prompt"], request["cached"], request["tokens"]) == (34, 8, 3)
    assert request["kv_bytes"] == 4096
    kinds = [kind for kind, _, _ in request["segments"]]
    assert [kind for kind in kinds if kind != "sending"] == [
        "queue", "prefill queue", "prefill", "transfer", "decode",
    ]  # fmt: skip
    assert told["transfers"]["transfer"]["p50"] == pytest.approx(0.03, rel=0.1)
    assert told["transfers"]["join"]["p50"] == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize(
    "line",
    [
        b"", b": 1 [2]", b":t ", b":t {", b":t []", b':t {"queue":-1}', b':t {"queue":"x"}',
        b':t {"path":"' + b"x" * 99 + b'"}', b":t {" + b" " * 2000 + b"}", b':t "\xff"',
        b':t {"total":1e999}',
    ],
)  # fmt: skip
def test_times_that_make_no_sense_are_none(line: bytes) -> None:
    assert read_answer_times(line) is None


def test_quantiles_are_right_to_a_bucket() -> None:
    histogram = LogHistogram()
    assert histogram.quantile(0.5) == 0
    for number in range(1, 1001):
        histogram.add(number / 1000)
    for part in (0.01, 0.5, 0.99):
        assert histogram.quantile(part) == pytest.approx(part, rel=0.06)
    other = LogHistogram()
    other.add(0.0)
    other.merge(histogram)
    assert other.num == 1001
    assert other.quantile(0.0001) < 1e-5


def test_figures_are_of_the_last_minute_and_memory_of_five() -> None:
    clock = ManualClock()
    recent = RecentRequests(clock)
    figures = recent.figures
    for second in range(400):
        clock.now = 2000.0 + second
        trace = RequestTrace(TraceContext.from_headers({}), "/v1/completions")
        record = recent.begin(trace, "acme")
        record.decode, record.session = "d", b"%d" % second
        record.trace.answered_at = record.trace.started_at + (2.0 if second < 300 else 0.1)
        recent.end(record, 500 if second == 350 else 200)
        figures.sample(Gauges(running=second))
    total = figures.total()
    assert total.num_requests == pytest.approx(60, abs=5)
    assert (total.num_failed, total.failed_by_tenant["acme"]) == (1, 1)
    assert total.ttft.quantile(0.99) == pytest.approx(0.1, rel=0.06)
    curve = figures.curve(lambda slot: slot.running / slot.samples)
    assert len(curve) == 60
    assert curve == sorted(curve)
    assert (len(recent.ended), recent.num_ended, recent.num_open) == (200, 400, 0)
    assert len(recent.sessions) == 400
    for number in range(2000):
        record.session = b"more %d" % number
        recent.sessions.note(record)
    assert len(recent.sessions) == 1024


async def test_rates_are_of_what_nodes_count_and_begin_anew_with_them() -> None:
    fleet = Fleet()
    registry, rates = fleet.registry, NodeRates(fleet.registry)

    async def tell(second: int, epoch: int = 1, **totals: Any) -> None:
        fleet.clock.now = float(second)
        told = report(epoch=epoch, sequence=second + 1, totals=NodeTotals(**totals))
        registry.apply_report(address("d"), told)
        await rates.sample()

    node = fleet.add("d")
    for second in range(1, 21):
        await tell(
            second,
            prompt_tokens_computed=30 * second,
            prompt_tokens_cached=10 * second,
            prompt_tokens_from_host=4 * second,
            prompt_tokens_from_disk=2 * second,
            generation_tokens=7 * second,
            num_drafts=2 * second,
            num_accepted_per_pos=(second, second // 2),
        )
    now = rates.of(fleet.node("d"))
    assert (now.tokens_in, now.tokens_out) == (pytest.approx(40), pytest.approx(7))
    assert now.hit_share == pytest.approx(0.25)
    assert (now.host_share, now.disk_share) == (pytest.approx(0.1), pytest.approx(0.05))
    assert now.accepted == (pytest.approx(0.5), pytest.approx(0.25))
    await tell(21, epoch=2, generation_tokens=3)
    assert rates.of(fleet.node("d")) == Rates()
    await tell(22, epoch=2, generation_tokens=5)
    assert rates.of(fleet.node("d")).tokens_out == pytest.approx(2)
    registry.set_members([])
    await rates.sample()
    assert rates.of(node) == Rates()


async def test_figures_of_many_nodes_are_taken_while_others_use_the_loop(cluster: Cluster) -> None:
    """A look at 1,000 nodes took 19 ms in one turn, in which no stream goes on."""
    router = await cluster.router(await cluster.decode())
    registry, sources = router.services.registry, router.services.sources
    more = [address(f"n{number}") for number in range(1000)]
    registry.set_members([*(node.address for node in registry.all_nodes()), *more])
    num_turns = 0

    async def count_turns() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0)
            num_turns += 1

    counting = asyncio.create_task(count_turns())
    taken = await sources.snapshot()
    assert len(taken.nodes) == 1001 and num_turns >= 12
    num_turns = 0
    await sources.sample()
    assert num_turns >= 12
    counting.cancel()


def test_times_are_read_as_they_were_written_and_by_newer_nodes_too() -> None:
    times = AnswerTimes(prompt=3, total=0.25)
    assert read_answer_times(times.line().rstrip(b"\n")) == times
    assert read_answer_times(b':t {"prompt":3,"total":0.25,"new":[1]}') == times


async def test_a_moved_answer_shows_where_it_went_on(cluster: Cluster) -> None:
    handler = TokenHandler(fault=once(die_at(4)))
    nodes = [await cluster.decode(name, handler) for name in ("a", "b")]
    router = await cluster.router(*nodes)
    await router.text({**BODY, "max_tokens": 8})
    told = await snapshot(router)
    [request] = told["ended"]
    assert request["moves"] == [["lost", request["decode"]]]
    kinds = [kind for kind, _, _ in request["segments"]]
    assert kinds[-3:] == ["decode", "move", "decode"]
    ends = [(begin, end) for kind, begin, end in request["segments"] if kind in ("decode", "move")]
    assert all(begin <= end for begin, end in ends)
    assert [end for _, end in ends[:-1]] == [begin for begin, _ in ends[1:]]
    assert told["cluster"]["moves"] == 1


async def test_an_answer_that_breaks_off_is_an_error_though_its_status_was_200(
    cluster: Cluster,
) -> None:
    node = await cluster.decode(handler=TokenHandler(fault=die_at(2)))
    router = await cluster.router(node, max_migrations=1, resume_timeout_s=0.01)
    async with router.post(BODY) as response:
        assert response.status == 200
        await response.read()
    told = await snapshot(router)
    assert told["ended"][0]["broken"] is True
    assert told["cluster"]["failed"] == told["tenants"][0]["failed"] == 1


async def test_an_outage_shows_and_a_client_s_mistake_is_no_error(cluster: Cluster) -> None:
    router = await cluster.router()
    for body, status in ((BODY, 503), ("no object", 400)):
        async with router.post(body) as response:
            assert response.status == status
    told = await snapshot(router)
    assert (told["cluster"]["requests"], told["cluster"]["failed"]) == (2, 1)
    assert told["tenants"][0]["failed"] == 1
    assert "first" not in told["ended"][0]
    assert told["router"]["state"] == "no decode node"


async def test_a_feed_begins_with_all_and_goes_on_with_changes(cluster: Cluster) -> None:
    node = await cluster.decode(handler=TokenHandler())
    router = await cluster.router(node)
    router.services.feed._tick_s = 0.02
    await router.text(BODY)
    async with router.client.get(router.url + "/status/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        heard = events(response)
        first = await anext(heard)
        assert first["full"]
        assert len(first["ended"]) == 1
        assert first["curves"]["slots"] == 60
        quiet = await anext(heard)
        while len(quiet) > 2:
            quiet = await anext(heard)
        assert set(quiet) == {"tick", "now"}, "nothing changed, and the page hears that we live"
        await node.status.change(num_running_requests=3)
        while "nodes" not in (changed := await anext(heard)):
            pass
        assert changed["nodes"][0]["running"] == 3
        await router.text(BODY)
        while "ended" not in (changed := await anext(heard)):
            pass
        assert len(changed["ended"]) == 1
        assert "full" not in changed
    await eventually(lambda: router.services.feed.num_viewers == 0)
    assert router.services.feed._ticking is None, "nobody looks: nothing is made"


async def test_viewers_share_snapshots_and_slow_ones_skip_them() -> None:
    num_taken = 0

    async def take() -> Snapshot:
        nonlocal num_taken
        num_taken += 1
        sections = {"count": b"%d" % num_taken, "same": b"0"}
        return Snapshot(sections, {}, b"[]", {1: b"{}"})

    feed = StatusFeed(take, tick_s=3600)
    async with contextlib.AsyncExitStack() as stack:
        quick, slow, late = [
            await stack.enter_async_context(contextlib.aclosing(feed.events())) for _ in range(3)
        ]
        assert json.loads((await anext(quick))[6:])["full"]
        await anext(slow)
        assert num_taken == 1
        for count in (2, 3):
            await feed._advance()
            update = json.loads((await anext(quick))[6:])
            assert update.keys() == {"tick", "now", "count"}
            assert update["count"] == count
        caught_up, begun = await anext(slow), await anext(late)
        assert json.loads(caught_up[6:])["full"]
        assert caught_up is begun, "the same bytes for all"
        assert num_taken == 3
        feed.close()
        for viewer in (quick, slow, late):
            assert await anext(viewer, None) is None


async def test_no_two_snapshots_are_made_at_a_time() -> None:
    """The older one of two would follow the newer, where it takes longer."""
    num_begun = num_ended = most_at_once = 0

    async def take() -> Snapshot:
        nonlocal num_begun, num_ended, most_at_once
        num_begun += 1
        most_at_once = max(most_at_once, num_begun - num_ended)
        await asyncio.sleep(0.02)
        num_ended += 1
        return Snapshot({"count": b"%d" % num_begun}, {}, b"[]", {})

    feed = StatusFeed(take, tick_s=0.001)

    async def see(count: int) -> None:
        async with contextlib.aclosing(feed.events()) as events:
            for _ in range(count):
                await anext(events)

    async def come_later() -> None:
        await eventually(lambda: num_begun == 1)
        await see(3)

    await asyncio.gather(see(4), come_later())
    assert most_at_once == 1 and num_begun >= 4


async def test_too_many_viewers_are_refused(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_feed, "MAX_VIEWERS", 1)
    router = await cluster.router(await cluster.decode())
    async with router.client.get(router.url + "/status/events") as one:
        await anext(events(one))
        async with router.client.get(router.url + "/status/events") as another:
            assert another.status == 503
            assert "Too many" in (await another.json())["error"]["message"]


async def test_a_viewer_that_takes_nothing_is_disconnected(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_feed, "_SEND_TIMEOUT_S", 0.05)
    router = await cluster.router(await cluster.decode())
    feed = router.services.feed
    feed._tick_s = 0.002
    large = Snapshot({"large": b'"%b"' % (b"x" * 100_000)}, {}, b"[]", {})
    small = Snapshot({"large": b'""'}, {}, b"[]", {})
    turns = itertools.cycle([large, small])

    async def take() -> Snapshot:
        return next(turns)

    monkeypatch.setattr(feed, "_take", take)
    _, writer = await asyncio.open_connection("127.0.0.1", int(router.url.rpartition(":")[2]))
    writer.write(b"GET /status/events HTTP/1.1\r\nhost: x\r\n\r\n")
    await eventually(lambda: feed.num_viewers == 1)
    await eventually(lambda: feed.num_viewers == 0)
    writer.close()


async def test_the_page_is_served_with_a_policy_that_lets_nothing_else_in(cluster: Cluster) -> None:
    router = await cluster.router(await cluster.decode())
    for path, kind in (
        ("/status", "text/html"), ("/status/page.css", "text/css"),
        ("/status/main.js", "text/javascript"), ("/status/icon.svg", "image/svg+xml"),
    ):  # fmt: skip
        async with router.client.get(router.url + path) as response:
            assert response.status == 200
            assert response.headers["content-type"].startswith(kind)
            policy = response.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            tag = response.headers["etag"]
        known = {"if-none-match": tag}
        async with router.client.get(router.url + path, headers=known) as response:
            assert response.status == 304
    for path, status in (
        ("/status/nothing.js", 404), ("/status/page.html", 404), ("/status/..%2fsnapshot.py", 404),
        ("/status?format=xml", 400),
    ):  # fmt: skip
        async with router.client.get(router.url + path) as response:
            assert response.status == status, path
    async with router.client.head(router.url + "/status/events") as response:
        assert response.status == 200


def test_nothing_of_the_page_loads_or_runs_what_is_elsewhere() -> None:
    files = page_files()
    assert {"page.html", "page.css", "main.js", "icon.svg"} <= files.keys()
    for name, file in files.items():
        text = file.content.decode()
        outside = set(re.findall(r"https?://[^\s\"')]+", text)) - {"http://www.w3.org/2000/svg"}
        assert not outside, name
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "eval(",
            'style="',
            " onclick",
        ):
            assert word not in text, (name, word)
    page = files["page.html"].content.decode()
    named = set(re.findall(r'(?:href|src)="status/([^"]+)"', page))
    for name in files:
        if name.endswith(".js"):
            named |= set(re.findall(r'from "\./([^"]+)"', files[name].content.decode()))
    assert named == files.keys() - {"page.html"}, "what is there is used, and the other way round"


def test_a_wheel_has_the_page(tmp_path: Path) -> None:
    [wheel] = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    packed = set(zipfile.ZipFile(wheel).namelist())
    assert {f"router/observe/status/page/{name}" for name in page_files()} <= packed


async def test_metrics_of_a_node_go_with_it(cluster: Cluster) -> None:
    stays, goes = await cluster.decode("a"), await cluster.decode("b")
    router = await cluster.router(stays, goes)
    while not (stays.requests and goes.requests):
        await router.text(BODY)
    registry = router.services.registry
    assert goes.target in generate_latest(router.services.metrics.registry).decode()
    registry.set_members(
        [n.address for n in registry.all_nodes() if n.address.target == stays.target]
    )
    text = generate_latest(router.services.metrics.registry).decode()
    assert stays.target in text
    assert goes.target not in text


def test_first_bytes_of_a_model_go_with_it() -> None:
    """Each model has two dozen series; a router sees many come and go."""
    versions = {("old", "old"), ("new", "new")}
    metrics = RouterMetrics(NodeRegistry(), versions=lambda: versions)

    def counted() -> set[str]:
        pattern = r'time_to_first_byte_seconds_count{model="(\w+)"'
        return set(re.findall(pattern, generate_latest(metrics.registry).decode()))

    metrics.first_byte.observe(("old", "old"), 1, None)
    assert counted() == {"old", "new"}
    versions.remove(("old", "old"))
    assert counted() == {"new"}
    versions.clear()
    assert counted() == {"new"}, "nobody says what is served: it may be this one"


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
    assert 'tenant="gone"' in generate_latest(metrics.registry).decode()
    file.write_text(entries[0])
    assert keys.reload()
    text = generate_latest(metrics.registry).decode()
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
    async with router.client.post(router.url + "/flush_cache?timeout=0.5") as response:
        assert response.status == 400, "as SGLang says it"
    assert [node.status.reset_within_s for node in nodes] == [0.5, 0.5, 0.5]
    resets = [node.status.num_resets for node in nodes]
    async with router.client.head(router.url + "/flush_cache") as response:
        assert response.status == 200
    assert [node.status.num_resets for node in nodes] == resets
    async with router.client.get(router.url + "/flush_cache?timeout=0.25") as response:
        assert response.status == 400
    assert [node.status.reset_within_s for node in nodes] == [0.25, 0.25, 0.25]
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
        for base, words in ((api, "see /docs (the API); "), (admin, "see /status (the cluster), ")):
            async with client.get(base) as response:
                assert words in (await response.json())["error"]["message"]
        for path in ("/admin/nodes", "/admin/nodes/d/drain", "/flush_cache", "/abort_request"):
            async with client.post(api + path) as response:
                assert response.status == 404
                told = (await response.json())["error"]["message"]
            assert (
                told == f"POST {path} is not served on this port, but at the router's --admin-port"
            )
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
