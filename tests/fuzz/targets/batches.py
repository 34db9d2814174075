"""Forms that clients upload, and the lines of their batches: taken byte for byte, or refused."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from edge.http.errors import HttpError
from router.batches.errors import LineFault
from router.batches.files.form_reader import FormReader
from router.batches.files.line_cutter import LineCutter
from router.batches.lines.input_line import read_line
from router.batches.runs.validation import Validation
from router.request.model_route import plain_route
from router.store.files import FilePart
from tests.fuzz.damage import altered, damaged, json_bytes, packed, unpacked
from tests.fuzz.target import Fault, Target, judged

_ENDPOINT = "/v1/chat/completions"
_LINE: dict[str, Any] = {
    "custom_id": "a",
    "method": "POST",
    "url": _ENDPOINT,
    "body": {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "stream": False},
}
_MOST = 1 << 14


def _form(purpose: bytes, name: bytes, content: bytes) -> bytes:
    field = b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\n' + purpose
    head = b'\r\n--b\r\ncontent-disposition: form-data; name="file"; filename="' + name
    return field + head + b'"\r\n\r\n' + content + b"\r\n--b--\r\n"


@st.composite
def _forms(draw: st.DrawFn) -> bytes:
    """Draws a form, and into which pieces it is cut. One in some is whole, and says what its file
    is."""
    odd = st.sampled_from(
        [b"\r\n", b"\r\n--", b"\r\n--b", b"\n", b"--b--", b"\r", b"\0", b"x" * 99]
    )
    content = b"".join(draw(st.lists(odd | st.binary(max_size=40), max_size=8)))
    form = _form(draw(st.sampled_from([b"batch", b"", b"\xff"])), b"f", content)
    is_whole = draw(st.booleans()) and b"\r\n--b" not in content
    if not is_whole:
        form = draw(damaged(st.just(form)))
    kinds = ["multipart/form-data; boundary=b"]
    if not is_whole:
        kinds += ["multipart/form-data", "multipart/form-data; boundary=" + "b" * 257, "x"]
    kind = draw(
        st.sampled_from(kinds) | st.text(max_size=20) if not is_whole else st.just(kinds[0])
    )
    cut = draw(st.integers(1, 200))
    return packed(
        ("kind", kind.encode("latin-1", "replace")), ("cut", b"%d" % cut), ("form", form),
        *([("file", content)] if is_whole else []),
    )  # fmt: skip


def _check_form(data: bytes) -> None:
    found = dict(unpacked(data))
    form, kind = found.get("form", b""), found.get("kind", b"").decode("latin-1")
    size = (
        max(1, int(found.get("cut", b"9")[:3] or b"9")) if found.get("cut", b"9").isdigit() else 9
    )
    reader = judged(lambda: FormReader.of_headers({"content-type": kind}), HttpError)
    if reader is None:
        return
    cutter, content = LineCutter(_MOST), b""

    def read() -> bool:
        nonlocal content
        for start in range(0, len(form), size):
            for part in cutter.feed(reader.take(form[start : start + size])):
                content += part.data
        content += b"".join(part.data for part in cutter.close())
        return True

    is_read = judged(read, HttpError)
    if "file" in found and not (is_read and reader.is_whole and content == found["file"]):
        raise Fault(f"the file became {content[:200]!r}")


@st.composite
def _lines(draw: st.DrawFn) -> bytes:
    lines = [
        json_bytes(draw(altered({**_LINE, "custom_id": str(number)}, 2)))
        for number in range(draw(st.integers(0, 4)))
    ]
    return draw(damaged(st.just(b"\n".join(lines)), 2))


def _check_lines(data: bytes) -> None:
    """Raises `Fault` where a line passes that is no request."""
    lines = data.split(b"\n")
    found = Validation(_ENDPOINT, 3, plain_route)
    found.take(FilePart(0, len(lines), data))
    found.close()
    for fault in found.faults:
        json.dumps(fault)
    if found.faults:
        return
    for place, text in enumerate(lines):
        line = judged(lambda text=text, place=place: read_line(text, place, _ENDPOINT), LineFault)
        if line is None or json.loads(line.body)["priority"] != (1 << 31) - 1:
            raise Fault(f"line {place} passed and is no request")


TARGETS = [
    Target(name="upload_forms", inputs=_forms(), check=_check_form, examples=500),
    Target(name="batch_lines", inputs=_lines(), check=_check_lines, examples=500),
]
