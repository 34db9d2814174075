"""Reads what a decode node makes of its model's text: its tokens, how its output is read, and how
requests that do not say are sampled."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Self

from decode_node.config import DecodeNodeSettings
from decode_node.parsers.output_parsers import OutputParsers, UnknownParser
from engine.config import ModelConfig
from engine.frontend.tokenizer import Tokenizer
from engine.models.sampling_defaults import SamplingDefaults, not_applied
from engine.node.settings import SettingsError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedText:
    """Is read before any weights: what is wrong with it costs no time."""

    tokenizer: Tokenizer
    parsers: OutputParsers
    defaults: SamplingDefaults

    @classmethod
    def read(cls, settings: DecodeNodeSettings, model: ModelConfig) -> Self:
        """Reads it from the checkpoint. Raises `TokenizerError`, `CannotStartError`,
        `SettingsError`."""
        tokenizer = Tokenizer.of_model(model)
        defaults = find_defaults(settings, model)
        parsers = create_parsers(settings, tokenizer)
        logger.info(
            "tool calls are read as %s, reasoning as %s",
            parsers.tool_call_parser or "text",
            parsers.reasoning_parser or "text",
        )
        return cls(tokenizer, parsers, defaults)


def find_defaults(settings: DecodeNodeSettings, model: ModelConfig) -> SamplingDefaults:
    """Returns the sampling parameters of requests that do not say, and tells them in the log.
    Raises `CannotStartError`."""
    source, override = settings.generation_config, settings.override_generation_config
    defaults = SamplingDefaults.find(model, source, override)
    if told := defaults.told():
        values = ", ".join(f"{name}={value:g}" for name, value in told.items())
        logger.info(
            "requests that do not say are sampled with %s (--generation-config %s); "
            "--generation-config none leaves it at the API's defaults",
            values,
            source,
        )
    if names := not_applied(model, source):
        logger.warning(
            "generation_config.json has %s, which requests do not get: they are sampled without",
            ", ".join(names),
        )
    return defaults


def create_parsers(settings: DecodeNodeSettings, tokenizer: Tokenizer) -> OutputParsers:
    """Chooses the parsers of the model's output. Raises `SettingsError`."""
    try:
        return OutputParsers.of_model(
            tokenizer,
            tokenizer.template_sources,
            reasoning_parser=_unless_none(settings.reasoning_parser),
            tool_call_parser=_unless_none(settings.tool_call_parser),
        )
    except UnknownParser as error:
        raise SettingsError(str(error)) from None


def _unless_none(name: str) -> str:
    return "" if name == "none" else name
