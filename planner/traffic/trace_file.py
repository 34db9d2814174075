"""Reads traces: who came when, with how long a prompt, and how long the answer was.

    tandem     JSONL: {"arrival_s": 1.25, "input_tokens": 2000, "output_tokens": 150,
                       "session": "a", "prefix_hashes": [17, 4711]}    the last two if known
    Mooncake   JSONL: {"timestamp": 27482, "input_length": 6955, "output_length": 52,
                       "hash_ids": [46, 47, ...]}    milliseconds; a hash for each 512 tokens
    bench      the result of `python -m bench.serving.goodput --dump`: JSON, one list for each load

`prefix_hashes` name blocks of `block_tokens` tokens, each with all that is before it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from planner.errors import TraceError
from planner.traffic.traffic import MAX_SPAN_S, Arrival, Traffic, in_order

_MOONCAKE_BLOCK = 512
_MAX_TOKENS = 10_000_000


def read_trace(path: Path, *, block_tokens: int = 512, load: str = "") -> Traffic:
    """Reads a trace of any of the formats. `load` names one of several in a result of the bench.

    Raises:
        TraceError: it cannot be read, or line N of it makes no sense.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise TraceError(f"{path}: {reason}") from None
    if not text.strip():
        raise TraceError(f"{path}: the file is empty; a trace has one JSON object on each line")
    first = text.lstrip().split("\n", 1)[0].strip()
    if first == "{" or '"figures"' in first:
        return _read_result(path, text, load)
    rows = list(_rows(path, text))
    is_mooncake = "input_length" in rows[0][1]
    reader = _mooncake if is_mooncake else _tandem
    arrivals = in_order([reader(_Row(path, line, row)) for line, row in rows])
    return _checked(path, Traffic(path.name, arrivals,
                                  _MOONCAKE_BLOCK if is_mooncake else block_tokens))  # fmt: skip


class _Row:
    """Reads fields of one line, and says which line it is when one is wrong."""

    def __init__(self, path: Path, line: int, fields: dict[str, Any]) -> None:
        self._where = f"{path}:{line}"
        self.fields = fields

    def wrong(self, text: str) -> TraceError:
        return TraceError(f"{self._where}: {text}")

    def number(self, name: str, unit: str, most: float) -> float:
        value = self.fields.get(name)
        if value is None:
            known = ", ".join(sorted(self.fields)[:8]) or "nothing"
            raise self.wrong(f"{name} ({unit}) is missing; the line has {known}")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # No comparison turns a whole number into a float, which a very large one does not fit into.
        if not is_number or not 0 <= value <= most:
            raise self.wrong(f"{name} is {_shown(value)}; it is {unit}, from 0 to {most:g}")
        return float(value)

    def tokens(self, name: str) -> int:
        value = self.number(name, "a number of tokens", _MAX_TOKENS)
        if value != int(value) or value < 1:
            raise self.wrong(f"{name} is {value:g}; it is a whole number of tokens, 1 or more")
        return int(value)

    def hashes(self, name: str) -> tuple[int, ...]:
        values = self.fields.get(name) or []
        if not isinstance(values, list) or not all(isinstance(v, int | str) for v in values):
            raise self.wrong(f"{name} is {_shown(values)}; it is a list of hashes")
        return tuple(v if isinstance(v, int) else hash(v) for v in values)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _rows(path: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for line, content in enumerate(text.splitlines(), 1):
        if not content.strip():
            continue
        try:
            row = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{path}:{line}: this is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise TraceError(f"{path}:{line}: this is {_shown(row)}, and no JSON object")
        yield line, row


def _tandem(row: _Row) -> Arrival:
    session = row.fields.get("session") or ""
    if not isinstance(session, str | int):
        raise row.wrong(f"session is {_shown(session)}; it is a name")
    return Arrival(
        at_s=row.number("arrival_s", "seconds", MAX_SPAN_S * 10_000),
        num_prompt=row.tokens("input_tokens"),
        num_output=row.tokens("output_tokens"),
        session=str(session),
        blocks=row.hashes("prefix_hashes"),
    )


def _mooncake(row: _Row) -> Arrival:
    num_prompt = row.tokens("input_length")
    return Arrival(
        at_s=row.number("timestamp", "milliseconds", 1e3 * MAX_SPAN_S * 10_000) / 1e3,
        num_prompt=num_prompt,
        num_output=max(1, round(row.number("output_length", "a number of tokens", _MAX_TOKENS))),
        blocks=row.hashes("hash_ids")[: num_prompt // _MOONCAKE_BLOCK],
    )


def _read_result(path: Path, text: str, load: str) -> Traffic:
    try:
        loads = json.loads(text)["figures"]["loads"]
        by_name = {str(item["load"]): item["requests"] for item in loads if "requests" in item}
    except (ValueError, KeyError, TypeError, RecursionError):
        raise TraceError(
            f"{path}: this is neither JSONL nor a result of `python -m bench.serving.goodput`"
        ) from None
    if not by_name:
        raise TraceError(f"{path}: it has no requests; run the bench with --dump")
    name = load or (next(iter(by_name)) if len(by_name) == 1 else "")
    if name not in by_name:
        listed = ", ".join(map(repr, by_name))
        raise TraceError(f"{path}: choose a load of it with --load: {listed}")
    found = []
    rows = by_name[name]
    if not isinstance(rows, list) or not all(isinstance(fields, dict) for fields in rows):
        raise TraceError(f"{path}: requests of load {name!r} are {_shown(rows)}, no JSON objects")
    for number, fields in enumerate(rows, 1):
        if fields.get("sent") is None or fields.get("error"):
            continue
        row = _Row(path, number, fields)
        found.append(
            Arrival(row.number("sent", "seconds", MAX_SPAN_S), row.tokens("prompt_tokens"),
                    row.tokens("tokens"))
        )  # fmt: skip
    if not found:
        raise TraceError(f"{path}: no request of load {name!r} was answered")
    return _checked(path, Traffic(f"{path.name}, {name}", in_order(found)))


def _checked(path: Path, traffic: Traffic) -> Traffic:
    if len(traffic.arrivals) < 2 or traffic.span_s == 0:
        raise TraceError(f"{path}: at least two requests at different times are needed")
    if traffic.span_s > MAX_SPAN_S:
        raise TraceError(
            f"{path}: the trace spans {traffic.span_s / 86_400:.0f} days; are its times in another "
            "unit? arrival_s is in seconds, Mooncake's timestamp in milliseconds"
        )
    return traffic
