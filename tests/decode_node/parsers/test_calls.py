"""Calls of the ten families: what is read, from streams in every cut, as tokens and as text."""

from __future__ import annotations

from functools import cache

import pytest

from decode_node.parsers.families.families import CALL_FAMILIES
from decode_node.parsers.families.formats import literals
from decode_node.parsers.families.reasoning_families import REASONING_FAMILIES
from decode_node.parsers.output_parser import OutputParser
from decode_node.parsers.output_parsers import OutputParsers
from tests.decode_node.parsers.outputs import FAMILIES, OUTPUTS, TOOLS, Output
from tests.decode_node.parsers.parsing import (
    Parsed,
    merged,
    parse,
    pieces,
    random_cuts,
    two_part_cuts,
)

REASONING = {
    "openai": "openai_gptoss",
    "kimi_k2": "kimi_k2",
    "mistral": "mistral",
    "seed_oss": "seed_oss",
    "kimi_k3": "kimi_k3",
    "gemma4": "gemma4",
    "solar_open": "solar_open",
    "muse_glimmer": "muse_glimmer",
    "minimax_m3": "minimax_m3",
}
NUM_RANDOM_CUTS = 100


class Texts:
    def __init__(self, added: dict[str, int]) -> None:
        self.added_token_ids = added


def reasoning_of(family: str) -> str:
    return REASONING.get(family, "deepseek_r1")


@cache
def tokens_of(family: str) -> dict[str, int]:
    """Numbers the markers of a family, as a tokenizer with tokens for all of them does."""
    form = next(known.form for known in CALL_FAMILIES if family in known.names)
    reasoning = next(known for known in REASONING_FAMILIES if reasoning_of(family) in known.names)
    texts = [*literals(form), *literals(reasoning)]
    texts += ["｜DSML｜"] * (family in ("deepseek_v32", "deepseek_v4", "deepseek_v41"))
    texts += ["｜GCML｜"] * (family == "gigachat35")
    texts += ["<|action_start|>", "<|plugin|>"] * (family == "internlm")
    texts += ["<｜tool_call_begin｜>", "<｜tool_sep｜>", "<｜tool_call_end｜>"] * (
        family == "step3"
    )
    texts += ["<|open|>", "<|close|>", "<|sep|>"] * (family == "kimi_k3")
    texts += ["<|channel>", "<|tool_response>"] * (family == "gemma4")
    texts += ["<|role_sep|>", "<|message_sep|>"] * (family == "gigachat30")
    texts += ["<|begin|>", "<|content|>"] * (family == "solar_open")
    texts += ["<|start|>", "<|message|>", "<|eot|>"] * (family == "muse_glimmer")
    plain = {
        "qwen3_coder": ("</parameter>", "</function>"),
        "seed_oss": ("</parameter>", "</function>"),
        "minimax_m2": ("</parameter>", "</invoke>"),
        "deepseek_v32": ("<",),
        "deepseek_v4": ("<",),
        "deepseek_v41": ("<",),
        "gigachat35": ("<",),
        "step3": ("<step", "</step"),
        "dots": ("</parameter>", "</invoke>"),
        "minicpm5": ("<function", "<param"),
        "functionary": ("<function=", ">"),
        "muse_glimmer": ("<atem:", "</atem:"),
    }
    found = sorted(
        {
            text
            for text in texts
            if text[:1] + text[-1:] in ("<>", "[]", "｜｜", "][")
            and text.count("<") < 2
            and not text.startswith(plain.get(family, "no marker"))
        }
    )
    return {text: 1000 + i for i, text in enumerate(found)}


def parsers_of(family: str, added: dict[str, int]) -> OutputParsers:
    return OutputParsers.of_model(
        Texts(added),
        tool_call_parser=family,
        reasoning_parser=reasoning_of(family),
    )


def new_parser(output: Output, added: dict[str, int]) -> OutputParser:
    return parsers_of(output.family, added).parser(TOOLS, is_reasoning_open=output.is_open)


def expected(output: Output, num_reasoning_tokens: int) -> Parsed:
    return Parsed(
        output.reasoning, output.content, output.calls, output.incomplete, num_reasoning_tokens
    )


@pytest.mark.parametrize(
    ("output", "as_tokens"),
    [
        pytest.param(output, as_tokens, id=f"{output}, as {'tokens' if as_tokens else 'text'}")
        for output in OUTPUTS
        for as_tokens in (True, False)
        if as_tokens or not output.tokens_only
    ],
)
def test_outputs_are_read_the_same_in_every_cut(output: Output, as_tokens: bool) -> None:
    added = tokens_of(output.family) if as_tokens else {}
    made = parsers_of(output.family, added)
    stream = pieces(output.text, added)

    def fresh() -> OutputParser:
        return made.parser(TOOLS, is_reasoning_open=output.is_open)

    whole = parse(fresh(), [stream])
    assert whole == expected(output, whole.num_reasoning_tokens)
    for seed in range(NUM_RANDOM_CUTS // 10):
        assert parse(fresh(), random_cuts(stream, seed)) == whole
    long_tokens = two_part_cuts(stream)
    long_tokens += [
        random_cuts(stream, seed) for seed in range(NUM_RANDOM_CUTS // (1 if as_tokens else 4))
    ]
    for cut in long_tokens:
        read = parse(fresh(), map(merged, cut))
        assert read == expected(output, read.num_reasoning_tokens)


def test_all_families_are_covered() -> None:
    assert set(FAMILIES) == {family.names[0] for family in CALL_FAMILIES}
