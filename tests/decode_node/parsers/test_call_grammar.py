"""Grammars of calls are the inverse of parsers: whatever one lets through, the other reads as calls
whose arguments follow the schemas."""

from __future__ import annotations

import json
import random
from functools import cache, lru_cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from decode_node.grammar.answer_grammar import answer_grammar
from decode_node.grammar.grammar_text import GrammarText
from decode_node.grammar.reasoning import ReasoningState
from decode_node.parsers.output_parsers import OutputParsers
from decode_node.parsers.visible_text import ParsedText
from decode_node.protocol.chat.tools import Tool, ToolUse
from edge.http.errors import BadRequest
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from engine.frontend.input_processor import GenerationRequest
from engine.frontend.output_processor import OutputProcessor
from engine.frontend.text.visible_text import PieceReader
from engine.frontend.tokenizer import Tokenizer
from tests.decode_node.parsers.outputs import FAMILIES
from tests.decode_node.parsers.parsing import Parsed, joined
from tests.decode_node.parsers.test_calls import reasoning_of, tokens_of

END = "<|eos|>"
MAX_TOKENS = 700
TOOLS = (
    Tool(
        "get_weather",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer", "minimum": 0, "maximum": 9},
                "unit": {"type": "string", "enum": ["C", "F", 'K "x" \\']},
                "metric": {"type": "boolean"},
                "spot": {"$ref": "#/$defs/spot"},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
            "$defs": {
                "spot": {
                    "type": "object",
                    "properties": {"lat": {"type": "number"}},
                    "required": ["lat"],
                    "additionalProperties": False,
                }
            },
        },
        strict=True,
        raw={},
    ),
    Tool(
        "now",
        {"type": "object", "properties": {}, "additionalProperties": False},
        strict=True,
        raw={},
    ),
)
SCHEMAS = {tool.name: tool.parameters or {} for tool in TOOLS}
CLOSERS = (
    "</think>",
    "[/THINK]",
    "</parameter>",
    "</arg_value>",
    "</｜DSML｜parameter>",
    "/parameter>",
    '<|"|>',
    '"',
    "}",
)
"""Texts that end what is free, and would rarely be drawn."""
OWN_CLOSERS = {
    "functiongemma": ("<escape>",),
    "gigachat35": ("</｜GCML｜parameter>",),
    "deepseek_v41": ("</｜DSML｜ parameter>",),
    "step3": ("</steptml:parameter>",),
    "k2_horizon": ("</ifm|arg_value>",),
    "muse_glimmer": ("</atem:parameter>",),
    "minimax_m3": ("]<]minimax[>[</city>", "]<]minimax[>[</unit>"),
}
_TEXT = [
    'the {"name": "get_weather", "arguments": {"city": "x", "days": 3}} true [1, 2.5] (a=\'b\')'
]


