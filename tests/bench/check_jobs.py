"""Checks the jobs of plans without running them, and tells what does not hold:
`python -m tests.bench.check_jobs PLAN ...`."""

from __future__ import annotations

import argparse
import contextlib
import io
import runpy
import sys
from collections.abc import Iterator
from typing import Any, get_args
from unittest.mock import patch

import pytest

from bench.jobs.plan import Job, read_plans
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


def problem_of_command(job: Job) -> str:
    """Returns why a module cannot be run with these arguments; empty: it can."""
    module, *arguments = job.words
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
        found = problem_of_tests(job) if job.is_test else problem_of_command(job)
        if found:
            yield f"{job.name}: {found}"


def main() -> None:
    found = list(problems(read_plans(sys.argv[1:])))
    for line in found:
        print(line)
    sys.exit(int(bool(found)))


if __name__ == "__main__":
    main()
