"""Writes one line of a batch's output or of its errors."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

import msgspec

from router.batches.lines.input_line import InputLine
from router.store.batches import Progress

_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class _Details(msgspec.Struct):
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class _Usage(msgspec.Struct):
    """Has the names of both APIs."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


_decode_answer = msgspec.json.Decoder(_Answer).decode


@dataclass(frozen=True, slots=True)
class ResultLine:
    """Is a line for the output, or for the errors, of the request in line `place`."""

    place: int
    data: bytes
    is_error: bool
    progress: Progress


def answered(line: InputLine, status: int, request_id: str, body: bytes) -> ResultLine:
    """Returns the line of a request that was answered, well or not."""
    response = {"status_code": status, "request_id": request_id, "body": _one_line(body)}
    is_error = status >= 400
    if is_error:
        return ResultLine(line.place, _line(line, response, None), True, Progress(num_failed=1))
    return ResultLine(line.place, _line(line, response, None), False, _progress(body))


def not_executed(line: InputLine, code: str, message: str) -> ResultLine:
    """Returns the line of a request that was not answered."""
    data = _line(line, None, {"code": code, "message": message})
    return ResultLine(line.place, data, True, Progress(num_failed=1))


def _line(line: InputLine, response: Any, error: Any) -> bytes:
    return (
        msgspec.json.encode(
            {
                "id": f"batch_req_{uuid.uuid4().hex}",
                "custom_id": line.custom_id,
                "response": response,
                "error": error,
            }
        )
        + b"\n"
    )


def _one_line(body: bytes) -> msgspec.Raw:
    """Returns JSON without ends of lines; what is none, as a text."""
    if b"\n" not in body and b"\r" not in body:
        try:
            msgspec.json.decode(body, type=msgspec.Raw)
        except _UNREADABLE:
            return msgspec.Raw(msgspec.json.encode(body.decode("utf-8", "replace")))
        return msgspec.Raw(body)
    try:
        return msgspec.Raw(msgspec.json.format(body, indent=-1))
    except _UNREADABLE:
        return msgspec.Raw(msgspec.json.encode(body.decode("utf-8", "replace")))


def _progress(body: bytes) -> Progress:
    try:
        usage = _decode_answer(body).usage or _Usage()
    except _UNREADABLE:
        usage = _Usage()
    given = usage.prompt_tokens_details or usage.input_tokens_details or _Details()
    made = usage.completion_tokens_details or usage.output_tokens_details or _Details()
    return Progress(
        num_completed=1,
        input_tokens=usage.prompt_tokens + usage.input_tokens,
        cached_tokens=given.cached_tokens,
        output_tokens=usage.completion_tokens + usage.output_tokens,
        reasoning_tokens=made.reasoning_tokens,
    )
