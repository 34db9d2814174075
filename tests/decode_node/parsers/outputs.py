"""Outputs of all families, written from the formats' public documentation.

Each is the text that a model generates, its special tokens spelled out. Whether a marker is a token
or text depends on the tokenizer; tests read every output both ways.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from decode_node.protocol.chat.tools import Tool
from tests.decode_node.parsers.parsing import Call
from tests.decode_node.parsers.writers import WRITERS, plain

TOOLS = (
    Tool(
        "get_weather",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "metric": {"type": "boolean"},
                "places": {"type": "array", "items": {"type": "string"}},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "limit": {"type": ["number", "null"]},
            },
            "required": ["city"],
        },
        strict=False,
        raw={},
    ),
    Tool("now", {"type": "object", "properties": {}}, strict=False, raw={}),
    Tool("write-file.v2", {}, strict=False, raw={}),
)

HOSTILE = (
    'a "quoted" \\ {brace} [x] </tool_call> <tool_call> </think>\n```\n[TOOL_CALLS] 日本 👩‍👩‍👧 é'
)
"""A text that quotes what formats consist of."""
HOSTILE_JSON = (
    '{"city": "a \\"quoted\\" \\\\ {brace} [x] </tool_call> <tool_call> </think>\\n```\\n'
    '[TOOL_CALLS] 日本 👩‍👩‍👧 é", "o": {"p": [[], {}, "}"]}}'
)
FRAMED = ("gigachat30",)
"""Families whose calls begin with what stands around parts of an answer."""
PARIS = '{"city": "Paris", "days": 3}'


@dataclass(frozen=True)
class Output:
    """One output and how it is to be read."""

    family: str
    what: str
    text: str
    calls: list[Call] = field(default_factory=list)
    content: str = ""
    reasoning: str = ""
    incomplete: str = ""
    is_open: bool = False
    tokens_only: bool = False
    """Markers as text would be taken for what they quote."""

    def __str__(self) -> str:
        return f"{self.family}: {self.what}"


def call(name: str = "get_weather", arguments: str = PARIS, *, is_complete: bool = True) -> Call:
    return Call(name, arguments, is_complete)


def broken(arguments: str, name: str = "get_weather") -> Call:
    return call(name, arguments, is_complete=False)


def _json_outputs() -> Iterator[Output]:
    """Yields the same outputs in every format whose arguments are JSON."""
    v3, sep = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
    kimi = "<|tool_call_begin|>functions."
    named = '{{"name": "{name}", "arguments": {args}}}'
    formats = {
        "hermes": (
            "",
            '<tool_call>\n{{"name": "{name}", "arguments": {args}}}\n</tool_call>',
            "\n",
            "",
        ),
        "llama3_json": (
            "<|python_tag|>",
            '{{"name": "{name}", "parameters": {args}}}',
            "; ",
            "",
        ),
        "deepseek_v3": (
            "<｜tool▁calls▁begin｜>",
            f"{v3}function{sep}{{name}}\n```json\n{{args}}\n```<｜tool▁call▁end｜>",
            "\n",
            "<｜tool▁calls▁end｜>",
        ),
        "deepseek_v31": (
            "<｜tool▁calls▁begin｜>",
            f"{v3}{{name}}{sep}{{args}}<｜tool▁call▁end｜>",
            "",
            "<｜tool▁calls▁end｜>",
        ),
        "kimi_k2": (
            "<|tool_calls_section_begin|>",
            kimi + "{name}:0<|tool_call_argument_begin|>{args}<|tool_call_end|>",
            "",
            "<|tool_calls_section_end|>",
        ),
        "mistral": ("", "[TOOL_CALLS]{name}[ARGS]{args}", "", ""),
        "llama_nemotron_json": ("<TOOLCALL>[", named, ", ", "]</TOOLCALL>"),
        "minimax": ("<tool_calls>\n", named, "\n", "\n</tool_calls>"),
        "apriel": ("<tool_calls>[", named, ", ", "]</tool_calls>"),
        "apertus": ("<|tools_prefix|>[", '{{"{name}": {args}}}', ", ", "]<|tools_suffix|>"),
        "cohere_command3": (
            "<|START_ACTION|>[\n    ",
            '{{"tool_call_id": "0", "tool_name": "{name}", "parameters": {args}}}',
            ",\n    ",
            "\n]<|END_ACTION|>",
        ),
        "granite": ("<|tool_call|>[", named, ", ", "]"),
        "phi4_mini_json": ("functools[", named, ", ", "]"),
        "gigachat3": ("", f"<|function_call|>{named}", "", ""),
        "functionary": ("", "<function={name}>{args}</function>", "", ""),
        "gigachat30": ("", f"<|message_sep|>\n\nfunction call<|role_sep|>\n{named}", "", ""),
        "solar_open": (
            "<|tool_calls|>",
            "<|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>{name}<|tool_call:args|>{args}"
            "<|tool_call:end|>",
            "",
            "<|calls|>",
        ),
    }
    for family, (begin, one, between, end) in formats.items():

        def of(args: str, name: str = "get_weather", one: str = one) -> str:
            return one.format(name=name, args=args)

        yield Output(family, "one call", begin + of(PARIS) + end, [call()])
        yield Output(
            family,
            "content, then two calls",
            f"Let me look.\n\n{begin}{of(PARIS)}{between}{of('{}', 'now')}{end}\n",
            [call(), call("now", "{}")],
            content="Let me look.",
        )
        yield Output(
            family,
            "hostile arguments",
            begin + of(HOSTILE_JSON, "write-file.v2") + end,
            [call("write-file.v2", HOSTILE_JSON)],
        )
        if family not in FRAMED:
            yield Output(family, "unknown function", x := begin + of("{}", "rm") + end, content=x)
        cut = (begin + of(PARIS)).index("Paris") + 3
        yield Output(
            family,
            "cut off in the arguments",
            (begin + of(PARIS))[:cut],
            [broken('{"city": "Par')],
            incomplete="call",
        )
        cut = (begin + of(PARIS)).index("weather")
        if family not in FRAMED:
            yield Output(family, "cut off in the name", x := (begin + of(PARIS))[:cut], content=x)
        yield Output(family, "no call", "It rains.\n{}\n", content="It rains.\n{}\n")
        garbage = begin + of("@ no JSON")
        if family in FRAMED:
            continue
        yield Output(family, "garbage in place of arguments", garbage, content=garbage)


def _outputs() -> Iterator[Output]:
    yield from _json_outputs()
    yield Output(
        "hermes",
        "keys in another order, and more of them",
        '<tool_call>{"id": [1], "arguments": {"city": "A"}, "name": "get_weather", "x": 1}'
        "</tool_call>",
        [call(arguments='{"city": "A"}')],
    )
    yield Output(
        "hermes",
        "more keys behind the arguments",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "A"}, "id": "}"}</tool_call>.',
        [call(arguments='{"city": "A"}')],
        content=".",
    )
    yield Output(
        "hermes",
        "no last brace, one too many, arguments as a string, null and none",
        '<tool_call>{"name": "now", "arguments": {}</tool_call>'
        '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>'
        '<tool_call>{"name": "now", "arguments": null}</tool_call>'
        '<tool_call>{"name": "now"}</tool_call>'
        '<tool_call>{"name": "now", "arguments": {}}}</tool_call>',
        [
            call("now", "{}"),
            call("now", '{"a": 1}'),
            call("now", "{}"),
            call("now", "{}"),
            call("now", "{}"),
        ],
        content="}",
    )
    yield Output(
        "hermes",
        "text between and behind calls",
        '<tool_call>{"name": "now", "arguments": {}}</tool_call> and '
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>\nDone. \n',
        [call("now", "{}"), call("now", "{}")],
        content="and \nDone. \n",
    )
    yield Output(
        "hermes",
        "arguments break off at the end marker",
        '<tool_call>{"name": "now", "arguments": {"a": [1, </tool_call>So.',
        [broken('{"a": [1, ', "now")],
        content="So.",
        incomplete="call",
        tokens_only=True,
    )
    yield Output(
        "hermes",
        "reasoning with a call in it",
        "<think>\nI say <tool_call>{}</tool_call>.\n</think>\n\n"
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
        [call("now", "{}")],
        reasoning="\nI say <tool_call>{}</tool_call>.\n",
    )
    yield Output(
        "llama4_json",
        "one call",
        f'<|python_start|>{{"name": "get_weather", "parameters": {PARIS}}}<|python_end|>',
        [call()],
    )
    yield Output(
        "llama4_json",
        "both markers in front of the calls",
        f'<|python_start|><|python_end|>{{"name": "get_weather", "parameters": {PARIS}}}; '
        '{"name": "now", "parameters": {}}',
        [call(), call("now", "{}")],
    )
    yield Output(
        "llama3_json",
        "bare objects",
        '\n{"name": "now", "parameters": {}}; {"name": "get_weather", "parameters": {"city": "A"}}',
        [call("now", "{}"), call(arguments='{"city": "A"}')],
    )
    yield Output(
        "llama3_json", "an object that is no call", x := '{"name": "Bob", "age": 3}', content=x
    )
    yield Output(
        "mistral",
        "array",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "A"}, "id": "a1"}, '
        '{"arguments": {}, "name": "now"}]',
        [call(arguments='{"city": "A"}'), call("now", "{}")],
    )
    yield Output(
        "mistral",
        "names without and with ids",
        '[TOOL_CALLS]now{"a": "[ARGS]"}[TOOL_CALLS]now[CALL_ID]abc123def[ARGS]{}',
        [call("now", '{"a": "[ARGS]"}'), call("now", "{}")],
    )
    yield Output(
        "mistral",
        "reasoning",
        "[THINK]Hm[/THINK]Yes.[TOOL_CALLS]now[ARGS]{}",
        [call("now", "{}")],
        reasoning="Hm",
        content="Yes.",
    )
    yield Output(
        "kimi_k2",
        "a section whose name is misspelled",
        "Yes.<|tool_call_section_begin|><|tool_call_begin|>functions.now:0"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_call_section_end|>",
        [call("now", "{}")],
        content="Yes.",
    )
    yield Output(
        "kimi_k2",
        "reasoning that a call ends",
        "Hm.<|tool_calls_section_begin|><|tool_call_begin|>functions.now:3"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        [call("now", "{}")],
        reasoning="Hm.",
        is_open=True,
    )
    yield Output(
        "deepseek_v31",
        "no arguments",
        "</think><｜tool▁call▁begin｜>now<｜tool▁sep｜><｜tool▁call▁end｜>",
        [call("now", "{}")],
        is_open=True,
    )
    yield from _xml_outputs()
    yield from _framed_outputs()
    yield from _harmony_outputs()
    yield from _pythonic_outputs()
    yield from _muse_outputs()
    yield from _element_outputs()
    yield from _plain_outputs()


def _plain_outputs() -> Iterator[Output]:
    """Yields the same outputs in formats that others are like."""
    yield Output(
        "ernie45",
        "reasoning, content in its frame, a call",
        "Hm.</think>\n\n<response>\nIt rains.\n</response>\n"
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n',
        [call("now", "{}")],
        content="\n\nIt rains.",
        reasoning="Hm.",
        is_open=True,
    )
    for family in (
        *("step3", "dots", "iquest_q1", "k2_horizon", "gigachat35", "deepseek_v41", "longcat"),
        *("functiongemma", "internlm", "granite-20b-fc"),
    ):

        def of(*calls: tuple[str, dict[str, object]], family: str = family) -> str:
            return plain(WRITERS[family](calls))

        paris: tuple[str, dict[str, object]] = ("get_weather", {"city": "Paris", "days": 3})
        yield Output(
            family,
            "content, then two calls",
            f"Let me look.\n\n{of(paris, ('now', {}))}\n",
            [call(), call("now", "{}")],
            content="Let me look.",
        )
        yield Output(family, "unknown function", x := of(("rm", {"a": "b"})), content=x)
        whole = of(paris)
        yield Output(
            family,
            "cut off in a text",
            whole[: whole.index("Paris") + 3],
            [broken('{"city": "Par')],
            incomplete="call",
        )


def _xml(family: str, name: str, parameters: dict[str, str], *, cut: bool = False) -> str:
    """Writes one call of a format with tags."""
    if family == "qwen3_coder":
        inner = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in parameters.items())
        return f"<tool_call>\n<function={name}>\n{inner}" + (
            "" if cut else "</function>\n</tool_call>"
        )
    if family == "hunyuan_v3":
        tag = "{}:opensource>".format
        inner = "".join(
            f"<{tag('arg_key')}{k}</{tag('arg_key')}\n<{tag('arg_value')}{v}</{tag('arg_value')}\n"
            for k, v in parameters.items()
        )
        call_begin = f"<{tag('tool_call')}{name}<{tag('tool_sep')}\n{inner}"
        return f"<{tag('tool_calls')}\n{call_begin}" + (
            "" if cut else f"</{tag('tool_call')}\n</{tag('tool_calls')}"
        )
    if family == "minicpm5":
        inner = "".join(f'<param name="{k}">{v}</param>' for k, v in parameters.items())
        return f'<function name="{name}">{inner}' + ("" if cut else "</function>")
    if family == "glm45":
        inner = "".join(
            f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in parameters.items()
        )
        return f"<tool_call>{name}\n{inner}" + ("" if cut else "</tool_call>")
    if family == "muse_glimmer":
        inner = "".join(
            f'<atem:parameter name="{k}">{v}</atem:parameter>\n' for k, v in parameters.items()
        )
        return f'<atem:function_calls>\n<atem:invoke name="{name}">\n{inner}' + (
            "" if cut else "</atem:invoke>\n</atem:function_calls>"
        )
    if family in ("seed_oss", "minimax_m2"):
        space, function, parameter, invoke = {
            "seed_oss": ("seed", "function={}", "parameter={}", "function"),
            "minimax_m2": ("minimax", 'invoke name="{}"', 'parameter name="{}"', "invoke"),
        }[family]
        inner = "".join(f"<{parameter.format(k)}>{v}</parameter>\n" for k, v in parameters.items())
        return f"<{space}:tool_call>\n<{function.format(name)}>\n{inner}" + (
            "" if cut else f"</{invoke}>\n</{space}:tool_call>"
        )
    types = {"city": "true", "note": "true"}
    inner = "".join(
        f'<｜DSML｜parameter name="{k}" string="{types.get(k, "false")}">{v}</｜DSML｜parameter>\n'
        for k, v in parameters.items()
    )
    section = "tool_calls" if family == "deepseek_v4" else "function_calls"
    return f'<｜DSML｜{section}>\n<｜DSML｜invoke name="{name}">\n{inner}' + (
        "" if cut else f"</｜DSML｜invoke>\n</｜DSML｜{section}>"
    )


def _xml_outputs() -> Iterator[Output]:
    for family in (
        *("qwen3_coder", "glm45", "deepseek_v32", "deepseek_v4", "seed_oss", "minimax_m2"),
        *("minicpm5", "hunyuan_v3"),
    ):
        end_of_thinking = "</seed:think>" if family == "seed_oss" else "</think>"

        def of(name: str = "get_weather", family: str = family, **parameters: str) -> str:
            return _xml(family, name, parameters)

        yield Output(
            family,
            "types of the schema",
            of(city="12", days="3", metric="true", places='["a", "b"]', limit="null"),
            [
                call(
                    arguments='{"city": "12", "days": 3, "metric": true, "places": ["a", "b"], '
                    '"limit": null}'
                )
            ],
        )
        yield Output(
            family,
            "types that are nearly right",
            of(days="3.0", metric="True", places="['a', None]", limit="much"),
            [call(arguments='{"days": 3, "metric": true, "places": ["a", null], "limit": "much"}')],
        )
        yield Output(
            family,
            "content, reasoning, two calls",
            f"Hm.{end_of_thinking}\n\nYes. \n{of(city='A')}\n{of('now')}\n",
            [call(arguments='{"city": "A"}'), call("now", "{}")],
            content="\n\nYes.",
            reasoning="Hm.",
            is_open=True,
        )
        text = 'if a < b: "x\\ny"\n\n\t</p> <parameter= </invoke> é 👩‍👩‍👧 </function> {}'
        yield Output(
            family,
            "hostile text",
            of(city=text),
            [
                call(
                    arguments='{"city": "if a < b: \\"x\\\\ny\\"\\n\\n\\t</p> <parameter= '
                    '</invoke> é 👩‍👩‍👧 </function> {}"}'
                )
            ],
        )
        yield Output(
            family,
            "empty text, and line breaks of its own",
            of(city="") + of(city="\na\n\n"),
            [call(arguments='{"city": ""}'), call(arguments='{"city": "\\na\\n\\n"}')],
        )
        yield Output(family, "unknown function", x := of("rm", city="A"), content=x)
        whole = _xml(family, "get_weather", {"city": "Paris"}, cut=True)
        yield Output(
            family,
            "cut off in a text",
            whole[: whole.index("Paris") + 3],
            [broken('{"city": "Par')],
            incomplete="call",
        )
        whole = _xml(family, "get_weather", {"city": "Paris"}, cut=True)
        yield Output(
            family,
            "cut off between parameters",
            whole,
            [broken('{"city": "Paris"')],
            incomplete="call",
        )
        whole = _xml(family, "get_weather", {"days": "34"}, cut=True)
        yield Output(
            family,
            "cut off in a number",
            whole[: whole.index("34") + 1],
            [broken('{"days": 3')],
            incomplete="call",
        )
    yield Output(
        "qwen3_coder",
        "values that quote their own end",
        _xml("qwen3_coder", "get_weather", {"city": "a</parameter>b</function>c"}),
        [call(arguments='{"city": "a</parameter>b</function>c"}')],
    )
    yield Output(
        "qwen3_coder",
        "a parameter without its end",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nA\n</function>\n</tool_call>",
        [call(arguments='{"city": "A"}')],
    )
    yield from _quoting_outputs()
    yield Output(
        "glm45",
        "a value with its own closing tag, and one that is not closed",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>a </arg_value> b</arg_value>\n"
        "<arg_key>note</arg_key>\n<arg_value>c\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
        "</tool_call>",
        [call(arguments='{"city": "a </arg_value> b", "note": "c", "days": 3}')],
    )
    yield Output(
        "glm45",
        "one line, types unknown",
        '<tool_call>write-file.v2<arg_key>a</arg_key><arg_value>{"b": 1}</arg_value>'
        "<arg_key>c</arg_key><arg_value>d e</arg_value></tool_call>",
        [call("write-file.v2", '{"a": {"b": 1}, "c": "d e"}')],
    )


def _framed_outputs() -> Iterator[Output]:
    """Yields answers whose parts have texts around them, which are no part of any."""
    end = "<|end|><|begin|>assistant"
    yield Output(
        "solar_open",
        "reasoning and an answer",
        f"<|think|>Hm.{end}<|content|>It rains.<|end|>",
        content="It rains.",
        reasoning="Hm.",
    )
    yield Output(
        "solar_open",
        "reasoning and a call",
        f"<|think|>Hm.{end}<|tool_calls|><|tool_call:begin|>now<|tool_call:args|>{{}}"
        "<|tool_call:end|><|calls|>",
        [call("now", "{}")],
        reasoning="Hm.",
    )
    yield Output(
        "gigachat30",
        "unknown function",
        '<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "rm", "arguments": {}}',
        content='\n\nfunction call<|role_sep|>\n{"name": "rm", "arguments": {}}',
    )
    family, quote = "gemma4", '<|"|>'
    yield Output(
        family,
        "content, then two calls",
        f'I look.\n<|tool_call>call:get_weather{{city:{quote}a, {{b}} "c"{quote},days:3}}'
        "<tool_call|>"
        f"<|tool_call>call:now{{}}<tool_call|><|tool_response>",
        [call(arguments='{"city": "a, {b} \\"c\\"", "days": 3}'), call("now", "{}")],
        content="I look.",
    )
    yield Output(
        family,
        "values of all kinds, nested",
        f"<|tool_call>call:write-file.v2{{a:[{quote}x{quote},1.5,[],{{}}],b:{{c:true,"
        f'{quote}d e{quote}:null,"f":"g"}},h:plain word}}<tool_call|>',
        [
            call(
                "write-file.v2",
                '{"a": ["x", 1.5, [], {}], "b": {"c": true, "d e": null, "f": "g"}, '
                '"h": "plain word"}',
            )
        ],
    )
    yield Output(
        family,
        "reasoning",
        "<|channel>thought\nHm.<channel|><|tool_call>call:now{}<tool_call|>",
        [call("now", "{}")],
        reasoning="Hm.",
    )
    for what, text, arguments in (
        ("a text", f"city:{quote}Par", '{"city": "Par'),
        ("a number", "days:1", '{"days": 1'),
        ("a list", f"places:[{quote}a{quote},", '{"places": ["a"'),
    ):
        yield Output(
            family,
            f"cut off in {what}",
            f"<|tool_call>call:get_weather{{{text}",
            [broken(arguments)],
            incomplete="call",
        )
    x = "<|tool_call>call:rm{a:1}<tool_call|>"
    yield Output(family, "unknown function", x, content=x)
    x = "<|tool_call>call:now(@ no)<tool_call|>"
    yield Output(family, "garbage in place of arguments", x, content=x)
    family = "functionary_v32"
    yield Output(family, "content", "all\nIt rains.\n>>> x\n", content="It rains.\n>>> x\n")
    yield Output(family, "a call", f"get_weather\n{PARIS}", [call()])
    yield Output(
        family,
        "content and two calls",
        f"all\nI look.\n>>>get_weather\n{PARIS}>>>now\n{{}}",
        [call(), call("now", "{}")],
        content="I look.",
    )
    yield Output(family, "unknown function", x := "rm\n{}", content=x)
    yield Output(
        family,
        "cut off",
        'get_weather\n{"city": "Par',
        [broken('{"city": "Par')],
        incomplete="call",
    )
    one = f'{{"name": "get_weather", "arguments": {PARIS}, "id": "call_1"}}'
    both = f'[{one}, {{"name": "now", "arguments": {{}}}}]\n'
    yield Output("xlam", "two calls", both, [call(), call("now", "{}")])
    for what, x in (
        ("a list", '[1, {"a": 2}]'),
        ("an object", one),
        ("an unknown function", '[{"name": "rm", "arguments": {}}]'),
        ("a list behind text", "It rains. " + both.strip()),
    ):
        yield Output("xlam", what, x, content=x)
    cut = both[: both.index("Paris") + 3]
    yield Output("xlam", "cut off", cut, [broken('{"city": "Par')], incomplete="call")
    family = "glm4"
    yield Output(family, "a call", f"get_weather\n{PARIS}", [call()])
    yield Output(
        family,
        "content and two calls",
        f"\nI look.<|assistant|>get_weather\n{PARIS}<|assistant|>now\n{{}}",
        [call(), call("now", "{}")],
        content="\nI look.",
    )
    for x in ("now is the time", "now", "now\nand then", "rm\n{}", "\nnow\n{}"):
        yield Output(family, f"content {x!r}", x, content=x)
    yield Output(
        family,
        "cut off",
        'get_weather\n{"city": "Par',
        [broken('{"city": "Par')],
        incomplete="call",
    )
    family, sep = "kimi_k3", "<|sep|>"
    said = f"<|open|>response{sep}Yes.<|close|>response{sep}"
    city = f'<|open|>argument key="city" type="string"{sep}a "b"<|close|>argument{sep}'
    days = f'<|open|>argument key="days" type="number"{sep}3<|close|>argument{sep}'
    calls = (
        f'<|open|>tools{sep}<|open|>call tool="get_weather" index="1"{sep}{city}{days}'
        f'<|close|>call{sep}<|open|>call tool="now" index="2"{sep}<|close|>call{sep}'
        f"<|close|>tools{sep}"
    )
    yield Output(
        family,
        "reasoning, content, two calls",
        f"Hm.<|close|>think{sep}{said}{calls}<|close|>message{sep}",
        [call(arguments='{"city": "a \\"b\\"", "days": 3}'), call("now", "{}")],
        content="Yes.",
        reasoning="Hm.",
        is_open=True,
    )
    yield Output(family, "content", f"{said}<|close|>message{sep}", content="Yes.")
    odd = days.replace('key="days"', 'key="a &quot;b&quot; &amp;lt;"')
    yield Output(
        family,
        "a key that is escaped",
        f'<|open|>tools{sep}<|open|>call tool="now" index="1"{sep}{odd}<|close|>call{sep}',
        [call("now", '{"a \\"b\\" &lt;": 3}')],
    )
    cut = city[: city.index(' "b"')]
    yield Output(
        family,
        "cut off in a text",
        f'<|open|>tools{sep}<|open|>call tool="get_weather" index="1"{sep}{cut}',
        [broken('{"city": "a')],
        incomplete="call",
    )
    x = f'<|open|>tools{sep}<|open|>call tool="rm" index="1"{sep}<|close|>call{sep}'
    yield Output(family, "unknown function", x, content=x)


def _quoting_outputs() -> Iterator[Output]:
    """Yields values that quote calls, and tags that were left out."""
    for family in (
        *("qwen3_coder", "seed_oss", "minimax_m2", "deepseek_v32", "minicpm5", "muse_glimmer"),
    ):

        def of(family: str = family, **parameters: str) -> str:
            return _xml(family, "get_weather", parameters)

        if family != "minicpm5":
            whole = of(city="A", days="3")
            first = _xml(family, "get_weather", {"city": "A"}, cut=True)
            closing = re.search(r"\n?</[^<>]*parameter>\n", first)
            assert closing is not None
            for what, tag in (("without", ""), ("with another name as", "</city>")):
                text = whole.replace(closing[0], f"{tag}\n", 1)
                yield Output(
                    family,
                    f"a parameter {what} its end",
                    text,
                    [call(arguments='{"city": "A", "days": 3}')],
                )
        quoted = of(city="x", days="1")
        for what, text in (
            ("a whole call", f"So:\n{quoted}\nDone"),
            ("parameters that the tool has not", _unknown_parameters(family)),
        ):
            yield Output(
                family,
                f"a value that quotes {what}",
                of(city=text, days="3"),
                [call(arguments=json.dumps({"city": text, "days": 3}, ensure_ascii=False))],
                tokens_only=family == "deepseek_v32",
            )
        known = '{"city": "A", "more": "b", "days": 3}'
        yield Output(
            family,
            "a parameter that the tool has not",
            of(city="A", more="b", days="3").replace('more" string="false"', 'more" string="true"'),
            [call(arguments=known)],
        )


def _unknown_parameters(family: str) -> str:
    """Returns a text with parameters of another tool."""
    begin, whole = (_xml(family, "", some, cut=True) for some in ({}, {"a": "1", "b": "2"}))
    return f"Use\n{whole[len(begin) :]}\nEnd"


def _harmony_outputs() -> Iterator[Output]:
    family = "openai"
    analysis = "<|channel|>analysis<|message|>"
    to = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    next_ = "<|start|>assistant"
    yield Output(
        family,
        "reasoning and an answer",
        f"{analysis}Hm.<|end|>{next_}<|channel|>final<|message|>It rains.\n<|return|>",
        content="It rains.\n",
        reasoning="Hm.",
    )
    yield Output(
        family,
        "reasoning, a word before, a call",
        f"{analysis}Hm.<|end|>{next_}<|channel|>commentary<|message|>One moment.<|end|>"
        f"{next_}{to}{PARIS}<|call|>",
        [call()],
        content="One moment.",
        reasoning="Hm.",
    )
    yield Output(
        family,
        "recipient before the channel, and another call",
        f" to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>{PARIS}"
        "<|call|>"
        f"{next_} to=functions.now<|channel|>commentary json<|message|><|call|>",
        [call(), call("now", "{}")],
    )
    yield Output(
        family,
        "headers without their beginning",
        f"{analysis}Hm.<|end|>assistant<|channel|>commentary<|message|>One moment.<|end|>"
        f"assistant{to}{PARIS}<|call|>assistant to=functions.now<|channel|>commentary<|message|>"
        "{}<|call|>assistant<|channel|>final<|message|>assistant<|return|>",
        [call(), call("now", "{}")],
        content="One moment.assistant",
        reasoning="Hm.",
    )
    yield Output(
        family,
        "hostile text",
        f"{to}{HOSTILE_JSON}<|call|>",
        [call(arguments=HOSTILE_JSON)],
    )
    yield Output(
        family,
        "somebody else",
        x := "<|channel|>commentary to=browser.search code<|message|>{}<|call|>",
        content=x,
    )
    yield Output(family, "cut off", f'{to}{{"city', [broken('{"city')], incomplete="call")
    yield Output(
        family, "cut off in reasoning", f"{analysis}Hm", reasoning="Hm", incomplete="reasoning"
    )
    yield Output(family, "cut off in a header", x := "<|channel|>comm", content=x)
    yield Output(family, "no markers", "It rains.", content="It rains.")
    yield Output(
        family,
        "two messages of a kind",
        f"{analysis}A<|end|>{next_}{analysis}B<|end|>{next_}<|channel|>final<|message|>C<|return|>",
        content="C",
        reasoning="A\nB",
    )


def _muse_outputs() -> Iterator[Output]:
    family, next_ = "muse_glimmer", "<|start|>assistant"

    def of(name: str = "get_weather", to: str = "", **parameters: str) -> str:
        return f" to={to or name}<|message|>{_xml(family, name, parameters)}"

    thought = f" to=self<|message|>Hm.<|eom|>{next_}"
    yield Output(
        family,
        "reasoning and an answer",
        f"{thought} to=user<|message|>It rains.\n<|eot|>",
        content="It rains.\n",
        reasoning="Hm.",
    )
    yield Output(
        family,
        "reasoning, a word before, more reasoning, two calls",
        f"{thought} to=user<|message|>One moment.<|eom|>{next_}{thought}"
        f"{of(city=' a b', days='3')}<|eom|>{next_}{of('now')}<|eot|>",
        [call(arguments='{"city": " a b", "days": 3}'), call("now", "{}")],
        content="One moment.",
        reasoning="Hm.Hm.",
    )
    yield Output(
        family,
        "two messages of a kind",
        f"{thought}{thought} to=user<|message|>A<|eom|>{next_} to=user<|message|>B<|eot|>",
        content="A\nB",
        reasoning="Hm.\nHm.",
    )
    yield Output(
        family,
        "a name that is doubled, and a header without its beginning",
        f"to=now.now<|message|>{_xml(family, 'now.now', {})}<|eom|>assistant{of('now')}<|eot|>",
        [call("now", "{}"), call("now", "{}")],
    )
    yield Output(
        family,
        "somebody else",
        f" to=rm<|message|>{_xml(family, 'rm', {'a': '1'})}<|eot|>",
        content=_xml(family, "rm", {"a": "1"}),
    )
    yield Output(family, "no header", "It rains to=user.", content="It rains to=user.")
    yield Output(family, "cut off in a header", x := " to=us", content=x)
    yield Output(
        family,
        "cut off in reasoning",
        " to=self<|message|>Hm",
        reasoning="Hm",
        incomplete="reasoning",
    )
    yield Output(
        family,
        "cut off in a text",
        of(city="Paris")[: of(city="Paris").index("Paris") + 3],
        [broken('{"city": "Par')],
        incomplete="call",
    )


def _element_outputs() -> Iterator[Output]:
    family, tag = "minimax_m3", "]<]minimax[>["

    def element(key: str, *values: str) -> str:
        return f"{tag}<{key}>{''.join(values)}{tag}</{key}>"

    def of(*elements: str, name: str = "get_weather") -> str:
        invoke = f'{tag}<invoke name="{name}">{"".join(elements)}{tag}</invoke>\n'
        return f"{tag}<tool_call>\n{invoke}{tag}</tool_call>"

    city, days = element("city", "Paris"), element("days", "3")
    first, second = of(city, days), of(name="now")
    both = first.replace(f"{tag}</tool_call>", "") + second.replace(f"{tag}<tool_call>\n", "")
    yield Output(family, "one call", first, [call()])
    yield Output(
        family,
        "reasoning, content, two calls",
        f"<mm:think>Hm.</mm:think>Yes. {both}\n",
        [call(), call("now", "{}")],
        content="Yes.",
        reasoning="Hm.",
    )
    yield Output(
        family,
        "types of the schema",
        of(
            *(element("city", "12 "), element("metric", "true"), element("limit", "1.5")),
            element("places", element("item", "a"), element("item", "")),
        ),
        [
            call(
                arguments='{"city": "12 ", "metric": true, "limit": 1.5, "places": ["a", ""]}',
            )
        ],
    )
    yield Output(
        family,
        "elements of no schema, and what is empty",
        of(
            element("a", element("b", element("item", element("c", "1"))), element("d", "x y")),
            element("e", ""),
            name="write-file.v2",
        )
        + of(element("places", "")),
        [
            call("write-file.v2", '{"a": {"b": [{"c": "1"}], "d": "x y"}, "e": ""}'),
            call(arguments='{"places": []}'),
        ],
    )
    yield Output(
        family,
        "JSON in place of elements",
        of(element("places", '["a", "b"]')),
        [call(arguments='{"places": ["a", "b"]}')],
    )
    yield Output(family, "an argument without its end", of(f"{tag}<city>Paris", days), [call()])
    yield Output(
        family,
        "a list without the end of its last element",
        of(f"{tag}<places>{tag}<item>a{tag}</places>", days),
        [call(arguments='{"places": ["a"], "days": 3}')],
    )
    yield Output(
        family, "a call without ends", of(f"{tag}<city>A"), [call(arguments='{"city": "A"}')]
    )
    quoting = f"So: {of(city)} and {tag}</city> more, {tag} <, {tag}</x>"
    yield Output(
        family,
        "a value that quotes a call and its own end",
        of(element("city", quoting), days),
        [call(arguments=json.dumps({"city": quoting, "days": 3}))],
    )
    yield Output(family, "unknown function", x := of(city, name="rm"), content=x)
    for what, text, arguments in (
        ("a text", f"{tag}<city>Par", '{"city": "Par'),
        ("a list", f"{tag}<places>{element('item', 'a')}", '{"places": ["a"'),
        ("a number", f"{tag}<days>1", '{"days": 1'),
    ):
        whole = of(text)
        yield Output(
            family,
            f"cut off in {what}",
            whole[: whole.index(f"{tag}</invoke>")],
            [broken(arguments)],
            incomplete="call",
        )


def _pythonic_outputs() -> Iterator[Output]:
    for family, begin, end in (
        ("pythonic", "", ""),
        ("llama4_pythonic", "<|python_start|>", "<|python_end|>"),
        ("lfm2", "<|tool_call_start|>", "<|tool_call_end|>"),
    ):
        yield Output(
            family,
            "two calls",
            f'{begin}[get_weather(city="Paris", days=3), now()]{end}',
            [call(), call("now", "{}")],
        )
        yield Output(
            family,
            "literals of all kinds",
            f"{begin}[get_weather(city='a\\'b) \\\\', places=[\"x\", ('y',)], "
            f"limit=-1.5, metric=True, note=None, o={{'k': [1, {{}}]}}, e=\"\")]{end}",
            [
                call(
                    arguments='{"city": "a\'b) \\\\", "places": ["x", ["y"]], "limit": -1.5, '
                    '"metric": true, "note": null, "o": {"k": [1, {}]}, "e": ""}'
                )
            ],
        )
        yield Output(
            family,
            "three quotes",
            f'{begin}[get_weather(city="""a "b", (c)\nd""", days=1)]{end}',
            [call(arguments='{"city": "a \\"b\\", (c)\\nd", "days": 1}')],
        )
        yield Output(family, "unknown function", x := f"{begin}[rm(a=1)]{end}", content=x)
        yield Output(family, "no literal", x := f"{begin}[now(a=open('x'))]{end}", content=x)
        yield Output(
            family,
            "cut off",
            f'{begin}[get_weather(city="Paris", days=',
            [broken('{"city": "Paris"')],
            incomplete="call",
        )
        yield Output(family, "a list", x := "[1, 2] and more", content=x)
    begin, end = "<function_calls>\n", "\n</function_calls>"
    yield Output(
        "olmo3",
        "two calls, a line each",
        f"{begin}get_weather(city='Paris', days=3)\nnow(){end}",
        [call(), call("now", "{}")],
    )
    yield Output("olmo3", "unknown function", x := f"{begin}rm(a=1){end}", content=x)
    yield Output(
        "olmo3",
        "content, and a call that is cut off",
        f"I look.\n{begin}get_weather(city='Paris', days=",
        [broken('{"city": "Paris"')],
        content="I look.",
        incomplete="call",
    )
    yield Output("olmo3", "a list", x := "[now()]", content=x)
    yield Output("pythonic", "text", x := "It rains. [now()]", content=x)


OUTPUTS = list(_outputs())
FAMILIES = sorted({output.family for output in OUTPUTS})
