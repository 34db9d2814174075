"""The sampling parameters of requests that do not say: the checkpoint's advice, and the operator's.

1. `generation_config.json` of the checkpoint (`auto`), of another folder, or of none
2. `--override-generation-config`, value by value
3. a request's own values, which always win
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from engine.config import ModelConfig
from engine.contracts.errors import CannotStartError, InvalidRequest
from engine.contracts.sampling_params import SamplingParams, check_sampling
from engine.models.config.json_file import read_json

_FILE = "generation_config.json"
_NONE = ("none", "vllm")
"""Names of no file at all; the second is vLLM's."""
OVERRIDE = "--override-generation-config"
_NOT_APPLIED = (
    "bad_words_ids", "begin_suppress_tokens", "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty", "epsilon_cutoff", "eta_cutoff",
    "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id",
    "guidance_scale", "min_length", "min_new_tokens", "no_repeat_ngram_size", "num_beams",
    "penalty_alpha", "sequence_bias", "stop_strings", "suppress_tokens", "top_h", "typical_p",
    "watermarking_config",
)  # fmt: skip
"""Parameters that change what transformers generates, and that no request gets by itself here."""
_NEUTRAL: tuple[Any, ...] = (None, False, 0, 1, [], {})


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Holds what is set; None leaves a parameter at the API's own default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None

    @classmethod
    def find(cls, model: ModelConfig, source: str, override: str) -> SamplingDefaults:
        """Reads the file that `source` names, and `override`, which is JSON. Raises
        `CannotStartError`."""
        path = _file_of(model, source)
        found = NO_DEFAULTS
        if source not in _NONE:
            if path.is_file():
                found = read_json(path, cls)
                found._check(str(path), model.vocab_size)
            elif source != "auto":
                raise CannotStartError(
                    f"{path} does not exist; name the folder of a {_FILE} with "
                    f"--generation-config, or auto, or none"
                )
        own = read_override(override)
        own._check(OVERRIDE, model.vocab_size)
        return msgspec.structs.replace(found, **own.to_dict())

    def to_dict(self) -> dict[str, float]:
        """Returns what is set, by name."""
        found: dict[str, float] = msgspec.to_builtins(self)
        return found

    def _check(self, source: str, vocab_size: int) -> None:
        """Raises `CannotStartError` for values that no request could have."""
        params = {name: value for name, value in self.to_dict().items() if name != "max_new_tokens"}
        if params.get("top_k") == -1:
            params["top_k"] = 0
        try:
            check_sampling(SamplingParams(**params), vocab_size)  # type: ignore[arg-type]
        except InvalidRequest as error:
            raise CannotStartError(
                f"{source}: {error.message}; correct it, or set it with {OVERRIDE}"
            ) from None
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise CannotStartError(f"{source}: max_new_tokens must be at least 1; correct it")


NO_DEFAULTS = SamplingDefaults()


def not_applied(model: ModelConfig, source: str) -> list[str]:
    """Returns the parameters in the file that `source` names which requests do not get: as in vLLM,
    they are sampled without. Raises `CannotStartError`."""
    path = _file_of(model, source)
    if source in _NONE or not path.is_file():
        return []
    content = read_json(path, dict[str, Any])
    return [name for name in _NOT_APPLIED if content.get(name) not in _NEUTRAL]


def _file_of(model: ModelConfig, source: str) -> Path:
    return Path(model.path if source == "auto" else source) / _FILE


def read_override(text: str) -> SamplingDefaults:
    """Reads a JSON object, whose names must all be known; empty text stands for none. Raises
    `CannotStartError`."""
    if not text:
        return NO_DEFAULTS
    try:
        names = msgspec.json.decode(text, type=dict[str, msgspec.Raw]).keys()
        if unknown := sorted(names - set(SamplingDefaults.__struct_fields__)):
            known = ", ".join(SamplingDefaults.__struct_fields__)
            raise CannotStartError(f"{OVERRIDE} has no {', '.join(unknown)}; it has {known}")
        return msgspec.json.decode(text, type=SamplingDefaults)
    except msgspec.DecodeError as error:
        raise CannotStartError(
            f"{OVERRIDE} must be a JSON object such as "
            f'{{"temperature": 0.6}}, but cannot be read: {error}'
        ) from None
