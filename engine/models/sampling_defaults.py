"""The sampling parameters of requests that do not say: the checkpoint's advice, and the operator's.

1. `generation_config.json` of the checkpoint (`auto`), of another folder, or of none
2. `--override-generation-config`, value by value
3. a request's own values, which always win
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from engine.config import ModelConfig
from engine.errors import CannotStartError, InvalidRequest
from engine.models.config_file import read_json
from engine.sampling_params import SamplingParams, check_sampling

_FILE = "generation_config.json"
_NONE = ("none", "vllm")
"""Names of no file at all; the second is vLLM's."""
OVERRIDE = "--override-generation-config"


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
        folder = Path(model.path if source == "auto" else source)
        path = folder / _FILE
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
        return msgspec.structs.replace(found, **own.told())

    def told(self) -> dict[str, float]:
        """Returns what is set, by name."""
        found: dict[str, float] = msgspec.to_builtins(self)
        return found

    def _check(self, source: str, vocab_size: int) -> None:
        """Raises `CannotStartError` for values that no request could have."""
        params = {name: value for name, value in self.told().items() if name != "max_new_tokens"}
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
