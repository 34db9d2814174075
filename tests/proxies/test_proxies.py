"""Streams pass nginx, haproxy and caddy at their default settings, and Envoy as documented: whole,
and token by token.

Time limits of proxies and keep-alives are shortened alike, to a twentieth; `long_pause.py` lets
them be as they are.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from tests.proxies.proxies import (
    ENVOY,
    NAMES,
    PATIENCE_S,
    WHOLE_ANSWER_S,
    find_proxy,
    running_proxy,
)
from tests.proxies.streams import BODY, DONE, PausingNode, Seen, SteppingNode, read_stream
from tests.router.cluster import TIMEOUT_S, run_cluster
from tests.router.fakes import event

SCALE = 1 / 20
PAUSE_S = 70.0 * SCALE
KEEPALIVE_S = 10.0 * SCALE

pytestmark = pytest.mark.skipif(
    not all(map(find_proxy, (*NAMES, ENVOY))),
    reason="no nginx, haproxy, caddy and envoy here (`make proxies`)",
)


async def test_a_pause_outlives_the_patience_of_proxies(tmp_path: Path) -> None:
    """Without keep-alives those that have patience at all cut the same stream."""
    node = PausingNode(PAUSE_S)

    async def ask(name: str, router: str) -> Seen:
        async with running_proxy(name, tmp_path, router, scale=SCALE) as url:
            return await read_stream(client, url)

    async with run_cluster() as cluster, aiohttp.ClientSession() as client:
        decode = await cluster.decode(handler=node.answer)
        kept = await cluster.router(decode, sse_keepalive_s=KEEPALIVE_S)
        silent = await cluster.router(decode, sse_keepalive_s=0.0)
        asked = [ask(name, router.url) for router in (kept, silent) for name in NAMES]
        keys = [*NAMES, *(f"{name}, silent" for name in NAMES)]
        seen = dict(zip(keys, await asyncio.gather(*asked), strict=True))
    for name in NAMES:
        assert seen[name].is_complete and seen[name].num_comments >= 4, seen[name]
        assert seen[name].longest_s < PAUSE_S
        is_impatient = name in PATIENCE_S
        assert (seen[f"{name}, silent"].status == 504) is is_impatient, seen[f"{name}, silent"]
        assert seen[f"{name}, silent"].is_complete is not is_impatient


async def test_envoy_cuts_what_takes_longer_than_its_route_allows_unless_documented(
    tmp_path: Path,
) -> None:
    """Comments do not help: its limit is for a whole answer."""
    node = PausingNode(PAUSE_S)

    async def ask(*, is_documented: bool) -> Seen:
        proxy = running_proxy(ENVOY, tmp_path, router.url, scale=SCALE, is_documented=is_documented)
        async with proxy as url:
            return await read_stream(client, url)

    async with run_cluster() as cluster, aiohttp.ClientSession() as client:
        decode = await cluster.decode(handler=node.answer)
        router = await cluster.router(decode, sse_keepalive_s=KEEPALIVE_S)
        cut, whole = await asyncio.gather(ask(is_documented=False), ask(is_documented=True))
    assert SCALE * WHOLE_ANSWER_S > KEEPALIVE_S, "no comment would come before"
    assert cut.status == 200 and cut.num_comments and cut.broke and not cut.data, cut
    assert whole.is_complete and whole.num_comments >= 4, whole


@pytest.mark.parametrize("is_documented", [False, True], ids=["defaults", "docs/proxies.md"])
@pytest.mark.parametrize("name", [*NAMES, ENVOY])
async def test_tokens_come_one_by_one(name: str, is_documented: bool, tmp_path: Path) -> None:
    """The node makes a token only when the client has the one before: none may be held back."""
    node = SteppingNode(6)
    async with run_cluster() as cluster, aiohttp.ClientSession() as client:
        router = await cluster.router(await cluster.decode(handler=node.answer))
        proxy = running_proxy(name, tmp_path, router.url, is_documented=is_documented)
        async with (
            asyncio.timeout(TIMEOUT_S),
            proxy as url,
            client.post(f"{url}/v1/completions", json=BODY) as response,
        ):
            for index in range(node.num_tokens):
                assert await response.content.readuntil(b"\n\n") == event(index)
                node.may_go_on.put_nowait(None)
            assert await response.read() == DONE
