"""Keys are found where clients put them, and a browser's password opens pages only."""

from __future__ import annotations

import base64
from collections.abc import Mapping

import pytest

from edge.http.errors import Unauthorized
from edge.http.request_head import PAGES, RequestHead


def basic(text: str) -> dict[str, str]:
    return {"authorization": "Basic " + base64.b64encode(text.encode()).decode()}


@pytest.mark.parametrize(
    ("headers", "keys"),
    [
        ({}, []),
        ({"authorization": "Bearer one"}, ["one"]),
        ({"authorization": "bEaReR  one "}, ["one"]),
        ({"authorization": "Bearer "}, []),
        ({"authorization": "one"}, []),
        ({"x-api-key": "one"}, ["one"]),
        ({"x-api-key": ""}, []),
        ({"authorization": "Bearer one", "x-api-key": "two"}, ["one", "two"]),
        (basic("anybody:one"), []),
    ],
)
def test_keys_that_are_shown(headers: Mapping[str, str], keys: list[str]) -> None:
    assert RequestHead(path="/v1/models", headers=headers).shown_keys() == keys


@pytest.mark.parametrize("path", sorted(PAGES))
def test_a_password_opens_a_page_and_changes_nothing(path: str) -> None:
    for method, keys in (("GET", ["o:ne"]), ("HEAD", ["o:ne"]), ("POST", [])):
        head = RequestHead(method=method, path=path, headers=basic("anybody:o:ne"))
        assert head.shown_keys() == keys


@pytest.mark.parametrize("value", ["", "!", "b25l", base64.b64encode(b"\xff:\xfe").decode()])
def test_what_is_no_password_is_no_key(value: str) -> None:
    head = RequestHead(path="/status", headers={"authorization": f"Basic {value}"})
    assert head.shown_keys() == []


def test_a_page_asks_the_browser_for_a_login() -> None:
    for path, scheme in (("/status", "Basic"), ("/v1/models", "Bearer")):
        error = Unauthorized.of(RequestHead(path=path, headers={}), "no")
        assert error.headers()["www-authenticate"].startswith(scheme)
