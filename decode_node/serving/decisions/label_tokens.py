"""Finds the labels that a model can answer with as one token."""

from __future__ import annotations

from decode_node.protocol.decisions.question_texts import labels
from engine.frontend.tokenizer import Tokenizer

_TAIL = 64
"""Characters of a prompt's end that may change how the tokens behind them are cut."""


def label_tokens(tokenizer: Tokenizer, prompt: str, count: int) -> dict[str, int]:
    """Returns up to `count` labels, with the token of each where it begins an answer to
    `prompt`."""
    tail = prompt[-_TAIL:]
    before = tokenizer.encode(tail, add_special_tokens=False)
    found: dict[str, int] = {}
    for label in labels():
        *same, token_id = tokenizer.encode(tail + label, add_special_tokens=False)
        if same == before and token_id not in found.values():
            found[label] = token_id
            if len(found) == count:
                break
    return found
