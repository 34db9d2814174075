"""The router answers some things itself: limits, keys, bad input, models, readiness, metrics."""

from __future__ import annotations

import asyncio
import importlib.metadata
import random
import socket
import threading
from base64 import b64encode
from typing import Any

import httpx
import pytest
from yarl import URL

from router.app import create_admin_app
from router.request import info
from tests.router.cluster import TIMEOUT_S, Cluster, RunningRouter, eventually
from tests.router.fakes import FakeDecodeNode, answer_json, never_answer

BODY = {"model": "demo", "prompt": "hello"}


async def _post(router: RunningRouter, data: bytes, **headers: str) -> tuple[int, Any]:
    url = router.url + "/v1/completions"
    headers = {"content-type": "application/json", **headers}
    async with router.client.post(url, data=data, headers=headers) as response:
        return response.status, await response.json()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"12",
        b'"text"',
        b'{"model": }',
        b'{"a": NaN}',
        b"\xff\xfe\x00",
        b'{"model": "x"} {}',
        b"[" * 200_000,
        b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"model": "\\ud800"}',
        b'{"\xff": 1}',
    ],
    ids=lambda data: repr(data[:30]),
)
async def test_a_body_that_is_not_a_json_object_is_a_400(cluster: Cluster, data: bytes) -> None:
    decode = await cluster.decode()
    status, body = await _post(await cluster.router(decode), data)
    assert status == 400
    assert body["error"]["type"] == "invalid_request_error"
    assert "JSON" in body["error"]["message"]
    assert not decode.requests


@pytest.mark.parametrize(
    "data",
    [
        b'{"model": 3, "prompt": {"a": 1}}',
        b'{"messages": "hello"}',
        b'{"messages": [1, null, {"role": 7}]}',
        b'{"messages": [], "prompt_cache_key": ["x"]}',
        b'{"prompt": ' + b"[" * 100 + b"]" * 100 + b"}",
        b'{"prompt": "\xff"}',
        b'{"model": "\xff"}',
        b"{}",
    ],
    ids=lambda data: repr(data[:30]),
)
async def test_what_only_the_node_can_judge_is_left_to_it(cluster: Cluster, data: bytes) -> None:
    decode = await cluster.decode(handler=answer_json(400, {"error": {"message": "no"}}))
    status, body = await _post(await cluster.router(decode), data)
    assert (status, body) == (400, {"error": {"message": "no"}})
    assert decode.requests[0][1] == data


async def test_random_bytes_never_hurt(cluster: Cluster) -> None:
    rng = random.Random(5)
    router = await cluster.router(await cluster.decode(handler=answer_json(200, {})))
    good = b'{"model": "demo", "messages": [{"role": "user", "content": "hi"}], "n": 1}'
    for _ in range(200):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        status, _ = await _post(router, bytes(data))
        assert status in (200, 400, 404)


async def test_garbage_instead_of_http_is_refused_and_others_go_on(cluster: Cluster) -> None:
    router = await cluster.router(await cluster.decode())
    host, port = router.url.removeprefix("http://").split(":")
    rng = random.Random(6)
    for _ in range(20):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(rng.randbytes(rng.randrange(1, 2000)))
        writer.write_eof()
        async with asyncio.timeout(TIMEOUT_S):
            answer = await reader.read()
        assert answer == b"" or answer.startswith(b"HTTP/1.1 400")
        writer.close()
    assert "[DONE]" in await router.text(BODY)


@pytest.mark.parametrize("declared", [True, False])
async def test_too_large_a_body_is_a_413(cluster: Cluster, declared: bool) -> None:
    decode = await cluster.decode()
    router = await cluster.router(decode, max_body_bytes=100_000)

    async def pieces() -> Any:
        for _ in range(11):
            yield b"x" * 10_000

    data = b"x" * 110_000 if declared else pieces()
    headers = {"content-type": "application/json"}
    url = router.url + "/v1/completions"
    async with router.client.post(url, data=data, headers=headers) as response:
        assert response.status == 413
        assert (await response.json())["error"]["code"] == "request_too_large"
    assert not decode.requests


