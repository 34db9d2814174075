"""Reasoning and content: by special tokens, by text, opened by the prompt or by the model."""

from __future__ import annotations

import pytest

from decode_node.grammar.reasoning import ReasoningState, reasoning_state
from decode_node.parsers.output_parsers import OutputParsers, UnknownParser
from decode_node.protocol.chat.tools import Tool
from tests.decode_node.parsers.parsing import Parsed, parse, pieces, random_cuts, two_part_cuts

THINK = {"<think>": 7, "</think>": 8}
TEMPLATE = "{{ '<think>' + thoughts + '</think>' }}"


class Texts:
    def __init__(self, added: dict[str, int]) -> None:
        self.added_token_ids = added


def parsers(added: dict[str, int], name: str = "deepseek_r1") -> OutputParsers:
    return OutputParsers.of_model(Texts(added), reasoning_parser=name)


def read(text: str, *, added: dict[str, int], is_open: bool, name: str = "deepseek_r1") -> Parsed:
    """Parses a text whole, in every two parts and in random parts, and checks that all agree."""
    made = parsers(added, name)
    stream = pieces(text, added)
    whole = parse(made.parser(is_reasoning_open=is_open), [stream])
    for cut in [*two_part_cuts(stream), *(random_cuts(stream, seed) for seed in range(50))]:
        assert parse(made.parser(is_reasoning_open=is_open), cut) == whole
    return whole


@pytest.mark.parametrize("added", [THINK, {}], ids=["tokens", "text"])
@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "content", "incomplete"),
    [
        ("a <b\n</think>\n\nyes", True, "a <b\n", "\n\nyes", ""),
        ("<think>\nhm</think>yes", False, "\nhm", "yes", ""),
        ("\n<think>hm</think>yes", False, "hm", "yes", ""),
        ("<think>hm</think>yes", True, "hm", "yes", ""),
        ("yes", False, "", "yes", ""),
        (" </thin", False, "", " </thin", ""),
        ("\n <thi", False, "", "\n <thi", ""),
        ("hm, </thin", True, "hm, </thin", "", "reasoning"),
        ("", True, "", "", "reasoning"),
        ("</think>yes", True, "", "yes", ""),
        ("\n</think>yes</think>", False, "", "yes</think>", ""),
        ("yes <think>no</think>", False, "", "yes <think>no</think>", ""),
        ("hm</think>a</think><think>b", True, "hm", "a</think><think>b", ""),
        ("<tool_call>{}</tool_call></think>yes", True, "<tool_call>{}</tool_call>", "yes", ""),
    ],
)
def test_reasoning_is_the_first_stretch(
    added: dict[str, int], text: str, is_open: bool, reasoning: str, content: str, incomplete: str
) -> None:
    answer = read(text, added=added, is_open=is_open)
    assert (answer.reasoning, answer.content) == (reasoning, content)
    assert answer.incomplete == incomplete


def test_text_that_spells_a_marker_is_text_where_the_marker_is_a_token() -> None:
    made = parsers(THINK)
    spelled = [*"say </think>", 8, *"yes"]
    answer = parse(made.parser(is_reasoning_open=True), [spelled])
    assert (answer.reasoning, answer.content) == ("say </think>", "yes")


def test_reasoning_tokens_are_those_between_the_markers() -> None:
    answer = read("<think>four</think>and more", added=THINK, is_open=False)
    assert answer.num_reasoning_tokens == 4
    assert read("four</think>more", added=THINK, is_open=True).num_reasoning_tokens == 4
    assert read("more", added=THINK, is_open=False).num_reasoning_tokens == 0
    made = parsers(THINK)
    broken = made.parser(is_reasoning_open=True)
    broken.push(["", "ü", 8, "x"])
    assert broken.num_reasoning_tokens == 2


def test_kimi_may_call_without_ending_its_reasoning() -> None:
    added = {"<|tool_calls_section_begin|>": 9}
    answer = read("hm<|tool_calls_section_begin|>x", added=added, is_open=True, name="kimi_k2")
    assert (answer.reasoning, answer.content) == ("hm", "<|tool_calls_section_begin|>x")


