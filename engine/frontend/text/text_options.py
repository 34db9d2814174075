"""How the text of an output is written, as vLLM names it. No node but the one that answers asks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Says how tokens become text.

    Attributes:
        skip_special_tokens: Special tokens have no text.
        spaces_between_special_tokens: Where special tokens are shown, neighbours are apart, if the
            tokenizer puts spaces between its tokens.
        include_stop_str_in_output: The stop string or stop token that ends the text is its end.
        continues_prompt: The text goes on with the prompt's. Some tokenizers leave out the space at
            the beginning of a text, and here it is between two words.
    """

    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    continues_prompt: bool = False


PLAIN_TEXT = TextOptions()
