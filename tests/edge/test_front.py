"""A service is seen from outside: by pages of other sites, below other paths, by ids of answers."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from pydantic import ValidationError

from edge.http.front import HttpFront
from edge.http.settings import HttpEdgeSettings
from tests.edge.test_guarded_connections import KEY, POST, read_end, service

SITE = b"origin: https://a.example\r\n"
ONE_SITE = HttpFront(origins=["https://a.example"])
ALLOWED = b"access-control-allow-origin: https://a.example\r\n"
END = b"connection: close\r\n\r\n"
PREFLIGHT = (
    b"OPTIONS /v1/completions HTTP/1.1\r\nhost: a\r\naccess-control-request-method: POST\r\n"
    b"access-control-request-headers: content-type, authorization\r\n"
)


async def exchange(front: HttpFront, request: bytes) -> tuple[bytes, list[tuple[str, object]]]:
    """Returns the answer, and what reached the application."""
    async with service(front) as running:
        reader, writer = await running.connect(request)
        answer = await read_end(reader)
        writer.close()
        return answer, running.asked


async def test_a_page_asks_first_without_a_key_and_hears_what_it_may() -> None:
    answer, asked = await exchange(ONE_SITE, PREFLIGHT + SITE + END)
    assert answer.startswith(b"HTTP/1.1 204 ")
    assert ALLOWED in answer
    assert b"access-control-allow-headers: content-type, authorization\r\n" in answer
    assert b"access-control-allow-methods: GET, POST\r\n" in answer
    assert not asked


async def test_other_sites_are_told_no_and_why() -> None:
    site = SITE.replace(b"a.example", b"a.example.evil")
    answer, asked = await exchange(ONE_SITE, PREFLIGHT + site + END)
    assert answer.startswith(b"HTTP/1.1 403 ")
    assert b"--allowed-origins" in answer
    assert b"access-control-allow" not in answer
    assert not asked
    answer, _ = await exchange(ONE_SITE, b"GET /x HTTP/1.1\r\nhost: a\r\n" + KEY + site + END)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"access-control-allow" not in answer
    assert b"vary: origin\r\n" in answer


async def test_answers_and_refusals_of_the_connection_are_for_pages_too() -> None:
    get = b"GET /x HTTP/1.1\r\nhost: a\r\nx-request-id: mine\r\n" + SITE
    for key, status in ((KEY, b"200"), (b"", b"401")):
        answer, _ = await exchange(ONE_SITE, get + key + END)
        assert answer.startswith(b"HTTP/1.1 " + status)
        assert ALLOWED in answer
        assert answer.count(b"x-request-id: mine\r\n") == 1
        assert b"x-request-id" in answer[answer.index(b"access-control-expose-headers") :]


async def test_any_site_may_be_allowed_but_never_with_a_login() -> None:
    answer, _ = await exchange(
        HttpFront(origins=["*"]), b"GET /x HTTP/1.1\r\nhost: a\r\n" + KEY + SITE + END
    )
    assert ALLOWED in answer
    assert b"allow-credentials" not in answer


@pytest.mark.parametrize("method", [b"POST", b"GET"])
async def test_a_preflight_is_known_by_its_method_alone(method: bytes) -> None:
    """Else its headers would let anything past the key."""
    request = PREFLIGHT.replace(b"OPTIONS", method) + SITE + END
    answer, asked = await exchange(ONE_SITE, request)
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert not asked


async def test_without_the_setting_nobody_asks_first() -> None:
    answer, asked = await exchange(HttpFront(), PREFLIGHT + SITE + END)
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert b"access-control" not in answer
    assert not asked


async def test_below_a_root_path_requests_come_with_it_or_without() -> None:
    front = HttpFront(root_path="/llm")
    for path, status, inner in (
        (b"/llm/health", b"200", "/health"),
        (b"/health", b"200", "/health"),
        (b"/llm/x", b"401", None),
        (b"/llmhealth", b"401", None),
        (b"/llm//health", b"401", None),
    ):
        answer, asked = await exchange(front, b"GET " + path + b" HTTP/1.1\r\nhost: a\r\n" + END)
        assert answer.startswith(b"HTTP/1.1 " + status), path
        assert asked == ([(inner, None)] if inner else [])


FORM = b"application/x-www-form-urlencoded"


@pytest.mark.parametrize(
    ("said", "is_refused"),
    [
        (SITE, True),
        (b"origin: null\r\n", True),
        (b"sec-fetch-site: cross-site\r\n", True),
        (b"sec-fetch-site: same-site\r\norigin: http://a\r\n", True),
        (b"sec-fetch-site: same-origin\r\norigin: https://outside\r\n", False),
        (b"sec-fetch-site: none\r\n", False),
        (b"origin: http://a\r\n", False),
        (b"", False),
    ],
)
@pytest.mark.parametrize("kind", [FORM, b"text/plain;charset=UTF-8", b"multipart/form-data", None])
async def test_what_another_site_s_page_sends_unasked_reaches_nothing(
    said: bytes, kind: bytes | None, is_refused: bool
) -> None:
    """Also what has no body, and where nothing has to show a key: on operators' paths."""
    line = b"" if kind is None else b"content-type: " + kind + b"\r\n"
    request = b"POST /x HTTP/1.1\r\nhost: a\r\n" + KEY + line + said + END
    answer, asked = await exchange(HttpFront(), request)
    assert (b"origin_refused" in answer) == is_refused
    assert answer.startswith(b"HTTP/1.1 403 ") == is_refused
    assert bool(asked) != is_refused
    if b"origin:" in said:
        answer, _ = await exchange(HttpFront(origins=["*"]), request)
        assert b"origin_refused" not in answer
    for path, is_changed in ((b"/x", False), (b"/flush_cache?timeout=1", True)):
        answer, _ = await exchange(HttpFront(), request.replace(b"POST /x", b"GET " + path))
        assert (b"origin_refused" in answer) == (is_changed and is_refused), path


