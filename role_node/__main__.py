"""Runs a node that changes between prefill and decode: `python -m role_node --help`."""

from __future__ import annotations

from edge.program import run

if __name__ == "__main__":
    run("role_node.main")
