"""The fields that say how tokens are drawn, for all bodies that have them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from decode_node.protocol.bodies.body import Count, Int, StrictBody
from edge.http.errors import BadRequest

_NGRAM = "no_repeat_ngram_size"


class SamplingFields(StrictBody):
    """The fields themselves, by OpenAI's names and vLLM's."""

    max_tokens: Int | None = None
    """The most tokens to generate; what is left of the context where it is not given, or is more
    (`--strict-max-tokens` refuses more)."""
    temperature: float | None = None
    """How freely tokens are drawn: 0 always takes the most likely one; up to 100."""
    top_p: float | None = None
    """Sample from the smallest set of tokens whose probability reaches this; 0 to 1."""
    n: Count | None = None
    """The number of answers to each prompt; choice i is drawn with `seed` + i. All prompts together
    have at most 64 answers (`--max-choices`)."""
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    """Up to 64 texts that end the answer; it ends before them."""
    seed: Int | None = None
    """The same seed gives the same answer; one is drawn where none is given."""
    presence_penalty: float | None = None
    """Lowers tokens that the answer has already; -2 to 2."""
    frequency_penalty: float | None = None
    """Lowers tokens by how often the answer has them; -2 to 2."""
    logit_bias: dict[str, float] | None = None
    """Adds an amount from -100 to 100 to the logits of token ids."""
    top_k: Int | None = None
    """Sample from the k most likely tokens; 0 or -1 takes all."""
    min_p: float | None = None
    """Leave out tokens less likely than this share of the most likely one; 0 to 1."""
    repetition_penalty: float | None = None
    """Divides the logits of tokens that prompt or answer have; above 1 they become rarer."""
    min_tokens: Int | None = None
    """No end of sequence, stop token or stop text ends the answer before this many tokens."""
    ignore_eos: bool | None = None
    """The model's own end of sequence does not end the answer."""
    stop_token_ids: Annotated[list[Int], Field(fail_fast=True)] | None = None
    """Up to 256 token ids that end the answer, besides the model's own."""
    prompt_logprobs: Int | None = None
    """Log probabilities of the prompt's tokens, with this many of the most likely ones."""
    allowed_token_ids: Annotated[list[Int], Field(fail_fast=True)] | None = None
    """The only tokens that the answer may have; up to 4096."""
    bad_words: Annotated[list[str], Field(fail_fast=True)] | None = None
    """Up to 256 words that the answer must not have."""
    no_repeat_ngram_size: Int | None = None
    """No sequence of this many tokens comes twice in the answer; up to 128, 0 lets any."""
    vllm_xargs: dict[str, Any] | None = None
    """Only `no_repeat_ngram_size`, as MinerU's clients write it; `debug` changes nothing."""
    include_stop_str_in_output: bool | None = None
    """The answer ends with the stop text or stop token that ended it."""
    skip_special_tokens: bool | None = None
    """Special tokens have no text; on unless it is false."""
    spaces_between_special_tokens: bool | None = None
    """Put spaces between special tokens where the tokenizer does; on unless it is false."""
    logprob_token_ids: Annotated[list[Int], Field(fail_fast=True)] | None = None
    """Tell the log probabilities of these tokens, and of the answer's own, in place of the most
    likely ones; up to 128, with `logprobs`."""

    @property
    def ngram_size(self) -> int:
        """Returns the size by either of its names. Raises `BadRequest` for other parameters of
        extensions."""
        given = self.vllm_xargs or {}
        for name, value in given.items():
            is_size = name == _NGRAM and type(value) is int
            if not is_size and name != "debug" and value:
                param = f"vllm_xargs.{name}"
                raise BadRequest(
                    f"{param}: of parameters of extensions only {_NGRAM} is built, a number",
                    param=param,
                    code="unsupported_parameter",
                )
        named = self.no_repeat_ngram_size
        return named if named is not None else given.get(_NGRAM) or 0
