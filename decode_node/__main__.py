"""Runs a decode node: `python -m decode_node --help`."""

from __future__ import annotations

from edge.program import run

if __name__ == "__main__":
    run("decode_node.main")
