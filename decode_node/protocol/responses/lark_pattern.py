"""Writes a Lark grammar as one regular expression, where it is one: where no rule needs itself.

A custom tool's input travels inside of JSON, in which a grammar's texts would be spelled otherwise.
Of a regular expression the grammar library knows how JSON spells its matches. Codex's grammar of
patches is such a grammar.

    start: "a" part+          (?:a(?:(?:[0-9]+)\\n)+)
    part: /[0-9]+/ LF
    %import common.LF
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

from decode_node.protocol.bodies.known_patterns import is_known_pattern

MAX_PATTERN = 1 << 16
"""Characters of the regular expression."""
_MAX_DEPTH = 100
_COMMON = {
    "LF": r"\n",
    "CR": r"\r",
    "NEWLINE": r"(?:\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9A-Fa-f]",
    "INT": "[0-9]+",
    "SIGNED_INT": r"[+\-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[A-Za-z_][A-Za-z0-9_]*",
}
"""Terminals of Lark's library `common`."""
_TOKEN = re.compile(
    r"""\s*(?:(?P<text>"(?:\\.|[^"\\\n])*"i?)|(?P<regex>/(?:\\.|[^/\\\n])+/[a-z]*)"""
    r"""|(?P<name>[A-Za-z_]\w*)|(?P<number>\d+)|(?P<sign>->|\.\.|[()\[\]|?*+~]))"""
)
_COMMENT = re.compile(r"""("(?:\\.|[^"\\\n])*"|/(?![/*])(?:\\.|[^/\\\n])+/)|(?://|#)[^\n]*""")
_RULE = re.compile(r"[?!]{0,2}(?P<name>[A-Za-z_]\w*)(?:\.-?\d+)?\s*:(?P<body>.*)", re.DOTALL)
_IMPORT = re.compile(
    r"%import\s+common\s*(?:\.\s*(?P<one>\w+)(?:\s*->\s*(?P<own>\w+))?|\((?P<all>[\w\s,]+)\))\s*"
)
_STATEMENT = re.compile(r"\n(?=[?!]{0,2}[A-Za-z_]\w*(?:\.-?\d+)?\s*:|%)")


class NoPattern(ValueError):
    """The grammar is no regular expression, or none that can be read. The text says why."""


def lark_pattern(grammar: str) -> str:
    """Returns a regular expression of the texts that a grammar's rule `start` matches. Raises
    `NoPattern`."""
    rules: dict[str, str] = {}
    known: dict[str, str] = {}
    for statement in _STATEMENT.split(_COMMENT.sub(lambda found: found[1] or "", grammar)):
        if not (said := statement.strip()):
            continue
        if found := _IMPORT.fullmatch(said):
            known |= _imported(found)
        elif found := _RULE.fullmatch(said):
            if found["name"] in rules:
                raise NoPattern(f"{found['name']} is defined twice")
            rules[found["name"]] = found["body"]
        else:
            raise NoPattern(f"{said[:40]!r} is not supported")
    return _Patterns(rules, known).of("start")


def _imported(found: re.Match[str]) -> dict[str, str]:
    names = [found["one"]] if found["one"] else re.findall(r"\w+", found["all"])
    if unknown := [name for name in names if name not in _COMMON]:
        raise NoPattern(f"common.{unknown[0]} is not supported")
    return {found["own"] or name: _COMMON[name] for name in names}


class _Patterns:
    """Holds the patterns of the rules that are known so far."""

    def __init__(self, rules: dict[str, str], known: dict[str, str]) -> None:
        self._rules = rules
        self._known = known
        self._open: list[str] = []

    def of(self, name: str) -> str:
        """Returns the pattern of a rule."""
        if name in self._known:
            return self._known[name]
        if name in self._open:
            raise NoPattern(f"{name} needs itself: only grammars without recursion are supported")
        if name not in self._rules:
            raise NoPattern(f"{name} is not defined")
        if len(self._open) >= _MAX_DEPTH:
            raise NoPattern("its rules are nested too deeply")
        self._open.append(name)
        self._known[name] = f"(?:{_Body(self._rules[name], self.of).read()})"
        self._open.pop()
        return self._known[name]