async def test_a_large_body_within_the_limit_passes(cluster: Cluster) -> None:
    decode = await cluster.decode()
    router = await cluster.router(decode)
    await router.text({**BODY, "prompt": "y" * (3 << 20)})
    assert len(decode.requests[0][1]) > 3 << 20


async def test_a_body_that_never_ends_is_a_408(cluster: Cluster) -> None:
    router = await cluster.router(await cluster.decode(), body_timeout_s=0.2)
    host, port = router.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n"
        b"content-type: application/json\r\ncontent-length: 50\r\n\r\n{"
    )
    async with asyncio.timeout(TIMEOUT_S):
        assert (await reader.readline()).startswith(b"HTTP/1.1 408")
    writer.close()


async def test_a_client_that_leaves_while_sending_its_body_is_forgotten(cluster: Cluster) -> None:
    router = await cluster.router(await cluster.decode())
    host, port = router.url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)))
    client.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n"
        b"content-type: application/json\r\ncontent-length: 50\r\n\r\n{"
    )
    await asyncio.sleep(0)
    client.close()
    assert "[DONE]" in await router.text(BODY)


@pytest.mark.parametrize(
    ("headers", "status"),
    [({"content-encoding": "gzip"}, 415), ({"content-encoding": "identity"}, 200)],
)
async def test_compressed_bodies_are_refused(
    cluster: Cluster, headers: dict[str, str], status: int
) -> None:
    router = await cluster.router(await cluster.decode(handler=answer_json(200, {})))
    assert (await _post(router, b'{"prompt": "x"}', **headers))[0] == status


async def test_an_unknown_model_is_a_404_that_names_the_known(cluster: Cluster) -> None:
    router = await cluster.router(await cluster.decode())
    status, body = await _post(router, b'{"model": "gpt-9", "prompt": "x"}')
    assert status == 404
    assert body["error"]["code"] == "model_not_found"
    assert "'demo'" in body["error"]["message"]
    status, body = await _post(router, b'{"model": "%b"}' % (b"x" * 100_000))
    assert status == 404
    assert len(body["error"]["message"]) < 300


@pytest.mark.parametrize("path", ["/v1/nothing", "/", "/v1/completions"])
async def test_other_paths_and_methods_get_the_error_object(cluster: Cluster, path: str) -> None:
    router = await cluster.router(await cluster.decode())
    async with router.client.get(router.url + path) as response:
        assert response.status == (405 if path == "/v1/completions" else 404)
        assert (await response.json())["error"]["type"] == "invalid_request_error"


async def test_more_open_requests_than_allowed_are_a_503(cluster: Cluster) -> None:
    gate = asyncio.Event()

    async def held(request: Any) -> Any:
        await gate.wait()
        return await answer_json(200, {})(request)

    router = await cluster.router(await cluster.decode(handler=held), max_open_requests=2)
    tasks = [asyncio.create_task(router.text(BODY)) for _ in range(2)]
    await eventually(lambda: router.num_open == 2)
    status, body = await _post(router, b"{}")
    assert (status, body["error"]["code"]) == (503, "overloaded")
    gate.set()
    await asyncio.gather(*tasks)


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        ("Bearer one", 200),
        ("bearer two", 200),
        ("Bearer three", 401),
        ("Bearer ", 401),
        ("Basic one", 401),
        ("one", 401),
        ("", 401),
        ("Bearer \xff", 401),
    ],
)
async def test_keys(cluster: Cluster, authorization: str, status: int) -> None:
    decode = await cluster.decode(handler=answer_json(200, {}))
    router = await cluster.router(decode, api_keys="one, two")
    headers = {"authorization": authorization} if authorization else {}
    got, body = await _post(router, b'{"prompt": "x"}', **headers)
    assert got == status
    if status == 401:
        assert body["error"]["code"] == "invalid_api_key"
        assert not decode.requests


