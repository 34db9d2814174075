"""Images, where they are said to be, and the templates of chats."""

from __future__ import annotations

import io
import json
from functools import cache
from typing import Any

import numpy as np
from hypothesis import strategies as st
from PIL import Image, ImageOps
from yarl import URL

from decode_node.images.fetch import AllowedHosts, ImageFetcher
from decode_node.images.fit import fitted
from decode_node.images.image_reader import _of_data_url
from decode_node.images.preprocess import ImageError, preprocess
from engine.frontend.templates.chat_template import ChatTemplate, ChatTemplateError
from engine.images.vision_spec import PixelSpec
from tests.fuzz.damage import SCALARS, WORDS, altered, damaged, packed, unpacked
from tests.fuzz.target import Fault, Target, judged, same

_PIXELS = PixelSpec(patch_size=14, min_pixels=28 * 28, max_pixels=28 * 28 * 16)
_MOST = 1 << 16
_HOSTS = AllowedHosts.of("img.example.com, *.cdn.example.com, odd.example.com:8443")


@cache
def _encoded() -> list[bytes]:
    """Returns small images in all formats and kinds of pixels that are read."""
    found = []
    draw = np.random.default_rng(1)
    for mode, shape in (("RGB", (20, 30, 3)), ("L", (9, 9)), ("RGBA", (16, 8, 4)), ("P", (8, 8))):
        image = Image.fromarray(
            draw.integers(0, 255, shape, np.uint8), mode if mode != "P" else "L"
        )
        image = image.convert(mode)
        for kind in ("PNG", "JPEG", "WEBP", "GIF"):
            if kind == "JPEG" and mode in ("RGBA", "P"):
                continue
            options: dict[str, Any] = {}
            if kind == "JPEG":
                exif = Image.Exif()
                exif[0x0112] = 6
                options["exif"] = exif.tobytes()
            with io.BytesIO() as file:
                image.save(file, kind, **options)
                found.append(file.getvalue())
    return found


def _check_image(data: bytes) -> None:
    """An image is refused, or is what Pillow alone makes of it."""
    found = judged(lambda: preprocess(data, _PIXELS, _MOST), ImageError, own_words=True)
    if found is None:
        return
    size = _PIXELS.patch_size
    if len(found.patches) != found.rows * found.columns * _PIXELS.unit**2 * 3:
        raise Fault(f"{found.rows} x {found.columns} tokens with {len(found.patches)} bytes")
    with Image.open(io.BytesIO(data)) as image:
        turned = ImageOps.exif_transpose(image).convert("RGB")
    height, width, *_ = fitted(turned.height, turned.width, _PIXELS)
    same((found.rows * 2 * size, found.columns * 2 * size), (height, width), "the size")
    theirs = np.asarray(turned.resize((width, height), Image.Resampling.BICUBIC))
    same(sorted(found.patches), sorted(theirs.tobytes()), "the pixels")


_PARTS = st.sampled_from(
    [
        "http://",
        "https://",
        "HTTP://",
        "ftp://",
        "file:///",
        "data:",
        "//",
        "/",
        "\\",
        "@",
        ":",
        ":80",
        ":443",
        ":8443",
        ":0",
        ":99999",
        "#",
        "?",
        "img.example.com",
        "a.cdn.example.com",
        "cdn.example.com",
        "odd.example.com",
        "127.0.0.1",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "0x7f.1",
        "2130706433",
        "localhost",
        "%2e",
        "%40",
        "%00",
        "。",
        "ı",
        "xn--",
        "..",
        ".",
        "user:word@",
        "\t",
        "\r\n",
        " ",
        "a.png",
        "é",
    ]
)


def _check_url(data: bytes) -> None:
    """An image is fetched from the place that was checked, though the HTTP library reads the
    URL anew."""
    url = data.decode("utf-8", "replace")
    fetcher = ImageFetcher(_HOSTS, max_bytes=100, timeout_s=1.0)
    judged(lambda: _of_data_url(url, 100, False), ImageError)
    found = judged(lambda: fetcher.checked(url), ImageError)
    if found is None:
        return
    _, host, port = found
    try:
        dialled = URL(url)
    except ValueError:
        return
    same((host, port), ((dialled.host or "").rstrip("."), dialled.port), "the place")
    if not _HOSTS.allow(host, port, dialled.scheme):
        raise Fault(f"{host}:{port} is not allowed")


_TEMPLATES = [
    """{% for m in messages %}<|{{ m.role }}|>{{ m.content }}
{%- if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}""",
    """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}
{{ message['content'] | trim }}{% elif message.content is string %}
{{ message.content.split('</think>')[-1] }}{% else %}{% for p in message.content %}{{ p.text }}
{% endfor %}{% endif %}{% endfor %}{{ strftime_now('%Y') }}""",
    """{%- set ns = namespace(x=0) %}{% for m in messages[::-1] %}{% set ns.x = ns.x + 1 %}
{{ loop.index0 ~ ns.x }}{% generation %}{{ m['content'][0:3] }}{% endgeneration %}{% endfor %}
{{ raise_exception('no') if ns.x > 3 }}""",
]
_CHAT = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {
        "role": "assistant",
        "content": "a</think>b",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
    },
]


@st.composite
def _chats(draw: st.DrawFn) -> bytes:
    source = draw(damaged(st.sampled_from(_TEMPLATES).map(str.encode), 2))
    messages = draw(altered(_CHAT, 3))
    variables = draw(st.dictionaries(WORDS, SCALARS, max_size=2))
    text = json.dumps([messages, variables]).encode()
    return packed(("template", source), ("messages", text))


def _check_chat(data: bytes) -> None:
    given = dict(unpacked(data))
    try:
        messages, variables = json.loads(given["messages"])
    except (KeyError, ValueError, RecursionError, TypeError):
        return
    if not isinstance(messages, list) or not isinstance(variables, dict):
        return
    # A message is an object by the time it gets here.
    messages = [one for one in messages if isinstance(one, dict)]
    source = given.get("template", b"").decode("utf-8", "replace")

    def render() -> None:
        template = ChatTemplate(source, {"bos_token": "<s>"})
        template.render(messages, variables={str(k): v for k, v in variables.items()})

    judged(render, ChatTemplateError, own_words=False)


TARGETS = [
    Target(
        name="images",
        inputs=st.deferred(lambda: damaged(st.sampled_from(_encoded()), 4)),
        check=_check_image,
        examples=400,
    ),
    Target(
        name="image_urls",
        check=_check_url,
        examples=1000,
        inputs=st.lists(_PARTS, max_size=7).map(lambda parts: "".join(parts).encode()),
    ),
    Target(name="chat_templates", inputs=_chats(), check=_check_chat, examples=400),
]
