#!/usr/bin/env python3
"""Does the suite notice? Plants one bug after the other in a copy of the code and runs the tests
that should fail.

    1. the tracked files are copied; the tests named below must pass on the copy as it is
    2. each bug is one small change of one file. Its tests must fail (not: fail to start), or not
       come to an end, where the bug is that something is waited for
    3. the file is put back

    python tests/planted_bugs.py                    all, about a minute on two idle cores
    python tests/planted_bugs.py --only no-epoch

Bugs are in `tests/bugs`. Exit code 1 when a bug is not caught, or a change no longer fits the code.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.arguments import names_among
from bench.record import write_result
from tests.bugs.bug import Bug
from tests.bugs.cluster_bugs import CLUSTER_BUGS
from tests.bugs.engine_bugs import ENGINE_BUGS

ROOT = Path(__file__).resolve().parent.parent
_TIMEOUT_S = 180
_HANG_S = 45
_TESTS_FAILED = 1
BUGS = (*CLUSTER_BUGS, *ENGINE_BUGS)


@dataclass(frozen=True, slots=True)
class Verdict:
    name: str
    what: str
    path: str
    tests: str
    caught: bool
    first_failure: str
    seconds: float


def copy_tree(target: Path) -> None:
    """Copies the tracked files as they are now."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        source = ROOT / name
        if source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)


def run_tests(tree: Path, tests: tuple[str, ...], timeout_s: float = _TIMEOUT_S) -> tuple[int, str]:
    """Returns the exit code of pytest, and the first test that failed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, timeout=timeout_s,
        check=False,
    )  # fmt: skip
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    name = failed[0].removeprefix("FAILED ").split(" - ")[0] if failed else ""
    return done.returncode, name or done.stdout[-300:]


@contextmanager
def planted(tree: Path, bug: Bug) -> Iterator[None]:
    """Raises `SystemExit` when the change does not fit the code."""
    path = tree / bug.path
    text = path.read_text()
    if text.count(bug.old) != 1:
        raise SystemExit(f"{bug.name}: {bug.old!r} is {text.count(bug.old)} times in {bug.path}")
    path.write_text(text.replace(bug.old, bug.new))
    try:
        yield
    finally:
        path.write_text(text)


def judge(tree: Path, bug: Bug) -> Verdict:
    started = time.monotonic()
    with planted(tree, bug):
        try:
            code, failure = run_tests(tree, bug.tests, _HANG_S if bug.hangs else _TIMEOUT_S)
        except subprocess.TimeoutExpired:
            if not bug.hangs:
                raise
            code, failure = _TESTS_FAILED, f"{bug.tests[-1]} does not end"
    tests = " ".join(bug.tests)
    return Verdict(
        bug.name, bug.what, bug.path, tests, code == _TESTS_FAILED,
        failure if code else "", round(time.monotonic() - started, 1),
    )  # fmt: skip


def check_clean(tree: Path, bugs: tuple[Bug, ...]) -> None:
    """Raises `SystemExit` when a test fails without any bug."""
    for tests in dict.fromkeys(bug.tests for bug in bugs):
        code, failure = run_tests(tree, tests)
        if code:
            raise SystemExit(f"fails without a bug: {failure}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = [bug.name for bug in BUGS]
    parser.add_argument(
        "--only", type=names_among(every), default=[], help="names of bugs, comma separated"
    )
    args = parser.parse_args()
    bugs = tuple(bug for bug in BUGS if bug.name in (args.only or every))
    with tempfile.TemporaryDirectory(prefix="tandem-bugs-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        check_clean(tree, bugs)
        verdicts = []
        for bug in bugs:
            verdict = judge(tree, bug)
            verdicts.append(verdict)
            word = "caught" if verdict.caught else "NOT CAUGHT"
            print(f"{word:10} {bug.name}: {verdict.first_failure}", flush=True)
    caught = sum(verdict.caught for verdict in verdicts)
    print(f"{caught} of {len(verdicts)} caught")
    if not args.only:
        write_result("planted_bugs", [asdict(verdict) for verdict in verdicts])
    return 0 if caught == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
