"""A tiny model, adapters for it, and engines that serve them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.lora.adapted_engine import Adapted, adapted
from tests.engine.models.reference_models import FAMILIES, save_checkpoint


@pytest.fixture(scope="session")
def adapted_family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Adapted]:
    """Returns a family's model with its adapters; each is written once."""
    known: dict[str, Adapted] = {}

    def of(family: str) -> Adapted:
        if family not in known:
            folder: Path = tmp_path_factory.mktemp(family)
            save_checkpoint(FAMILIES[family], folder / "model")
            known[family] = adapted(folder)
        return known[family]

    return of
