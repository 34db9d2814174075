"""The status page in a real browser: how it looks at every width, and what it does."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections import deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from edge.http.answers.answer_times import AnswerTimes
from router.observe.batch_metrics import BatchFacts
from router.observe.status.page_files import page_files
from router.observe.status.snapshot import Snapshot
from tests.browser.chromium import Chromium, Page, find_chromium, running_browser
from tests.router.cluster import RunningRouter, eventually, run_cluster
from tests.router.fakes import FakeDecodeNode
from tests.router.token_server import TokenHandler

HOSTILE = '"><script>window.hacked = 1</script><img src=x onerror="window.hacked = 2">'
BODY = {"model": "demo", "prompt": "hello", "seed": 7, "max_tokens": 3, "stream": True}
TIMES = AnswerTimes(
    prompt=1234, cached=1024, tokens=56, path="remote", queue=1e-5, prefill=1e-4, first=1e-3,
    second=2e-3, kv_first=1e-4, kv_last=1e-3, kv_bytes=1 << 20, total=0.01,
)  # fmt: skip
LIGHT, DARK = "light", "dark"


@pytest.fixture(scope="module")
def devtools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    binary = find_chromium()
    if binary is None:
        pytest.skip("there is no browser here (`make chromium`; Debian: chromium-headless-shell)")
    with running_browser(binary, tmp_path_factory.mktemp("profile")) as url:
        yield url


@contextlib.asynccontextmanager
async def shown(devtools: str, router: RunningRouter, width: int = 1280) -> AsyncIterator[Page]:
    """Gives the page of `router`, when it has its first data; at the end nothing may have gone
    wrong in it."""
    router.services.feed._tick_s = 0.1
    async with Chromium.connect(devtools) as browser, browser.page() as page:
        await page.screen(width)
        await page.open(router.url + "/status")
        await page.until("document.querySelectorAll('.tile').length === 8")
        yield page
        assert page.complaints == []


@contextlib.asynccontextmanager
async def busy_router(**settings: Any) -> AsyncIterator[tuple[FakeDecodeNode, RunningRouter]]:
    """Gives a router that has answered requests, with nodes that have much to tell."""
    async with run_cluster() as cluster:
        handler = TokenHandler(gap_s=0.003, end=TIMES.line() + b"data: [DONE]\n\n")
        prefill, decode = await cluster.prefill(), await cluster.decode(handler=handler)
        for node in (prefill, decode):
            node.status.load.num_accepted_per_pos.extend([800, 600, 400, 200])
            node.status.load.model_aliases.append("a-very-long-alias-of-the-model" * 4)
            await node.status.change(
                num_running_requests=1234, num_waiting_requests=567, num_free_blocks=77,
                prompt_tokens_computed=10**9, generation_tokens=10**9, version="123.45.6",
                num_drafts=1000,
            )  # fmt: skip
        router = await cluster.router(prefill, decode, **settings)
        for number in range(8):
            await router.text(BODY, x_session_id=f"somebody-{number}")
        yield decode, router


async def test_nothing_sticks_out_at_any_width_and_light_and_dark_differ(devtools: str) -> None:
    async with busy_router() as (_, router), shown(devtools, router) as page:
        pictures = {}
        for width, scheme in itertools.product((390, 768, 1280, 1920), (LIGHT, DARK)):
            await page.prefer(color_scheme=scheme)
            await page.screen(width)
            wide = await page.ask("[document.documentElement.scrollWidth, innerWidth]")
            assert wide[0] <= wide[1] == width, (width, scheme)
            out = await page.ask(
                "Array.from(document.querySelectorAll('main *:not(.wide *):not(svg *)'))"
                ".filter((e) => e.getBoundingClientRect().right > innerWidth + 1)"
                ".map((e) => e.outerHTML.slice(0, 200))"
            )
            assert out == [], (width, scheme)
            colour = await page.ask("getComputedStyle(document.body).backgroundColor")
            pictures[width, scheme] = (colour, await page.picture())
        for width in (390, 1280):
            assert pictures[width, LIGHT] != pictures[width, DARK]
            (light, _), (dark, _) = pictures[width, LIGHT], pictures[width, DARK]
            assert _brightness(light) > 0.8 > 0.1 > _brightness(dark)


async def test_the_table_of_nodes_fits_a_desk_and_becomes_cards_on_a_phone(devtools: str) -> None:
    async with busy_router() as (_, router), shown(devtools, router) as page:
        table = "document.getElementById('nodes-scroll')"
        assert await page.ask(f"{table}.scrollWidth <= {table}.clientWidth")
        heads = await page.ask(
            "Array.from(document.querySelectorAll('#nodes th'), (e) => e.innerText)"
        )
        assert "KV in use" in heads
        await page.screen(390)
        cell = "document.querySelector('#nodes td:nth-child(4)')"
        assert await page.ask(f"getComputedStyle({cell}, '::before').content") == '"Running"'
        assert await page.ask(f"getComputedStyle({cell}).display") == "flex"


_NODES = 500


def _texts(selector: str) -> str:
    """Returns what asks for the texts of all these elements."""
    return f"Array.from(document.querySelectorAll('{selector}'), (e) => e.innerText)"


def many_nodes(router: RunningRouter) -> None:
    """Makes the router show as many nodes as a large cluster has: of each twenty one is unwell."""

    def node(number: int) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "tier": "prefill" if number % 2 else "decode", "state": "ready",
            "node": f"10.0.{number // 250}.{number % 250}:8100", "ours": 1, "sessions": 5,
            "host": f"tandem-decode-{number:05d}", "model": "llama-8b", "version": "0.2.0",
            "running": number % 60, "waiting": number % 7, "backlog_tokens": 0, "backlog_s": 0.1,
            "kv": number % 80 / 100, "kv_tokens": 10**6, "tokens_in_per_s": 5.0,
            "tokens_out_per_s": 7.0, "hits": 0.5, "host_hits": 0, "disk_hits": 0, "accepted": [],
            "late_s": 0,
        }  # fmt: skip
        if number % 20 == 7:
            facts |= {"state": ("ejected", "draining", "ready")[number % 3], "kv": 0.97}
        return facts

    snapshot = router.services.feed._take

    async def take() -> Snapshot:
        found = await snapshot()
        shown = [node(number) for number in range(_NODES)]
        names = [f"{one['tier']} {one['node']}" for one in shown]
        sections = {**found.sections, "names": msgspec.json.encode(names)}
        nodes = {name: msgspec.json.encode(one) for name, one in zip(names, shown, strict=True)}
        return replace(found, sections=sections, nodes=nodes)

    router.services.feed._take = take


async def test_of_500_nodes_the_worst_come_first(devtools: str) -> None:
    async with busy_router() as (_, router):
        many_nodes(router)
        async with shown(devtools, router) as page:
            await page.until("document.querySelectorAll('#nodes tbody tr').length === 10")
            assert (await page.ask("document.getElementById('node-sum').innerText")).startswith(
                "500: 483 ready, 9 draining, 8 ejected · fullest KV 97 % at tandem-decode-"
            )
            states = (
                "Array.from(document.querySelectorAll('#nodes tbody .pill'), (e) => e.innerText)"
            )
            assert await page.ask(states) == ["ejected"] * 8 + ["draining"] * 2
            await page.ask("document.querySelectorAll('#node-filter input')[1].click()")
            await page.ask("document.getElementById('node-more').click()")
            assert len(await page.ask(states)) == 25
            await page.ask("document.querySelectorAll('#node-filter input')[0].click()")
            assert len(await page.ask(states)) == _NODES
            await page.ask(
                "const order = document.getElementById('node-order'); order.value = 'Running';"
                "order.dispatchEvent(new Event('change'))"
            )
            counts = [int(text) for text in await page.ask(_texts("#nodes td[data-label=Running]"))]
            assert counts == sorted(counts, reverse=True) and counts[0] == 59
            await page.ask(
                "const search = document.getElementById('node-search');"
                "search.value = 'DECODE-00123';"
                "search.dispatchEvent(new Event('input'))"
            )
            assert await page.ask(_texts("#nodes .address")) == ["10.0.0.123:8100"]
            await page.ask("search.value = 'nobody'; search.dispatchEvent(new Event('input'))")
            assert await page.ask("!document.getElementById('node-none').hidden")


async def test_a_phone_shows_a_large_cluster_on_three_screens(devtools: str) -> None:
    async with busy_router() as (_, router):
        many_nodes(router)
        router.services.sources.tenants = lambda: {f"tenant-{n}" for n in range(100)}
        for number in range(20):
            await router.text(BODY, x_session_id=f"another-{number}")
        async with shown(devtools, router, 390) as page:
            await page.until("document.querySelectorAll('#list li').length === 5")
            assert await page.ask("document.documentElement.scrollHeight") <= 3 * 844
            folded = "document.querySelectorAll('details.fold:not([open])').length"
            assert await page.ask(folded) == 6
            await page.ask("document.querySelector('details.fold summary').click()")
            assert await page.ask(folded) == 5
            await page.screen(1280)
            await page.until(f"{folded} === 0")


async def test_batches_show_how_far_they_are(devtools: str) -> None:
    async with busy_router() as (_, router):
        facts = BatchFacts(
            id="batch_1", tenant="acme", model="demo", status="in_progress", num_total=100_000,
            num_completed=41_000, num_failed=2, expires_at=2e9,
        )  # fmt: skip
        async with shown(devtools, router) as page:
            hidden = "document.getElementById('batches-part').hidden"
            assert await page.ask(hidden)
            router.services.sources.batches = lambda: [facts]
            await page.until(f"!{hidden}")
            row = "document.querySelector('#batches tbody tr').innerText"
            assert "41,002 of 100k" in await page.ask(row)


async def test_updates_come_in_place(devtools: str) -> None:
    """Scroll positions, focus, open details and the page itself stay."""
    async with busy_router() as (decode, router), shown(devtools, router, 760) as page:
        await page.ask("window.same = true; document.body.dataset.mine = 'yes'")
        await page.until("document.querySelectorAll('#list li').length === 8")
        await page.ask(
            "document.getElementById('nodes-scroll').scrollLeft = 90;"
            "window.first = document.querySelector('#list summary'); first.click(); first.focus();"
            "window.scrollTo(0, 333)"
        )
        scrolled = "[document.getElementById('nodes-scroll').scrollLeft, window.scrollY]"
        assert await page.ask(scrolled) == [90, 333]
        running = "document.querySelector('#nodes tbody tr:last-child td[data-label=Running]')"
        assert await page.ask(f"{running}.innerText") == "1,234"
        await decode.status.change(num_running_requests=4321)
        await page.until(f"{running}.innerText === '4,321'")
        await router.text(BODY)
        await page.until("document.getElementById('newer').innerText === 'Show 1 newer'")
        assert await page.ask(scrolled) == [90, 333]
        assert await page.ask("document.activeElement === first && first.parentElement.open")
        assert (
            await page.ask("document.querySelector('#list details[open] dl').innerText.length") > 80
        )
        recent = router.services.recent
        recent.ended = deque(list(recent.ended)[-1:], maxlen=1)
        for _ in range(2):
            await page.ask("document.getElementById('pause').click()")
        await decode.status.change(num_running_requests=77)
        await page.until(f"{running}.innerText === '77'")
        assert await page.ask("document.querySelectorAll('#list li').length") == 8
        assert await page.ask("first.isConnected && first.parentElement.open")
        recent.ended = deque(recent.ended, maxlen=9)
        await page.ask("document.getElementById('newer').click()")
        assert await page.ask("document.querySelectorAll('#list li').length") == 1
        assert await page.ask("window.same && document.body.dataset.mine === 'yes'"), "no reload"


async def test_a_timeline_is_drawn_to_scale_and_told_in_words(devtools: str) -> None:
    async with busy_router() as (_, router), shown(devtools, router) as page:
        await page.until("document.querySelectorAll('#list li').length === 8")
        told = await page.ask("document.querySelector('#list svg').getAttribute('aria-label')")
        for words in ("Queue ", "Prefill 0.1 ms", "KV transfer", "Decode ", "first token after "):
            assert words in told
        kinds = await page.ask(
            "Array.from(document.querySelectorAll('#list li:first-child rect'),"
            " (e) => [e.getAttribute('class'), e.getBoundingClientRect().left])"
        )
        bars = dict(kinds)
        assert bars["queue"] < bars["prefill"] < bars["decode"]
        before = await page.ask("document.getElementById('axis').innerText")
        await page.ask("document.querySelectorAll('#scale input')[1].click()")
        assert await page.ask("document.getElementById('axis').innerText") != before
        await page.ask("document.querySelectorAll('#filter input')[2].click()")
        assert await page.ask("document.querySelectorAll('#list li').length") == 0
        assert "None of these" in await page.ask("document.getElementById('none').innerText")


async def test_keys_reach_everything(devtools: str) -> None:
    async with busy_router() as (_, router), shown(devtools, router) as page:
        await page.until("document.querySelectorAll('#list li').length === 8")
        reached = []
        for _ in range(11):
            for kind in ("keyDown", "keyUp"):
                await page.call("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab",
                                windowsVirtualKeyCode=9)  # fmt: skip
            reached.append(
                await page.ask(
                    "[document.activeElement.id || document.activeElement.name ||"
                    " document.activeElement.tagName,"
                    " getComputedStyle(document.activeElement).outlineStyle]"
                )
            )
        names = [name for name, _ in reached]
        nodes = ["node-search", "node-order", "node-filter", "nodes-scroll"]
        assert names[:9] == ["A", "pause", *nodes, "filter", "scale", "SUMMARY"]
        assert dict(reached)["pause"] == dict(reached)["SUMMARY"] == "solid"


async def test_hostile_names_are_only_text(devtools: str) -> None:
    async with run_cluster() as cluster:
        node = await cluster.decode(handler=TokenHandler())
        await node.status.change(model_name=HOSTILE, fingerprint=HOSTILE, version=HOSTILE)
        router = await cluster.router(node)
        services = router.services
        services.sources.tenants = lambda: {HOSTILE}
        await router.text({**BODY, "model": HOSTILE}, x_session_id=HOSTILE.replace(" ", "_"))
        async with shown(devtools, router) as page:
            await page.until("document.querySelectorAll('#list li').length === 1")
            await page.ask("document.querySelector('#list summary').click()")
            text = await page.until("document.querySelector('#list dl').innerText")
            assert "<script>" in text
            assert text.count("window.hacked") >= 1
            assert "<script>" in await page.ask("document.getElementById('tenants').innerText")
            assert "<script>" in await page.ask("document.getElementById('nodes').innerText")
            assert await page.ask("window.hacked") is None
            assert await page.ask("document.querySelectorAll('img').length") == 1
            assert await page.ask("document.scripts.length") == 1


async def test_it_says_so_when_the_router_is_gone_and_comes_back_by_itself(devtools: str) -> None:
    async with run_cluster() as cluster:
        router = await cluster.router(await cluster.decode())
        feed = router.services.feed
        feed._tick_s = 0.1
        async with Chromium.connect(devtools) as browser, browser.page() as page:
            await page.screen(1280)
            # Time runs ten times as fast for the page, which waits for seconds.
            await page.call(
                "Page.addScriptToEvaluateOnNewDocument",
                source="const now = performance.now.bind(performance);"
                "performance.now = () => 10 * now();"
                "for (const name of ['setTimeout', 'setInterval']) { const real = window[name];"
                "window[name] = (work, ms, ...more) => real(work, ms / 10, ...more); }",
            )
            is_live = (
                "document.getElementById('live-text').innerText === 'live'"
                " && document.getElementById('banner').hidden"
            )
            await page.open(router.url + "/status")
            await page.until(is_live)
            feed.close()
            await page.until("!document.getElementById('banner').hidden")
            banner = await page.ask("document.getElementById('banner').innerText")
            assert "does not answer" in banner
            assert await page.ask("document.body.className") == "stale"
            feed._is_closed = False
            await page.until(is_live)


async def test_a_pause_ends_the_stream_and_keeps_what_is_shown(devtools: str) -> None:
    async with busy_router() as (_, router), shown(devtools, router) as page:
        feed = router.services.feed
        await eventually(lambda: feed.num_viewers == 1)
        await page.ask("document.getElementById('pause').click()")
        await eventually(lambda: feed.num_viewers == 0)
        assert await page.ask("document.getElementById('live-text').innerText") == "paused"
        assert await page.ask("document.getElementById('banner').hidden")
        await page.ask("document.getElementById('pause').click()")
        await eventually(lambda: feed.num_viewers == 1)


async def test_a_login_opens_all_parts_of_the_page(devtools: str) -> None:
    async with run_cluster() as cluster:
        router = await cluster.router(await cluster.decode(), api_keys="secret")
        router.url = router.url.replace("://", "://anybody:secret@")
        async with shown(devtools, router) as page:
            assert await page.ask("document.getElementById('live-text').innerText") == "live"


def test_colours_are_readable() -> None:
    """WCAG AA: 4.5 to 1 for text, 3 to 1 for what is drawn and must be seen."""
    for colours in _palettes(page_files()["page.css"].content.decode()):
        texts = [(name, ground) for name in ("text", "muted", "accent", "good", "doubtful", "bad",
                 "prefill", "decode") for ground in ("card",)]  # fmt: skip
        texts += [(name, ground) for name in ("text", "muted") for ground in ("page", "inset")]
        texts += [(name, f"{name}-soft") for name in ("good", "doubtful", "bad")]
        for name, ground in texts:
            assert _contrast(colours[name], colours[ground]) >= 4.5, (name, ground)
        for name in ("queue", "prefill", "transfer", "decode", "move", "accent"):
            assert _contrast(colours[name], colours["card"]) >= 3, name


def _palettes(css: str) -> list[dict[str, str]]:
    """Returns the colours by name, light and dark."""
    blocks = re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    light, dark = (dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", block)) for block in blocks)
    assert light.keys() == dark.keys()
    assert len(light) > 15
    return [light, dark]


def _contrast(one: str, other: str) -> float:
    darker, lighter = sorted(map(_luminance, (one, other)))
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _brightness(rgb: str) -> float:
    return sum(map(int, re.findall(r"\d+", rgb)[:3])) / (3 * 255)
