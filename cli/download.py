"""Gets a model of the hub into the cache, before anything serves it: `tandem download`.

Downloads go on where they were cut off. A mark, if one is wanted, is made when the checkpoint is
complete: what waits for it, such as the pods of the chart, needs no network then.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from engine.models.checkpoint import CheckpointError, resolve_model


def main(argv: list[str]) -> int:
    """Exit code: 1 if the model cannot be had, with the reason on standard error."""
    parser = argparse.ArgumentParser(prog="tandem download", description=__doc__)
    parser.add_argument("model", help="name on the Hugging Face hub")
    parser.add_argument("--revision", help="branch, tag or commit; default: the main branch")
    parser.add_argument("--mark", type=Path, help="file that is made when all is there")
    wanted = parser.parse_args(argv)
    try:
        folder = resolve_model(wanted.model, revision=wanted.revision)
    except CheckpointError as error:
        print(f"tandem download: {error}", file=sys.stderr)
        return 1
    if wanted.mark is not None:
        wanted.mark.parent.mkdir(parents=True, exist_ok=True)
        wanted.mark.touch()
    print(folder)
    return 0
