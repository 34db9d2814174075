"""Finds what waits for the collector of reference cycles when it should be gone."""

from __future__ import annotations

import gc
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_ROOMS = ("decode_node", "edge", "engine", "prefill_node", "router", "uvicorn")


@contextmanager
def garbage_is_kept() -> Iterator[None]:
    """Keeps what only a collection would find. What was there before is left out: it may be what
    hundreds of other tests have made."""
    gc.collect()
    gc.freeze()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
        gc.unfreeze()


def left_behind() -> Counter[str]:
    """Returns what of ours, or of the HTTP server that carries it, is garbage in cycles: objects,
    frames, coroutines and functions, by name."""
    gc.collect()
    return Counter(name for one in gc.garbage if (name := _name(one)))


def _name(one: object) -> str:
    match one:
        case types.FrameType():
            return _of_code(one.f_code)
        case types.CoroutineType():
            return _of_code(one.cr_code)
        case types.GeneratorType():
            return _of_code(one.gi_code)
        case types.AsyncGeneratorType():
            return _of_code(one.ag_code)
        case types.FunctionType():
            return _of_code(one.__code__)
    module = type(one).__module__
    return f"{module}.{type(one).__qualname__}" if module.split(".")[0] in _ROOMS else ""


def _of_code(code: types.CodeType) -> str:
    path = Path(code.co_filename)
    is_ours = path.is_relative_to(_ROOT) and path.relative_to(_ROOT).parts[0] in _ROOMS
    return f"{path.stem}: {code.co_qualname}" if is_ours else ""
