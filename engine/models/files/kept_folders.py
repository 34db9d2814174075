"""Folders that are made of other files once, and kept beside the hub's cache.

    1. a folder was made of files that hold the same: it is taken as it is
    2. else it is made beside its place
    3. and moved there as a whole, so that nothing ever sees a part of it

They are in `tandem` of `HF_HOME`, where each kind has a folder. Torch-free.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from huggingface_hub.constants import HF_HOME

from engine.models.errors import CheckpointError

STORE = Path(HF_HOME) / "tandem"


def kept_folder(place: Path, write: Callable[[Path], None]) -> Path:
    """Returns the folder `place`, which `write` fills if it is not there. Raises
    `CheckpointError`."""
    if place.is_dir():
        return place
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(dir=place.parent))
        try:
            write(beside)
            beside.rename(place)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    except OSError as error:
        if place.is_dir():  # another node of this host was quicker
            return place
        raise CheckpointError(
            place, f"cannot be written ({error})", "set HF_HOME to a folder with room"
        ) from error
    return place
