#!/usr/bin/env python3
"""Times a start, phase by phase, with an empty cache of compiled kernels and with a full one:
imports, device, weights, memory, KV cache, steps of warm-up, graphs.

    python -m bench.engine.start                              # 8B shape, random weights
    python -m bench.engine.start --shape qwen3-30b-a3b --quantization fp8

One worker in a process of its own for each start; the first has a folder of its own for Triton's
cache, the second finds there what the first compiled. Results: bench/results/NAME.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from bench.arguments import add_model, parser_of
from bench.engine.models.shapes import shape_config
from bench.record import write_result
from engine.executor.precompiling import start_precompiling
from host.child_process import stop_all


class Phases:
    """Times what follows each other. `seconds` by phase, in order."""

    def __init__(self, began: float) -> None:
        self.seconds: dict[str, float] = {}
        self.compiled_s = 0.0
        self.num_compiled = 0
        self._last = began

    def end(self, phase: str) -> None:
        now = time.time()
        self.seconds[phase], self._last = round(now - self._last, 2), now

    def compiled(self, *, times: Any, cache_hit: bool, **_: Any) -> None:
        """Counts a compilation, as Triton's listener."""
        if not cache_hit:
            self.compiled_s += 1e-6 * times.total
            self.num_compiled += 1


def start(shape: str, quantization: str, began: float) -> dict[str, object]:
    """Starts a worker in this process. `began`: when its process did, `time.time()`."""
    config = shape_config(shape, quantization=quantization)
    helpers = start_precompiling(config)
    from triton import knobs

    from engine.worker.worker import Worker

    phases = Phases(began)
    knobs.compilation.listener = phases.compiled
    worker = Worker(config, rank=0, rendezvous="")
    phases.end("imports")
    worker.init_device()
    phases.end("device")
    worker.load_model(lambda fraction: None)
    phases.end("weights")
    num_blocks = worker.determine_num_blocks()
    phases.end("memory")
    worker.initialize_kv_cache(num_blocks)
    phases.end("KV cache")
    worker.capture_model(_ends_of_stages(phases))
    phases.end("the rest")
    stop_all(helpers)
    worker.shutdown()
    return {
        "total_s": round(sum(phases.seconds.values()), 2),
        "phases_s": phases.seconds,
        "compiled": phases.num_compiled,
        "compiled_s": round(phases.compiled_s, 2),
    }


def _ends_of_stages(phases: Phases) -> Callable[[str, float], None]:
    """Returns what takes a worker's reports: a stage has ended when the next one begins."""
    running: list[str] = []

    def report(stage: str, fraction: float) -> None:
        if running and stage != running[-1]:
            phases.end(running[-1])
        running.append(stage)

    return report


def in_a_process(arguments: list[str], cache: str) -> dict[str, Any]:
    """Starts a worker in a process of its own and returns what it found."""
    command = [sys.executable, "-m", "bench.engine.start", *arguments, "--began", str(time.time())]
    environment = {**os.environ, "TRITON_CACHE_DIR": cache}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = parser_of(__doc__, "start")
    add_model(parser, "llama-3.1-8b")
    parser.add_argument(
        "--began", type=float, help="time a start in this process, which began then"
    )
    arguments = parser.parse_args()
    if arguments.began is not None:
        print(json.dumps(start(arguments.shape, arguments.quantization, arguments.began)))
        return
    words = ["--shape", arguments.shape, "--quantization", arguments.quantization]
    figures: dict[str, object] = {"shape": arguments.shape, "quantization": arguments.quantization}
    with tempfile.TemporaryDirectory() as cache:
        for kind in ("cold", "warm"):
            figures[kind] = found = in_a_process(words, cache)
            print(kind, json.dumps(found, indent=1), flush=True)
    print(write_result(arguments.name, figures))


if __name__ == "__main__":
    main()
