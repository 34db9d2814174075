"""Runs `tandem`: one command for the whole cluster and for each of its services."""

from __future__ import annotations

import os
import sys
from importlib import import_module

from edge.installed_version import installed_version

_USAGE = """\
usage: tandem COMMAND [options]

a cluster on this machine
  demo      start it with the demo checkpoint, talk to it, stop it
  up        start a router, prefill nodes and decode nodes, and keep them running
  serve     the same, by the name that vLLM gives it
  chat      talk to a running cluster from the terminal

one service, for clusters over several hosts
  router    takes OpenAI requests and places them
  prefill   computes prompts
  decode    streams tokens; works alone, too
  node      is one of both, and changes to the other when asked

a running cluster
  nodes     lists its nodes, takes one out of use and back

a running node
  profile      records what its GPUs do, for a few seconds
  switch-role  makes a node of `tandem node` prefill or decode

a checkpoint
  download      gets it from the hub, before anything serves it
  calibrate-kv  finds the scales of an FP8 KV cache

sizes and choices
  explain   says which kernels compute a step of a model, on a device that need not be here
  bench     measures the speed of a node on this machine's GPUs
  plan      says how many prefill and decode nodes some traffic needs

tandem COMMAND --help describes each; settings of services are environment variables, too.
"""

_SERVICES = {
    "router": "router",
    "prefill": "prefill_node",
    "decode": "decode_node",
    "node": "role_node",
}
_TOOLS = {
    "calibrate-kv": "engine.calibration",
    "plan": "planner",
    "bench": "engine.speed",
    "explain": "engine.explain",
}
_COMMANDS = {
    "demo": "demo",
    "up": "up",
    "download": "download",
    "serve": "up",
    "chat": "chat",
    "nodes": "nodes",
    "profile": "node_profile",
    "switch-role": "switch_role",
}
"""Modules of this folder, by command. Only the one asked for is imported: a router's host has not
what the others need."""


def main(argv: list[str] | None = None) -> int:
    """Exit code. A service takes the place of this process."""
    args = sys.argv[1:] if argv is None else argv
    command, rest = (args[0], args[1:]) if args else ("--help", [])
    if module := {**_SERVICES, **_TOOLS}.get(command):
        os.execv(sys.executable, [sys.executable, "-m", module, *rest])
    if command in _COMMANDS:
        return int(import_module(f"cli.{_COMMANDS[command]}").main(rest))
    if command in ("--help", "-h", "help"):
        print(_USAGE, end="")
        return 0
    if command == "--version":
        print(f"tandem {installed_version()}")
        return 0
    print(f"tandem: no command {command!r}\n\n{_USAGE}", end="", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