async def test_a_key_may_come_as_anthropic_s_clients_show_it(cluster: Cluster) -> None:
    decode = await cluster.decode(handler=answer_json(200, {}))
    router = await cluster.router(decode, api_keys="one")
    for path, key, status in (
        ("/v1/messages", "one", 200),
        ("/v1/completions", "one", 200),
        ("/v1/messages", "two", 401),
    ):
        async with router.post(BODY, path=path, x_api_key=key) as answer:
            assert answer.status == status
    assert all("x-api-key" not in headers for headers, _ in decode.requests)


async def test_the_status_page_opens_in_a_browser_by_a_login(cluster: Cluster) -> None:
    router = await cluster.router(await cluster.decode(), api_keys="one")
    async with router.client.get(router.url + "/status") as answer:
        assert answer.status == 401
        assert answer.headers["www-authenticate"].startswith("Basic ")
    for password, status in (("one", 200), ("two", 401)):
        login = b64encode(f"anybody:{password}".encode()).decode()
        headers = {"authorization": f"Basic {login}"}
        parts = [(f"/status{part}", status) for part in ("", "/page.css", "/main.js")]
        for path, expected in (*parts, ("/v1/models", 401)):
            async with router.client.get(router.url + path, headers=headers) as answer:
                assert answer.status == expected, path


async def test_only_operators_are_told_what_operators_may_ask(cluster: Cluster) -> None:
    """A client may know what it can ask, and need not learn of the rest by a typing error."""
    router = await cluster.router(await cluster.decode())
    transport = httpx.ASGITransport(create_admin_app(router.services))
    async with (
        httpx.AsyncClient(base_url=router.url) as api,
        httpx.AsyncClient(base_url="http://admin", transport=transport) as admin,
    ):
        for path in ("/nothing", "/metric", "/statu", "/v1/load_lora_adapte"):
            for client, are_named in ((api, False), (admin, True)):
                said = (await client.get(path)).json()["error"]["message"]
                named = [one in said for one in ("/metrics", "/status/", "/reset_prefix_cache")]
                assert named == [are_named] * 3, (path, said)
        assert (await api.get("/metrics")).status_code == 200, "it is there all the same"


async def test_what_is_not_served_is_named_with_what_is(cluster: Cluster) -> None:
    router = await cluster.router(await cluster.decode())
    for method, path, status, words in (
        ("POST", "/chat/completions", 404, ["POST /chat/completions", "/v1/chat/completions?"]),
        ("GET", "/v1/completions//", 404, ["POST /v1/completions"]),
        ("GET", "/v1/model", 404, ["did you mean /v1/models?", "POST /v1/completions"]),
        ("GET", "/", 404, ["/status (the cluster)", "/metrics (counters)", "/docs (the API)"]),
        ("GET", "/nothing/at/all", 404, ["GET /nothing/at/all", "served: ", "GET /health"]),
        ("GET", "/v1/completions", 405, ["/v1/completions takes POST, not GET"]),
        ("POST", "/v1/models/a/b", 405, ["/v1/models/a/b takes GET, not POST"]),
    ):
        async with router.client.request(method, router.url + path) as answer:
            assert answer.status == status
            message = (await answer.json())["error"]["message"]
            assert all(word in message for word in words), message
            assert answer.headers["x-request-id"]
    async with router.client.get(router.url + "/v1/completions") as answer:
        assert answer.headers["allow"] == "POST"


async def test_who_wants_a_websocket_is_led_to_http(cluster: Cluster) -> None:
    """Codex asks so for each conversation with the server that it takes for its maker's."""
    router = await cluster.router(await cluster.decode())
    wish = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    for path, status in (("/v1/responses", 426), ("/v1/nothing", 404), ("/health", 200)):
        async with router.client.get(router.url + path, headers=wish) as answer:
            assert answer.status == status
            if status == 426:
                error = (await answer.json())["error"]
                assert (error["code"], answer.headers["upgrade"]) == ("no_websockets", "HTTP/1.1")
                assert answer.headers["connection"] == "upgrade"