class Model:
    """A tokenizer with a family's markers, as tokens or not, and its grammars and parsers."""

    def __init__(self, family: str, *, has_tokens: bool = True) -> None:
        backend = Backend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        backend.train_from_iterator(
            _TEXT * 3,
            trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False),
        )
        backend.add_special_tokens([END, *(sorted(tokens_of(family)) if has_tokens else [])])
        self.tokenizer = Tokenizer(backend)
        self._closers = CLOSERS + OWN_CLOSERS.get(family, ())
        end = backend.token_to_id(END)
        assert end is not None
        self.end = end
        self._ll = LLTokenizer(backend.to_str(), eos_token=[end])
        self.parsers = OutputParsers.of_model(
            self.tokenizer, tool_call_parser=family, reasoning_parser=reasoning_of(family)
        )
        closing = [
            i
            for i in range(self.tokenizer.vocab_size)
            if i >= end or any(char in '"}])<\n' for char in self.tokenizer.decode([i]))
        ]
        self._closing = np.array(closing)
        self._tokens = lru_cache(maxsize=1000)(self._tokens_of)

    def _tokens_of(self, mask: bytes) -> tuple[list[int], list[int]]:
        """Returns the tokens that a mask allows, and those among them that end things."""
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
        closing = self._closing[bits[self._closing] > 0]
        return bits[: self.tokenizer.vocab_size].nonzero()[0].tolist(), closing.tolist()

    def grammar(self, use: ToolUse) -> str:
        text = GrammarText()
        body = self.parsers.call_grammar(text, use, [self.end])
        assert body is not None
        return text.write(body)

    def whole_grammar(self, use: ToolUse, state: ReasoningState) -> str:
        """Returns the grammar of an answer with its reasoning."""
        text = GrammarText(self.tokenizer.added_token_ids)
        body = self.parsers.call_grammar(text, use, [self.end])
        form = self.parsers.reasoning_format
        return answer_grammar(text, body, end_ids=[self.end], reasoning=form, state=state)

    def draw(self, grammar: str, seed: int) -> list[int] | None:
        """Draws an answer, with a liking for what ends things; None if it takes too long."""
        matcher, rng = LLMatcher(self._ll, grammar, log_level=0), random.Random(seed)
        assert not matcher.is_error(), matcher.get_error()
        ids: list[int] = []
        while len(ids) < MAX_TOKENS:
            if rng.random() < 0.1:
                closer = self.tokenizer.encode(rng.choice(self._closers), add_special_tokens=False)
                ids += closer[: matcher.try_consume_tokens(closer)]
            allowed, closing = self._tokens(matcher.compute_bitmask())
            is_end = len(closing) > 0 and rng.random() < 0.5
            chosen = rng.choice(closing if is_end else allowed)
            assert matcher.consume_token(chosen), matcher.get_error()
            if chosen == self.end:
                return ids
            ids.append(chosen)
        return None

    def read(
        self, ids: list[int], tools: tuple[Tool, ...] = TOOLS, *, is_open: bool = False
    ) -> Parsed:
        parser = self.parsers.parser(tools, is_reasoning_open=is_open)
        request = GenerationRequest(
            "r",
            RequestSpec([1], SamplingParams(max_tokens=len(ids) + 1)),
            reader=PieceReader(
                self.parsers.marker_token_ids,
                lambda: ParsedText(parser, stops_in_reasoning=True),
            ),
        )
        output = OutputProcessor(request, self.tokenizer).process(
            [*ids, self.end], finish_reason="stop"
        )
        return joined([*parser.push(output.pieces or ()), *parser.finish()])

    def accepts(self, grammar: str, text: str) -> bool:
        """Says whether a text, its markers spelled out, is a complete answer."""
        matcher = LLMatcher(self._ll, grammar, log_level=0)
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@cache
def model(family: str, has_tokens: bool = True) -> Model:
    return Model(family, has_tokens=has_tokens)


@cache
def validator(tool: str) -> jsonschema.Draft202012Validator:
    jsonschema.Draft202012Validator.check_schema(SCHEMAS[tool])
    return jsonschema.Draft202012Validator(SCHEMAS[tool])


def check_calls(answer: Parsed) -> None:
    for call in answer.calls:
        assert call.is_complete, call
        validator(call.name).validate(json.loads(call.arguments))


