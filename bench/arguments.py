"""Command lines of benches: their parsers, and lists of names."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Returns a parser that shows a module's docstring as it is written."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
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
