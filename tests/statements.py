"""Finds the statements of a module: a seventh of what `ast.walk` visits, all that there is to see
where imports and docstrings are looked for."""

from __future__ import annotations

import ast
from collections.abc import Iterator

_BLOCKS = "body", "orelse", "finalbody", "handlers", "cases"


def statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Yields the statements of a module, those within others among them, and the cases and handlers
    of exceptions that hold some."""
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        for name in _BLOCKS:
            children = getattr(node, name, ())
            yield from children
            left += children
