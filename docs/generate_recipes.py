"""Writes the table of vLLM's recipes into docs/models.md.

docs/recipes.json lists the models that vLLM's own recipes serve with prefill and decode apart: the
architecture of each, and the forms it is published in, the recipe's default first. What is read is
asked of tandem's own readers; no weights are.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.models.config.wrappers import text_architecture
from engine.models.quantization.reader import read_quantization
from engine.models.registry import MODELS
from engine.models.specs.base import UnsupportedField

DATA, PAGE = Path(__file__).with_name("recipes.json"), Path(__file__).with_name("models.md")
BEGIN, END = "<!-- by docs/generate_recipes.py -->\n", "<!-- end -->"
Json = dict[str, Any]


def is_known(recipe: Json) -> bool:
    """Returns whether a recipe's architecture is here, with all that the model has of it."""
    name = recipe["architecture"]
    if "lacks" in recipe:
        return False
    types = [recipe["text"]] if "text" in recipe else []
    return name in MODELS or text_architecture(name, types) is not None


def readable(formats: Json) -> set[str]:
    """Returns the forms of weights that are read."""
    found = set()
    for name, block in formats.items():
        try:
            read_quantization(Path(), block)
        except UnsupportedField:
            continue
        found.add(name)
    return found


def table(data: Json) -> str:
    """Returns the section: what is accepted, and a row for the recipes of each architecture."""
    read = readable(data["formats"])
    counts = {"default": 0, "nvfp4": 0}
    alike: dict[tuple[str, str], list[str]] = {}
    for recipe in sorted(data["recipes"], key=lambda one: not is_known(one)):
        known, default = is_known(recipe), recipe["published"][0]
        takes = [form for form in recipe["published"] if known and form in read]
        counts["default"] += default in takes
        counts["nvfp4"] += "nvfp4" in takes
        shown = ", ".join(f"**{form}**" if form in takes else form for form in recipe["published"])
        kind = recipe["architecture"], recipe.get("lacks", "")
        alike.setdefault(kind, []).append(f"{recipe['model']} ({shown})")
    rows = [f"| `{name}` | {'; '.join(of)} | {lacks} |" for (name, lacks), of in alike.items()]
    total = len(data["recipes"])
    has_fp4 = sum("nvfp4" in recipe["published"] for recipe in data["recipes"])
    return "\n".join(
        (
            f"{data['source']} has {total} models to be served with prefill and decode apart.",
            f"tandem accepts {counts['default']} in the form that a recipe takes by default.",
            f"{has_fp4} have a variant in NVFP4, of which tandem accepts {counts['nvfp4']}.",
            "Accepted are the architecture and the form of weights, by the readers that a node",
            "starts with; weights of this size were not loaded. Forms in bold are read.",
            "",
            "| architecture | models, and what each is published in, the default first | lacks |",
            "|---|---|---|",
            *rows,
            "",
        )
    )


def main() -> None:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, behind = rest.partition(END)
    text = table(json.loads(DATA.read_text(encoding="utf-8")))
    PAGE.write_text(f"{before}{BEGIN}{text}{END}{behind}", encoding="utf-8")


if __name__ == "__main__":
    main()
