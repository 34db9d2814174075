"""The parameters by which one request's next token is chosen, and their allowed values.

The same parameters give the same token at the same position on every rank, on a prefill or on a
decode node, after a preemption and after a resume: randomness is a pure function of
(`seed`, position, token id). The seed is therefore always set before a request reaches an engine.

A new parameter is named in three places: where the HTTP body becomes these
(`decode_node.protocol`), here, and where it is used. Everything between carries them whole.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from typing import Literal

import msgspec

from engine.contracts.errors import check

MAX_LOGPROBS = 128
"""Engines can give this many; a decode node's setting allows fewer."""
DEFAULT_MAX_LOGPROBS = 20
MAX_LOGPROB_TOKEN_IDS = 128
MAX_TOP_K = (1 << 31) - 1
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 256
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 4096
MAX_BAD_WORDS = 256
MAX_BAD_WORD_LENGTH = 256
"""Characters of a bad word."""
MAX_BAD_WORD_TOKENS = 32
MAX_NGRAM = 128
MAX_BEAMS = 32
MAX_GRAMMAR_BYTES = 1 << 18
"""The size of a grammar's text. It may hold the schemas of many tools."""

_NOT_WITH_BEAMS = (
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "stop",
    "prompt_logprobs",
    "allowed_token_ids",
    "bad_words",
    "grammar",
    "logprob_token_ids",
    "no_repeat_ngram_size",
)
"""Fields that change which tokens are likely, or look at an answer while it grows."""
_SURROGATE = re.compile("[\ud800-\udfff]")
"""Characters that UTF-8 cannot write."""


