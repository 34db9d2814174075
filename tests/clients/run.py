"""Runs third-party clients, unchanged and pinned, against a cluster of this tree.

Called by `make test-clients`:

    python tests/clients/run.py FOLDER

`FOLDER` has one environment for each `*.txt` beside this file, which pins what is in it: client
libraries disagree about the version of `openai` that they need. Each client is a script that gets
the cluster's address and ends with an error when something is not as its library promises. The
model is the demo checkpoint with a chat template that takes tools; what it says is of no matter,
because schemas and required calls hold for any model. Agents act on what a model says: theirs is
scripted (`agent_turns.py`).
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
DEMO = ROOT / "cli" / "demo_checkpoint"
CLIENTS = {
    "guidellm": ("guidellm",),
    "openai-1": ("openai",),
    "openai-2": (
        "openai",
        "instructor",
        "llama_index",
        "lm_eval",
        "serving_benchmarks",
    ),
    "openai-3": ("openai", "litellm", "langchain", "pydantic_ai", "agents", "anthropic"),
    "node": ("ai_sdk", "anthropic", "openai"),
}
"""Scripts by the environment that they run in: `NAME_client.py`, for node `NAME_client.mjs`. The
longest comes first."""

AT_ONCE = 2
"""Clients that run at a time: half of what they do is importing themselves, on one core."""

START_S = 120.0
CLIENT_S = 600.0
"""Two minutes are enough where a client has a core to itself; CI installs and tests meanwhile."""
STOP_S = 60.0
LAST_LINES = 60
"""A failure is followed by so many of the cluster."""


class Cluster:
    """Runs `tandem serve` while it is open. `url` is where clients find it."""

    def __init__(self, model: Path) -> None:
        self.url = ""
        self._lines: list[str] = []
        self._is_up = threading.Event()
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "cli", "serve", str(model), "--port", "0"),
                *("--served-model-name", "demo", "--tool-call-parser", "hermes"),
                "--enable-tokenizer-info-endpoint",
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> Cluster:
        if not self._is_up.wait(START_S) or not self.url:
            self.__exit__()
            raise SystemExit("the cluster did not start:\n" + "".join(self._lines))
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def last_lines(self) -> str:
        """Returns what it has printed last, and whether it has ended."""
        code = self._process.poll()
        end = "" if code is None else f"the cluster ended with {code}\n"
        return "".join(self._lines[-LAST_LINES:]) + end

    def _read(self) -> None:
        """Takes all that it prints, so that it never waits for us."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)
            if found := re.search(r"serving at (http://[\d.:]+)/v1", line):
                self.url = found[1]
                self._is_up.set()
        self._is_up.set()


def command(environment: Path, name: str) -> list[str]:
    """Returns the command that runs a script; none where the machine has nothing to run it."""
    if environment.name != "node":
        return [str(environment / "bin" / "python"), str(HERE / f"{name}_client.py")]
    if not (environment / "node_modules").is_dir():
        return []
    return ["node", str(environment / f"{name}_client.mjs")]


def run_client(environment: Path, name: str, url: str) -> bool:
    """Runs one script and prints how it went. One that cannot run here is no failure."""
    started_at = time.monotonic()
    words = command(environment, name)
    if not words:
        print(f"skipped {name}: there is no npm here, or it could not install the client")
        return True
    said, is_good = run_to_end([*words, url])
    seconds = time.monotonic() - started_at
    print(f"{'passed' if is_good else 'FAILED'} {name} in {environment.name}, {seconds:.1f} s")
    if not is_good:
        print(said)
    return is_good


def run_agents(environments: Path) -> bool:
    """Runs coding agents against a scripted node, and prints how each went."""
    words = [sys.executable, str(HERE / "agent_turns.py"), str(environments)]
    said, is_good = run_to_end(words)
    print(said, end="")
    return is_good


def run_to_end(words: list[str]) -> tuple[str, bool]:
    """Returns what a program has printed, and whether it ended in time and without a failure."""
    with tempfile.TemporaryFile("w+", errors="replace") as out:
        try:
            code = subprocess.run(words, stdout=out, stderr=out, timeout=CLIENT_S).returncode
            end = ""
        except subprocess.TimeoutExpired:
            code, end = 1, f"no end after {CLIENT_S:.0f} s\n"
        out.seek(0)
        return out.read() + end, code == 0


def main() -> int:
    environments = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "demo"
        shutil.copytree(DEMO, model)
        shutil.copy(HERE / "chat_template.jinja", model)
        with Cluster(model) as cluster, ThreadPoolExecutor(AT_ONCE) as pool:
            started_at = time.monotonic()
            running = [pool.submit(run_agents, environments)]
            running += [
                pool.submit(run_client, environments / environment, name, cluster.url)
                for environment, names in CLIENTS.items()
                for name in names
            ]
            results = [each.result() for each in running]
            if not all(results):
                print(f"the cluster's last lines:\n{cluster.last_lines()}")
    seconds = time.monotonic() - started_at
    print(f"{sum(results)} of {len(results)} clients without a failure, {seconds:.0f} s")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
