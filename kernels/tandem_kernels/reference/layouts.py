"""States what the kernel of each operation takes of its tensors, and holds references to it.

A reference would take any strides; a kernel computes addresses by those that it is launched with,
and reads memory that is not its tensor's where the others are not as it expects. `kernel_takes`
says it of each tensor of an operation, and is read off the kernel's addresses:

    "T H D"           [T, H, D], contiguous
    "T | H D"         the step from one T to the next is passed on, and may be any; behind the bar
                      all is contiguous
    "T H D |"         all steps are passed on, or the launcher copies what is not contiguous
    "* | H"           of any rank, if all dimensions before the last can be made one
    "N or N G"        of either rank
    "... : int32"     one of these types; `int` is int32 or int64
    "... @16"         the address, and all steps that are passed on, are multiples of 16 bytes

    "N%p | H D"       all that has a `%p` lies in one memory, with the same bytes from one N to the
                      next: a kernel is given the step of one of them alone

A letter is one size in all of a call; `R+1` is one more, `>=R` as much at least, `_` any. What is
no tensor has a mapping of its fields, and of either a pair of both. All tensors of a call are on
one device.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

Fields: TypeAlias = Mapping[str, "Need"]
Need: TypeAlias = str | Fields | tuple[str, Fields]

_DIM = re.compile(r"(>=)?([A-Za-z]*)\+?(\d*)|_")
_MEMORY = re.compile(r"%\w+")
_SHORT = {"int": ("int32", "int64")}


class LayoutError(ValueError):
    """A kernel would misread a tensor."""


class _Form:
    """Describes one layout of one rank.

    Attributes:
        dims: (axis, letter or "", added to it, whether that is the least) of those that are bound.
        memory: Names what it shares memory and its first step with; empty: nothing.
        passed: Leading dimensions whose steps kernels are launched with.
    """

    __slots__ = ("aligned", "dims", "dtypes", "memory", "passed", "rank", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        rest, _, kinds = text.partition(":")
        rest, _, aligned = rest.partition("@")
        self.aligned = int(aligned or 0)
        self.memory = "".join(_MEMORY.findall(rest))
        rest = _MEMORY.sub("", rest)
        names = [one for kind in kinds.split() for one in _SHORT.get(kind, (kind,))]
        self.dtypes = frozenset(getattr(torch, name) for name in names)
        front, bar, behind = rest.partition("|")
        dims = (front + behind).split()
        self.passed = len(front.split()) if bar else 0
        self.rank = -1 if "*" in dims else len(dims)
        axes = range(-len(dims), 0)
        self.dims: list[tuple[int, str, int, bool]] = []
        for axis, dim in zip(axes, dims, strict=True):
            letter, more, is_least = _parsed(dim)
            if letter or more:
                self.dims.append((axis, letter, more, is_least))

    def takes(self, value: Tensor, shape: torch.Size, sizes: dict[str, int]) -> bool:
        """Returns whether the kernel reads `value` right; binds letters to its sizes."""
        for axis, letter, more, is_least in self.dims:
            size = shape[axis] - more
            known = sizes.setdefault(letter, size) if letter else 0
            if size != known and not (is_least and size > known):
                return False
        if self.dtypes and value.dtype not in self.dtypes:
            return False
        if self.aligned and not self._is_aligned(value):
            return False
        if self.memory and not self._shares_memory(value, sizes):
            return False
        return value.is_contiguous() or self._has_steps(value)

    def _has_steps(self, value: Tensor) -> bool:
        shape: Sequence[int] = value.shape
        steps: Sequence[int] = value.stride()
        if 0 in shape:
            return True
        first = 1 if self.rank < 0 else self.passed
        if self.rank < 0 and len(shape) > 2:
            shape, steps = _as_rows(shape, steps)
        dense = 1
        for size, step in zip(reversed(shape[first:]), reversed(steps[first:]), strict=True):
            if size != 1 and step != dense:
                return False
            dense *= size
        return first > 0

    def _shares_memory(self, value: Tensor, sizes: dict[str, int]) -> bool:
        place = value.untyped_storage().data_ptr()
        step = value.stride(0) * value.element_size()
        is_same = sizes.setdefault(f"address of {self.memory}", place) == place
        return is_same and (len(value) < 2 or sizes.setdefault(self.memory, step) == step)

    def _is_aligned(self, value: Tensor) -> bool:
        steps = value.stride()[: self.passed]
        passed = [step for size, step in zip(value.shape, steps, strict=False) if size > 1]
        size = value.element_size()
        return value.data_ptr() % self.aligned == 0 and not any(
            step * size % self.aligned for step in passed
        )


def _parsed(dim: str) -> tuple[str, int, bool]:
    found = _DIM.fullmatch(dim.replace("*", "_"))
    if found is None:
        raise TypeError(f"`{dim}` is no size")
    least, letter, number = found.groups()
    return letter or "", int(number or 0), least is not None


def _as_rows(shape: Sequence[int], steps: Sequence[int]) -> tuple[list[int], list[int]]:
    """Returns [rows, width] and its steps; no step of what cannot be seen as rows is right."""
    rows, step = 1, 0
    for size, own in zip(reversed(shape[:-1]), reversed(steps[:-1]), strict=True):
        if size == 1:
            continue
        if rows == 1:
            step = own
        elif own != step * rows:
            return [rows, 2], [step, -1]
        rows *= size
    return [rows, shape[-1]], [step, steps[-1]]


class _Parsed:
    """Holds what a parameter or a field may be: tensors of some ranks, or something with fields."""

    __slots__ = ("any_rank", "fields", "forms")

    def __init__(self, need: Need) -> None:
        text, fields = need if isinstance(need, tuple) else (need, need)
        texts = text.split(" or ") if isinstance(text, str) else []
        forms = [_Form(text) for text in texts]
        self.forms = {form.rank: form for form in forms}
        self.any_rank = self.forms.get(-1)
        of_parts = fields.items() if isinstance(fields, Mapping) else ()
        self.fields = [(name, _Parsed(part)) for name, part in of_parts]

    def check(
        self, name: str, value: Any, sizes: dict[str, int], devices: set[torch.device] | None
    ) -> None:
        """Raises LayoutError: a kernel would misread `value`."""
        if isinstance(value, Tensor):
            if devices is not None:
                devices.add(value.device)
            shape = value.shape
            form = self.forms.get(len(shape), self.any_rank)
            if form is None or not form.takes(value, shape, sizes):
                raise LayoutError(self._complaint(name, value, sizes))
        elif isinstance(value, (tuple, list)):
            for one in value:
                self.check(name, one, sizes, devices)
        elif value is not None:
            for field, need in self.fields:
                need.check(f"{name}.{field}", getattr(value, field), sizes, devices)

    def _complaint(self, name: str, value: Tensor, sizes: dict[str, int]) -> str:
        wanted = " or ".join(form.text for form in self.forms.values())
        known = ", ".join(
            f"{letter} = {size}" for letter, size in sizes.items() if " " not in letter
        )
        return (
            f"its kernel takes `{name}` as [{wanted}] ({known}), not {value.dtype}"
            f" {list(value.shape)} of strides {list(value.stride())}"
        )


class Layouts:
    """Holds what the kernel of an operation takes of its parameters that are or hold tensors."""

    def __init__(self, function: Callable[..., Any], needs: Fields) -> None:
        code = function.__code__
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if unknown := set(needs) - set(names):
            raise TypeError(f"{function.__name__} has no parameters {sorted(unknown)}")
        self.name = function.__name__
        self.needs = needs
        self._parsed = [(names.index(name), name, _Parsed(need)) for name, need in needs.items()]

    def check(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], *, looks_at_devices: bool = False
    ) -> None:
        """Raises LayoutError: the operation's kernel would misread one of its tensors, or
        `looks_at_devices` and they are on several."""
        sizes: dict[str, int] = {}
        devices: set[torch.device] | None = set() if looks_at_devices else None
        try:
            for index, name, need in self._parsed:
                value = args[index] if index < len(args) else kwargs.get(name)
                if value is not None:
                    need.check(name, value, sizes, devices)
        except LayoutError as misread:
            raise LayoutError(f"{self.name}: {misread}") from None
        if devices is not None and len(devices) > 1:
            raise LayoutError(f"{self.name}: its tensors are on several devices")


_STATED: dict[Callable[..., Any], Layouts] = {}


def kernel_takes(**needs: Need) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """States what the kernel takes whose reference is decorated; letters are bound in the order of
    `needs`."""

    def state(reference: Callable[P, R]) -> Callable[P, R]:
        _STATED[reference] = Layouts(reference, needs)
        return reference

    return state


def layouts_of(reference: Callable[..., Any]) -> Layouts:
    """Raises TypeError: nothing is stated."""
    if reference not in _STATED:
        name = reference.__name__
        raise TypeError(f"{name} does not state by `kernel_takes` what its kernel takes")
    return _STATED[reference]


NORM: Fields = {"weight": "H"}
KV_SCALES: Fields = {"k": "_: float32", "v": "_: float32"}
_PAGES: Fields = {"k": "N%p | _ B _", "v": "N%p | _ B _"}
WRITTEN_KV: Need = ("N 2 | _ B _", _PAGES)
ATTENDED_KV: Need = ("N | 2 _ B _", _PAGES)
GATHERED_KV: Need = ("N 2 | _ B _", {"k": "N | _ B _", "v": "N | _ B _"})
INDEX_PAGES: Fields = {"keys": "N | B D", "scales": "N | B: float32"}
ROW_PAGES: Need = (
    "_ | _ D",
    {"numbers": "N%p | B _", "rotated": "N%p | B _", "exponents": "N%p | B _: uint8"},
)
ATTENTION: Fields = {
    "seq_lens": "R: int32",
    "query_start_loc": "R+1: int32",
    "block_tables": ">=R | _: int32",
    "hidden": {"seq_lens": "R: int32", "query_start_loc": "R+1: int32"},
}
STATES: Fields = {
    "seq_lens": "R: int32",
    "query_start_loc": "R+1: int32",
    "blocks": "R: int32",
    "pending": {"rows": ">=R: int32", "num_taken": "_: int32"},
}
ROWS: Fields = {
    "token_ids": "Q | _: int32",
    "num_computed": "Q: int32",
    "total_len": "Q: int32",
    "max_len": "Q: int32",
    "block_table": "Q _: int32",
    "num_taken": "Q: int32",
}
STEP: Fields = {
    "input_ids": "M: int32",
    "positions": "M: int64",
    "slot_mapping": "M: int64",
    "seq_lens": "_: int32",
    "block_tables": "_ _: int32",
}
OPEN_TOKENS: Fields = {"pages": "_ | _ W: float32", "slot_mapping": "T: int", "metadata": ATTENTION}
SEEN_ROWS: Fields = {
    "pages": (
        "_ | _ D",
        {"numbers": "M%q | C _", "rotated": "M%q | C _", "exponents": "M%q | C _: uint8"},
    ),
    "block_tables": ">=R | _: int32",
    "chosen": "T _: int32",
}
BACK_TURN: Fields = {"positions": "T: int", "cos_sin_cache": "_ _: float32"}
STREAM_WEIGHTS: Fields = {"fn": "O _: float32", "base": "O: float32", "scale": "_: float32"}
BATCH: Fields = {"query_bounds": "R+1: int32", "key_bounds": "R+1: int32"}
