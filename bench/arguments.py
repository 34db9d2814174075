"""Command lines of benches: their parsers, and lists of names."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable


def parser_of(doc: str | None, name: str | None = None) -> argparse.ArgumentParser:
    """Returns a parser that shows a module's docstring as it is written. `name`: of the result file
    by default, where `--name` gives another; empty: it follows from what is measured."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if name is not None:
        about = "of the result file" if name else "of the result; default: by what is measured"
        parser.add_argument("--name", default=name, help=about)
    return parser


def add_model(parser: argparse.ArgumentParser, shape: str, quantization: str = "") -> None:
    """Adds which model it is, with random weights."""
    from bench.engine.models.shapes import QUANTIZATIONS, SHAPES

    parser.add_argument("--shape", choices=SHAPES, default=shape)
    parser.add_argument(
        "--quantization", choices=("", *QUANTIZATIONS), default=quantization, help="of the weights"
    )


def names_among(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Returns a `type` of an argument: comma separated, each of them known. Nothing gives none."""
    names = list(known)

    def parse(text: str) -> list[str]:
        wanted = [name for name in text.split(",") if name]
        for name in wanted:
            if name not in names:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(names)}")
        return wanted

    return parse


def numbers(text: str) -> list[int]:
    """Reads an argument's value: whole numbers, comma separated. Nothing gives none."""
    return [int(number) for number in text.split(",") if number]
