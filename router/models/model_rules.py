"""Reads the file that gives models other names and splits them between versions.

    models = ["llama-8b-v1", "llama-8b-v2", "qwen-32b"]      # optional

    [aliases]
    "gpt-4o" = "llama-8b"               # clients who ask for gpt-4o get llama-8b

    [splits."llama-8b"]                 # 90 sessions in 100 get the first, 10 the second
    "llama-8b-v1" = 90
    "llama-8b-v2" = 10

Versions are names by which nodes serve a model (`--served-model-name`). A split may bear the name
of one of its own versions: nodes that already serve as llama-8b need no restart for a second
version beside them, and when all sessions have moved, the name stays. An alias leads to a model or
a split, never to an alias. `models` are those that exist though no node of theirs is there: 503
then and not 404. Names with dots need quotes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from router.errors import ConfigurationError

MAX_NAME = 512


class _File(msgspec.Struct, forbid_unknown_fields=True):
    models: list[str] = []
    aliases: dict[str, str] = {}
    splits: dict[str, dict[str, float]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRules:
    """Holds the rules. `splits` has versions with their weights, in the file's order."""

    models: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    splits: Mapping[str, tuple[tuple[str, float], ...]] = field(default_factory=dict)

    def targets(self) -> set[str]:
        """Returns all names that nodes should serve by these rules."""
        versions = {name for split in self.splits.values() for name, _ in split}
        plain = {target for target in self.aliases.values() if target not in self.splits}
        return {*self.models, *versions, *plain}

    def hidden(self, served: Iterable[str]) -> set[str]:
        """Returns those of `served` that no client reaches by their own name."""
        versions = {name: {v for v, _ in split} for name, split in self.splits.items()}
        return {
            name
            for name in served
            if name in self.aliases or (name in versions and name not in versions[name])
        }


def read_rules(text: str) -> ModelRules:
    """Returns the rules in `text`, TOML. Raises `ConfigurationError` naming what is wrong."""
    try:
        file = msgspec.toml.decode(text, type=_File)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"the model rules cannot be read: {error} (names with dots need quotes)"
        ) from None
    for name in (*file.models, *file.aliases, *file.aliases.values(), *file.splits):
        _check_name(name)
    for name in file.models:
        _check(file.models.count(name) == 1, f"list the model {name!r} twice")
    for name, target in file.aliases.items():
        _check_alias(file, name, target)
    for name, split in file.splits.items():
        _check_split(file, name, split)
    return ModelRules(
        models=tuple(file.models),
        aliases=dict(file.aliases),
        splits={name: tuple(split.items()) for name, split in file.splits.items()},
    )


def _check_alias(file: _File, name: str, target: str) -> None:
    _check(name not in file.models, f"have an alias {name!r} that hides the model of that name")
    _check(name not in file.splits, f"have {name!r} both as an alias and as a split")
    _check(
        target not in file.aliases,
        f"lead the alias {name!r} to {target!r}, which is an alias: name the model itself",
    )


def _check_split(file: _File, name: str, split: Mapping[str, float]) -> None:
    _check(bool(split), f"give the split {name!r} no version")
    for version, weight in split.items():
        _check_name(version)
        _check(
            weight > 0 and math.isfinite(weight),
            f"give {version!r} of {name!r} the weight {weight:g}: weights are positive; leave out "
            f"a version that is to get nothing",
        )
        is_rule = version in file.aliases or (version in file.splits and version != name)
        _check(
            not is_rule,
            f"have {version!r} in the split {name!r}, which is a rule and no name that nodes serve",
        )


def _check_name(name: str) -> None:
    _check(0 < len(name) <= MAX_NAME and name.isprintable(), f"have the name {name[:40]!r}")


def _check(is_right: bool, problem: str) -> None:
    if not is_right:
        raise ConfigurationError(f"the model rules {problem}")