@pytest.mark.parametrize(
    ("store", "paths"),
    [
        (
            "batch",
            [
                ("POST", "/v1/files"),
                ("GET", "/v1/files/"),
                ("GET", "/v1/files/file-1/content"),
                ("DELETE", "/v1/files/file-1"),
                ("POST", "/v1/batches"),
                ("POST", "/v1/batches/batch_1/cancel"),
            ],
        ),
        (
            "response",
            [
                ("GET", "/v1/responses/resp_1"),
                ("DELETE", "/v1/responses/resp_1"),
                ("POST", "/v1/responses/resp_1/cancel"),
                ("GET", "/v1/responses/resp_1/input_items"),
                ("POST", "/v1/conversations"),
                ("GET", "/v1/conversations/conv_1"),
                ("POST", "/v1/conversations/conv_1/items"),
            ],
        ),
    ],
)
async def test_who_wants_what_a_router_does_not_keep_learns_what_that_needs(
    cluster: Cluster, store: str, paths: list[tuple[str, str]]
) -> None:
    router = await cluster.router(await cluster.decode())
    for method, path in paths:
        async with router.client.request(method, router.url + path, json={}) as answer:
            assert answer.status == 404
            error = (await answer.json())["error"]
            assert (error["type"], error["code"]) == ("invalid_request_error", f"no_{store}_store")
            assert f"--{store}-store" in error["message"] and "served" not in error["message"]
    url = router.url + paths[0][1]
    async with router.client.request(
        paths[0][0], url, headers={"anthropic-version": "2023-06-01"}
    ) as answer:
        assert f"--{store}-store" in (await answer.json())["error"]["message"]
    async with router.client.get(router.url + paths[-1][1][:6]) as answer:
        listed = (await answer.json())["error"]["message"].partition("served: ")[2]
        assert listed and paths[-1][1].split("/")[2] not in listed, "nobody is led there"


@pytest.mark.parametrize("prefix", ["", "/llm"])
async def test_a_slash_at_the_end_leads_to_the_path_without(cluster: Cluster, prefix: str) -> None:
    """Proxies in front have changed scheme, host and path: an answer that named them led astray."""
    router = await cluster.router(await cluster.decode(), root_path=prefix)
    for method, path, location in (
        ("POST", "/v1/completions/?a=%2F", "../completions?a=%2F"),
        ("GET", "/status/", "../status"),
        ("GET", "/version/", "../version"),
        ("GET", "/v1/models/", "../models"),
        ("HEAD", "/v1/models/?limit=2", "../models?limit=2"),
    ):
        url = URL(router.url + prefix + path, encoded=True)
        async with router.client.request(method, url, json=BODY, allow_redirects=False) as answer:
            assert (answer.status, answer.headers["location"]) == (307, location)
        async with router.client.request(method, url, json=BODY) as answer:
            assert answer.status == 200
    url = URL(router.url + "/v1/completions%2F", encoded=True)
    async with router.client.post(url, json=BODY, allow_redirects=False) as answer:
        assert answer.status == 404


@pytest.mark.parametrize(
    "path", ["/health", "/ready", "/ping", "/metrics", "/version", "/v1/models", "/v1/models/demo"]
)
async def test_whoever_may_get_may_ask_for_the_head(cluster: Cluster, path: str) -> None:
    """Load balancers check health so, and `curl -I`. The connection is whole afterwards."""
    router = await cluster.router(await cluster.decode())
    async with router.client.get(router.url + path) as answer:
        length = answer.headers["content-length"]
    async with router.client.head(router.url + path) as answer:
        assert (answer.status, await answer.read()) == (200, b"")
        assert path == "/metrics" or answer.headers["content-length"] == length
    async with router.client.post(router.url + path.replace("/ping", "/health")) as answer:
        assert (answer.status, answer.headers["allow"]) == (405, "GET")


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics", "/status", "/ready", "/x"])
async def test_every_answer_has_the_request_s_id(cluster: Cluster, path: str) -> None:
    router = await cluster.router(await cluster.decode())
    mine = {"x-request-id": "mine"}
    async with router.client.get(router.url + path, headers=mine) as answer:
        assert answer.headers.getall("x-request-id") == ["mine"]