@pytest.mark.parametrize(
    ("method", "path", "said", "is_refused"),
    [
        (b"GET", b"/flush_cache", b"user-agent: Mozilla/5.0 (X11)\r\n", True),
        (b"GET", b"/flush_cache", b"user-agent: Mozilla/5.0\r\nreferer: http://a/\r\n", True),
        (b"GET", b"/flush_cache", b"user-agent: Mozilla/5.0\r\nsec-fetch-site: none\r\n", False),
        (b"GET", b"/flush_cache", b"user-agent: Mozilla/5.0\r\norigin: http://a\r\n", False),
        (b"GET", b"/flush_cache", b"user-agent: curl/7.88.1\r\n", False),
        (b"GET", b"/flush_cache", b"user-agent: python-requests/2.32.3\r\n", False),
        (b"GET", b"/flush_cache", b"", False),
        (b"GET", b"/status", b"user-agent: Mozilla/5.0 (X11)\r\n", False),
        (b"POST", b"/flush_cache", b"user-agent: Mozilla/5.0 (X11)\r\n", False),
    ],
)
async def test_an_image_in_a_page_changes_nothing_where_browsers_name_no_site(
    method: bytes, path: bytes, said: bytes, is_refused: bool
) -> None:
    """They name it over HTTPS and to loopback. A form's origin they always tell."""
    request = method + b" " + path + b" HTTP/1.1\r\nhost: a\r\n" + KEY + said + END
    answer, asked = await exchange(HttpFront(), request)
    assert (b"origin_refused" in answer) == is_refused
    assert bool(asked) != is_refused


@pytest.mark.parametrize(
    ("kind", "is_taken"),
    [
        (b"application/json", True),
        (b"Application/JSON; charset=utf-8", True),
        (b"application/vnd.x+json", True),
        (b"text/plain", False),
        (FORM, False),
        (b"multipart/form-data; boundary=x", False),
        (b"text/x+json", False),
        (b"application/jsonp", False),
        (None, False),
    ],
)
async def test_only_what_says_json_is_read(kind: bytes | None, is_taken: bool) -> None:
    """A page of any site can make a browser send the others."""
    line = b"" if kind is None else b"content-type: " + kind + b"\r\n"
    head = POST.replace(b"content-type: application/json\r\n", line).replace(b"500", b"2")
    answer, _ = await exchange(HttpFront(), head + KEY + END + b"{}")
    assert answer.startswith(b"HTTP/1.1 " + (b"200 " if is_taken else b"415 "))
    if not is_taken:
        assert b"application/json" in answer and b"curl: -H" in answer
        assert kind is None or kind.partition(b";")[0] in answer


async def test_every_refusal_of_a_connection_has_the_request_s_id() -> None:
    mine = b"x-request-id: mine\r\n"
    for request in (
        b"GET /x HTTP/1.1\r\nhost: a\r\n" + mine + b"\r\n",
        b"GET /x HTTP/1.1\r\nhost: a\r\nhost: b\r\n" + mine + b"\r\n",
        POST + KEY + mine + b"transfer-encoding: chunked\r\n\r\n",
        POST.replace(b"500", b"5000") + KEY + mine + b"\r\n",
    ):
        answer, _ = await exchange(HttpFront(), request)
        assert b"x-request-id: mine\r\n" in answer, answer
    answer, _ = await exchange(HttpFront(), b"not http\r\n\r\n")
    assert b"x-request-id: " in answer


def test_settings_name_what_is_no_origin_and_no_path() -> None:
    given = partial(HttpEdgeSettings, send_timeout_s=20.0)
    settings = given(allowed_origins="https://a.example, http://[::1]:3000", root_path="/llm/")
    front = settings.http_front()
    assert list(front.origins) == ["https://a.example", "http://[::1]:3000"]
    assert front.root_path == "/llm"
    as_vllm = given(allowed_origins='["*"]').http_front()
    assert list(as_vllm.origins) == ["*"]
    for wrong in ("a.example", "https://a/b", "https://a, *.b", "[1", "null"):
        with pytest.raises(ValidationError, match="allowed_origins"):
            given(allowed_origins=wrong)
    for wrong in ("llm", "/a b", "//", "/a/../b?"):
        with pytest.raises(ValidationError, match="root_path"):
            given(root_path=wrong)


async def test_a_page_that_leaves_costs_nothing() -> None:
    async with service(ONE_SITE) as running:
        for _ in range(3):
            _, writer = await running.connect(PREFLIGHT + SITE)
            writer.transport.abort()
        async with asyncio.timeout(30):
            await running.until_open(0)
