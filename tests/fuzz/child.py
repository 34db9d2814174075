"""Tries inputs on targets, in a process that may die of them.

(nothing)      tries what failed before, and then draws inputs, the same for the same seed;
               shrinks what fails
--replay       only the former
--seconds S    draws, and then lets atheris change inputs by the branches that they take
--shrink FILE  makes an input that fails as small as it gets, each try in a fork

KEPT/failures/TARGET   inputs that failed, with what they raised
KEPT/corpus/TARGET     inputs that take other branches than all others
KEPT/current/TARGET    the input that is being tried: of a process that has died, why
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import logging
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings

from tests.fuzz.limits import Limits, bound_memory
from tests.fuzz.shrink import shrunk
from tests.fuzz.target import Target
from tests.fuzz.targets import MODULES

FAILED = 9
"""The exit status of a process whose input failed, and was written."""
_NEVER_S = 100_000
"""libFuzzer's own clock is on the wall: `Limits` has one of processor time."""
_OURS = ("decode_node", "edge", "engine", "host", "kv_transfer", "prefill_node", "router")


class Trial:
    """Tries inputs, and keeps the last that failed. After `until`, in processor time of this
    process, it tries no more."""

    def __init__(self, target: Target, limits: Limits, until: float = float("inf")) -> None:
        self._target = target
        self._limits = limits
        self._until = until
        self.num_tried = 0
        self.num_left = 0
        """Inputs for which there was no time."""
        self.failed: tuple[bytes, str] | None = None

    def __call__(self, data: bytes) -> None:
        """Tries an input. Raises whatever it makes the target raise."""
        if time.process_time() > self._until and self.failed is None:
            self.num_left += 1
            return
        self.num_tried += 1
        self._limits.begin(data)
        try:
            self._target.check(data)
            self._limits.end()
        except BaseException:
            self.failed = data, traceback.format_exc()
            raise

    def write_failure(self, folder: Path) -> Path:
        """Writes the input that failed last, which is the smallest, beside what it raised."""
        assert self.failed is not None
        data, why = self.failed
        path = failure_path(folder, data)
        path.write_bytes(data)
        path.with_suffix(".txt").write_text(why, encoding="utf-8", errors="backslashreplace")
        return path


def failure_path(folder: Path, data: bytes) -> Path:
    """Returns the file of an input."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{hashlib.sha256(data).hexdigest()[:16]}.bin"


def find(name: str) -> Target:
    """Imports a target."""
    targets: list[Target] = importlib.import_module(MODULES[name]).TARGETS
    return next(target for target in targets if target.name == name)


def draw(target: Target, count: int, seed_number: int, take: Callable[[bytes], None]) -> None:
    """Gives `count` inputs to `take`, the same for the same seed, and shrinks one that it raises
    at."""

    @seed(seed_number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
        report_multiple_bugs=False,
        print_blob=False,
    )
    @given(target.inputs)
    def give(data: bytes) -> None:
        take(data)

    give()


def _search(name: str, args: argparse.Namespace) -> None:
    """Searches by coverage; does not return."""
    import atheris

    with atheris.instrument_imports(include=list(_OURS)):
        target = find(name)
    trial = Trial(target, Limits(target, args.kept / "current" / name))
    corpus = args.kept / "corpus" / name
    corpus.mkdir(parents=True, exist_ok=True)

    def keep(data: bytes) -> None:
        trial(data)
        (corpus / hashlib.sha1(data).hexdigest()).write_bytes(data)

    def change(data: bytes) -> None:
        try:
            trial(data)
        except BaseException:
            trial.write_failure(args.kept / "failures" / name)
            raise

    try:
        draw(target, target.examples, args.seed, keep)
    except BaseException:
        trial.write_failure(args.kept / "failures" / name)
        raise
    options = [
        f"-max_total_time={args.seconds}", f"-seed={args.seed + 1}", "-rss_limit_mb=0",
        f"-timeout={_NEVER_S}", "-detect_leaks=0", "-print_final_stats=1",
        f"-artifact_prefix={args.kept}/{name}-",
    ]  # fmt: skip
    atheris.Setup([sys.argv[0], *options, str(corpus)], change)
    atheris.Fuzz()


def _fuzz(name: str, args: argparse.Namespace) -> bool:
    """Tries what failed before, and then what is drawn. Returns whether nothing failed."""
    started = time.monotonic()
    target, failures = find(name), args.kept / "failures" / name
    current = args.kept / "current" / name
    limits = Limits(target, current)
    trial = Trial(target, limits, time.process_time() + args.most_s)
    try:
        for path in sorted(failures.glob("*.bin")):
            trial(path.read_bytes())
            path.unlink()
            path.with_suffix(".txt").unlink(missing_ok=True)
        if not args.replay:
            draw(target, target.examples, args.seed, trial)
    except BaseException:
        if trial.failed is None:
            raise
        path = trial.write_failure(failures)
        print(f"{name}: {path}\n{trial.failed[1]}")
        return False
    finally:
        current.unlink(missing_ok=True)
    took, left = time.monotonic() - started, trial.num_left
    rest = f", {left} left out for want of time" if left else ""
    print(f"{name}: {trial.num_tried} inputs in {took:.1f} s{rest}", flush=True)
    return True


def _shrink(name: str, args: argparse.Namespace) -> None:
    target = find(name)
    limits = Limits(target, args.kept / "current" / name)
    bound_memory()
    failures = args.kept / "failures" / name
    data = shrunk(args.shrink.read_bytes(), Trial(target, limits))
    failure_path(failures, data).write_bytes(data)
    (args.kept / "current" / name).unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="+")
    parser.add_argument("--kept", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most-s", type=float, default=float("inf"))
    parser.add_argument("--replay", action="store_true")
    parser.add_argument("--seconds", type=int, default=0)
    parser.add_argument("--shrink", type=Path)
    args = parser.parse_args()
    logging.disable()
    warnings.simplefilter("ignore")
    for name in args.targets:
        (args.kept / "current").mkdir(parents=True, exist_ok=True)
        if args.shrink is not None:
            _shrink(name, args)
            return
        if args.seconds:
            _search(name, args)
    find(args.targets[0])
    bound_memory()
    are_well = [_fuzz(name, args) for name in args.targets]
    sys.exit(0 if all(are_well) else FAILED)


if __name__ == "__main__":
    main()
