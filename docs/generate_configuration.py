"""Writes docs/configuration.md from the settings classes: one definition, one page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic import SecretStr
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from cli.chat import ChatSettings
from cli.local_cluster.cluster import UpSettings
from cli.node_profile import ProfileSettings
from cli.switch_role import SwitchSettings
from decode_node.config import DecodeNodeSettings
from prefill_node.config import PrefillNodeSettings
from role_node.config import RoleNodeSettings
from router.config import RouterSettings

PAGE = Path(__file__).parent / "configuration.md"

HEAD = """\
# Configuration

Every setting is a flag and an environment variable; a flag wins. This page is generated from the
settings classes by `make docs`.

"""

SERVICES: list[tuple[str, type[BaseSettings]]] = [
    ("tandem up", UpSettings),
    ("tandem router", RouterSettings),
    ("tandem prefill", PrefillNodeSettings),
    ("tandem decode", DecodeNodeSettings),
    ("tandem node", RoleNodeSettings),
    ("tandem chat", ChatSettings),
    ("tandem profile", ProfileSettings),
    ("tandem switch-role", SwitchSettings),
]
PARENTS: dict[type[BaseSettings], str] = {RoleNodeSettings: "tandem decode"}
"""Those that only add to another service's settings, or say what differs."""


def flag(name: str, field: FieldInfo) -> str:
    """As it is typed: positional arguments in capitals."""
    if any("CliPositionalArg" in repr(mark) for mark in field.metadata):
        return name.upper()
    return "--" + name.replace("_", "-")


def type_name(field: FieldInfo) -> str:
    text = getattr(field.annotation, "__name__", None) or str(field.annotation)
    if not isinstance(field.annotation, type):
        text = str(field.annotation)
    literal = re.fullmatch(r"typing\.Literal\[(.*)\]", text)
    if literal:
        return literal.group(1).replace("'", "").replace(", ", " / ")
    return text.replace("typing.", "").replace(" | ", " or ")


def default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value: Any = field.get_default(call_default_factory=True)
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if "/demo_checkpoint" in str(value):
        return "the demo checkpoint"
    return "" if value in (None, "") else f"`{value}`"


def section(title: str, settings: type[BaseSettings]) -> str:
    prefix = settings.model_config.get("env_prefix", "")
    parent = PARENTS.get(settings)
    lines = [
        f"## {title}",
        "",
        *([f"All settings of `{parent}`, and:", ""] if parent else []),
        "| flag | environment | type | default | meaning |",
        "|---|---|---|---|---|",
    ]
    for name, field in settings.model_fields.items():
        if parent and name not in settings.__annotations__:
            continue
        meaning = (field.description or "").replace("|", "\\|").replace("\n", " ")
        lines.append(
            f"| `{flag(name, field)}` | `{(prefix + name).upper()}` | {type_name(field)} "
            f"| {default(field)} | {meaning} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    PAGE.write_text(HEAD + "\n".join(section(t, s) for t, s in SERVICES), encoding="utf-8")


if __name__ == "__main__":
    main()
