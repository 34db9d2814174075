"""Fixtures mend what Triton's interpreter does otherwise than a GPU."""

from __future__ import annotations

import inspect
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from known_operations import short_way
from triton.runtime import interpreter

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from one seed, and none runs as compiled code by mistake."""
    assert triton.knobs.runtime.interpret
    torch.manual_seed(11)


@pytest.fixture(scope="session", autouse=True)
def remembers() -> Iterator[None]:
    with remembering(), pytest.MonkeyPatch.context() as patch:
        _touch_given_memory_alone(patch)
        yield


@contextmanager
def remembering() -> Iterator[None]:
    """Makes the interpreter remember what it finds out anew for each operation."""
    with pytest.MonkeyPatch.context() as patch:
        _look_for_builtins_once(patch)
        _know_types_and_shapes(patch)
        _leave_alone_what_is_alike(patch)
        _know_shapes_of_pairs(patch)
        _know_operands(patch)
        _take_masks_of_numbers(patch)
        yield


def _look_for_builtins_once(patch: pytest.MonkeyPatch) -> None:
    """Remembers what there is to replace in the language, whether that is done, and NumPy's name of
    a type: a third of the interpreter's time."""
    replace_all = interpreter._patch_lang
    numpy_type, numpy_types = interpreter._get_np_dtype, {}

    @cache
    def builtins_of(package: Any) -> list[str]:
        return [name for name, found in inspect.getmembers(package) if tl.core.is_builtin(found)]

    @cache
    def interpreted(found: Any, package: Any, name: str) -> Any:
        use, semantic = getattr(found, "__wrapped__", found), interpreter.interpreter_semantic

        def without_a_compiler(*given: Any, **how: Any) -> Any:
            how["_semantic"] = semantic
            return use(*given, **how)

        return short_way(package, name, without_a_compiler)

    def replace_builtins(package: Any, _: Any, scope: Any) -> None:
        for name in builtins_of(package):
            if tl.core.is_builtin(found := getattr(package, name)):
                scope.set_attr(package, name, interpreted(found, package, name))

    @cache
    def languages_of(function: Any) -> list[Any]:
        return [found for found in function.__globals__.values() if found is tl or found is tl.core]

    def replace_unless_done(function: Any) -> Any:
        if any(tl.core.is_builtin(language.load) for language in languages_of(function)):
            return replace_all(function)
        return interpreter._LangPatchScope()

    def remembered_numpy_type(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in numpy_types:
            numpy_types[name] = numpy_type(kind.scalar)
        return numpy_types[name]

    patch.setattr(interpreter, "_patch_builtin", replace_builtins)
    patch.setattr(interpreter, "_patch_lang", replace_unless_done)
    patch.setattr(interpreter, "_get_np_dtype", remembered_numpy_type)


def _know_types_and_shapes(patch: pytest.MonkeyPatch) -> None:
    """Remembers types of blocks and shapes of tensors, which are made and checked for every
    operation. Leaves out that sums of integers are computed in 64 bits as well: only where the
    interpreter debugs, it looks at them. Both are half of its time."""
    make_type, make_tensor = tl.block_type.__init__, tl.tensor.__init__
    types: dict[tuple[Any, ...], dict[str, Any]] = {}
    shapes: dict[str, tuple[Any, Any]] = {}

    def known_type(self: Any, element: Any, shape: Any) -> None:
        sizes = shape.values if isinstance(shape, tl.tuple) else shape
        key = (element.name, *[getattr(size, "value", size) for size in sizes])
        if (known := types.get(key)) is None:
            make_type(self, element, shape)
            types[key] = dict(self.__dict__)
        else:
            self.__dict__.update(known)

    def known_shape(self: Any, handle: Any, kind: Any) -> None:
        if (known := shapes.get(kind.name)) is None:
            make_tensor(self, handle, kind)
            shapes[kind.name] = self.numel, self.shape
        else:
            self.handle, self.type, self.dtype = handle, kind, kind.scalar
            self.numel, self.shape = known

    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    patch.setattr(tl.block_type, "__init__", known_type)
    patch.setattr(tl.tensor, "__init__", known_shape)
    patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))


