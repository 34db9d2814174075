"""Describes a model as SGLang's router and its frontend language ask before all else."""

from __future__ import annotations

MODEL_INFO_PATHS = ("/model_info", "/get_model_info")
"""The second one is the older name."""


def model_info(name: str, root: str) -> dict[str, object]:
    """Returns the description of the model `name`; `root` is what the operator called it."""
    return {
        "model_path": root,
        "tokenizer_path": root,
        "served_model_name": name,
        "is_generation": True,
    }
