"""What the router reads of a request: just enough to place it.

Nothing is checked beyond JSON syntax: the decode node validates, with the tokenizer at hand. A
field of a wrong type counts as absent here and is refused there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec
import xxhash

from router.errors import BadRequest

_MAX_KEY_LENGTH = 256
_PREFIX_BYTES = 4096
"""About 1024 tokens of raw text: past a short shared opening, still equal in every later turn."""
_BYTES_PER_TOKEN = 4

_Body = dict[str, msgspec.Raw]
_decode_body = msgspec.json.Decoder(_Body).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_text = msgspec.json.Decoder(str).decode

_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class SessionSource(StrEnum):
    """What told the router which requests belong together."""

    HEADER = "header"
    CACHE_KEY = "prompt_cache_key"
    PROMPT = "prompt"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestInfo:
    """`session_key` is empty when nothing tells the session. `session_id` is what the client
    called it, if it did. `num_prompt_tokens` is a guess from the length of the text."""

    path: str
    request_id: str
    model: str = ""
    session_key: bytes = b""
    session_source: SessionSource = SessionSource.NONE
    session_id: str = ""
    num_prompt_tokens: int = 0


def read_request_info(
    path: str, request_id: str, headers: Mapping[str, str], body: bytes
) -> RequestInfo:
    """Raises `BadRequest` when the body is not a JSON object."""
    fields = _read_body(body)
    prompt = fields.get("messages") or fields.get("prompt") or msgspec.Raw(b"")
    model = _text(fields.get("model"))
    source, session = _session(headers, fields)
    session_id = session.decode() if source is not SessionSource.PROMPT else ""
    return RequestInfo(
        path=path,
        request_id=request_id,
        model=model,
        session_key=_session_key(model, source, session),
        session_source=source,
        session_id=session_id,
        num_prompt_tokens=estimate_tokens(bytes(prompt)),
    )


def _read_body(body: bytes) -> _Body:
    try:
        return _decode_body(body)
    except msgspec.ValidationError:
        raise BadRequest("The request body must be a JSON object.") from None
    except msgspec.DecodeError as error:
        raise BadRequest(f"The request body is not valid JSON: {error}.") from None
    except UnicodeDecodeError:
        raise BadRequest("The request body is not valid JSON: it is not UTF-8.") from None
    except RecursionError:
        raise BadRequest("The JSON of the request body is nested too deeply.") from None


def _session(headers: Mapping[str, str], fields: _Body) -> tuple[SessionSource, bytes]:
    """The first of: the client's header, its `prompt_cache_key`, the opening of the prompt."""
    if is_plain_key(header := headers.get("x-session-id", "")):
        return SessionSource.HEADER, header.encode()
    if is_plain_key(cache_key := _text(fields.get("prompt_cache_key"))):
        return SessionSource.CACHE_KEY, cache_key.encode()
    if "messages" in fields:
        opening = _first_messages(fields["messages"])
    else:
        opening = _prompt_opening(fields.get("prompt"))
    return (SessionSource.PROMPT, opening) if opening else (SessionSource.NONE, b"")


def _session_key(model: str, source: SessionSource, session: bytes) -> bytes:
    """16 bytes; equal for requests of one session to one model."""
    if source is SessionSource.NONE:
        return b""
    return xxhash.xxh3_128_digest(b"\0".join((model.encode(), source.value.encode(), session)))


def is_plain_key(text: str) -> bool:
    """Printable ASCII of a reasonable length, so that it may become a header value."""
    return 0 < len(text) <= _MAX_KEY_LENGTH and text.isascii() and text.isprintable()


def _first_messages(raw: msgspec.Raw) -> bytes:
    """The messages up to the first of the user: the same in every turn of a conversation, and
    different between conversations that share a system prompt."""
    opening: list[bytes] = []
    for message in _list(raw):
        opening.append(bytes(message))
        if _role(message) == "user":
            break
    return b"\n".join(opening)


def _prompt_opening(raw: msgspec.Raw | None) -> bytes:
    """The first bytes of a raw prompt (text or token ids; of several prompts, the first)."""
    if raw is None:
        return b""
    return bytes(raw).lstrip(b" \t\r\n[")[:_PREFIX_BYTES]


def estimate_tokens(prompt: bytes) -> int:
    """From JSON text: token ids are counted by their commas, text by its length."""
    if prompt.lstrip(b" \t\r\n[")[:1].isdigit():
        return prompt.count(b",") + 1
    return len(prompt) // _BYTES_PER_TOKEN


def _text(raw: msgspec.Raw | None) -> str:
    try:
        return _decode_text(raw) if raw is not None else ""
    except _UNREADABLE:
        return ""


def _list(raw: msgspec.Raw) -> list[msgspec.Raw]:
    try:
        return _decode_list(raw)
    except _UNREADABLE:
        return []


def _role(message: msgspec.Raw) -> str:
    try:
        return _text(_decode_body(message).get("role"))
    except _UNREADABLE:
        return ""
