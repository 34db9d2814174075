"""Checks commands without running them, and prints what is wrong with each:

python -m tests.bench.check_jobs PLAN ...      the jobs of plans
python -m tests.bench.check_jobs FILE.json ... the commands that result files name
python -m tests.bench.check_jobs bench.PART    whether the modules of a part import
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import runpy
import shlex
import sys
import traceback
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import pytest

from bench.plan import Job, read_plans
from engine.fast_paths import FastPath

_parse_known = argparse.ArgumentParser.parse_known_args
_FAST_PATHS = frozenset(get_args(FastPath))


class _Parsed(Exception):
    """A command's arguments have been read: it need not go on."""


def _parse_and_stop(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
    namespace, unknown = _parse_known(self, *args, **kwargs)
    if unknown:
        self.error(f"unrecognized arguments: {' '.join(unknown)}")
    given = getattr(namespace, "disabled_fast_paths", "")
    if wrong := set(filter(None, given.split(","))) - _FAST_PATHS:
        self.error(f"no such fast paths: {', '.join(wrong)}")
    raise _Parsed


def problem_of_command(words: Sequence[str]) -> str:
    """Returns why a module cannot be run with these arguments; empty: it can."""
    module, *arguments = words
    spec = find_spec(module)
    if spec is None or not spec.origin:
        return f"no module {module}"
    source = Path(spec.origin).read_text()
    if "__main__" not in source:
        return f"{module} is no command"
    if "parse_arg" not in source:  # it would run, and cannot be stopped where it reads arguments
        return "it reads no arguments" if arguments and "sys.argv" not in source else ""
    errors = io.StringIO()
    with (
        patch.object(argparse.ArgumentParser, "parse_args", _parse_and_stop),
        patch.object(sys, "argv", [module, *arguments]),
        contextlib.redirect_stderr(errors),
    ):
        try:
            runpy.run_module(module, run_name="__main__")
        except _Parsed:
            return ""
        except ImportError as error:
            return str(error)
        except SystemExit:
            return errors.getvalue().splitlines()[-1]
    return "it has parsed no arguments"


def problem_of_tests(job: Job) -> str:
    """Returns why pytest finds no test; empty: it does."""
    options = ["--collect-only", "-q", "-p", "no:cacheprovider"]
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        code = pytest.main([*options, *job.words[1:]])
    return "" if code == pytest.ExitCode.OK else told.getvalue()[-300:]


def problems(jobs: list[Job]) -> Iterator[str]:
    for job in jobs:
        found = problem_of_tests(job) if job.pytest else problem_of_command(job.words)
        if found:
            yield f"{job.name}: {found}"


def problems_of_results(files: list[str]) -> Iterator[str]:
    """Looks only for the file of a script of the test suite: it may read no arguments."""
    for file in files:
        _, first, *words = shlex.split(json.loads(Path(file).read_text())["command"])
        if first == "-m":
            found = problem_of_command(words)
        else:
            found = "" if Path(first).is_file() else f"no {first}"
        if found:
            yield f"{Path(file).name}: {found}"


def problem_of_import(part: str) -> str:
    """Imports all modules of a part; returns why one cannot be, empty: all can."""
    modules = [
        ".".join(file.with_suffix("").parts) for file in Path(*part.split(".")).rglob("*.py")
    ]
    try:
        for module in sorted(modules):
            import_module(module)
    except Exception:
        return traceback.format_exc()
    return "" if modules else "there is no module"


def main() -> None:
    parts, results, plans = [], [], []
    for name in sys.argv[1:]:
        kind = parts if name.startswith("bench.") else results if name.endswith(".json") else plans
        kind.append(name)
    found = [f"{part}: {problem}" for part in parts if (problem := problem_of_import(part))]
    found += [*problems(read_plans(plans)), *problems_of_results(results)]
    for line in found:
        print(line)
    sys.exit(int(bool(found)))


if __name__ == "__main__":
    main()
