"""Says what becomes of an operator's call to the engine that has no answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from decode_node.errors import Unavailable
from engine.contracts.errors import EngineCallTimeout, EngineDeadError


@contextmanager
def engine_answers() -> Iterator[None]:
    """Raises `Unavailable` where the engine is dead, or has not answered in time."""
    try:
        yield
    except EngineCallTimeout as error:
        raise Unavailable(str(error), code="engine_timeout") from None
    except EngineDeadError as error:
        raise Unavailable(str(error), code="engine_dead") from None
