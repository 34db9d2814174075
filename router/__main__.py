"""Runs `python -m router`: see `--help`, or `router.config.RouterSettings`."""

from __future__ import annotations

from edge.program import run

if __name__ == "__main__":
    run("router.main")
