"""Renders an OpenAPI document as one HTML page: no script, nothing to load, every text escaped."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}

_REF = "#/components/schemas/"
_BOUNDS = {
    "minimum": "at least {}",
    "maximum": "at most {}",
    "exclusiveMinimum": "more than {}",
    "exclusiveMaximum": "less than {}",
    "maxItems": "{} items at most",
    "maxLength": "{} characters at most",
}

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 14px/1.5 system-ui, sans-serif; margin: 1.5rem; max-width: 70rem; color: #222 }}
h1 {{ font-size: 1.3rem }} h2 {{ font-size: 1.1rem; margin-top: 2rem }}
h3 {{ font-size: 1rem; margin-top: 1.5rem }}
table {{ border-collapse: collapse; width: 100% }}
td, th {{ padding: .15rem .7rem; text-align: left; vertical-align: top }}
th {{ border-bottom: 1px solid #999 }} tr:nth-child(odd) td {{ background: #f4f4f4 }}
code {{ font-size: .95em }} b.required {{ color: #a40000 }}
@media (prefers-color-scheme: dark) {{
body {{ color: #ddd; background: #181818 }} tr:nth-child(odd) td {{ background: #222 }}
a {{ color: #8ab4f8 }} b.required {{ color: #ff8080 }} }}
</style></head><body>
<h1>{title}</h1>
<p>{description}</p>
<p>Bodies are JSON and are sent with <code>Content-Type: application/json</code>; keys as
<code>Authorization: Bearer KEY</code> or <code>x-api-key: KEY</code>. For programs:
<a href="openapi.json">openapi.json</a>.</p>
{sections}
</body></html>
"""

_NO_BOUND = 1 << 53
"""Bounds from here on are those of how numbers are kept."""

Schema = Mapping[str, Any]


def render_api(document: Schema) -> str:
    info = document.get("info", {})
    operations = [
        _operation(path, method, operation)
        for path, methods in document.get("paths", {}).items()
        for method, operation in methods.items()
    ]
    schemas = document.get("components", {}).get("schemas", {})
    kinds = [_schema(name, schema) for name, schema in sorted(schemas.items())]
    sections = ["<h2>Paths</h2>", *operations, "<h2>Types</h2>", *kinds]
    return _PAGE.format(
        title=escape(str(info.get("title", ""))),
        description=escape(str(info.get("description", ""))),
        sections="\n".join(sections),
    )


def _operation(path: str, method: str, operation: Schema) -> str:
    parts = [f"<h3><code>{escape(method.upper())} {escape(path)}</code></h3>"]
    if summary := operation.get("summary"):
        parts.append(f"<p>{escape(str(summary))}</p>")
    if body := operation.get("requestBody"):
        parts.append(f"<p>Body: {_content(body)}.</p>")
    rows = [
        f"<tr><td>{escape(status)}</td><td>{escape(str(answer.get('description', '')))}</td>"
        f"<td>{_content(answer)}</td></tr>"
        for status, answer in operation.get("responses", {}).items()
    ]
    return "\n".join([*parts, _table(("status", "meaning", "body"), rows)])


def _content(holder: Schema) -> str:
    kinds = [content.get("schema", {}) for content in holder.get("content", {}).values()]
    shown = [
        _type(kind) if "$ref" in kind else escape(kind.get("description", "")) for kind in kinds
    ]
    return " or ".join(text for text in shown if text)


def _schema(name: str, schema: Schema) -> str:
    head = f'<h3 id="{escape(name)}"><code>{escape(name)}</code></h3>'
    about = f"<p>{escape(str(schema['description']))}</p>" if "description" in schema else ""
    fields = schema.get("properties")
    if not fields:
        return f"{head}\n{about}\n<p>{_type(schema)}</p>"
    required = schema.get("required", ())
    rows = [_field(field, kind, field in required) for field, kind in fields.items()]
    return f"{head}\n{about}\n{_table(('field', 'type', 'meaning'), rows)}"


def _field(name: str, schema: Schema, is_required: bool) -> str:
    notes = [escape(note) for note in _notes(schema)]
    if is_required:
        notes.insert(0, '<b class="required">required</b>')
    return (
        f"<tr><td><code>{escape(name)}</code></td><td>{_type(schema)}</td>"
        f"<td>{'; '.join(notes)}</td></tr>"
    )


def _notes(schema: Schema) -> Iterator[str]:
    if "description" in schema:
        yield str(schema["description"]).rstrip(".")
    for part in (schema, *schema.get("anyOf", ())):
        for word, text in _BOUNDS.items():
            if word in part and abs(part[word]) < _NO_BOUND:
                yield text.format(part[word])
    if schema.get("default") is not None:
        yield f"default {json.dumps(schema['default'])}"


def _type(schema: Schema) -> str:
    """Returns how a type is called; a link where it has a name."""
    if "$ref" in schema:
        name = escape(str(schema["$ref"]).removeprefix(_REF))
        return f'<a href="#{name}">{name}</a>'
    for word in ("anyOf", "oneOf", "allOf"):
        if word in schema:
            kinds = dict.fromkeys(_type(part) for part in schema[word])
            return " or ".join(kind for kind in kinds if kind != "null")
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f"<code>{escape(json.dumps(value))}</code>" for value in values)
    if "prefixItems" in schema:
        return f"[{', '.join(_type(item) for item in schema['prefixItems'])}]"
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return escape(str(schema.get("type", "anything")))


def _table(head: tuple[str, ...], rows: list[str]) -> str:
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f"<table><tr>{names}</tr>\n{chr(10).join(rows)}\n</table>" if rows else ""
