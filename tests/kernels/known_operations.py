"""Triton's interpreter decides for every operation anew what its operands become: 10 to 40 us for
one of NumPy. Here it decides once.

    a + b ─▶ what became of such types? ─ known ──▶ np.add, and a tensor of the type found then
                                        └ unknown ─▶ Triton's own way; known from then on where
                                                     NumPy alone gives the same, bit for bit

Known become operations whose operands have one type, or of which one is a number that this type
holds: there a result's type follows from the operands' types, and its numbers from NumPy's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

ARITHMETIC = {
    "__add__": np.add,
    "__radd__": np.add,
    "__sub__": np.subtract,
    "__mul__": np.multiply,
    "__rmul__": np.multiply,
    "__and__": np.bitwise_and,
    "__or__": np.bitwise_or,
    "__xor__": np.bitwise_xor,
    "__lshift__": np.left_shift,
    "__rshift__": np.right_shift,
}
COMPARISONS = {
    "__lt__": np.less,
    "__le__": np.less_equal,
    "__gt__": np.greater,
    "__ge__": np.greater_equal,
    "__eq__": np.equal,
    "__ne__": np.not_equal,
}
WHOLE = {"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
BROKEN = {"fp16", "fp32", "fp64"}
NUMPYS = WHOLE | BROKEN
COMPARED_WITH = {int: {"int32", "int64"}, float: {"fp32"}}
"""A type of numbers to those of tensors that compare with it without becoming wider."""
EVERY = slice(None)
Way = Callable[..., Any]


def made(data: np.ndarray, kind: tl.dtype, scalar: tl.dtype) -> tl.tensor:
    """Returns a tensor of numbers that have its type, which is not looked at again."""
    handle = interpreter.TensorHandle.__new__(interpreter.TensorHandle)
    handle.data, handle.dtype, handle.attr = data, scalar, {}
    return tl.tensor(handle, kind)


def distinct(number: Any) -> Any:
    """Returns a key of a number. There are two zeros, which are equal."""
    return number if number else str(number)


def is_same(data: Any, found: np.ndarray) -> bool:
    return (
        type(data) is np.ndarray
        and (data.dtype, data.shape) == (found.dtype, found.shape)
        and data.tobytes() == found.tobytes()
    )


def operator(name: str, long_way: Way) -> Way:
    """Returns what computes an operator of tensors."""
    compute: Any = ARITHMETIC.get(name) or COMPARISONS[name]
    known: dict[tuple[Any, ...], Any] = {}

    def shortened(left: Any, right: Any) -> Any:
        value = right.value if type(right) is tl.constexpr else right
        is_tensor = type(value) is tl.tensor
        mine = left.handle.data
        if is_tensor:
            theirs = value.handle.data
            key = left.type.name, value.type.name, mine.dtype, theirs.dtype
        else:
            key = left.type.name, distinct(value), type(value), mine.dtype
        if (plan := known.get(key)) is not None:
            number, kind, scalar = plan
            return made(compute(mine, theirs if is_tensor else number), kind, scalar)
        result = long_way(left, right)
        if is_tensor and _are_alike(left, value):
            number = None
        elif not is_tensor and _holds(left, value, name in COMPARISONS):
            number = np.array([value], mine.dtype)
        else:
            return result
        data = compute(mine, theirs if is_tensor else number)
        if is_same(data, result.handle.data):
            known[key] = number, result.type, result.handle.dtype
        return result

    return shortened


def _are_alike(left: Any, right: Any) -> bool:
    return left.dtype.name == right.dtype.name and not left.dtype.is_ptr()


def _holds(tensor: Any, number: Any, is_comparison: bool) -> bool:
    """Returns whether a number becomes one of the tensor's type."""
    name, of = tensor.dtype.name, type(number)
    if is_comparison:
        return name in COMPARED_WITH.get(of, ())
    return (of is int and name in WHOLE) or (of is float and name in BROKEN)


