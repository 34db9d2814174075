"""Lark grammars of custom tools hold their input; what is no pattern is refused by name."""

from __future__ import annotations

import json
import re
import tracemalloc

import pytest

from decode_node.protocol.chat.tools import Tool, ToolUse
from decode_node.protocol.responses.lark_pattern import NoPattern, lark_pattern
from decode_node.protocol.responses.responses_tools import ResponseTools
from edge.http.errors import BadRequest
from tests.decode_node.parsers.test_call_grammar import model

APPLY_PATCH = """start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
PATCHES = [
    '*** Begin Patch\n*** Add File: a "b".txt\n+x \\ {"y": 1}\n+\n*** End Patch\n',
    "*** Begin Patch\n*** Delete File: é\n*** End Patch",
    "*** Begin Patch\n*** Update File: a\n*** Move to: b\n@@ def f():\n-x\n+y\n z\n"
    "*** End of File\n*** End Patch",
]
NO_PATCHES = [
    "*** Begin Patch\n*** End Patch",
    "*** Begin Patch\n*** Add File: a\nx\n*** End Patch",
    "*** Begin Patch\n*** Add File: a\n+x\n*** End Patch\nmore",
    "hello",
]


def custom(definition: str, syntax: str = "lark") -> dict[str, object]:
    form = {"type": "grammar", "syntax": syntax, "definition": definition}
    return {"type": "custom", "name": "apply_patch", "format": form}


def test_the_published_grammar_is_a_pattern() -> None:
    pattern = re.compile(lark_pattern(APPLY_PATCH))
    assert all(pattern.fullmatch(patch) for patch in PATCHES)
    assert not any(pattern.fullmatch(text) for text in NO_PATCHES)


@pytest.mark.parametrize("family", ["hermes", "qwen3_coder", "kimi_k2", "openai"])
def test_calls_are_held_to_it(family: str) -> None:
    function = ResponseTools.of([custom(APPLY_PATCH)]).functions[0]["function"]
    tool = Tool(function["name"], function["parameters"], function["strict"], raw={})
    made = model(family)
    grammar = made.grammar(ToolUse((tool,), "required"))
    written = {
        "hermes": '<tool_call>\n{{"name": "apply_patch", "arguments": {{"input": {json}}}}}\n'
        "</tool_call>",
        "qwen3_coder": "<tool_call>\n<function=apply_patch>\n<parameter=input>\n{text}\n"
        "</parameter>\n</function>\n</tool_call>",
        "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.apply_patch:0"
        '<|tool_call_argument_begin|>{{"input": {json}}}<|tool_call_end|>'
        "<|tool_calls_section_end|>",
        "openai": "<|channel|>commentary to=functions.apply_patch <|constrain|>json<|message|>"
        '{{"input": {json}}}',
    }[family]

    def accepts(text: str) -> bool:
        told = written.format(json=json.dumps(text, ensure_ascii=False), text=text)
        return made.accepts(grammar, told)

    assert all(map(accepts, PATCHES))
    assert not any(map(accepts, NO_PATCHES))


@pytest.mark.parametrize(
    ("grammar", "texts", "others"),
    [
        ('start: "a".."c"~2..3 // three\n  | X\nX.2: /x+/i', ["ab", "abc", "xX"], ["a", "d", ""]),
        ('?start: ["(" n ")"] "B"i # end\nn: INT ("," INT)*\n%import common (INT)',
         ["b", "(1,22)B"], ["()b", "(1)"]),
        ('start: W\n%import common.WORD -> W', ["abc"], ["1"]),
    ],
)  # fmt: skip
def test_what_lark_has_is_read(grammar: str, texts: list[str], others: list[str]) -> None:
    pattern = re.compile(lark_pattern(grammar))
    assert all(map(pattern.fullmatch, texts))
    assert not any(map(pattern.fullmatch, others))


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ('start: "(" start? ")"', "start needs itself"),
        ('start: "a"\n%ignore " "', "%ignore"),
        ("start: other", "other is not defined"),
        ("other: /a/", "start is not defined"),
        ("start: /a(?=b)/", "look-around"),
        ('start: ("a"', r"\( is not closed"),
        ("start: common\n%import common.NOTHING", "common.NOTHING"),
        ("a: /xxxxxxxxxxxxxxxx/\n" * 2, "defined twice"),
        (
            "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(20)) + 'r20: "aaaa"\nstart: r0',
            "more than",
        ),
        ("start: " + "(" * 500 + '"a"' + ")" * 500, "too deeply"),
        ("start: $", "not supported"),
    ],
)
def test_what_is_no_pattern_is_refused_by_name(grammar: str, why: str) -> None:
    with pytest.raises(NoPattern, match=why):
        lark_pattern(grammar)
    with pytest.raises(BadRequest, match="cannot be enforced") as error:
        ResponseTools.of([custom(grammar)])
    assert error.value.param == "tools.0.format.definition"


def test_a_rule_that_many_parts_name_is_refused_before_it_is_repeated() -> None:
    """A long rule, a million times in another, would take more memory than there is."""
    long = '"' + "b" * 50_000 + '"'
    for by in (" ", "|"):
        tracemalloc.start()
        with pytest.raises(NoPattern, match="more than 65536 characters"):
            lark_pattern(f"start: {by.join(['a'] * 2000)}\na: {long}")
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most < 10 << 20
