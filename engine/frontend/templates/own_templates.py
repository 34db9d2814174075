"""Brings chat templates for models whose checkpoints have a program in place of one."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent / "chat_templates"
_FILES = {
    "DeepseekV4ForCausalLM": "deepseek_v4.jinja",
    "KimiK3ForCausalLM": "kimi_k3.jinja",
}


def own_template(architecture: str) -> str | None:
    """Returns the template of an architecture; None: its checkpoints bring one."""
    name = _FILES.get(architecture)
    return None if name is None else (_FOLDER / name).read_text(encoding="utf-8")
