"""How the next token of one request is chosen.

The same parameters give the same token at the same position on every rank, on a prefill or on a
decode node, after a preemption and after a resume: randomness is a pure function of
(`seed`, position, token id). The seed is therefore always set before a request reaches an engine.
"""

from __future__ import annotations

import msgspec

MAX_LOGPROBS = 20


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Validated at the edge (`engine.frontend.input_processor`); inside, taken as correct.

    Attributes:
        max_tokens: Generated tokens at most, at least 1.
        min_tokens: End-of-sequence and stop token ids are masked before this many tokens.
        temperature: 0 is greedy.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the smallest set of tokens whose probability reaches this; in (0, 1].
        min_p: Drop tokens less likely than `min_p` times the most likely one; in [0, 1].
        repetition_penalty: Divides positive and multiplies negative logits of tokens that the
            prompt or the output holds; > 0.
        presence_penalty: Subtracted once from logits of tokens that the output holds.
        frequency_penalty: Subtracted once for each time that the output holds the token.
        logit_bias: Token id to an amount added to its logit.
        seed: 64 bits, unsigned.
        stop: Strings that end the text; matched on decoded text, in the node server.
        stop_token_ids: Token ids that end the output, in addition to the model's own.
        ignore_eos: The model's end-of-sequence ids do not end the output.
        logprobs: None for none, k for the chosen token's and the top k log probabilities.
        prompt_logprobs: The same of the prompt's tokens; none of it is taken from a cache then.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def needs_penalties(self) -> bool:
        """Whether token counts of this request must be kept."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )
