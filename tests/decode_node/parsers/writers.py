"""Writes calls as each family of models does, with any arguments.

What stands between `QUOTE` and `UNQUOTE` is a value's text: markers in it are text and no tokens,
as a tokenizer reads what a model quotes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.frontend.text.pieces import Piece
from tests.decode_node.parsers.parsing import pieces

Arguments = Mapping[str, Any]
QUOTE, UNQUOTE = "\ufdd4", "\ufdd5"
_QUOTED = re.compile(f"{QUOTE}(.*?){UNQUOTE}", re.DOTALL)


def quoted(text: str) -> str:
    return f"{QUOTE}{text}{UNQUOTE}"


def plain(text: str) -> str:
    """Returns what the model writes, as text."""
    return text.replace(QUOTE, "").replace(UNQUOTE, "")


def stream(text: str, added: Mapping[str, int]) -> list[Piece]:
    """Cuts a text into characters and tokens, of which quoted texts have none."""
    found: list[Piece] = []
    for at, part in enumerate(_QUOTED.split(text)):
        found += pieces(part, {} if at % 2 else added)
    return found


def _json(value: Any) -> str:
    return quoted(json.dumps(value, ensure_ascii=False))


def _named(name: str, arguments: Arguments, key: str = "arguments") -> str:
    return f'{{"name": {json.dumps(name)}, "{key}": {_json(arguments)}}}'


def _listed(begin: str, end: str, between: str = ", ") -> Callable[[Sequence[Any]], str]:
    return lambda calls: begin + between.join(_named(*call) for call in calls) + end


def _each(begin: str, end: str, key: str = "arguments") -> Callable[[Sequence[Any]], str]:
    return lambda calls: "\n".join(begin + _named(*call, key) + end for call in calls)


def _named_json(one: str, begin: str = "", end: str = "") -> Callable[[Sequence[Any]], str]:
    def write(calls: Sequence[Any]) -> str:
        texts = (
            one.replace("NAME", name).replace("INDEX", str(i)).replace("JSON", _json(arguments))
            for i, (name, arguments) in enumerate(calls)
        )
        return begin + "".join(texts) + end

    return write


def _text(value: Any) -> str:
    """Returns a value as formats with tags write it."""
    return quoted(value) if isinstance(value, str) else _json(value)


def _tagged(
    call: str,
    parameter: str,
    begin: str = "",
    end: str = "",
    text_mark: str = "",
    other_mark: str = "",
) -> Callable[[Sequence[Any]], str]:
    def write(calls: Sequence[Any]) -> str:
        found = []
        for name, arguments in calls:
            inner = "".join(
                parameter.replace("KEY", key)
                .replace("MARK", text_mark if isinstance(value, str) else other_mark)
                .replace("VALUE", _text(value))
                for key, value in arguments.items()
            )
            found.append(call.replace("NAME", name).replace("PARAMETERS", inner))
        return begin + "\n".join(found) + end

    return write


def _pythonic(begin: str, end: str, between: str = ", ") -> Callable[[Sequence[Any]], str]:
    def write(calls: Sequence[Any]) -> str:
        texts = (
            f"{name}({', '.join(f'{key}={quoted(repr(value))}' for key, value in args.items())})"
            for name, args in calls
        )
        return begin + between.join(texts) + end

    return write


def _braced(
    calls: Sequence[Any],
    begin: str = "<|tool_call>",
    end: str = "<tool_call|>",
    quote: str = '<|"|>',
) -> str:
    def value_of(value: Any) -> str:
        match value:
            case str():
                return f"{quote}{quoted(value)}{quote}"
            case dict():
                return "{" + ",".join(f"{k}:{value_of(v)}" for k, v in value.items()) + "}"
            case list():
                return "[" + ",".join(map(value_of, value)) + "]"
        return json.dumps(value)

    return "".join(f"{begin}call:{name}{value_of(a)}{end}" for name, a in calls)


def _elements(calls: Sequence[Any]) -> str:
    tag = "]<]minimax[>["

    def element(key: str, value: Any) -> str:
        inner = quoted(value) if isinstance(value, str) else json.dumps(value)
        if isinstance(value, dict):
            inner = "".join(element(k, v) for k, v in value.items())
        elif isinstance(value, list):
            inner = "".join(element("item", v) for v in value)
        return f"{tag}<{key}>{inner}{tag}</{key}>"

    found = [f"{tag}<tool_call>\n"]
    for name, arguments in calls:
        inner = "".join(element(key, value) for key, value in arguments.items())
        found.append(f'{tag}<invoke name="{name}">{inner}{tag}</invoke>\n')
    return "".join(found) + f"{tag}</tool_call>"


def _kimi_k3(calls: Sequence[Any]) -> str:
    kinds = {str: "string", bool: "boolean", dict: "object", list: "array", type(None): "null"}
    sep = "<|sep|>"
    found = [f"<|open|>tools{sep}"]
    for number, (name, arguments) in enumerate(calls):
        found.append(f'<|open|>call tool="{name}" index="{number}"{sep}')
        for key, value in arguments.items():
            name_of_type = kinds.get(type(value), "number")
            escaped = key.replace("&", "&amp;").replace('"', "&quot;")
            found.append(f'<|open|>argument key="{escaped}" type="{name_of_type}"{sep}')
            found.append(f"{_text(value)}<|close|>argument{sep}")
        found.append(f"<|close|>call{sep}")
    return "".join(found) + f"<|close|>tools{sep}"


def _dsml(section: str, bar: str = "｜DSML｜") -> Callable[[Sequence[Any]], str]:
    return _tagged(
        f'<{bar}invoke name="NAME">\nPARAMETERS</{bar}invoke>',
        f'<{bar}parameter name="KEY" string="MARK">VALUE</{bar}parameter>\n',
        f"<{bar}{section}>\n",
        f"\n</{bar}{section}>",
        "true",
        "false",
    )


def _muse(calls: Sequence[Any]) -> str:
    write = _tagged(
        '<atem:function_calls>\n<atem:invoke name="NAME">\nPARAMETERS</atem:invoke>\n'
        "</atem:function_calls>",
        '<atem:parameter name="KEY">VALUE</atem:parameter>\n',
    )
    messages = (f" to={name}<|message|>{write([(name, arguments)])}" for name, arguments in calls)
    return "<|eom|><|start|>assistant".join(messages) + "<|eot|>"


def _harmony(calls: Sequence[Any]) -> str:
    head = "<|channel|>commentary to=functions."
    return "<|start|>assistant".join(
        f"{head}{name} <|constrain|>json<|message|>{_json(arguments)}<|call|>"
        for name, arguments in calls
    )


def _apertus(calls: Sequence[Any]) -> str:
    inner = ", ".join(f'{{"{name}": {_json(arguments)}}}' for name, arguments in calls)
    return f"<|tools_prefix|>[{inner}]<|tools_suffix|>"


def _cohere(calls: Sequence[Any]) -> str:
    inner = ",\n    ".join(
        f'{{"tool_call_id": "{i}", "tool_name": "{name}", "parameters": {_json(arguments)}}}'
        for i, (name, arguments) in enumerate(calls)
    )
    return f"<|START_ACTION|>[\n    {inner}\n]<|END_ACTION|>"


WRITERS: Mapping[str, Callable[[Sequence[tuple[str, Arguments]]], str]] = {
    "hermes": _each("<tool_call>\n", "\n</tool_call>"),
    "ernie45": _each("<tool_call>\n", "\n</tool_call>"),
    "llama3_json": lambda calls: "; ".join(_named(*call, "parameters") for call in calls),
    "llama4_json": lambda calls: (
        f"<|python_start|>{'; '.join(_named(*call, 'parameters') for call in calls)}<|python_end|>"
    ),
    "gigachat3": lambda calls: "".join("<|function_call|>" + _named(*call) for call in calls),
    "gigachat30": lambda calls: "".join(
        f"<|message_sep|>\n\nfunction call<|role_sep|>\n{_named(*call)}" for call in calls
    ),
    "llama_nemotron_json": _listed("<TOOLCALL>[", "]</TOOLCALL>"),
    "minimax": _listed("<tool_calls>\n", "\n</tool_calls>", "\n"),
    "apriel": _listed("<tool_calls>[", "]</tool_calls>"),
    "xlam": _listed("[", "]"),
    "granite": _listed("<|tool_call|>[", "]"),
    "phi4_mini_json": _listed("functools[", "]"),
    "apertus": _apertus,
    "cohere_command3": _cohere,
    "mistral": _named_json("[TOOL_CALLS]NAME[ARGS]JSON"),
    "deepseek_v3": _named_json(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nJSON\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": _named_json(
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>JSON<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "kimi_k2": _named_json(
        "<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>JSON<|tool_call_end|>",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
    ),
    "solar_open": _named_json(
        "<|tool_call:begin|>a1<|tool_call:name|>NAME<|tool_call:args|>JSON<|tool_call:end|>",
        "<|tool_calls|>",
        "<|calls|>",
    ),
    "functionary": _named_json("<function=NAME>JSON</function>"),
    "functionary_v32": lambda calls: _named_json(">>>NAME\nJSON")(calls).removeprefix(">>>"),
    "glm4": lambda calls: _named_json("<|assistant|>NAME\nJSON")(calls)[len("<|assistant|>") :],
    "openai": _harmony,
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "qwen3_coder": _tagged(
        "<tool_call>\n<function=NAME>\nPARAMETERS</function>\n</tool_call>",
        "<parameter=KEY>\nVALUE\n</parameter>\n",
    ),
    "seed_oss": _tagged(
        "<seed:tool_call>\n<function=NAME>\nPARAMETERS</function>\n</seed:tool_call>",
        "<parameter=KEY>VALUE</parameter>\n",
    ),
    "minimax_m2": _tagged(
        '<invoke name="NAME">\nPARAMETERS</invoke>',
        '<parameter name="KEY">VALUE</parameter>\n',
        "<minimax:tool_call>\n",
        "\n</minimax:tool_call>",
    ),
    "glm45": _tagged(
        "<tool_call>NAME\nPARAMETERS</tool_call>",
        "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n",
    ),
    "hunyuan_v3": _tagged(
        "<tool_call:opensource>NAME<tool_sep:opensource>\nPARAMETERS</tool_call:opensource>",
        "<arg_key:opensource>KEY</arg_key:opensource>\n"
        "<arg_value:opensource>VALUE</arg_value:opensource>\n",
        "<tool_calls:opensource>\n",
        "\n</tool_calls:opensource>",
    ),
    "minicpm5": _tagged(
        '<function name="NAME">PARAMETERS</function>', '<param name="KEY">VALUE</param>'
    ),
    "muse_glimmer": _muse,
    "minimax_m3": _elements,
    "kimi_k3": _kimi_k3,
    "gemma4": _braced,
    "functiongemma": lambda calls: _braced(
        calls, "<start_function_call>", "<end_function_call>", "<escape>"
    ),
    "longcat": _each("<longcat_tool_call>\n", "\n</longcat_tool_call>"),
    "internlm": _each("<|action_start|><|plugin|>\n", "<|action_end|>", "parameters"),
    "granite-20b-fc": _each("<function_call>", ""),
    "step3": _tagged(
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="NAME">\n'
        "PARAMETERS</steptml:invoke><｜tool_call_end｜>",
        '<steptml:parameter name="KEY">VALUE</steptml:parameter>\n',
        "<｜tool_calls_begin｜>\n",
        "\n<｜tool_calls_end｜>",
    ),
    "dots": _tagged(
        '<invoke name="NAME">\nPARAMETERS</invoke>',
        '<parameter name="KEY">VALUE</parameter>\n',
        "<dots_function_call>\n",
        "\n</dots_function_call>",
    ),
    "iquest_q1": _tagged(
        "<iquest_tool_call>NAMEPARAMETERS</iquest_tool_call>",
        "<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>",
    ),
    "k2_horizon": _tagged(
        "<ifm|tool_call>NAME\nPARAMETERS</ifm|tool_call>",
        "<ifm|arg_key>KEY</ifm|arg_key>\n<ifm|arg_type>any</ifm|arg_type>\n"
        "<ifm|arg_value>VALUE</ifm|arg_value>\n",
        "<ifm|tool_calls>\n",
        "\n</ifm|tool_calls>",
    ),
    "gigachat35": _dsml("tool_calls", "｜GCML｜"),
    "deepseek_v41": _dsml("calls", "｜DSML｜ "),
    "pythonic": _pythonic("[", "]"),
    "llama4_pythonic": _pythonic("<|python_start|>[", "]<|python_end|>"),
    "lfm2": _pythonic("<|tool_call_start|>[", "]<|tool_call_end|>"),
    "olmo3": _pythonic("<function_calls>\n", "\n</function_calls>", "\n"),
}
