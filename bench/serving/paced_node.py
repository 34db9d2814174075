"""A decode node with `bench.serving.paced_core` in place of its core. Takes a node's flags."""

from __future__ import annotations

import sys

from decode_node.main import main as run_decode_node
from engine.frontend import core_client


def main() -> int:
    core_client.CORE_MODULE = "bench.serving.paced_core"
    return run_decode_node()


if __name__ == "__main__":
    sys.exit(main())
