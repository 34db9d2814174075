"""Runs a prefill node: `python -m prefill_node --help`."""

from __future__ import annotations

from edge.program import run

if __name__ == "__main__":
    run("prefill_node.main")
