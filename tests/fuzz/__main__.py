"""Fuzzes every door of tandem through which bytes of others come.

    python -m tests.fuzz                  tries what failed before, then draws the same inputs in
                                          every run; what CI does
    python -m tests.fuzz --minutes 30     searches by coverage, for so long in all (atheris)
    python -m tests.fuzz TARGET...        the same for some targets
    python -m tests.fuzz --seed 7         draws other inputs

Two processes run at once: one for each module of targets, or for each target of a search. What
fails is in `.fuzz/failures/TARGET`, as small as it gets; the next run tries it first, and removes
it when it fails no more.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.child import FAILED, failure_path
from tests.fuzz.targets import MODULES

ROOT = Path(__file__).resolve().parents[2]
_PROCESSES = 2
_TARGET_S = 6.0
"""Processor time that drawn inputs of one target may take; then the rest is left out."""
_PATIENCE_S = 600.0
"""A process that does not compute is ended after so long."""


@dataclass(frozen=True)
class Runner:
    """Runs processes that try inputs. `seconds` of search by coverage for each target; 0: none."""

    kept: Path
    seconds: int = 0
    seed: int = 0

    def run(self, names: list[str]) -> list[str]:
        """Fuzzes targets, in one process as long as it lives. Returns those of which one failed."""
        failed: set[str] = set()
        while names:
            code, said = self._child(*names)
            new = [name for name in names if self._has_failed(name)]
            failed.update(new)
            if code in (0, FAILED) and (new or code == 0):
                _tell(said)
                break
            died = [name for name in names if (self.kept / "current" / name).is_file()]
            failed.update(died or names)
            _tell(f"{', '.join(died or names)}: the process ended with {code}\n{said}")
            for name in died:
                self._keep(name, said)
            names = names[names.index(died[0]) + 1 :] if died else []
        return sorted(failed)

    def search(self, name: str) -> list[str]:
        """Searches by coverage behind what failed before. Returns the target if it failed."""
        code, said = self._child(name, "--replay")
        if code == 0:
            code, said = self._child(name, "--seconds", str(self.seconds))
        if code == 0:
            (self.kept / "current" / name).unlink(missing_ok=True)
            found = re.search(r"number_of_executed_units: (\d+)", said)
            _tell(f"{name}: {found[1] if found else 'no'} inputs in {self.seconds} s by coverage")
            return []
        _tell(f"{name}: {said}")
        self._keep(name, said)
        return [name]

    def _has_failed(self, name: str) -> bool:
        return any((self.kept / "failures" / name).glob("*.bin"))

    def _child(self, *arguments: str) -> tuple[int, str]:
        """Runs a process. Returns its exit status and what it said."""
        command = [sys.executable, "-m", "tests.fuzz.child", "--kept", str(self.kept)]
        command += ["--seed", str(self.seed), "--most-s", str(_TARGET_S), *arguments]
        done = subprocess.run(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_PATIENCE_S + self.seconds,
            check=False,
        )
        return done.returncode, done.stdout.decode(errors="replace")

    def _keep(self, name: str, said: str) -> None:
        """Keeps the input that a process died of, or that a search has found, and makes it
        smaller."""
        folder, current = self.kept / "failures" / name, self.kept / "current" / name
        if current.is_file() and not self._has_failed(name):
            failure_path(folder, b"").unlink(missing_ok=True)
            path = failure_path(folder, current.read_bytes())
            path.write_bytes(current.read_bytes())
            path.with_suffix(".txt").write_text(said[-4000:], encoding="utf-8")
        current.unlink(missing_ok=True)
        for path in list(folder.glob("*.bin")):
            self._child(name, "--shrink", str(path))
            smaller = [other for other in folder.glob("*.bin") if other != path]
            if smaller:
                path.with_suffix(".txt").rename(smaller[0].with_suffix(".txt"))
                path.unlink()
            break
        for path in folder.glob("*.bin"):
            _tell(f"{name}: {path}")


def _tell(said: str) -> None:
    print(said.strip()[-6000:], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kept", type=Path, default=ROOT / ".fuzz")
    args = parser.parse_args()
    if unknown := set(args.targets) - set(MODULES):
        parser.error(
            f"no such target: {', '.join(sorted(unknown))}; there are {', '.join(MODULES)}"
        )
    names = args.targets or list(MODULES)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rounds = -(-len(names) // _PROCESSES)
    runner = Runner(args.kept, round(args.minutes * 60 / rounds), args.seed)
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[MODULES[name]].append(name)
    with ThreadPoolExecutor(_PROCESSES) as threads:
        if args.minutes:
            found = list(threads.map(runner.search, names))
        else:
            found = list(threads.map(runner.run, groups.values()))
    if failed := [name for some in found for name in some]:
        sys.exit(f"failed: {', '.join(failed)}; inputs are in {args.kept / 'failures'}")


if __name__ == "__main__":
    main()