def _leave_alone_what_is_alike(patch: pytest.MonkeyPatch) -> None:
    """Gives back at once a type compared with itself, and values that are no constants to unwrap: a
    tenth of the interpreter's time."""
    unwrap, equal = tl.core._unwrap_if_constexpr, tl.dtype.__eq__
    plain = {tl.tensor, tl.dtype, tl.block_type, tl.pointer_type, bool, int, float, type(None)}

    def unwrap_unless_plain(value: Any) -> Any:
        return value if type(value) in plain else unwrap(value)

    patch.setattr(tl.core, "_unwrap_if_constexpr", unwrap_unless_plain)
    patch.setattr(tl.dtype, "__eq__", lambda self, other: self is other or equal(self, other))


def _know_shapes_of_pairs(patch: pytest.MonkeyPatch) -> None:
    """Remembers the types that two operands become, by theirs, and fills in their numbers: a fifth
    of the interpreter's time."""
    semantic = tl.semantic.TritonSemantic
    broadcast = semantic.broadcast_impl_value
    become: dict[tuple[str, str], list[Any]] = {}

    def spread(one: Any, kind: Any, sizes: tuple[int, ...]) -> Any:
        given = one.handle
        is_block = one.type.is_block()
        dtype = given.data.dtype if is_block else interpreter._get_np_dtype(given.dtype)
        data = np.empty(sizes, dtype)
        data[...] = given.data
        return tl.tensor(interpreter.TensorHandle(data, given.dtype.scalar), kind)

    def known_broadcast(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
        key = left.type.name, right.type.name
        if (known := become.get(key)) is None:
            found = broadcast(self, left, right)
            become[key] = [
                None if new is old else (new.type, new.handle.data.shape)
                for new, old in zip(found, (left, right), strict=True)
            ]
            return found
        of_left, of_right = known
        return (
            left if of_left is None else spread(left, *of_left),
            right if of_right is None else spread(right, *of_right),
        )

    patch.setattr(semantic, "broadcast_impl_value", known_broadcast)


def _know_operands(patch: pytest.MonkeyPatch) -> None:
    """Gives back at once operands of one type, and remembers what a number becomes beside a tensor
    of some type: a fifth of the interpreter's time."""
    semantic = tl.semantic.TritonSemantic
    check, numbers = semantic.binary_op_type_checking_impl, {int, float}
    constants: dict[tuple[Any, ...], Any] = {}

    def known_operands(self: Any, left: Any, right: Any, *how: Any, **more: Any) -> Any:
        tensors = type(left) is tl.tensor, type(right) is tl.tensor
        if all(tensors):
            # Quotients of halves are wider, and pointers are allowed here and there.
            if not (how[3:] or more or left.dtype.is_ptr()):
                if left.type.name == right.type.name:
                    return left, right
                if left.dtype.name == right.dtype.name:
                    return self.broadcast_impl_value(left, right)
        elif any(tensors):
            place = tensors.index(False)
            number, beside = (left, right)[place], (right, left)[place]
            # Zeros of both signs are equal.
            if type(number) in numbers and (number or type(number) is int):
                key = place, beside.type.name, number, type(number), how, tuple(more.items())
                if (known := constants.get(key)) is not None:
                    return (known, right) if place == 0 else (left, known)
                operands = check(self, left, right, *how, **more)
                if operands[1 - place] is beside:
                    constants[key] = operands[place]
                return operands
        return check(self, left, right, *how, **more)

    patch.setattr(semantic, "binary_op_type_checking_impl", known_operands)


def _take_masks_of_numbers(patch: pytest.MonkeyPatch) -> None:
    """Makes masks truths before they are used. In the interpreter a comparison of scalars becomes
    integers where it meets a block, and Triton 3.9 refuses these as a mask."""
    builder = interpreter.InterpreterBuilder

    def with_truths(use: Any, place: int) -> Any:
        def use_truths(self: Any, *given: Any, **how: Any) -> Any:
            mask = given[place]
            if isinstance(mask, interpreter.TensorHandle) and mask.data.dtype != bool:
                mask = interpreter.TensorHandle(mask.data.astype(bool), tl.int1)
            return use(self, *given[:place], mask, *given[place + 1 :], **how)

        return use_truths

    for name, place in (("create_masked_load", 1), ("create_masked_store", 2)):
        patch.setattr(builder, name, with_truths(getattr(builder, name), place))


def _touch_given_memory_alone(patch: pytest.MonkeyPatch) -> None:
    """Refuses what is read or written beside the tensors that a kernel is given. On a GPU such an
    access gives what lies there, and ends the process where nothing does."""
    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    take, given = executor._init_args_hst, _GIVEN

    def take_and_note(self: Any, args: Any, kwargs: Any) -> Any:
        taken = take(self, args, kwargs)
        given.note((*taken[0], *taken[1].values()))
        return taken

    patch.setattr(executor, "_init_args_hst", take_and_note)

    def checked(use: Any, pointers: int, mask: int) -> Any:
        def check_and_use(self: Any, *args: Any, **how: Any) -> Any:
            given.check(args[pointers], args[mask])
            return use(self, *args, **how)

        return check_and_use

    places = {
        "create_masked_load": (0, 1),
        "create_masked_store": (0, 2),
        "create_atomic_rmw": (1, 3),
    }
    for name, (pointers, mask) in places.items():
        patch.setattr(builder, name, checked(getattr(builder, name), pointers, mask))


class _Memory:
    """Knows the memory of the tensors of a launch.

    Attributes:
        is_all: Kernels are given addresses, too, of which nothing is known.
    """

    def __init__(self) -> None:
        self.is_all = False
        self._starts, self._ends = [0], [0]

    def note(self, arguments: tuple[Any, ...]) -> None:
        bases = [getattr(each, "base", each) for each in arguments]
        storages = [each.untyped_storage() for each in bases if isinstance(each, torch.Tensor)]
        spans = {(each.data_ptr(), each.data_ptr() + each.nbytes()) for each in storages}
        # None lies at zero.
        starts, ends = zip(*sorted({(0, 0), *spans}), strict=True)
        self._starts, self._ends = list(starts), list(ends)

    def check(self, pointers: Any, mask: Any) -> None:
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        places, chosen = pointers.data, np.asarray(mask.data, bool)
        if not chosen.all():
            places = places[chosen]
        if self.is_all or not places.size:
            return
        first, end = int(places.min()), int(places.max()) + size
        if end <= self._ends[bisect_right(self._starts, first) - 1]:
            return
        owner = np.searchsorted(np.array(self._starts, np.uint64), places, side="right") - 1
        ends = np.array(self._ends, np.uint64)[owner]
        assert (places + np.uint64(size) <= ends).all(), "a kernel leaves the memory of its tensors"


_GIVEN = _Memory()


@pytest.fixture
def follows_addresses() -> Iterator[None]:
    """Lets kernels leave their tensors, where these hold addresses of others."""
    _GIVEN.is_all = True
    yield
    _GIVEN.is_all = False


@pytest.fixture
def rows_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the interpreter compute each row of a tile alone. On some processors NumPy's BLAS
    rounds a row by its place among the others, which would hide what the kernel does."""
    matmul = np.matmul

    def by_rows(a: np.ndarray, b: np.ndarray, **options: object) -> np.ndarray:
        return np.concatenate([matmul(row[None], b, **options) for row in a])

    monkeypatch.setattr(np, "matmul", by_rows)


@pytest.fixture
def rounds_to_e4m3(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the interpreter round to e4m3 as torch does. By itself it loses the carry of a mantissa
    that is rounded up to the next power of two."""
    convert = interpreter._convert_float

    def converted(data: np.ndarray, kind: Any, to: Any, rounding: Any) -> np.ndarray:
        if to == tl.float8e4nv and kind == tl.float32:
            wide = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
            return wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return convert(data, kind, to, rounding)

    monkeypatch.setattr(interpreter, "_convert_float", converted)
