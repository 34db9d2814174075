"""A model's tokenizer as llguidance reads it, and the limits that every grammar is held to.

The node server checks a grammar with both before anything is computed, and every worker compiles it
with the same: what one accepts, the others do.

Making the tokenizer of 128k tokens takes about a second, 90 MB and, all that time, the interpreter
lock, whichever thread does it: make it at the start of a process, before anything waits.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import llguidance

from engine.config import ModelConfig


class GrammarUnavailable(Exception):
    """This model can follow no grammar. Says why and what to do."""


def load_grammar_tokenizer(
    model: ModelConfig, folder: Path | None = None
) -> llguidance.LLTokenizer:
    """Returns the checkpoint's tokenizer, with all of the model's ends and as many tokens as the
    model has logits. `folder`: that of tokenizer.json; None: the checkpoint's. Raises
    `GrammarUnavailable`."""
    file = (folder or Path(model.path)) / "tokenizer.json"
    if not model.eos_token_ids:
        raise GrammarUnavailable(
            "the model names no token that ends its output, so a grammar could not end either; "
            "add eos_token_id to its generation_config.json"
        )
    try:
        return llguidance.LLTokenizer(
            without_names(file.read_text(encoding="utf-8"), model.vocab_size),
            n_vocab=model.vocab_size,
            eos_token=list(model.eos_token_ids),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise GrammarUnavailable(
            f"grammars need the model's tokenizer, and {file} cannot be used: {error}"[:400]
        ) from error


def without_names(tokenizer: str, vocab_size: int) -> str:
    """Returns the text of a tokenizer.json whose special tokens have names that nothing writes, and
    without added tokens from `vocab_size` on: some tokenizers have tokens of images, for which the
    model has no logits, and the library refuses more tokens than logits.

    Where a grammar leaves one text only, the library spells it with the tokenizer, which takes a
    special token for its name: a schema with `{"enum": ["<s>"]}` forced the token, which the same
    grammar then refused. Grammars name special tokens by id.
    """
    content = json.loads(tokenizer)
    names: dict[str, str] = {}
    known = [added for added in content.get("added_tokens") or () if added["id"] < vocab_size]
    content["added_tokens"] = known
    for added in known:
        name = added["content"]
        if added.get("special") or (name.startswith("<") and name.endswith(">")):
            # The library knows special tokens by these brackets, too.
            names[name] = added["content"] = f"<\U0010fffd{added['id']}>"
    vocabulary = content["model"].get("vocab")
    if isinstance(vocabulary, dict):
        content["model"]["vocab"] = {names.get(name, name): i for name, i in vocabulary.items()}
    elif isinstance(vocabulary, list):
        for entry in vocabulary:
            entry[0] = names.get(entry[0], entry[0])
    return json.dumps(content, ensure_ascii=False)


@cache
def parser_limits() -> llguidance.LLParserLimits:
    """Returns what compiling a grammar, and one mask of it, may cost.

    All limits count operations. A clock would let ranks disagree on whether a grammar is refused,
    and ranks must always agree. Those of a mask are a quarter of the library's own or less: what
    needs more took up to 60 ms a mask, now 4, in which every row of the step waits. A row's
    automaton may take some 100 MB. Errors do not repeat the grammar or the output.
    """
    return llguidance.LLParserLimits(
        max_items_in_row=2000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=50_000,
        step_max_items=20_000,
        max_lexer_states=50_000,
        max_grammar_size=500_000,
        verbose_errors=False,
    )
