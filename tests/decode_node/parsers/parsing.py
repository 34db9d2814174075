"""Helpers of the parsers' tests: texts to pieces, deltas to answers, streams in cuts."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from decode_node.parsers.output_parser import OutputParser
from decode_node.parsers.stages.deltas import (
    CallArguments,
    CallEnd,
    CallStart,
    ContentText,
    Delta,
    ReasoningText,
)
from engine.frontend.text.pieces import Piece


@dataclass
class Call:
    name: str
    arguments: str = ""
    is_complete: bool | None = None


@dataclass
class Parsed:
    """Holds what a client has when it has joined all deltas."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)
    incomplete: str = ""
    num_reasoning_tokens: int = 0


def joined(deltas: Iterable[Delta]) -> Parsed:
    """Joins deltas as a client does, and checks their order: calls one after the other, no empty
    text, every call ended before the next part."""
    answer = Parsed()
    for delta in deltas:
        match delta:
            case ReasoningText(text):
                assert text
                answer.reasoning += text
            case ContentText(text):
                assert text and all(call.is_complete is not None for call in answer.calls)
                answer.content += text
            case CallStart(index, name):
                assert index == len(answer.calls)
                assert all(call.is_complete is not None for call in answer.calls)
                answer.calls.append(Call(name))
            case CallArguments(index, text):
                assert text and index == len(answer.calls) - 1
                assert answer.calls[index].is_complete is None
                answer.calls[index].arguments += text
            case CallEnd(index, is_complete):
                assert index == len(answer.calls) - 1
                assert answer.calls[index].is_complete is None
                answer.calls[index].is_complete = is_complete
    assert all(call.is_complete is not None for call in answer.calls)
    return answer


def parse(parser: OutputParser, pushes: Iterable[Iterable[Piece]]) -> Parsed:
    deltas = [delta for push in pushes for delta in parser.push(push)]
    answer = joined([*deltas, *parser.finish()])
    answer.incomplete = parser.incomplete
    answer.num_reasoning_tokens = parser.num_reasoning_tokens
    return answer


def pieces(text: str, added: Mapping[str, int], size: int = 1) -> list[Piece]:
    """Cuts a text into pieces of `size` characters, and its added tokens into their ids."""
    tokens = "|".join(map(re.escape, sorted(added, key=len, reverse=True))) or "(?!)"
    found: list[Piece] = []
    for part in re.split(f"({tokens})", text):
        if part in added:
            found.append(added[part])
        else:
            found += [part[i : i + size] for i in range(0, len(part), size)]
    return found


def random_cuts(stream: list[Piece], seed: int) -> list[list[Piece]]:
    rng = random.Random(seed)
    edges = sorted(rng.choices(range(len(stream) + 1), k=rng.randint(1, 8)))
    return [stream[a:b] for a, b in zip([0, *edges], [*edges, len(stream)], strict=True)]


def merged(stream: list[Piece]) -> list[Piece]:
    """Joins the texts between markers, as if they were long tokens."""
    return [
        piece
        for kind, group in itertools.groupby(stream, key=type)
        for piece in (["".join(group)] if kind is str else group)
    ]


def two_part_cuts(stream: list[Piece]) -> list[list[list[Piece]]]:
    return [[stream[:i], stream[i:]] for i in range(len(stream) + 1)]
