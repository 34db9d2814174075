"""Reads of a request what the router needs to place it, and no more.

Nothing is checked beyond JSON syntax: the decode node validates, with the tokenizer at hand. Bodies
are scanned, and passed on as they came: no values are made of what may be long, and nothing long is
copied but prompts with images. A field of a wrong type counts as absent here and is refused there.
So a prompt may be of any length here: it counts for what the model can take at most
(`RequestInfo.bounded`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self, TypeAlias

import msgspec
import xxhash

from edge.http import headers as names
from edge.http.bodies.json_fault import json_fault
from edge.http.errors import BadRequest, HttpError
from router.request.first_items import reader_of_first
from router.request.image_urls import image_names, may_hold_images, shortened
from router.request.model_route import ModelRoute, plain_route
from router.request.prompt_blocks import BLOCK_BYTES, MOST_BYTES, hash_blocks
from router.request.prompt_parts import PromptPart, parts_of, several_prompts
from router.request.prompt_text import PromptText, estimate_tokens
from router.request.proxied_path import PROXIED_PATHS, ProxiedPath
from router.request.tenants import ANYONE, Priority, Tenant

_MAX_KEY_LENGTH = 256
_MAX_ROLE_BYTES = 64
_MAX_TEXT_BYTES = 64 << 10
_MAX_LITERAL_BYTES = 64
_PREFIX_BYTES = 4096
"""About 1024 tokens of raw text: past a short shared opening, still equal in every later turn."""
_LIST = re.compile(rb"[ \t\r\n]*\[")
_MAX_COUNT = 1 << 31
_ASKED_PRIORITIES = {
    "interactive": Priority.INTERACTIVE,
    "standard": Priority.STANDARD,
    "batch": Priority.BATCH,
}


class _Message(msgspec.Struct):
    role: msgspec.Raw = msgspec.Raw(b"")

    @property
    def is_of_user(self) -> bool:
        return len(memoryview(self.role)) <= _MAX_ROLE_BYTES and _text(self.role) == "user"


_Body = dict[str, msgspec.Raw]
Bytes: TypeAlias = bytes | memoryview
_NOTHING = msgspec.Raw(b"")
_OWN_NAMES = ("request_id", "rid")
"""Fields in which a client names the answer."""
_NULL = msgspec.Raw(b"null")
_decode_body = msgspec.json.Decoder(_Body).decode
_MOST_ASKED = 1024
"""Answers that are counted by the items of a list; nodes give far fewer."""
_MOST_OPENING = 256
"""Messages of the beginning of a conversation."""
_read_asked = reader_of_first(_MOST_ASKED, msgspec.Raw)
_read_opening = reader_of_first(_MOST_OPENING, msgspec.Raw)
_read_roles = reader_of_first(_MOST_OPENING + 1, _Message)
_decode_text = msgspec.json.Decoder(str).decode
_decode_count = msgspec.json.Decoder(int | float).decode

_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class SessionSource(StrEnum):
    """Says by what the router knows which requests belong together."""

    HEADER = "header"
    FIELD = "session_id"
    CACHE_KEY = "prompt_cache_key"
    PROMPT = "prompt"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestInfo:
    """Holds what places a request.

    Attributes:
        generates: False for a question that any decode node answers at once.
        is_stream: The client wants events, as they come.
        asked_model: The name that the client wrote; empty when it wrote none.
        given_names: The client's own for the answer, besides `request_id`.
        model_name: The model it stands for, whose versions may be several.
        model: The version that serves it, by its nodes' first name for it.
        adapter: The adapter of that model that answers; empty for the model itself.
        adapter_digest: What it is.
        session_key: Empty when nothing tells the session.
        session_id: What the client called the session, if it did.
        is_later_turn: The conversation has gone on after its first question.
        num_prompt_tokens: A guess from the lengths of text and tools.
        num_tool_tokens: Of these, those of tools, which are in no block.
        prefix_blocks: Hash chain of the prompt's text (`router.request.prompt_blocks`), or of the
            first prompt's.
        tokens_per_block: About this many tokens are in each block.
        max_tokens: Longest answer that the client wants; 0 when it does not say.
        num_prompts: This many it has, each with an answer of its own.
        parts: Of several prompts, what places each; empty: there is one.
        num_answers: This many that it wants, to all prompts together.
        priority: Never better than the tenant's.
        endpoint: The node that it must go to, as an operator names nodes; empty: any.
        ttft_deadline_s: The client's time to the first token, in seconds; 0 when it does not say.
    """

    path: str
    request_id: str
    given_names: tuple[str, ...] = ()
    generates: bool = True
    is_stream: bool = False
    asked_model: str = ""
    model_name: str = ""
    model: str = ""
    adapter: str = ""
    adapter_digest: str = ""
    session_key: bytes = b""
    session_source: SessionSource = SessionSource.NONE
    session_id: str = ""
    is_later_turn: bool = False
    num_prompt_tokens: int = 0
    num_tool_tokens: int = 0
    prefix_blocks: tuple[int, ...] = ()
    tokens_per_block: float = 0.0
    max_tokens: int = 0
    num_prompts: int = 1
    parts: tuple[PromptPart, ...] = ()
    num_answers: int = 1
    tenant: Tenant = ANYONE
    priority: Priority = Priority.STANDARD
    endpoint: str = ""
    ttft_deadline_s: float = 0.0

    @property
    def is_idle_class(self) -> bool:
        """Returns whether it may only use what no other request does."""
        return self.priority is Priority.IDLE

    def bounded(self, max_model_len: int) -> Self:
        """Returns it with no more tokens than its model can take, whose nodes refuse or cut what
        is longer. 0: the model's length is not known."""
        if not max_model_len:
            return self
        num_tokens = min(self.num_prompt_tokens, max_model_len * self.num_prompts)
        share = num_tokens / self.num_prompt_tokens if num_tokens else 1.0
        return replace(
            self,
            num_prompt_tokens=num_tokens,
            num_tool_tokens=int(self.num_tool_tokens * share),
            tokens_per_block=self.tokens_per_block * share,
            max_tokens=min(self.max_tokens, max_model_len),
            parts=tuple(replace(p, num_tokens=int(p.num_tokens * share)) for p in self.parts),
        )

    def by_prompt(self) -> tuple[Self, ...]:
        """Returns a request for each part, or itself if there is one prompt."""
        if not self.parts:
            return (self,)
        return tuple(
            replace(
                self,
                num_prompt_tokens=one.num_tokens,
                num_tool_tokens=0,
                prefix_blocks=one.prefix_blocks,
                parts=(),
            )
            for one in self.parts
        )


