"""Names fields as the client knows them, where a request of one API amounts to one of another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from edge.http.errors import HttpError


@contextmanager
def named_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Renames the field at fault in errors that are raised inside: `names` maps the first part of
    its place."""
    try:
        yield
    except HttpError as error:
        if error.param is not None:
            first, dot, rest = error.param.partition(".")
            rest = rest.replace("function.", "") if first == "tools" else rest
            error.param = names.get(first, first) + dot + rest
        raise