@pytest.mark.parametrize("has_tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("family", FAMILIES)
def test_required_calls_are_read_and_valid(family: str, has_tokens: bool) -> None:
    made = model(family, has_tokens)
    grammar = made.grammar(ToolUse(TOOLS, "required"))
    num_read = 0
    for seed in range(10):
        ids = made.draw(grammar, seed)
        if ids is None:
            continue
        answer = made.read(ids)
        assert answer.calls and not answer.content, made.tokenizer.decode(ids)
        check_calls(answer)
        num_read += 1
    assert num_read > 1


@pytest.mark.parametrize("has_tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("family", ["hermes", "kimi_k2", "mistral", "openai", "glm45"])
def test_calls_come_behind_the_reasoning(family: str, has_tokens: bool) -> None:
    made = model(family, has_tokens)
    num_thoughts = 0
    for state in (ReasoningState.OPEN, ReasoningState.POSSIBLE):
        grammar = made.whole_grammar(ToolUse(TOOLS, "required"), state)
        for seed in range(8):
            ids = made.draw(grammar, seed)
            if ids is None:
                continue
            answer = made.read(ids, is_open=state is ReasoningState.OPEN)
            assert answer.calls and not answer.content.strip()
            check_calls(answer)
            num_thoughts += bool(answer.reasoning)
    assert num_thoughts > 2 or (family, has_tokens) == ("openai", False)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_named_tool_is_called_once(family: str) -> None:
    made = model(family)
    for parallel in (True, False):
        grammar = made.grammar(ToolUse(TOOLS, "named", "now", is_parallel=parallel))
        ids = made.draw(grammar, 1)
        assert ids is not None
        answer = made.read(ids)
        assert [call.name for call in answer.calls] == ["now"]
        assert not answer.content


@pytest.mark.parametrize("has_tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("family", FAMILIES)
def test_strict_tools_under_auto_leave_text_free(family: str, has_tokens: bool) -> None:
    made = model(family, has_tokens)
    for use in (ToolUse(TOOLS, "auto"), ToolUse(TOOLS, "auto", is_parallel=False)):
        grammar = made.grammar(use)
        for seed in range(4):
            ids = made.draw(grammar, seed)
            if ids is not None:
                answer = made.read(ids)
                check_calls(answer)
                assert use.is_parallel or len(answer.calls) < 2


HERMES_CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize("has_tokens", [True, False], ids=["tokens", "text"])
def test_what_begins_as_a_call_is_one(has_tokens: bool) -> None:
    made = model("hermes", has_tokens)
    grammar = made.grammar(ToolUse(TOOLS, "auto"))
    for text in ("", "It rains.", f"So: {HERMES_CALL}", f"{HERMES_CALL}\n{HERMES_CALL} x"):
        assert made.accepts(grammar, text), text
    for text in ("<tool_call>", HERMES_CALL.replace("now", "rm"), HERMES_CALL.replace("{}", "{")):
        assert not made.accepts(grammar, text), text


@pytest.mark.parametrize("has_tokens", [True, False], ids=["tokens", "text"])
def test_one_call_at_most_is_one_call_at_most(has_tokens: bool) -> None:
    made = model("hermes", has_tokens)
    twice = f"{HERMES_CALL}\n{HERMES_CALL}"
    for mode in ("auto", "required"):
        grammar = made.grammar(ToolUse(TOOLS, mode, is_parallel=False))
        assert made.accepts(grammar, HERMES_CALL)
        assert not made.accepts(grammar, twice)
    assert made.accepts(made.grammar(ToolUse(TOOLS, "required")), twice)


def test_tools_that_are_not_strict_leave_auto_alone() -> None:
    tool = Tool("f", {}, strict=False, raw={})
    made = model("hermes")
    text = GrammarText()
    assert made.parsers.call_grammar(text, ToolUse((tool,), "auto"), [made.end]) is None
    assert made.parsers.call_grammar(text, ToolUse((tool,), "none"), [made.end]) is None
    grammar = made.grammar(ToolUse((tool,), "required"))
    assert made.accepts(grammar, HERMES_CALL.replace("now", "f").replace("{}", '{"a": [1]}'))
    assert not made.accepts(grammar, HERMES_CALL.replace("now", "f").replace("{}", "[1]"))


def test_keywords_that_are_not_supported_are_refused_for_strict_tools_alone() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "weird"}}}
    made = model("glm45")
    strict = Tool("f", schema, strict=True, raw={})
    with pytest.raises(BadRequest, match=r"'f': 'a': format is not supported"):
        made.grammar(ToolUse((strict,), "required"))
    lax = Tool("f", schema, strict=False, raw={})
    ids = made.draw(made.grammar(ToolUse((lax,), "required")), 1)
    assert ids is not None and made.read(ids, (lax,)).calls


@pytest.mark.parametrize("family", ["hermes", "pythonic", "glm45"])
@pytest.mark.parametrize("pattern", ["^(?!a)b+$", r"^(a)\1$", r"\bword\b"])
def test_look_around_in_patterns_stops_strict_tools_alone(family: str, pattern: str) -> None:
    """Clients write it for addresses of mail, in tools that nobody has to call by the letter."""
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}}
    made = model(family)
    lax = Tool("f", schema, strict=False, raw={})
    ids = made.draw(made.grammar(ToolUse((lax,), "required")), 1)
    assert ids is not None and made.read(ids, (lax,)).calls
    strict = Tool("f", schema, strict=True, raw={})
    with pytest.raises(AssertionError, match=r"look-around|lookarounds|backreferences"):
        made.draw(made.grammar(ToolUse((strict,), "required")), 1)


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        ({"enum": 5}, "enum must be a list"),
        ({"enum": {"a": 1}}, "enum must be a list"),
        ({"pattern": ["a"]}, "pattern must be a text"),
        ({"minLength": "2"}, "minLength must be a whole number"),
        ({"maxLength": True}, "maxLength must be a whole number"),
    ],
)
def test_constraints_of_texts_that_are_none_are_refused_by_name(
    constraint: dict[str, Any], message: str
) -> None:
    schema = {"type": "object", "properties": {"p": {"type": "string", **constraint}}}
    for strict in (True, False):
        use = ToolUse((Tool("f", schema, strict=strict, raw={}),), "required")
        with pytest.raises(BadRequest, match=f"'f': 'p': {message}"):
            model("glm45").grammar(use)


