"""Names fields as the client knows them, where a request of one API amounts to one of another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from edge.http.errors import HttpError


@contextmanager
def named_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Renames the field at fault in errors that are raised inside: `names` maps the beginning of
    its place, one part or two. A message that begins with the place is renamed with it."""
    try:
        yield
    except HttpError as error:
        if (old := error.param) is not None:
            error.param = _renamed(old, names)
            if error.message.startswith(old):
                error.message = error.param + error.message.removeprefix(old)
        raise


def _renamed(place: str, names: Mapping[str, str]) -> str:
    parts = place.split(".")
    if parts[0] == "tools":
        tool = ".".join(parts[:2])
        return ".".join(
            [names.get(tool, tool), *(part for part in parts[2:] if part != "function")]
        )
    for length in (2, 1):
        if new := names.get(".".join(parts[:length])):
            return ".".join([new, *parts[length:]])
    return place
