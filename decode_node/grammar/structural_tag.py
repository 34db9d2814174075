"""Writes structural tags: text with parts that follow schemas. Both of vLLM's shapes are known.

    {"type": "structural_tag", "structures": [{"begin", "schema", "end"}], "triggers": [...]}
    {"type": "structural_tag", "format": {"type": "tag" | "sequence" | "triggered_tags" | ...}}

Free text goes up to the first trigger; behind it, one of the tags that begin with it must follow.
Where the texts of a tag hold special tokens, those are meant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from decode_node.grammar.grammar_text import (
    ANY_TEXT,
    NOTHING,
    Expression,
    GrammarText,
    either,
    json_schema,
    optional,
    regex,
    repeat,
    sequence,
    token,
)
from decode_node.grammar.schemas.schema_checks import check_json, check_schema, check_size
from edge.http.errors import BadRequest

LEGACY_KEYS = ("structures", "triggers")
_MAX_TAGS = 256


@dataclass(frozen=True, slots=True)
class _Tag:
    begin: str
    content: Any
    """A format."""
    ends: tuple[str, ...]


def express_tag(value: Any, text: GrammarText, param: str) -> Expression:
    """Returns what a structural tag allows. Raises `BadRequest` naming what it does not know."""
    writer = _Writer(text, param)
    if not isinstance(value, dict):
        raise writer.error("must be an object")
    check_json(value, param)
    if "structures" in value:
        tags = [
            _Tag(
                writer.string(item, "begin"),
                {"type": "json_schema", "json_schema": item.get("schema", True)},
                (writer.string(item, "end"),),
            )
            for item in writer.objects(value, "structures")
        ]
        return writer.triggered(tags, writer.strings(value, "triggers"))
    if "format" not in value:
        raise writer.error("needs format, or structures and triggers")
    return writer.express(value["format"])


class _Writer:
    """Writes formats into one grammar. `param` is the field that holds them, for errors."""

    def __init__(self, text: GrammarText, param: str) -> None:
        self._text = text
        self._param = param
        self._known: dict[str, Callable[[dict[str, Any]], Expression]] = {
            "const_string": lambda form: self._text.marked(self.string(form, "value")),
            "json_schema": self._json_schema,
            "regex": self._regex,
            "grammar": self._grammar,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": lambda form: either(*map(self.express, self.objects(form, "elements"))),
            "optional": lambda form: optional(self.express(form.get("content"))),
            "star": lambda form: repeat(self.express(form.get("content"))),
            "plus": lambda form: repeat(self.express(form.get("content")), 1),
            "repeat": self._repeat,
            "token": self._token,
            "tag": lambda form: self._tag(self._read_tag(form)),
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }

    def express(self, form: Any) -> Expression:
        kind = form.get("type") if isinstance(form, dict) else None
        write = self._known.get(kind) if isinstance(kind, str) else None
        if write is None:
            known = ", ".join(self._known)
            shown = kind[:64] if isinstance(kind, str) else "without a type"
            raise self.error(f"a format {shown} is not supported; there are {known}")
        return write(form)

    def triggered(
        self,
        tags: Sequence[_Tag],
        triggers: Sequence[str],
        *,
        at_least_one: bool = False,
        stop_after_first: bool = False,
    ) -> Expression:
        """Returns free text in which tags follow triggers."""
        options = []
        for trigger in triggers:
            head = self._up_to(trigger)
            mine = [tag for tag in tags if tag.begin.startswith(trigger)]
            if not mine or not trigger:
                raise self.error("has a trigger with which no tag begins")
            options += [self._tag(tag, len(trigger), head) for tag in mine]
        if any(not tag.begin.startswith(tuple(triggers)) for tag in tags):
            raise self.error("has a tag that begins with no trigger")
        part = self._text.rule("tagged", either(*options))
        rest = self._text.rule("rest", ANY_TEXT)
        if stop_after_first:
            return part if at_least_one else either(part, rest)
        return sequence(repeat(part, int(at_least_one)), rest)

    def _up_to(self, trigger: str) -> Expression:
        """Returns any text up to and with a trigger."""
        token_id = self._text.token_id(trigger)
        if token_id is None:
            return self._text.until("head", trigger)
        return sequence(ANY_TEXT, token(token_id))

    def _tag(self, tag: _Tag, num_done: int = 0, head: Expression = NOTHING) -> Expression:
        """Returns a tag. `head` has written the first `num_done` characters of its begin."""
        begin = self._text.marked(tag.begin[num_done:])
        if isinstance(tag.content, dict) and tag.content.get("type") == "any_text":
            return self._text.rule("tag", sequence(head, begin, self._text_until(tag.ends)))
        end = either(*map(self._text.marked, tag.ends))
        return self._text.rule("tag", sequence(head, begin, self.express(tag.content), end))

    def _text_until(self, ends: Sequence[str]) -> Expression:
        if not all(ends):
            raise self.error("any_text in a tag needs an end that is not empty")
        return either(*map(self._up_to, ends))

    def _read_tag(self, form: Any) -> _Tag:
        ends = form.get("end") if isinstance(form, dict) else None
        if isinstance(ends, list) and ends and all(isinstance(end, str) for end in ends):
            return _Tag(self.string(form, "begin"), form.get("content"), tuple(ends))
        return _Tag(self.string(form, "begin"), form.get("content"), (self.string(form, "end"),))

    def _triggered_tags(self, form: dict[str, Any]) -> Expression:
        self._refuse(form, "excludes")
        return self.triggered(
            [self._read_tag(tag) for tag in self.objects(form, "tags")],
            self.strings(form, "triggers"),
            at_least_one=form.get("at_least_one") is True,
            stop_after_first=form.get("stop_after_first") is True,
        )

    def _tags_with_separator(self, form: dict[str, Any]) -> Expression:
        tags = either(*(self._tag(self._read_tag(tag)) for tag in self.objects(form, "tags")))
        separator = self._text.marked(self.string(form, "separator"))
        found = tags
        if form.get("stop_after_first") is not True:
            found = sequence(tags, repeat(sequence(separator, tags)))
        return found if form.get("at_least_one") is True else optional(found)

    def _json_schema(self, form: dict[str, Any]) -> Expression:
        self._refuse(form, "style", "json")
        schema = form.get("json_schema")
        check_schema(schema, self._param)
        assert isinstance(schema, dict | bool)
        return json_schema(schema)

    def _regex(self, form: dict[str, Any]) -> Expression:
        self._refuse(form, "excludes")
        pattern = self.string(form, "pattern")
        check_size(pattern, self._param)
        return regex(pattern)

    def _grammar(self, form: dict[str, Any]) -> Expression:
        written = self.string(form, "grammar")
        check_size(written, self._param)
        return self._text.grammar("grammar", written)

    def _any_text(self, form: dict[str, Any]) -> Expression:
        self._refuse(form, "excludes")
        return ANY_TEXT

    def _sequence(self, form: dict[str, Any]) -> Expression:
        elements = self.objects(form, "elements")
        for element in elements[:-1]:
            if element.get("type") == "any_text":
                raise self.error("any_text must be the last element of a sequence, or in a tag")
        return sequence(*map(self.express, elements))

    def _repeat(self, form: dict[str, Any]) -> Expression:
        least, most = form.get("min", 0), form.get("max", -1)
        if type(least) is not int or type(most) is not int or least < 0 or most < -1:
            raise self.error("repeat needs min and max as numbers; -1 is no maximum")
        if most != -1 and most < least:
            raise self.error("repeat has a max below its min")
        return repeat(self.express(form.get("content")), least, None if most == -1 else most)

    def _token(self, form: dict[str, Any]) -> Expression:
        named = form.get("token")
        token_id = self._text.token_id(named) if isinstance(named, str) else named
        if type(token_id) is not int or not 0 <= token_id < 1 << 31:
            raise self.error("names a token that this model does not have")
        return token(token_id)

    def _refuse(self, form: dict[str, Any], key: str, *neutral: Any) -> None:
        if form.get(key) and form[key] not in neutral:
            raise self.error(f"{key} of a format is not supported")

    def string(self, form: Any, key: str) -> str:
        value = form.get(key) if isinstance(form, dict) else None
        if not isinstance(value, str):
            raise self.error(f"needs {key} as a string")
        return value

    def strings(self, form: dict[str, Any], key: str) -> list[str]:
        value = form.get(key)
        if not isinstance(value, list) or not value or len(value) > _MAX_TAGS:
            raise self.error(f"needs {key}, a list of 1 to {_MAX_TAGS}")
        if not all(isinstance(item, str) for item in value):
            raise self.error(f"needs {key} as strings")
        return list(value)

    def objects(self, form: dict[str, Any], key: str) -> list[dict[str, Any]]:
        value = form.get(key)
        if not isinstance(value, list) or not value or len(value) > _MAX_TAGS:
            raise self.error(f"needs {key}, a list of 1 to {_MAX_TAGS}")
        if not all(isinstance(item, dict) for item in value):
            raise self.error(f"needs {key} as objects")
        return list(value)

    def error(self, message: str) -> BadRequest:
        return BadRequest(f"{self._param}: {message}", param=self._param)
