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
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from bench.record import write_result
from decode_node.parsers.families import CALL_FAMILIES
from decode_node.parsers.formats import literals
from decode_node.parsers.output_parser import OutputParser
from decode_node.parsers.output_parsers import OutputParsers
from decode_node.protocol.tools import Tool
from engine.frontend.pieces import Piece

_ROUNDS = 7
_TOKEN = 4
"""Characters of a token of text."""
_PROSE = "The quick brown fox jumps over the lazy dog, and (again) 1 < 2.\n" * 60
_ARGUMENTS = json.dumps({"path": "a.py", "lines": [f'print("{i}")' for i in range(240)]})
_TOOLS = (Tool("write_file", {}, strict=False, raw={}),)


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


def call_text(family: str) -> str:
    """Returns one call with long arguments, as the family writes it."""
    texts = {
        "hermes": '<tool_call>\n{"name": "write_file", "arguments": ARGUMENTS}\n</tool_call>',
        "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.write_file:0"
        "<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>",
        "mistral": "[TOOL_CALLS]write_file[ARGS]ARGUMENTS",
        "openai": "<|channel|>commentary to=functions.write_file <|constrain|>json<|message|>"
        "ARGUMENTS<|call|>",
        "qwen3_coder": "<tool_call>\n<function=write_file>\n<parameter=text>\nARGUMENTS\n"
        "</parameter>\n</function>\n</tool_call>",
        "pythonic": "[write_file(lines=ARGUMENTS)]",
        "gemma4": '<|tool_call>call:write_file{text:<|"|>ARGUMENTS<|"|>}<tool_call|>',
        "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="write_file" index="1"<|sep|>'
        '<|open|>argument key="text" type="string"<|sep|>ARGUMENTS<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>",
    }
    return texts[family].replace("ARGUMENTS", _ARGUMENTS)


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


def measure(family: str, what: str, text: str, *, is_open: bool = False) -> Case:
    form = next(known.form for known in CALL_FAMILIES if family in known.names)
    markers = sorted(t for t in literals(form) if t[:2] in ("<|", "<t", "</", "[T", "[A"))
    markers += [] if family in ("openai", "mistral") else ["<think>", "</think>"]
    tokens = {token: 1000 + i for i, token in enumerate(markers)}
    reasoning = {"openai": "openai_gptoss", "mistral": "mistral"}.get(family, "qwen3")
    parsers = OutputParsers.of_model(
        _Tokens(tokens), reasoning_parser=reasoning, tool_call_parser=family
    )
    stream = [[piece] for piece in pieces(text, tokens)]

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
    """Returns the microseconds that `work` takes."""
    begin = time.perf_counter()
    work()
    return (time.perf_counter() - begin) * 1e6


def main() -> None:
    gc.disable()
    cases = [
        measure("hermes", "content", _PROSE),
        measure("hermes", "reasoning", _PROSE, is_open=True),
    ]
    for family in (
        "hermes",
        "kimi_k2",
        "mistral",
        "openai",
        "qwen3_coder",
        "pythonic",
        "gemma4",
        "kimi_k3",
    ):
        cases.append(measure(family, "call", call_text(family)))
    for case in cases:
        print(
            f"{case.family:12} {case.what:10} {case.num_tokens:6} tokens  "
            f"{case.us_per_token:6.2f} us/token  {case.us_per_parser:6.1f} us/parser"
        )
    write_result("parsers", [asdict(case) for case in cases])


if __name__ == "__main__":
    main()
