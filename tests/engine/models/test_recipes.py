"""The table of vLLM's recipes is what tandem's readers say."""

from __future__ import annotations

import json

from docs.generate_recipes import BEGIN, DATA, END, PAGE, is_known, readable, table


def test_the_page_has_the_table() -> None:
    shown = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    assert shown == table(json.loads(DATA.read_text(encoding="utf-8")))


def test_four_of_five_models_are_accepted() -> None:
    data = json.loads(DATA.read_text(encoding="utf-8"))
    read = readable(data["formats"])
    accepted = {
        recipe["model"]
        for recipe in data["recipes"]
        if is_known(recipe) and recipe["published"][0] in read
    }
    assert len(data["recipes"]) == 50 and len(accepted) >= 40
    unknown = [recipe for recipe in data["recipes"] if not is_known(recipe)]
    assert unknown and all(recipe["lacks"] for recipe in unknown)