def read_request_info(
    path: str,
    request_id: str,
    headers: Mapping[str, str],
    body: bytes,
    tenant: Tenant = ANYONE,
    route: Callable[[str], ModelRoute] = plain_route,
) -> RequestInfo:
    """Reads it. `path` is one of `PROXIED_PATHS`; `route` leads the model's name to what serves it.
    Raises `BadRequest` when the body is not a JSON object, and what `route` raises."""
    fields = _read_body(body)
    form = PROXIED_PATHS[path]
    asked, led = _model(fields, form, route)
    given = _first_given(fields, form.prompt)
    options = _read_part(fields.get(form.options, _NOTHING)) if form.options else fields
    has_images = given is not None and may_hold_images(body)
    if given is not None and has_images:
        given = msgspec.Raw(shortened(bytes(given)))
    text = PromptText.of(fields.get(form.preamble, _NOTHING), given or _NOTHING)
    opening, is_later_turn = _opening(given)
    # Further questions about the same images belong where these are.
    first: Sequence[Bytes] = (has_images and image_names(opening)) or opening
    if not first and form.takes_text and text.prompt:
        first = (text.prompt[:_PREFIX_BYTES],)
    source, session = _session(headers, fields, (text.preamble, *_lines(first)) if first else ())
    session_key = _session_key(tenant, led.name + led.adapter_digest, source, session)
    version = led.version(session_key or request_id.encode())
    # Templates write tools in front of the turns; agents bring more of them than of all else.
    num_tool_tokens = estimate_tokens(fields.get("tools", _NOTHING))
    prompts = several_prompts(given)
    num_prompts, seed = max(1, len(prompts)), _chain_seed(tenant, version + led.adapter_digest)
    parts = parts_of(prompts, seed)
    blocks = parts[0].prefix_blocks if parts else hash_blocks(text.beginning(MOST_BYTES), seed)
    return RequestInfo(
        path=path,
        request_id=request_id,
        given_names=tuple(filter(None, (_text(fields.get(k)) for k in _OWN_NAMES))),
        generates=form.generates,
        is_stream=form.generates and _is_true(fields.get("stream", _NOTHING)),
        asked_model=asked,
        model_name=led.name,
        model=version,
        adapter=led.adapter,
        adapter_digest=led.adapter_digest,
        session_key=session_key,
        session_source=source,
        session_id=_plain(session) if source is not SessionSource.PROMPT else "",
        is_later_turn=is_later_turn,
        num_prompt_tokens=text.num_tokens + num_tool_tokens + _num_further(fields, form),
        num_tool_tokens=num_tool_tokens,
        prefix_blocks=blocks,
        tokens_per_block=BLOCK_BYTES * text.num_tokens / max(1, len(text)),
        max_tokens=next(
            filter(None, (_count(options.get(k)) for k in form.max_tokens)), form.usual_tokens
        ),
        num_prompts=num_prompts,
        parts=parts,
        num_answers=max((1, *(_num_asked(options.get(k)) for k in form.answers))) * num_prompts,
        tenant=tenant,
        priority=_priority(headers, tenant),
        ttft_deadline_s=_milliseconds(headers.get(names.TTFT_DEADLINE, "")) / 1000,
    )