def pointer_sum(long_way: Way) -> Way:
    """Returns what adds to pointers and computes other sums as well."""
    add = operator("__add__", long_way)
    known: dict[tuple[Any, ...], Any] = {}

    def shortened(left: Any, right: Any) -> Any:
        if not left.dtype.is_ptr() or type(right) is not tl.tensor:
            return add(left, right)
        offsets = right.handle.data
        key = left.type.name, right.type.name, offsets.dtype
        if (plan := known.get(key)) is not None:
            width, kind, scalar = plan
            data = left.handle.data + offsets.astype(np.uint64) * width
            return made(data, kind, scalar)
        result = long_way(left, right)
        if right.dtype.name in ("int32", "int64"):
            width = np.uint64(max(1, left.dtype.element_ty.primitive_bitwidth // 8))
            data = left.handle.data + offsets.astype(np.uint64) * width
            if is_same(data, result.handle.data):
                known[key] = width, result.type, result.handle.dtype
        return result

    return shortened


def new_axes(long_way: Way) -> Way:
    """Returns what gives a tensor more axes: `x[:, None]`."""
    known: dict[tuple[Any, ...], Any] = {}

    def shortened(tensor: Any, slices: Any) -> Any:
        if type(slices) is not tuple or any(each not in (None, EVERY) for each in slices):
            return long_way(tensor, slices)
        key = tensor.type.name, *[each is None for each in slices]
        if (kind := known.get(key)) is not None:
            handle = tensor.handle
            return made(handle.data[slices], kind, handle.dtype.scalar)
        result = long_way(tensor, slices)
        if is_same(tensor.handle.data[slices], result.handle.data):
            known[key] = result.type
        return result

    return shortened


def cast(long_way: Way) -> Way:
    """Returns what makes a tensor's numbers others, where NumPy rounds as Triton does."""
    known: dict[tuple[Any, ...], Any] = {}

    def shortened(tensor: Any, dtype: Any, *how: Any, **more: Any) -> Any:
        if how or more or type(dtype) is not tl.dtype:
            return long_way(tensor, dtype, *how, **more)
        data = tensor.handle.data
        key = tensor.type.name, dtype.name, data.dtype
        if (plan := known.get(key)) is not None:
            to, kind, scalar = plan
            return made(data.astype(to), kind, scalar)
        result = long_way(tensor, dtype)
        if result is not tensor and {tensor.dtype.name, dtype.name} <= NUMPYS:
            found = result.handle
            if is_same(data.astype(found.data.dtype), found.data):
                known[key] = found.data.dtype, result.type, found.dtype
        return result

    return shortened


def load(long_way: Way) -> Way:
    """Returns what loads. What the hardware shall keep of it changes no number."""
    known: dict[tuple[Any, ...], Any] = {}
    builder = interpreter.interpreter_builder
    everything: dict[tuple[int, ...], Any] = {}

    def mask_of(mask: Any, shape: tuple[int, ...]) -> Any:
        if mask is None:
            if shape not in everything:
                everything[shape] = interpreter.TensorHandle(np.ones(shape, bool), tl.int1)
            return everything[shape]
        if mask.handle.data.shape == shape:
            return mask.handle
        spread = np.array(np.broadcast_to(mask.handle.data, shape), bool)
        return interpreter.TensorHandle(spread, tl.int1)

    def shortened(pointer: Any, mask: Any = None, other: Any = None, **hints: Any) -> Any:
        if not hints.keys() <= {"cache_modifier", "eviction_policy"}:
            return long_way(pointer, mask, other, **hints)
        other = other.value if type(other) is tl.constexpr else other
        is_plain = mask is None or type(mask) is tl.tensor
        if not is_plain or (other is not None and type(other) not in (int, float)):
            return long_way(pointer, mask, other, **hints)
        of_mask = None if mask is None else mask.type.name
        key = pointer.type.name, of_mask, distinct(other), type(other)

        def loaded(beside: Any) -> Any:
            masked = mask_of(mask, pointer.handle.data.shape)
            return builder.create_masked_load(pointer.handle, masked, beside, None, None, False)

        if (plan := known.get(key)) is not None:
            kind, beside = plan
            return tl.tensor(loaded(beside), kind)
        result = long_way(pointer, mask, other, **hints)
        found, name = result.handle.data, result.dtype.name
        if found.shape == pointer.handle.data.shape and name in NUMPYS | {"bf16"}:
            beside = None
            if other:
                beside = interpreter.TensorHandle(np.full_like(found, other), result.dtype)
            if is_same(loaded(beside).data, found):
                known[key] = result.type, beside
        return result

    return shortened


def where(long_way: Way) -> Way:
    """Returns what chooses between tensors of one type."""
    known: dict[tuple[str, ...], Any] = {}

    def shortened(condition: Any, one: Any, other: Any) -> Any:
        given = condition, one, other
        if any(type(each) is not tl.tensor for each in given):
            return long_way(*given)
        key = tuple(each.type.name for each in given)
        kind = known.get(key)
        if kind is None:
            result = long_way(*given)
            if condition.dtype is tl.int1 and one.dtype.name == other.dtype.name:
                data = np.where(*(each.handle.data for each in given))
                if is_same(data, result.handle.data):
                    known[key] = result.type
            return result
        data = np.where(condition.handle.data, one.handle.data, other.handle.data)
        return made(data, kind, kind.scalar)

    return shortened


METHODS: dict[str, Callable[[Way], Way]] = {
    **{name: partial(operator, name) for name in (*ARITHMETIC, *COMPARISONS)},
    "__add__": pointer_sum,
    "__getitem__": new_axes,
    "to": cast,
}
FUNCTIONS: dict[str, Callable[[Way], Way]] = {"load": load, "where": where}
SHORT = {tl.tensor: METHODS, tl: FUNCTIONS, tl.core: FUNCTIONS}


def short_way(package: Any, name: str, long_way: Way) -> Way:
    """Returns what does the same as a function of Triton's, in less time if that is known."""
    short = SHORT.get(package, {}).get(name)
    return short(long_way) if short else long_way
