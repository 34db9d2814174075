"""Is Jinja's sandbox with bounds: what a template does is counted, as `template_budget` says.

The sandbox keeps templates from Python's inner parts, not from making a gigabyte of text or going
through each message for each message. So loops and calls are counted here, and everything that can
make much of little: operators, `~`, filters and methods of texts.

    {% for x in xs %}   iterates over `counted(xs)`: the tree is changed before it is compiled
    a ~ b               calls `joined(a, b)`, likewise
    a + b, a * b, ...   Jinja asks `call_binop`
    f(x), x.f()         Jinja asks `call`
    x | f               filters that make texts longer are wrapped
    {{ x }}             all pieces of a text go through `concat`
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from inspect import signature
from typing import Any, cast

from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.frontend.templates.template_budget import MAX_TEXT, TemplateTooCostly, budget

_MAX_WIDTH = 10_000
"""Characters or items to which something is filled up, and to which a number may be raised."""
_MAX_BITS = 10_000
_WIDE_PERCENT = re.compile(r"%[-+ #0]*(?:\*|\d{5,})|%[-+ #0\d]*\.(?:\*|\d{5,})")
_WIDE_BRACES = re.compile(r"\{[^{}]*:[^{}]*(?:\d{5,}|\{)")
"""Match a format that fills up with more than some characters, or with a number that is given."""
_PADDING = ("center", "ljust", "rjust", "zfill")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Compiles templates that count what they do."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        del self.globals["lipsum"]
        for name, size in _FILTERS.items():
            self.filters[name] = _sized(self.filters[name], size)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = _call("counted", [cast(nodes.Expr, loop.iter)])
        _join_by_call(tree)
        return tree

    @staticmethod
    def counted(items: Iterable[Any]) -> Iterable[Any]:
        """Returns the items of a loop, each of which is a step."""
        return _Counted(items)

    @staticmethod
    def joined(*parts: object) -> str:
        return _concat(map(str, parts))

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Is what Jinja joins the pieces of an output, of a macro or of a block with."""
        return _concat(parts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            if isinstance(left, str | list) and isinstance(right, str | list):
                budget().make(len(left) + len(right))
            return left + right
        budget().step()
        if operator == "*":
            _check_product(left, right)
        elif operator == "**":
            _check_power(left, right)
        elif isinstance(left, str):
            _check_percent(left)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget().step()
        method = getattr(__obj, "__wrapped__", __obj)
        text = getattr(method, "__self__", None)
        if isinstance(text, str):
            _check_method(text, getattr(method, "__name__", ""), [*args, *kwargs.values()])
        return super().call(__context, __obj, *args, **kwargs)


class _Counted:
    """Is an iterable of steps. It has a length where the items have one: `loop.last` asks."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        step = budget().step
        for item in self._items:
            step()
            yield item

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]  # Jinja takes the TypeError for "unknown"


def _concat(parts: Iterable[str]) -> str:
    found, size = list[str](), 0
    for part in parts:
        size += len(part)
        if size > MAX_TEXT:
            break
        found.append(part)
    budget().make(size)
    return "".join(found)


def _call(name: str, arguments: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None)


def _join_by_call(node: nodes.Node) -> None:
    """Puts calls in the place of each `~` below a node."""
    for field, value in node.iter_fields():
        if isinstance(value, list):
            value[:] = [_without_concat(each) for each in value]
        else:
            setattr(node, field, _without_concat(value))


def _without_concat(value: Any) -> Any:
    if not isinstance(value, nodes.Node):
        return value
    _join_by_call(value)
    if not isinstance(value, nodes.Concat):
        return value
    return _call("joined", value.nodes).set_lineno(value.lineno)


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
    for items, count in ((left, right), (right, left)):
        if isinstance(items, str | bytes | list | tuple) and isinstance(count, int):
            budget().make(len(items) * max(0, count))


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * max(0, right))


def _check_bits(num_bits: int) -> None:
    if num_bits > _MAX_BITS:
        raise TemplateTooCostly("it makes a number of thousands of digits")


def _check_percent(text: str) -> None:
    if _WIDE_PERCENT.search(text.replace("%%", "")):
        raise TemplateTooCostly("it fills up a text to any width")


def _check_width(value: Any) -> None:
    if isinstance(value, int) and value > _MAX_WIDTH:
        raise TemplateTooCostly(f"it fills up to more than {_MAX_WIDTH}")


def _check_method(text: str, name: str, arguments: list[Any]) -> None:
    """Checks a method of a text that may make a longer one. Raises `TemplateTooCostly`."""
    if name in _PADDING:
        _check_width(arguments[0] if arguments else 0)
    elif name == "expandtabs":
        _check_width(arguments[0] if arguments else 0)
        budget().make(len(text) + text.count("\t") * _MAX_WIDTH)
    elif name in ("format", "format_map"):
        if _WIDE_BRACES.search(text):
            raise TemplateTooCostly("it fills up a text to any width")
    elif name == "replace" and len(arguments) > 1:
        _check_replaced(text, *arguments[:2])
    elif name == "join" and arguments and isinstance(arguments[0], list | tuple):
        _check_joined(arguments[0], text)
    elif name == "translate":
        raise TemplateTooCostly("translate makes texts of any length")


def _check_replaced(text: Any, old: Any, new: Any, *others: Any) -> None:
    text, old, new = str(text), str(old), str(new)
    count = text.count(old) if old else len(text) + 1
    budget().make(len(text) + count * max(0, len(new) - len(old)))


def _check_joined(items: Any, between: Any = "", *others: Any) -> None:
    if isinstance(items, list | tuple):
        sizes = sum(len(item) for item in items if isinstance(item, str))
        budget().make(sizes + len(str(between)) * len(items))


def _check_filled(items: Any, width: Any, *others: Any) -> None:
    _check_width(width)


def _check_indented(text: Any, width: Any = 4, *others: Any) -> None:
    _check_width(width)
    size = len(width) if isinstance(width, str) else int(width or 0)
    budget().make(len(str(text)) + str(text).count("\n") * size)


def _check_formatted(text: Any, *arguments: Any) -> None:
    _check_percent(str(text))


_FILTERS: Mapping[str, Callable[..., None]] = {
    "replace": _check_replaced,
    "join": _check_joined,
    "center": _check_filled,
    "batch": _check_filled,
    "slice": _check_filled,
    "indent": _check_indented,
    "format": _check_formatted,
}
"""Names the filters that make texts longer, and what says how long before they do."""


def _sized(function: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """Returns a filter that is checked first. Some get the context in front of what they filter."""
    start, form = int(hasattr(function, "jinja_pass_arg")), signature(function)

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        budget().step()
        given = form.bind(*args, **kwargs)
        given.apply_defaults()
        check(*[*given.arguments.values()][start:])
        made = function(*args, **kwargs)
        if isinstance(made, str):
            budget().make(len(made))
        return made

    return checked
