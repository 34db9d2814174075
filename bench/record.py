"""Result files: what was measured, on which machine, with which versions, by which command."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"

_PACKAGES = (
    "torch", "triton", "grpcio", "protobuf", "aiohttp", "httpx", "uvicorn", "uvloop", "httptools",
    "fastapi", "msgspec",
)  # fmt: skip


def write_result(name: str, figures: Mapping[str, object] | Sequence[object]) -> Path:
    """Writes `figures` and where they come from to `bench/results/<name>.json`."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({**origin(), "figures": figures}, indent=1) + "\n")
    return path


def origin() -> dict[str, object]:
    """Returns where figures come from that are measured now."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "command": command_line(),
        "commit": _output("git", "-C", str(RESULTS.parent), "rev-parse", "--short", "HEAD"),
        "machine": machine(),
        "versions": versions(),
    }


def command_line() -> str:
    """Returns how the benchmark was called, from the repository's root."""
    program = Path(sys.argv[0]).resolve()
    folder = "" if program.parent.name == "bench" else f"{program.parent.name}."
    called = f"-m bench.{folder}{program.stem}"
    tests = RESULTS.parents[1] / "tests"
    if program.is_relative_to(tests):
        called = f"tests/{program.relative_to(tests)}"
    return shlex.join(["python", *called.split(), *sys.argv[1:]])


def machine() -> dict[str, object]:
    gpus = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30, 1),
        "gpus": gpus.splitlines(),
        "system": f"{platform.system()} {platform.release()}",
        "load_average": round(os.getloadavg()[0], 2),
        "niceness": os.nice(0),
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