class _Parts:
    """Collects the parts of a pattern, as long as they are not too long in all: a rule that many
    parts name may be as long as a pattern can be."""

    def __init__(self) -> None:
        self._found: list[str] = []
        self._length = 0

    def add(self, part: str) -> None:
        self._found.append(part)
        self._length += len(part)
        if self._length > MAX_PATTERN:
            raise _too_long()

    def joined(self, by: str) -> str:
        pattern = by.join(self._found)
        if len(pattern) > MAX_PATTERN:
            raise _too_long()
        return pattern


class _Body:
    """Reads the right side of one rule."""

    def __init__(self, text: str, rule: Callable[[str], str]) -> None:
        self._rule = rule
        self._tokens = list[tuple[str, str]]()
        self._depth = at = 0
        text = text.strip()
        while at < len(text):
            if (found := _TOKEN.match(text, at)) is None:
                raise NoPattern(f"{text[at : at + 40]!r} is not supported")
            self._tokens.append((found.lastgroup or "", found[0].strip()))
            at = found.end()
        self._tokens.append(("end", ""))
        self._at = 0

    def read(self) -> str:
        """Returns the pattern of all of it."""
        pattern = self._options()
        if self._tokens[self._at][0] != "end":
            raise NoPattern(f"{self._tokens[self._at][1]!r} comes where nothing begins with it")
        return pattern

    def _takes(self, *signs: str) -> str:
        kind, text = self._tokens[self._at]
        if kind != "sign" or text not in signs:
            return ""
        self._at += 1
        return text

    def _options(self) -> str:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise NoPattern("its brackets are nested too deeply")
        options = _Parts()
        options.add(self._sequence())
        while self._takes("|"):
            options.add(self._sequence())
        self._depth -= 1
        return options.joined("|")

    def _sequence(self) -> str:
        parts = _Parts()
        while True:
            kind, text = self._tokens[self._at]
            if kind == "end" or (kind == "sign" and text in ")]|"):
                return parts.joined("")
            if self._takes("->"):
                self._at += 1
                continue
            parts.add(self._item())

    def _item(self) -> str:
        atom = self._atom()
        if sign := self._takes("?", "*", "+"):
            return f"(?:{atom}){sign}"
        if self._takes("~"):
            least = most = self._number()
            if self._takes(".."):
                most = self._number()
            return f"(?:{atom}){{{least},{most}}}"
        return atom

    def _number(self) -> str:
        kind, text = self._tokens[self._at]
        if kind != "number":
            raise NoPattern("a number has to follow ~")
        self._at += 1
        return text

    def _atom(self) -> str:
        kind, text = self._tokens[self._at]
        self._at += 1
        if kind == "text":
            first = _value(text)
            if self._takes(".."):
                last = _value(self._tokens[self._at][1])
                self._at += 1
                return f"[{_escaped(first)}-{_escaped(last)}]"
            return f"(?{'i' if text.endswith('i') else ''}:{_escaped(first)})"
        if kind == "regex":
            return _regex(text)
        if kind == "name":
            return self._rule(text)
        if text == "(" or text == "[":
            inner = self._options()
            if not self._takes({"(": ")", "[": "]"}[text]):
                raise NoPattern(f"{text} is not closed")
            return f"(?:{inner})" + ("?" if text == "[" else "")
        raise NoPattern(f"{text!r} comes where something has to begin")


def _value(text: str) -> str:
    try:
        found = ast.literal_eval(text.removesuffix("i"))
    except (ValueError, SyntaxError):
        found = None
    if not isinstance(found, str) or not found:
        raise NoPattern(f"{text[:40]} is no text")
    return found


def _escaped(text: str) -> str:
    """Returns a regular expression of `text` alone."""
    plain = re.sub(r"([!-/:;=?@\[-^`{-~])", r"\\\1", text)
    return plain.replace("\n", r"\n").replace("\r", r"\r").replace("\t", r"\t")


def _regex(text: str) -> str:
    inner, _, flags = text[1:].rpartition("/")
    if set(flags) - set("ims") or not is_known_pattern(inner):
        raise NoPattern(f"{text[:40]} has flags, look-around or references that are not supported")
    return f"(?{flags}:{inner})"


def _too_long() -> NoPattern:
    return NoPattern(f"it becomes a regular expression of more than {MAX_PATTERN} characters")
