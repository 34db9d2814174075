"""Reads what a decode node makes of its model's text: its tokens, how its output is read, and how
requests that do not say are sampled."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import xxhash

from decode_node.chat_templates.probe import ARGUMENTS, PARAMETERS, TOOL_NAME, Probe, probe
from decode_node.config import DecodeNodeSettings
from decode_node.images.image_reader import ImageReader
from decode_node.parsers.output_parsers import OutputParsers, UnknownParser, WrittenCall
from decode_node.protocol.chat.tools import Tool
from decode_node.serving.ask_limits import AskLimits
from decode_node.serving.chat_reading import ChatReading
from decode_node.serving.prompts.image_prompts import ImagePrompts
from decode_node.serving.prompts.prompts import Prompts
from decode_node.serving.served_model import ServedModel
from edge.installed_version import installed_version
from engine.config import ModelConfig
from engine.contracts.request_spec import AdapterRef
from engine.frontend.templates.chat_template import ChatTemplateError
from engine.frontend.tokenizer import Tokenizer, TokenizerError
from engine.models.config.sampling_defaults import SamplingDefaults, not_applied
from engine.node.settings.engine_settings import SettingsError

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
        tokenizer = with_template(Tokenizer.of_model(model), settings.chat_template)
        defaults = find_defaults(settings, model)
        parsers = create_parsers(settings, tokenizer)
        logger.info(
            "tool calls are read as %s, reasoning as %s",
            parsers.tool_call_parser or "text",
            parsers.reasoning_parser or "text",
        )
        if parsers.is_unread:
            logger.warning(
                "the chat template writes tool calls in a format that no parser reads: requests "
                "with tools are refused, unless their tool_choice is required or a function"
            )
        logger.info("the chat template takes %s", json.dumps(template_forms(tokenizer)))
        return cls(tokenizer, parsers, defaults)


def find_defaults(settings: DecodeNodeSettings, model: ModelConfig) -> SamplingDefaults:
    """Returns the sampling parameters of requests that do not say, and tells them in the log.
    Raises `CannotStartError`."""
    source, override = settings.generation_config, settings.override_generation_config
    defaults = SamplingDefaults.find(model, source, override)
    if told := defaults.to_dict():
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


def with_template(tokenizer: Tokenizer, file: Path | None) -> Tokenizer:
    """Returns the tokenizer with the operator's chat template, if there is one. Raises
    `SettingsError`."""
    if file is None:
        return tokenizer
    try:
        return tokenizer.with_chat_template(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ChatTemplateError) as error:
        raise SettingsError(f"--chat-template {file} cannot be used: {error}") from None


def template_forms(tokenizer: Tokenizer) -> dict[str, Any] | None:
    """Returns what the template of chats with tools wants; None without a template."""
    found = _probe(tokenizer)
    return found.forms.to_dict() if found else None


def chat_format(parsers: OutputParsers, tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns how chats are written and read, for the model's card."""
    return {
        "tool_call_parser": parsers.tool_call_parser or None,
        "reasoning_parser": parsers.reasoning_parser or None,
        "template": template_forms(tokenizer),
    }


def _probe(tokenizer: Tokenizer) -> Probe | None:
    try:
        return probe(tokenizer.chat_template_for(has_tools=True))
    except (TokenizerError, ChatTemplateError):
        return None


def create_parsers(settings: DecodeNodeSettings, tokenizer: Tokenizer) -> OutputParsers:
    """Chooses the parsers of the model's output. Raises `SettingsError`."""
    found = _probe(tokenizer)
    tool = Tool(TOOL_NAME, PARAMETERS, strict=False, raw={})
    try:
        return OutputParsers.of_model(
            tokenizer,
            tokenizer.template_sources,
            reasoning_parser=_unless_none(settings.reasoning_parser),
            tool_call_parser=_unless_none(settings.tool_call_parser),
            written=WrittenCall(found.written_call, tool, ARGUMENTS) if found else None,
        )
    except UnknownParser as error:
        raise SettingsError(str(error)) from None


def create_served_model(
    settings: DecodeNodeSettings,
    model: ModelConfig,
    adapters: Mapping[str, AdapterRef],
    text: ServedText,
    images: ImageReader,
) -> ServedModel:
    """Returns what requests are read with."""
    tokenizer = text.tokenizer
    return ServedModel(
        config=model,
        adapters=adapters,
        tokenizer=tokenizer,
        prompts=Prompts(
            model,
            tokenizer,
            trusts_templates=settings.trust_request_chat_template,
            sanitizes=settings.sanitize_control_tokens,
            moves_system_turns=settings.system_turns == "first",
            cuts_answers=not settings.strict_max_tokens,
            says_images=images.passes_over,
        ),
        images=ImagePrompts(
            images, model.vision, partial(tokenizer.encode, add_special_tokens=False)
        ),
        reading=ChatReading(
            text.parsers,
            tokenizer,
            allows_auto=settings.enable_auto_tool_choice,
            names_reasoning_twice=settings.reasoning_alias,
            stops_in_reasoning=settings.stop_in_reasoning,
        ),
        limits=AskLimits(settings.max_choices, settings.max_logprobs, settings.max_answer_logprobs),
        defaults=text.defaults,
        fingerprint=system_fingerprint(model),
    )


def system_fingerprint(model: ModelConfig) -> str:
    """Returns what answers say of the release and the model that computed them."""
    computed = xxhash.xxh3_64_hexdigest(f"{model.model_hash} {model.dtype}".encode())
    return f"tandem-{installed_version()}-{computed[:8]}"


def _unless_none(name: str) -> str:
    return "" if name == "none" else name