def _model(
    fields: _Body, form: ProxiedPath, route: Callable[[str], ModelRoute]
) -> tuple[str, ModelRoute]:
    """Returns the model's name, and where it leads. Errors name the field that the client sent."""
    sent = (name for name in form.model if _first_given(fields, (name,)) is not None)
    param = next(sent, "model")
    asked = _text(_first_given(fields, (param,)))
    try:
        return asked, route(asked)
    except HttpError as error:
        error.param = param
        raise


def _num_further(fields: _Body, form: ProxiedPath) -> int:
    """Returns a guess of the tokens that are computed behind the prompt."""
    return estimate_tokens(fields.get(form.further, _NOTHING)) if form.further else 0


def _read_body(body: bytes) -> _Body:
    try:
        return _decode_body(body)
    except msgspec.ValidationError:
        raise _bad_json("the body must be a JSON object") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        fault = json_fault(body, error)
        raise _bad_json(f"the body is not valid JSON: {fault}") from None


def _first_given(fields: _Body, names: Sequence[str]) -> msgspec.Raw | None:
    given = (fields.get(name) for name in names)
    return next((raw for raw in given if raw is not None and raw != _NULL), None)


def _read_part(raw: msgspec.Raw) -> _Body:
    """Returns nothing for what is no object."""
    try:
        return _decode_body(raw)
    except _UNREADABLE:
        return {}


def _bad_json(message: str) -> BadRequest:
    return BadRequest(message, code="invalid_json")


def _session(
    headers: Mapping[str, str], fields: _Body, opening: Sequence[Bytes]
) -> tuple[SessionSource, Sequence[Bytes]]:
    """Returns the first of the client's header, its `session_id`, its `prompt_cache_key`, the
    header of an agent, the prompt's opening."""
    if is_plain_key(header := headers.get(names.SESSION, "")):
        return SessionSource.HEADER, (header.encode(),)
    for source in (SessionSource.FIELD, SessionSource.CACHE_KEY):
        if is_plain_key(named := _text(fields.get(source.value))):
            return source, (named.encode(),)
    for name in names.AGENT_SESSIONS:
        if is_plain_key(header := headers.get(name, "")):
            return SessionSource.HEADER, (header.encode(),)
    return (SessionSource.PROMPT, opening) if opening else (SessionSource.NONE, ())