def test_null_constraints_of_texts_say_nothing() -> None:
    """Clients whose languages have no absent fields write them."""
    nulls = dict.fromkeys(("enum", "const", "pattern", "minLength", "maxLength"))
    parameters = {"type": "object", "properties": {"p": {"type": "string", **nulls}}}
    tool = Tool("f", {**parameters, "required": ["p"]}, strict=True, raw={})
    grammar = model("glm45").grammar(ToolUse((tool,), "required"))
    text = "<tool_call>f\n<arg_key>p</arg_key>\n<arg_value>any</arg_value>\n</tool_call>"
    assert model("glm45").accepts(grammar, text)


@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [
        ({"enum": ["a", "b"]}, "a", "c"),
        ({"const": "a"}, "a", "b"),
        ({"pattern": "^a+$"}, "aa", "ab"),
        ({"pattern": "b"}, "abc", "ac"),
        ({"pattern": r"x\.\d$"}, "ax.5", "ax.55"),
        ({"maxLength": 2}, "a", "abc"),
        ({"minLength": 2, "maxLength": 3}, "abc", "a"),
    ],
)
def test_texts_between_tags_follow_their_constraints(
    constraint: dict[str, Any], good: str, bad: str
) -> None:
    schema = {"type": "object", "properties": {"p": {"type": "string", **constraint}}}
    tool = Tool("f", {**schema, "required": ["p"]}, strict=True, raw={})
    for family in ("glm45", "qwen3_coder", "deepseek_v32"):
        made = model(family)
        grammar = made.grammar(ToolUse((tool,), "required"))
        text = {
            "glm45": "<tool_call>f\n<arg_key>p</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
            "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=p>\n{}\n</parameter>\n"
            "</function>\n</tool_call>",
            "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
            '<｜DSML｜parameter name="p" string="true">{}</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
            "</｜DSML｜function_calls>",
        }[family]
        assert made.accepts(grammar, text.format(good)), family
        assert not made.accepts(grammar, text.format(bad)), family


def test_arrays_of_mistral_may_begin_with_a_space() -> None:
    made = model("mistral", has_tokens=False)
    grammar = made.grammar(ToolUse(TOOLS, "required"))
    for space in ("", " "):
        assert made.accepts(grammar, f'[TOOL_CALLS]{space}[{{"name": "now", "arguments": {{}}}}]')


@pytest.mark.parametrize("family", FAMILIES)
def test_names_are_read_back_or_refused(family: str) -> None:
    """In JSON a name may have any characters; elsewhere those that could end it are refused."""
    made = model(family)
    for name in ("a-b.c_9", "größe", 'say "x" \\ <y>', "a b", "a:b"):
        tool = Tool(name, {"properties": {}, "additionalProperties": False}, strict=False, raw={})
        try:
            grammar = made.grammar(ToolUse((tool,), "required", is_parallel=False))
        except BadRequest as error:
            assert name not in ("a-b.c_9", "größe") and "in this model's format" in str(error)
            continue
        ids = made.draw(grammar, 1)
        assert ids is not None
        assert [call.name for call in made.read(ids, (tool,)).calls] == [name]
    if family in ("hermes", "llama3_json"):
        assert made.grammar(ToolUse((Tool("a b", {}, strict=False, raw={}),), "required"))


def test_calls_can_be_forced_from_a_model_whose_format_is_unknown() -> None:
    made = model("hermes")
    unknown = OutputParsers.of_model(made.tokenizer, tool_call_parser="", reasoning_parser="")
    for name in ("", "now"):
        text = GrammarText()
        use = ToolUse(TOOLS, "named" if name else "required", name)
        body = unknown.call_grammar(text, use, [made.end])
        assert body is not None
        grammar = text.write(body)
        assert made.accepts(grammar, '{"name": "now", "arguments": {}}')
        assert not made.accepts(grammar, "It rains.")
        ids = made.draw(grammar, 1)
        assert ids is not None
        parser = unknown.parser(TOOLS)
        answer = joined([*parser.push([made.tokenizer.decode(ids)]), *parser.finish()])
        assert answer.calls and not answer.content
        check_calls(answer)
