"""The setting of speculative decoding, in the JSON of vLLM's flag of the same name.

    --speculative-config '{"method": "ngram", "num_speculative_tokens": 3}'
    --speculative-config '{"method": "eagle3", "model": "FOLDER", "num_speculative_tokens": 3}'

Answers do not depend on it: a draft counts only where it is the token that would have been chosen.
So nodes need not agree. A prefill node, which chooses one token of each answer, drafts nothing; it
computes what a drafter with layers of its own keeps of a prompt, for the decode node.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, Field
from pydantic_settings import BaseSettings

from edge.command_line import SettingsError
from engine.config import DrafterName, EngineConfig, SpeculativeConfig
from engine.models.checkpoint import is_here, resolve_draft
from engine.models.draft_checkpoint import read_draft

logger = logging.getLogger(__name__)

MAX_DRAFTS = 15
MAX_NGRAM = 16
_LIMITS = {
    "num_speculative_tokens": MAX_DRAFTS,
    "prompt_lookup_max": MAX_NGRAM,
    "prompt_lookup_min": MAX_NGRAM,
}
_LOOKUPS = ("prompt_lookup_max", "prompt_lookup_min")
_DEFAULT_LOOKUP_MAX = 4
_DEFAULT_LOOKUP_MIN = 3
"""Two tokens come again by chance too often, where the answer repeats nothing."""


@dataclass(frozen=True, slots=True)
class ParsedSetting:
    """Holds the JSON's fields. `model`: name or folder of the drafter's checkpoint; "": none."""

    config: SpeculativeConfig
    model: str


def parse_speculative_config(text: str) -> SpeculativeConfig:
    """Reads the setting, without the drafter's checkpoint. Raises `ValueError`, which names the
    field that does not fit."""
    return parse_setting(text).config


def parse_setting(text: str) -> ParsedSetting:
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
    fields = _fields_of(method)
    for name, value in given.items():
        if name not in fields:
            known = ", ".join(("method", *fields))
            raise ValueError(f"{name!r} is no field of method {method!r}, which has {known}")
        if name == "model":
            if not isinstance(value, str) or not value:
                raise ValueError(f"model must be a name or a folder, not {value!r}")
        elif name == "adaptive":
            if not isinstance(value, bool):
                raise ValueError(f"adaptive must be true or false, not {value!r}")
        elif type(value) is not int or not 1 <= value <= _LIMITS[name]:
            raise ValueError(f"{name} must be an integer from 1 to {_LIMITS[name]}, not {value!r}")
    for name, meaning in (
        ("num_speculative_tokens", "how many tokens to draft in a step"),
        ("model", "name or folder of the drafter's checkpoint"),
    ):
        if name in fields and name not in given:
            raise ValueError(f"{name} is missing: {meaning}")
    least, most = given.get("prompt_lookup_min"), given.get("prompt_lookup_max")
    most = most or max(_DEFAULT_LOOKUP_MAX, least or 1)
    least = least or min(_DEFAULT_LOOKUP_MIN, most)
    if least > most:
        raise ValueError(f"prompt_lookup_min is {least}, more than prompt_lookup_max, {most}")
    config = SpeculativeConfig(
        method=method,
        num_speculative_tokens=given["num_speculative_tokens"],
        prompt_lookup_max=most,
        prompt_lookup_min=least,
        adaptive=given.get("adaptive", False),
    )
    return ParsedSetting(config, given.get("model", ""))


def _fields_of(method: str) -> tuple[str, ...]:
    """Returns the fields of a method beside its name. Lookups are what drafters fall back to."""
    model = () if method in ("ngram", "mtp") else ("model",)
    return (*model, "num_speculative_tokens", *_LOOKUPS, "adaptive")


def _checked(text: str | None) -> str | None:
    if text is not None:
        parse_speculative_config(text)
    return text


class SpeculativeSettings(BaseSettings):
    """See docs/operations.md."""

    speculative_config: Annotated[str | None, AfterValidator(_checked)] = Field(
        default=None,
        description="Speculative decoding, as JSON: method (ngram: what followed the last tokens "
        "where prompt or answer had them before; eagle3, eagle, medusa: heads; mtp: the layers "
        "of the model's own checkpoint that predict ahead; draft_model: a small model of the same "
        "vocabulary), model (name or folder of the drafter's checkpoint; not of ngram and mtp), "
        f"num_speculative_tokens (drafts of each request and step, 1 to {MAX_DRAFTS}), "
        "prompt_lookup_max and prompt_lookup_min (last tokens that are looked up, default "
        f"{_DEFAULT_LOOKUP_MAX} and {_DEFAULT_LOOKUP_MIN}), adaptive (true: each step drafts as "
        "many as pay, by what steps have cost and how many drafts were right). Answers do not "
        "depend on it. Prefill nodes draft nothing; given the same drafter, they compute its KV of "
        "prompts. Default: off.",
    )

    def with_drafts(self, config: EngineConfig, *, is_check: bool = False) -> EngineConfig:
        """Returns `config` with what the setting asks for. `is_check`: nothing is downloaded, so a
        drafter that is not here is not judged.

        Raises:
            SettingsError: A step has no room for the drafts, or there are fewer heads.
            CheckpointError: The drafter cannot be read, or does not fit the model.
        """
        if self.speculative_config is None:
            return config
        parsed = parse_setting(self.speculative_config)
        speculative, model = parsed.config, config.model
        if is_check and parsed.model and not is_here(parsed.model):
            return config
        if speculative.method != "ngram":
            folder = resolve_draft(parsed.model) if parsed.model else model.path
            draft = read_draft(
                speculative.method, str(folder), model, speculative.num_speculative_tokens
            )
            speculative = replace(speculative, draft=draft)
        role = config.kv_transfer.kv_role if config.kv_transfer is not None else None
        drafting = replace(config, speculative=speculative)
        if role is not None and len(drafting.kv_layout.groups) > len(config.kv_layout.groups):
            raise SettingsError(
                f"{speculative.method} keeps keys and values in blocks of its own, as its heads "
                "differ from the model's, and nodes hand over no such blocks; choose a drafter "
                "with key/value heads of the same number and size"
            )
        if role == "kv_producer":
            if speculative.draft is None or speculative.draft.num_layers == 0:
                logger.info("a prefill node drafts nothing: --speculative-config has no effect")
                return config
            logger.info("a prefill node drafts nothing; it computes the drafter's KV of prompts")
            return drafting
        _check_numbers(speculative, config.scheduler.max_num_batched_tokens)
        query_len = speculative.num_speculative_tokens + 1
        return replace(drafting, decode_query_len=query_len)


def _check_numbers(speculative: SpeculativeConfig, budget: int) -> None:
    """Raises `SettingsError` where a step has no room for this many drafts, or nothing makes
    them."""
    count = speculative.num_speculative_tokens
    if budget < count + 1:
        raise SettingsError(
            f"with {count} num_speculative_tokens a request computes {count + 1} tokens in a step, "
            f"and --max-num-batched-tokens is {budget}; raise it"
        )
    heads = (
        count if speculative.draft is None else speculative.draft.options.get("num_heads", count)
    )
    if count > heads:
        raise SettingsError(
            f"num_speculative_tokens is {count}, and the checkpoint has num_heads {heads}; lower it"
        )