def _session_key(
    tenant: Tenant, model: str, source: SessionSource, session: Sequence[Bytes]
) -> bytes:
    """Returns 16 bytes, equal for requests of one tenant's session to one model."""
    if source is SessionSource.NONE:
        return b""
    digest = xxhash.xxh3_128(_salted(tenant, b"%b\0%b\0" % (model.encode(), source.value.encode())))
    for part in session:
        digest.update(part)
    return digest.digest()


def _lines(texts: Sequence[Bytes]) -> Iterator[Bytes]:
    for i, text in enumerate(texts):
        yield from (b"\n", text) if i else (text,)


def _plain(session: Sequence[Bytes]) -> str:
    return b"".join(session).decode()


def _chain_seed(tenant: Tenant, model: str) -> int:
    return xxhash.xxh3_64_intdigest(_salted(tenant, model.encode()))


def _salted(tenant: Tenant, data: bytes) -> bytes:
    return b"%d:%b%b" % (len(tenant.salt), tenant.salt, data)


def _priority(headers: Mapping[str, str], tenant: Tenant) -> Priority:
    """Returns what the client asks for, as far as its tenant may have it."""
    wanted = _ASKED_PRIORITIES.get(headers.get(names.PRIORITY, "").lower())
    return tenant.priority if wanted is None else max(wanted, tenant.priority)


def is_plain_key(text: str) -> bool:
    """Returns whether it is printable ASCII of a reasonable length, fit for a header."""
    return 0 < len(text) <= _MAX_KEY_LENGTH and text.isascii() and text.isprintable()


def _is_true(raw: msgspec.Raw) -> bool:
    return bytes(memoryview(raw)[:_MAX_LITERAL_BYTES]).strip() == b"true"


def _text(raw: msgspec.Raw | None) -> str:
    """Returns "" for what is no text; of one longer than any that means something here, the
    beginning as it is written."""
    try:
        if raw is None:
            return ""
        if len(memoryview(raw)) > _MAX_TEXT_BYTES:
            return bytes(memoryview(raw)[:_MAX_TEXT_BYTES]).decode(errors="replace")
        return _decode_text(raw)
    except _UNREADABLE:
        return ""


def _count(raw: msgspec.Raw | None) -> int:
    """Returns 0 for what is no sensible number. Nodes take `3.0` for 3."""
    try:
        count = _decode_count(raw) if raw is not None else 0
    except _UNREADABLE:
        return 0
    return int(count) if 0 < count < _MAX_COUNT else 0


def _num_asked(raw: msgspec.Raw | None) -> int:
    """Returns a number, or the length of a list; 0 for what is none."""
    if raw is None or not _LIST.match(memoryview(raw)):
        return _count(raw)
    try:
        return len(_read_asked(raw))
    except _UNREADABLE:
        return 0


def _milliseconds(text: str) -> int:
    """Returns 0 for what is no sensible number."""
    is_number = text.isascii() and text.isdigit() and len(text) < 10
    return int(text) if is_number else 0


def _opening(raw: msgspec.Raw | None) -> tuple[list[memoryview], bool]:
    """Returns the messages up to the first of the user, and whether there are more: the opening
    is the same in every turn of a conversation, and different between conversations that share a
    system prompt.

    The roles are read first, because that ends at the first item which is no object: a million of
    zeros cost as much as one."""
    if raw is None or not _LIST.match(memoryview(raw)):
        return [], False
    try:
        messages = _read_roles(raw)
        texts = _read_opening(raw) if messages else []
    except _UNREADABLE:
        return [], False
    is_user = (message.is_of_user for message in messages)
    size = next((i for i, found in enumerate(is_user, 1) if found), len(texts))
    return [memoryview(text) for text in texts[:size]], size < len(messages)
