#!/usr/bin/env python3
"""Measures what parsing costs for each token of a stream: microseconds in the node server's loop.

A parser runs in the event loop of a decode node for every token of every stream that may call or
think, so 256 streams at 200 tokens a second are 51,200 calls of it each second. Each case is one
stream of about four characters a token, one token a push; the fastest of several rounds counts,
because other programs can only make it slower. Detokenising is not in it: that is done for every
stream anyway. Beside it stands what making a parser costs, once for each choice.

    python -m bench.serving.parsers
"""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from bench.record import write_result
from decode_node.parsers.families import CALL_FAMILIES
from decode_node.parsers.formats import CallFormat, literals
from decode_node.parsers.output_parser import OutputParser
from decode_node.parsers.output_parsers import OutputParsers
from decode_node.protocol.tools import Tool
from engine.frontend.pieces import Piece
from tests.decode_node.parsers.writers import WRITERS, plain

_ROUNDS = 15
_TOKEN = 4
"""Characters of a token of text."""
_TOKENS = re.compile(r"<\|?/?[\w:｜▁]+\|?>|\[[A-Z_]+\]|\]<\]minimax\[>\[|<\|\"\|>")
"""Matches what is a token of its own in these models, or might be."""
_PROSE = "The quick brown fox jumps over the lazy dog, and (again) 1 < 2.\n" * 60
_LINES = [f'print("{i}")' for i in range(240)]
_NAME = "write_file"
_TOOLS = (Tool(_NAME, {"properties": {"text": {"type": "string"}}}, strict=False, raw={}),)


@dataclass(slots=True)
class Case:
    family: str
    what: str
    num_tokens: int
    us_per_token: float
    us_per_parser: float


class _Tokens:
    def __init__(self, added_token_ids: Mapping[str, int]) -> None:
        self.added_token_ids = added_token_ids


def call_text(family: str, arguments: Mapping[str, object]) -> str:
    """Returns one call with long arguments, as a family of models writes it."""
    return plain(WRITERS[family]([(_NAME, arguments)]))


def pieces(text: str, tokens: Mapping[str, int]) -> list[Piece]:
    """Cuts a text into tokens of `_TOKEN` characters, and its markers."""
    found: list[Piece] = []
    while text:
        marker = next((token for token in tokens if text.startswith(token)), None)
        if marker is not None:
            found.append(tokens[marker])
            text = text[len(marker) :]
            continue
        stop = min((at for token in tokens if (at := text.find(token)) > 0), default=_TOKEN)
        found.append(text[: min(stop, _TOKEN)])
        text = text[min(stop, _TOKEN) :]
    return found


def form_of(family: str) -> CallFormat:
    return next(known.form for known in CALL_FAMILIES if family in known.names)


def measure(family: str, what: str, text: str, *, is_open: bool = False) -> Case:
    form = form_of(family)
    texts = {part for text in literals(form) for part in _TOKENS.findall(text)}
    own = {"openai": "openai_gptoss", "mistral": "mistral", "muse_glimmer": "muse_glimmer"}
    reasoning = own.get(family, "qwen3")
    texts |= set() if family in own else {"<think>", "</think>"}
    tokens = {token: 1000 + i for i, token in enumerate(sorted(texts))}
    parsers = OutputParsers.of_model(
        _Tokens(tokens), reasoning_parser=reasoning, tool_call_parser=family
    )
    stream = [[piece] for piece in pieces(text, tokens)]
    called = parsers.parser(_TOOLS, is_reasoning_open=is_open)
    deltas = [delta for push in stream for delta in called.push(push)] + called.finish()
    assert not what.startswith("call") or (called.num_calls == 1 and not called.incomplete), deltas

    def make() -> OutputParser:
        return parsers.parser(_TOOLS, is_reasoning_open=is_open)

    def run(parser: OutputParser) -> None:
        for piece in stream:
            parser.push(piece)
        parser.finish()

    of_stream = min(_timed(lambda: run(make())) for _ in range(_ROUNDS))
    of_parser = min(_timed(make) for _ in range(50))
    per_token = (of_stream - of_parser) / len(stream)
    return Case(family, what, len(stream), round(per_token, 2), round(of_parser, 1))


def _timed(work: Callable[[], object]) -> float:
    """Returns the microseconds of the CPU that `work` takes: other programs share the machine."""
    begin = time.process_time()
    work()
    return (time.process_time() - begin) * 1e6


def main() -> None:
    gc.disable()
    cases = [
        measure("hermes", "content", _PROSE),
        measure("hermes", "reasoning", _PROSE, is_open=True),
    ]
    cases.append(measure("minimax_m3", "call, list", call_text("minimax_m3", {"lines": _LINES})))
    for family in CALL_FAMILIES:
        name = family.names[0]
        cases.append(measure(name, "call", call_text(name, {"text": "\n".join(_LINES)})))
    for case in cases:
        print(
            f"{case.family:20} {case.what:11} {case.num_tokens:6} tokens  "
            f"{case.us_per_token:6.2f} us/token  {case.us_per_parser:6.1f} us/parser"
        )
    write_result("parsers", [asdict(case) for case in cases])


if __name__ == "__main__":
    main()
