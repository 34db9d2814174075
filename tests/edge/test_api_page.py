"""The page of an API says all that its document says, and nothing in it is taken for markup."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

from decode_node.http.openapi import openapi_document
from edge.http.api_page import render_api

EVIL = '"><script>alert(1)</script>&{}'


class Page(HTMLParser):
    """Collects links, ids and text; tags must be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.ids: set[str] = set()
        self.tags: set[str] = set()
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag != "meta":
            self._open.append(tag)
        values = dict(attrs)
        self.links.add(values.get("href") or "")
        self.ids.add(values.get("id") or "")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_has_every_path_type_and_field_and_no_dead_link() -> None:
    document = openapi_document()
    page = Page(render_api(document))
    text = set(page.texts)
    for path, methods in document["paths"].items():
        assert {f"{method.upper()} {path}" for method in methods} <= text
    schemas = document["components"]["schemas"]
    assert set(schemas) <= page.ids
    for schema in schemas.values():
        assert set(schema.get("properties", ())) <= text
    inner = {link for link in page.links if link.startswith("#")}
    assert inner and {link[1:] for link in inner} <= page.ids
    assert page.links - inner == {"", "openapi.json"}, "nothing is loaded from elsewhere"
    assert not page.tags & {"script", "link", "img", "iframe"}


def test_whatever_a_node_describes_is_only_text() -> None:
    schema: dict[str, Any] = {
        "description": EVIL,
        "required": [EVIL],
        "properties": {
            EVIL: {"type": EVIL, "description": EVIL, "default": EVIL, "maximum": 7},
            "a": {"enum": [EVIL]},
            "b": {"$ref": "#/components/schemas/" + EVIL},
            "c": {"type": "array", "items": {"anyOf": [{"type": EVIL}, {"type": "null"}]}},
        },
    }
    document = {
        "info": {"title": EVIL, "description": EVIL},
        "paths": {
            EVIL: {EVIL: {"summary": EVIL, "responses": {EVIL: {"description": EVIL}}}},
        },
        "components": {"schemas": {EVIL: schema}},
    }
    text = render_api(document)
    page = Page(text)
    assert "at most 7" in text
    assert "script" not in page.tags
    assert sum(EVIL in text for text in page.texts) >= 10


def test_an_empty_document_is_a_page() -> None:
    assert "Paths" in Page(render_api({})).texts