def test_the_prompt_decides_by_its_end_alone() -> None:
    form = parsers(THINK).reasoning_format
    assert form is not None and (form.begin.token_id, form.end.token_id) == (7, 8)
    for prompt, is_open in [
        ("<|user|>hi<|assistant|><think>\n", True),
        ("<|user|>what is <think>?<|assistant|>", False),
        ("<|assistant|><think>\n\n</think>\n\n", False),
    ]:
        assert (reasoning_state(prompt, form) is ReasoningState.OPEN) is is_open
    assert OutputParsers.of_model(Texts({}), reasoning_parser="").reasoning_format is None


def test_auto_recognises_the_template() -> None:
    assert OutputParsers.of_model(Texts(THINK), TEMPLATE).reasoning_parser == "deepseek_r1"
    assert OutputParsers.of_model(Texts({}), "[THINK]x[/THINK]").reasoning_parser == "mistral"
    none = OutputParsers.of_model(Texts({}), "{{ messages }}")
    assert (none.reasoning_parser, none.marker_token_ids) == ("", frozenset())


@pytest.mark.parametrize(
    ("family", "template", "tokens"),
    [
        ("openai", "<|start|>assistant<|channel|>final<|message|>", ()),
        ("openai", "", ("<|channel|>", "<|message|>")),
        ("deepseek_v32", '<{{ dsml_token }}function_calls>{% set dsml_token = "｜DSML｜" %}', ()),
        ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\\n```json", ()),
        ("deepseek_v31", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>", ()),
        ("kimi_k2", "<|im_assistant|>", ("<|tool_calls_section_begin|>",)),
        ("mistral", "[AVAILABLE_TOOLS][/INST][TOOL_CALLS] [", ()),
        ("glm45", "<tool_call>{f}\\n<arg_key>k</arg_key>\\n<arg_value>", ("<tool_call>",)),
        ("qwen3_coder", "<tool_call>\\n<function=f>\\n<parameter=p>", ("<tool_call>",)),
        ("seed_oss", "<seed:tool_call>\\n<function=f>\\n<parameter=p>", ()),
        ("minimax_m2", '<minimax:tool_call>\\n<invoke name="f">', ()),
        ("hermes", '<tool_call>\\n{\\"name\\": f, \\"arguments\\": a}', ("<tool_call>",)),
        ("llama4_pythonic", "<|header_start|>[func_name1(param1=value1)]", ()),
        ("llama4_json", '<|header_start|>{"name": f, "parameters": d}', ()),
        ("pythonic", "<|start_header_id|>[func_name1(params_name1=v)] parameters", ()),
        ("llama3_json", '<|start_header_id|>{"name": f, "parameters": d}', ()),
        ("granite", "respond with <|tool_call|> followed by a JSON list", ()),
        ("phi4_mini_json", "<|tool|>{{ message.tools }}<|/tool|>", ()),
        ("olmo3", "<function_calls>{{ calls }}</function_calls>", ()),
        ("lfm2", "<|tool_list_start|>", ("<|tool_call_start|>",)),
        ("", "<|im_start|>user", ("<tool_call>", "<think>")),
    ],
)
def test_auto_recognises_how_a_template_calls(
    family: str, template: str, tokens: tuple[str, ...]
) -> None:
    added = {token: i for i, token in enumerate(tokens)}
    assert OutputParsers.of_model(Texts(added), template).tool_call_parser == family


def test_only_tokens_of_the_format_are_markers() -> None:
    made = parsers({**THINK, "<|im_end|>": 9, " ": 10, "<": 11})
    assert made.marker_token_ids == {7, 8}


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(UnknownParser, match=r"'qwen9'; there are auto, .*deepseek_r1, .*qwen3"):
        parsers(THINK, "qwen9")


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("minimax_m3", "<mm:think>Hm</mm:think>Yes"),
        ("hunyuan_v3", "<think:opensource>Hm</think:opensource>Yes"),
        ("apertus", "<|inner_prefix|>Hm<|inner_suffix|>Yes"),
        ("cohere_command3", "<|START_THINKING|>Hm<|END_THINKING|>Yes"),
        ("gemma4", "<|channel>thought\nHm<channel|>Yes"),
    ],
)
def test_families_think_between_markers_of_their_own(name: str, answer: str) -> None:
    found = parse(parsers({}, name).parser(), [[answer]])
    assert (found.reasoning, found.content) == ("Hm", "Yes")


HERMES = {**THINK, "<tool_call>": 5, "</tool_call>": 6}
CALLED = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "reasoning", "num_calls", "content"),
    [
        (f"I look{CALLED}", "I look", 1, ""),
        (f"I look{CALLED}\n{CALLED}", "I look", 2, ""),
        (f"{CALLED}</think>yes", "", 1, "</think>yes"),
        ("say <tool_call>{}</tool_call>.</think>yes", "say <tool_call>{}</tool_call>.", 0, "yes"),
        ('say <tool_call>{"name": "rm"}</think>yes', 'say <tool_call>{"name": "rm"}', 0, "yes"),
        ("<tool_call><tool_call></think>yes", "<tool_call><tool_call>", 0, "yes"),
        (f"<tool_call>{CALLED}", "<tool_call>", 1, ""),
        ('hm<tool_call>\n{"na', 'hm<tool_call>\n{"na', 0, ""),
        (f"hm</think>{CALLED}", "hm", 1, ""),
    ],
)
def test_a_call_ends_reasoning_where_its_marker_is_a_token(
    text: str, reasoning: str, num_calls: int, content: str
) -> None:
    tools = [Tool("now", {}, strict=False, raw={})]
    made = OutputParsers.of_model(
        Texts(HERMES), reasoning_parser="qwen3", tool_call_parser="hermes"
    )
    stream = pieces(text, HERMES)
    for cut in [[stream], *two_part_cuts(stream), *(random_cuts(stream, i) for i in range(20))]:
        found = parse(made.parser(tools, is_reasoning_open=True), cut)
        assert (found.reasoning, found.content) == (reasoning, content)
        assert [call.name for call in found.calls] == ["now"] * num_calls
        num_tokens = sum(isinstance(piece, str) for piece in pieces(reasoning, HERMES))
        assert found.num_reasoning_tokens == num_tokens
    untold = parse(made.parser((), is_reasoning_open=True), [stream])
    assert not untold.calls, "nothing may be called"


@pytest.mark.parametrize(
    ("family", "reasoning", "token", "text"),
    [
        (
            *("deepseek_v32", "deepseek_r1", "｜DSML｜"),
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n'
            "</｜DSML｜function_calls>",
        ),
        (
            *("minimax_m3", "minimax_m3", "]<]minimax[>["),
            ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="now">]<]minimax[>[</invoke>\n'
            "]<]minimax[>[</tool_call>",
        ),
    ],
)
def test_a_call_ends_reasoning_where_its_marker_has_a_token_in_it(
    family: str, reasoning: str, token: str, text: str
) -> None:
    tools = [Tool("now", {}, strict=False, raw={})]
    made = OutputParsers.of_model(
        Texts({token: 5}), reasoning_parser=reasoning, tool_call_parser=family
    )
    quoted = f"say {text[: len(token) + 3]} and {text.replace('now', 'rm')}, "
    for thought in ("I look", f"{quoted}a < b"):
        stream = pieces(thought + text, {token: 5})
        for cut in [*two_part_cuts(stream), *(random_cuts(stream, i) for i in range(20))]:
            found = parse(made.parser(tools, is_reasoning_open=True), cut)
            assert (found.reasoning, found.content) == (thought, "")
            assert [(call.name, call.arguments) for call in found.calls] == [("now", "{}")]


def test_a_call_that_is_only_text_is_reasoning() -> None:
    made = OutputParsers.of_model(Texts(THINK), reasoning_parser="qwen3", tool_call_parser="hermes")
    tools = [Tool("now", {}, strict=False, raw={})]
    found = parse(made.parser(tools, is_reasoning_open=True), [[f"I look{CALLED}"]])
    assert (found.reasoning, found.calls) == (f"I look{CALLED}", [])


def test_thousands_of_markers_in_one_piece_of_reasoning_are_read() -> None:
    made = OutputParsers.of_model(
        Texts(HERMES), reasoning_parser="qwen3", tool_call_parser="hermes"
    )
    tools = [Tool("now", {}, strict=False, raw={})]
    found = parse(made.parser(tools, is_reasoning_open=True), [[5] * 3000])
    assert found.reasoning == "<tool_call>" * 3000