@pytest.mark.parametrize("path", ["/v1/models", "/v1/whatever", "//health", "/health/../v1/models"])
async def test_without_a_key_nothing_but_the_probes_answers(cluster: Cluster, path: str) -> None:
    router = await cluster.router(await cluster.decode(), api_keys="one")
    async with router.client.get(router.url + path) as response:
        assert response.status == 401
    for probe in ("/health", "/ready", "/metrics"):
        async with router.client.get(router.url + probe) as response:
            assert response.status == 200


async def test_models_are_those_of_all_nodes(cluster: Cluster) -> None:
    nodes = [await cluster.decode(f"d{i}") for i in range(3)]
    await nodes[1].status.change(model_name="other/model")
    router = await cluster.router(*nodes)
    async with router.client.get(router.url + "/v1/models") as response:
        listed = await response.json()
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["demo", "other/model"]
    async with router.client.get(router.url + "/v1/models/other/model") as response:
        assert (await response.json())["id"] == "other/model"
    async with router.client.get(router.url + "/v1/models/none") as response:
        assert response.status == 404


async def test_a_request_goes_to_a_node_of_its_model(cluster: Cluster) -> None:
    nodes = [await cluster.decode(f"d{i}") for i in range(2)]
    await nodes[1].status.change(model_name="other")
    router = await cluster.router(*nodes)
    for _ in range(5):
        await router.text({"model": "other", "prompt": "x"})
    assert (len(nodes[0].requests), len(nodes[1].requests)) == (0, 5)


async def test_ready_follows_the_nodes_and_health_does_not(cluster: Cluster) -> None:
    decode = await cluster.decode()
    router = await cluster.router(decode)
    async with router.client.get(router.url + "/ready") as response:
        body = await response.json()
        assert (response.status, body["decode_nodes"], body["prefill_nodes"]) == (200, 1, 0)
    await decode.status.change(draining=True)
    await router.wait_usable(decode=0, prefill=0)
    for path, status in (("/ready", 503), ("/health", 200), ("/v1/models", 503)):
        async with router.client.get(router.url + path) as response:
            assert response.status == status


