"""The setting of speculative decoding, in the JSON of vLLM's flag of the same name.

    --speculative-config '{"method": "ngram", "num_speculative_tokens": 3}'

Answers do not depend on it: a draft counts only where it is the token that would have been chosen.
So nodes need not agree, and a prefill node, which chooses one token of each answer, drafts nothing.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, Field
from pydantic_settings import BaseSettings

from engine.config import DrafterName, EngineConfig, SpeculativeConfig
from engine.node.command_line import SettingsError

logger = logging.getLogger(__name__)

MAX_DRAFTS = 15
MAX_NGRAM = 16
_LIMITS = {
    "num_speculative_tokens": MAX_DRAFTS,
    "prompt_lookup_max": MAX_NGRAM,
    "prompt_lookup_min": MAX_NGRAM,
}
_DEFAULT_LOOKUP_MAX = 4
_DEFAULT_LOOKUP_MIN = 3
"""Two tokens come again by chance too often, where the answer repeats nothing."""


def parse_speculative_config(text: str) -> SpeculativeConfig:
    """Reads the setting. Raises `ValueError`, which names the field that does not fit."""
    try:
        given: Any = json.loads(text)
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ValueError('must be a JSON object, such as {"method": "ngram", ...}')
    methods = get_args(DrafterName)
    method = given.pop("method", None)
    if method not in methods:
        wrong = "method is missing" if method is None else f"there is no method {method!r}"
        raise ValueError(f"{wrong}; those that exist: {', '.join(methods)}")
    for name, value in given.items():
        if name not in _LIMITS:
            known = ", ".join(("method", *_LIMITS))
            raise ValueError(f"{name!r} is no field of method {method!r}, which has {known}")
        if type(value) is not int or not 1 <= value <= _LIMITS[name]:
            raise ValueError(f"{name} must be an integer from 1 to {_LIMITS[name]}, not {value!r}")
    if "num_speculative_tokens" not in given:
        raise ValueError("num_speculative_tokens is missing: how many tokens to draft in a step")
    least, most = given.get("prompt_lookup_min"), given.get("prompt_lookup_max")
    most = most or max(_DEFAULT_LOOKUP_MAX, least or 1)
    least = least or min(_DEFAULT_LOOKUP_MIN, most)
    if least > most:
        raise ValueError(f"prompt_lookup_min is {least}, more than prompt_lookup_max, {most}")
    return SpeculativeConfig(
        method=method,
        num_speculative_tokens=given["num_speculative_tokens"],
        prompt_lookup_max=most,
        prompt_lookup_min=least,
    )


def _checked(text: str | None) -> str | None:
    if text is not None:
        parse_speculative_config(text)
    return text


class SpeculativeSettings(BaseSettings):
    """See docs/operations.md."""

    speculative_config: Annotated[str | None, AfterValidator(_checked)] = Field(
        default=None,
        description="Speculative decoding, as JSON: method (ngram: what followed the last tokens "
        "where prompt or answer had them before), num_speculative_tokens (drafts of each request "
        f"and step, 1 to {MAX_DRAFTS}), prompt_lookup_max and prompt_lookup_min (last tokens that "
        f"are looked up, default {_DEFAULT_LOOKUP_MAX} and {_DEFAULT_LOOKUP_MIN}). Answers do not "
        "depend on it. Prefill nodes draft nothing, and ignore it. Default: off.",
    )

    def with_drafts(self, config: EngineConfig) -> EngineConfig:
        """Returns `config` with what the setting asks for. Raises `SettingsError`."""
        if self.speculative_config is None:
            return config
        role = config.kv_transfer.kv_role if config.kv_transfer is not None else None
        if role == "kv_producer":
            logger.info("a prefill node drafts nothing: --speculative-config has no effect here")
            return config
        speculative = parse_speculative_config(self.speculative_config)
        query_len = speculative.num_speculative_tokens + 1
        budget = config.scheduler.max_num_batched_tokens
        if budget < query_len:
            raise SettingsError(
                f"with {query_len - 1} num_speculative_tokens a request computes {query_len} "
                f"tokens in a step, and --max-num-batched-tokens is {budget}; raise it"
            )
        return replace(config, decode_query_len=query_len, speculative=speculative)