class BeamParams(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Asks for the best answers that a beam search finds.

    Attributes:
        width: Beams that grow at the same time.
        length_penalty: Answers are compared by the sum of their log probabilities, divided by their
            length to this power.
        early_stopping: True ends the search with `width` answers; False, when those that grow could
            not become better at their present length; "never", nor at any length.
        rank: The first answer that is asked for; 0 is the best one. Further ones follow it.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    rank: int = 0

    def num_candidates(self, num_stop_ids: int) -> int:
        """Returns how many of the most likely tokens of each beam the search may take: as many as
        can end answers are left over, and may not count yet."""
        return max(2, 1 + num_stop_ids) * self.width + num_stop_ids


class SamplingParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Checked at each node's edge by `check_sampling`; inside, taken as correct.

    Messages carry only what differs from the defaults, under the number that is each field's
    `name`; numbers are never used again. A peer that does not know a number refuses the message
    instead of sampling another token.

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
        logprob_token_ids: The tokens whose log probabilities are returned in place of the top k; k
            is their number then.
        prompt_logprobs: The same for the prompt's tokens; the prompt is then computed in full,
            and nothing of it comes from a cache.
        allowed_token_ids: The only tokens that may be chosen; None allows all.
        bad_words: Words that the output must not hold, each as its tokens. Where a request has
            nothing else left to choose from, they do not apply.
        grammar: Text of an llguidance grammar (Lark, or its JSON form) that the output follows; ""
            for none. When it is complete the output ends, whatever `min_tokens` says.
        no_repeat_ngram_size: The output has no sequence of this many tokens twice; 0: it may.
            Where a request has nothing else left to choose from, it may as well.
        beam: The output is the best that a beam search finds; None: tokens are chosen one by one.
    """

    max_tokens: int = msgspec.field(default=16, name="1")
    min_tokens: int = msgspec.field(default=0, name="2")
    temperature: float = msgspec.field(default=1.0, name="3")
    top_k: int = msgspec.field(default=0, name="4")
    top_p: float = msgspec.field(default=1.0, name="5")
    min_p: float = msgspec.field(default=0.0, name="6")
    repetition_penalty: float = msgspec.field(default=1.0, name="7")
    presence_penalty: float = msgspec.field(default=0.0, name="8")
    frequency_penalty: float = msgspec.field(default=0.0, name="9")
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict, name="10")
    seed: int = msgspec.field(default=0, name="11")
    stop: tuple[str, ...] = msgspec.field(default=(), name="12")
    stop_token_ids: tuple[int, ...] = msgspec.field(default=(), name="13")
    ignore_eos: bool = msgspec.field(default=False, name="14")
    logprobs: int | None = msgspec.field(default=None, name="15")
    prompt_logprobs: int | None = msgspec.field(default=None, name="16")
    allowed_token_ids: tuple[int, ...] | None = msgspec.field(default=None, name="17")
    bad_words: tuple[tuple[int, ...], ...] = msgspec.field(default=(), name="18")
    grammar: str = msgspec.field(default="", name="19")
    logprob_token_ids: tuple[int, ...] = msgspec.field(default=(), name="20")
    beam: BeamParams | None = msgspec.field(default=None, name="21")
    no_repeat_ngram_size: int = msgspec.field(default=0, name="22")

    @property
    def needs_penalties(self) -> bool:
        """Returns whether token counts of this request must be kept."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


def everything(num_logprobs: int, prompt_logprobs: int | None = None) -> SamplingParams:
    """Returns parameters that leave nothing of the sampler out: warming up asks for them, so that a
    new one belongs here as well."""
    return SamplingParams(
        top_k=5,
        top_p=0.5,
        min_p=0.01,
        repetition_penalty=1.1,
        logit_bias={0: 1.0},
        allowed_token_ids=(0, 1),
        bad_words=((1,), (0, 1)),
        no_repeat_ngram_size=2,
        logprobs=num_logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def check_sampling(
    params: SamplingParams, vocab_size: int, eos_token_ids: Collection[int] = ()
) -> None:
    """Raises `InvalidRequest` naming the first parameter that is out of its range."""
    _check_ranges(params)
    check(
        0 <= params.top_k <= MAX_TOP_K,
        "top_k",
        f"must be 0 (off) to {MAX_TOP_K}, not {params.top_k}",
    )
    check(
        0 <= params.no_repeat_ngram_size <= MAX_NGRAM,
        "no_repeat_ngram_size",
        f"must be 0 (off) to {MAX_NGRAM}, not {params.no_repeat_ngram_size}",
    )
    check(0 <= params.seed < 1 << 64, "seed", "must have 64 bits")
    check(
        0 <= params.min_tokens <= params.max_tokens,
        "min_tokens",
        f"must be between 0 and max_tokens ({params.max_tokens}), not {params.min_tokens}",
    )
    _check_logprob_token_ids(params, vocab_size)
    most = min(MAX_LOGPROBS, vocab_size)
    for name in ("logprobs", "prompt_logprobs"):
        asked = getattr(params, name)
        check(
            asked is None or 0 <= asked <= most,
            name,
            f"must be between 0 and {most}, not {asked}",
        )
    _check_stop(params, vocab_size)
    _check_logit_bias(params, vocab_size)
    _check_allowed_token_ids(params, vocab_size, eos_token_ids)
    _check_bad_words(params, vocab_size)
    _check_grammar(params)
    _check_beam(params, vocab_size, eos_token_ids)


def _check_ranges(params: SamplingParams) -> None:
    """Refuses values out of range; NaN fails every comparison, so the same test refuses it."""
    for name, low, high in (
        ("temperature", 0.0, 100.0),
        ("top_p", 0.0, 1.0),
        ("min_p", 0.0, 1.0),
        ("repetition_penalty", 0.0, 100.0),
        ("presence_penalty", -2.0, 2.0),
        ("frequency_penalty", -2.0, 2.0),
    ):
        value = getattr(params, name)
        check(low <= value <= high, name, f"must be between {low:g} and {high:g}, not {value}")
    for name in ("top_p", "repetition_penalty"):
        check(getattr(params, name) > 0, name, "must be greater than 0")


def _check_logprob_token_ids(params: SamplingParams, vocab_size: int) -> None:
    name, ids = "logprob_token_ids", params.logprob_token_ids
    _check_count(name, len(ids), MAX_LOGPROB_TOKEN_IDS)
    _check_token_ids(name, ids, vocab_size)
    check(len(set(ids)) == len(ids), name, "names a token twice")
    check(not ids or params.logprobs == len(ids), name, "needs logprobs")


def _check_stop(params: SamplingParams, vocab_size: int) -> None:
    count = len(params.stop)
    check(count <= MAX_STOP_STRINGS, "stop", f"has {count} strings, more than {MAX_STOP_STRINGS}")
    for stop in params.stop:
        check(
            0 < len(stop) <= MAX_STOP_LENGTH,
            "stop",
            f"strings must have 1 to {MAX_STOP_LENGTH} characters",
        )
    _check_count("stop_token_ids", len(params.stop_token_ids), MAX_STOP_TOKEN_IDS)
    _check_token_ids("stop_token_ids", params.stop_token_ids, vocab_size)


def _check_logit_bias(params: SamplingParams, vocab_size: int) -> None:
    _check_count("logit_bias", len(params.logit_bias), MAX_LOGIT_BIAS)
    _check_token_ids("logit_bias", params.logit_bias, vocab_size)
    for bias in params.logit_bias.values():
        check(
            math.isfinite(bias) and abs(bias) <= 100,
            "logit_bias",
            f"must be between -100 and 100, not {bias}",
        )


def _check_allowed_token_ids(
    params: SamplingParams, vocab_size: int, eos_token_ids: Collection[int]
) -> None:
    allowed = params.allowed_token_ids
    if allowed is None:
        return
    check(len(allowed) > 0, "allowed_token_ids", "must not be empty; leave it out to allow all")
    _check_count("allowed_token_ids", len(allowed), MAX_ALLOWED_TOKEN_IDS)
    _check_token_ids("allowed_token_ids", allowed, vocab_size)
    check(
        params.min_tokens == 0 or not {*eos_token_ids, *params.stop_token_ids}.issuperset(allowed),
        "allowed_token_ids",
        "holds only tokens that end the output, which min_tokens forbids",
    )


def _check_bad_words(params: SamplingParams, vocab_size: int) -> None:
    """Checks the words. A word may be there twice: with a space before it, and without."""
    _check_count("bad_words", len(params.bad_words), 2 * MAX_BAD_WORDS)
    for word in params.bad_words:
        check(
            0 < len(word) <= MAX_BAD_WORD_TOKENS,
            "bad_words",
            f"has a word of {len(word)} tokens; 1 to {MAX_BAD_WORD_TOKENS} are possible",
        )
        _check_token_ids("bad_words", word, vocab_size)


def _check_grammar(params: SamplingParams) -> None:
    """Checks the size of a grammar; the frontend has checked that its text compiles."""
    if not params.grammar:
        return
    check(not _SURROGATE.search(params.grammar), "grammar", "holds half of a surrogate pair")
    size = len(params.grammar.encode())
    check(size <= MAX_GRAMMAR_BYTES, "grammar", f"has {size} bytes, more than {MAX_GRAMMAR_BYTES}")
    check(
        not params.ignore_eos,
        "ignore_eos",
        "cannot be combined with structured output: a complete document has to end",
    )


def _check_beam(params: SamplingParams, vocab_size: int, eos_token_ids: Collection[int]) -> None:
    """Checks a beam search, and that nothing is asked for that it does not go with."""
    beam = params.beam
    if beam is None:
        return
    num_stops = len({*params.stop_token_ids, *eos_token_ids})
    check(1 <= beam.width <= MAX_BEAMS, "best_of", f"must be 1 to {MAX_BEAMS} with use_beam_search")
    most = min(MAX_LOGPROBS, vocab_size)
    check(
        beam.num_candidates(num_stops) <= most,
        "best_of",
        f"looks at {beam.num_candidates(num_stops)} tokens for each beam, with {num_stops} that "
        f"end an answer; at most {most} are possible",
    )
    check(0 <= beam.rank < beam.width, "n", f"must be at most best_of ({beam.width})")
    penalty = beam.length_penalty
    check(
        math.isfinite(penalty) and abs(penalty) <= 100,
        "length_penalty",
        f"must be between -100 and 100, not {penalty}",
    )
    default = SamplingParams()
    for name in _NOT_WITH_BEAMS:
        check(
            getattr(params, name) == getattr(default, name),
            name,
            "cannot be combined with use_beam_search",
        )


def _check_count(param: str, count: int, limit: int) -> None:
    check(count <= limit, param, f"has {count} entries, more than {limit}")


def _check_token_ids(param: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Looks at the extremes first: a list may be as long as the vocabulary."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        wrong = next(i for i in token_ids if not 0 <= i < vocab_size)
        check(False, param, f"names token id {wrong}; this model's ids are 0 to {vocab_size - 1}")