async def test_without_any_node_the_answer_is_a_503(cluster: Cluster) -> None:
    router = await cluster.router()
    async with router.post(BODY) as response:
        assert response.status == 503
        assert response.headers["retry-after"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_errors_of_the_router_have_the_form_of_the_api(cluster: Cluster, path: str) -> None:
    router = await cluster.router(api_keys="key")
    for key, status, kind in (
        ("wrong", 401, "authentication_error"),
        ("key", 503, "overloaded_error"),
    ):
        headers = {"authorization": f"Bearer {key}"}
        asked = router.client.post(router.url + path, json={"messages": []}, headers=headers)
        async with asked as response:
            error = await response.json()
            assert response.status == status
            assert response.headers["content-length"] == str(len(await response.read()))
        assert error["type"] == "error" and error["error"]["type"] == kind
        assert set(error["error"]) == {"type", "message"} and error["error"]["message"]


async def test_metrics_name_the_nodes_that_exist(cluster: Cluster) -> None:
    prefill, decode = await cluster.prefill(), await cluster.decode()
    router = await cluster.router(prefill, decode)
    await router.text(BODY)
    async with router.client.get(router.url + "/metrics") as response:
        text = await response.text()
    assert 'tandem_router_nodes{state="ready",tier="decode"} 1.0' in text
    assert (
        f'tandem_router_node_report_age_seconds{{node="{prefill.target}",tier="prefill"}}' in text
    )
    assert 'tandem_router_placements_total{choice="least_loaded",session="prompt"} 1.0' in text
    seconds = 'tandem_router_time_to_first_byte_seconds_count{model="demo",version="demo"}'
    assert f"{seconds} 1.0" in text
    assert "process_resident_memory_bytes" in text


@pytest.mark.parametrize("item", [b"0", b"[5]", b'{"a":[]}', b'""', b"1e5"])
async def test_bodies_that_would_keep_the_router_busy_reach_neither_parser_nor_node(
    cluster: Cluster, item: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = await cluster.decode()
    router = await cluster.router(decode)
    monkeypatch.setattr("router.edge.api.read_request_info", None)
    data = b'{"messages": [' + b",".join([item] * 1_100_000)[: 7 << 20] + b"]}"
    status, body = await _post(router, data)
    assert (status, body["error"]["code"]) == (400, "request_too_complex")
    assert not decode.requests


def test_a_million_messages_that_are_none_are_read_up_to_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(info, "_read_opening", None)
    body = b'{"messages": [' + b"0," * 1_000_000 + b"0]}"
    read = info.read_request_info("/v1/chat/completions", "r", {}, body)
    assert not read.session_key and not read.is_later_turn


async def test_a_long_body_is_read_beside_the_event_loop(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_loop: list[bool] = []

    def watched(*args: Any) -> Any:
        on_loop.append(threading.current_thread() is threading.main_thread())
        return info.read_request_info(*args)

    monkeypatch.setattr("router.edge.api.read_request_info", watched)
    router = await cluster.router(await cluster.decode())
    for size in (100, 100_000):
        await router.text({**BODY, "prompt": "y" * size})
    assert on_loop == [True, False]


# What a service says of itself -----------------------------------------------------------------


async def test_version_ping_and_load(cluster: Cluster) -> None:
    decode = await cluster.decode(handler=never_answer())
    router = await cluster.router(decode)
    async with router.client.get(router.url + "/version") as answer:
        assert await answer.json() == {"version": importlib.metadata.version("tandem")}
    for method in ("GET", "POST"):
        async with router.client.request(method, router.url + "/ping") as answer:
            assert answer.status == 200
    asked = asyncio.create_task(router.text(BODY))
    await eventually(lambda: decode.num_open == 1)
    async with router.client.get(router.url + "/load") as answer:
        assert await answer.json() == {"server_load": 1}
    asked.cancel()
    await eventually(lambda: decode.num_open == 0)
    await eventually(lambda: router.num_open == 0)
    async with router.client.get(router.url + "/load") as answer:
        assert await answer.json() == {"server_load": 0}


async def test_the_api_is_described_as_a_node_describes_it(cluster: Cluster) -> None:
    decode = await cluster.decode()
    router = await cluster.router(decode, root_path="/llm")
    for path in ("/openapi.json", "/llm/openapi.json"):
        async with router.client.get(router.url + path) as answer:
            found = await answer.json()
    assert found == {**FakeDecodeNode.document, "servers": [{"url": "/llm"}]}
    async with router.client.get(router.url + "/docs") as answer:
        assert answer.headers["content-type"].startswith("text/html")
        assert answer.headers["content-security-policy"].startswith("default-src 'none'")
        assert "GET /fake" in await answer.text()
    await decode.stop_http()
    async with router.client.get(router.url + "/docs") as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (503, "no_node_available")


async def test_only_probes_are_open_where_there_are_keys(cluster: Cluster) -> None:
    router = await cluster.router(await cluster.decode(), api_keys="one")
    for path, status in (("/ping", 200), *((p, 401) for p in ("/version", "/load", "/docs"))):
        async with router.client.get(router.url + path) as answer:
            assert answer.status == status, path
