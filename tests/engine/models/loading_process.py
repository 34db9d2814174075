"""Loads a checkpoint into no memory at all, so that what remains is the loader's own.

    python -m tests.engine.models.loading_process FOLDER

Prints one JSON object. Parameters are on the `meta` device, as those of a GPU are not in the host's
memory. `peak` is how far the resident memory of the process rose, by the kernel's own high-water
mark: anonymous memory and mapped pages of files alike.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from engine.config import EngineConfig
from engine.models.checkpoint import load_model_config
from engine.models.factory import create_model
from engine.models.loader import load_weights
from tests.engine.tiny_model import place_alone


def status(field: str) -> int:
    """Returns a line of /proc/self/status, in bytes."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert found is not None
    return int(found[1]) * 1024


def main(folder: str) -> None:
    config = EngineConfig(engine_id="load", epoch=1, model=load_model_config(folder))
    model = create_model(config, place_alone(config.model), "meta")
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    totals: list[int] = []
    load_weights(model, config, lambda fraction: None, totals.append)
    print(json.dumps({"peak": status("VmHWM") - before, "total": totals[0]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
