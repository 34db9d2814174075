"""The profiles that come along: files of `planner/profiles`, each measured on the GPU it names."""

from __future__ import annotations

from importlib import resources

from engine.speed.profile import SpeedProfile, read_profile

_FOLDER = resources.files("planner") / "profiles"


def shipped_profiles() -> list[str]:
    """Returns their names."""
    names = (entry.name for entry in _FOLDER.iterdir())
    return sorted(name.removesuffix(".json") for name in names if name.endswith(".json"))


def shipped_profile(name: str) -> SpeedProfile:
    """Returns the one of that name, among `shipped_profiles`."""
    return read_profile((_FOLDER / f"{name}.json").read_bytes(), name)
