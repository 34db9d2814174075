"""Tests that every benchmark can be started, alone and by plans, and found by its question."""

from __future__ import annotations

import re
import subprocess
import sys
from fnmatch import fnmatch

import pytest

from bench.plan import PLANS, ROOT, read_plans
from bench.record import RESULTS
from tests.test_structure import RANKS, SOURCE_ROOTS

FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in sorted((ROOT / "bench").rglob("*.py"))
}
MAX_LINES = 10_200
PARTS = sorted({name.split(".")[1] for name in FILES if name.count(".") > 1})


@pytest.mark.parametrize("part", PARTS)
def test_modules_import(part):
    """Imports a part in a process of its own: what it changes on import stays in there."""
    assert not problems_of(f"bench.{part}")


def test_benches_are_few():
    """Git keeps what answers no question any more."""
    lines = {name: len(path.read_text().splitlines()) for name, path in FILES.items()}
    assert sum(lines.values()) <= MAX_LINES, lines


def commands() -> set[str]:
    """Returns the modules that are run by themselves."""
    return {name for name, path in FILES.items() if '__name__ == "__main__"' in path.read_text()}


def commands_of_the_map() -> list[str]:
    """Returns the modules that bench/README.md names, below the heading of their room."""
    found: list[str] = []
    room = ""
    for line in (ROOT / "bench" / "README.md").read_text().splitlines():
        if line.startswith("## "):
            named = re.search(r"`(bench\.\w+)`", line)
            room = f"{named[1]}." if named else ""
        words = re.findall(r"`(bench\.[\w.]+|\w+)`", line) if room else []
        words += [] if room else re.findall(r"`(bench\.[\w.]+)`", line)
        if not line.startswith("## "):
            found += [word if word.startswith("bench.") else room + word for word in words]
    return found


def test_the_map_has_every_command_once():
    assert sorted(commands_of_the_map()) == sorted(commands())


def test_code_names_benches_that_there_are():
    named = re.compile(r"\bbench[./]((?:engine|kv|network|router|serving)[./]\w+)")
    missing = [
        f"{path.relative_to(ROOT)}: {place}"
        for package in RANKS
        for path in (SOURCE_ROOTS.get(package, ROOT) / package).rglob("*.py")
        for place in named.findall(path.read_text())
        if not list((ROOT / "bench").glob(place.replace(".", "/") + "*"))
    ]
    assert not missing, missing


def problems_of(*plans_or_results: str) -> list[str]:
    command = [sys.executable, "-m", "tests.bench.check_jobs", *plans_or_results]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == int(bool(done.stdout)), done
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def problems():
    """Returns those of all plans in one queue, and of all results: one process imports what they
    name."""
    results = [path for path in RESULTS.glob("*.json") if path.name not in PEERS]
    assert len(results) > 20
    plans = [path.stem for path in PLANS.glob("*.toml")]
    return problems_of(*sorted(plans), *sorted(map(str, results)))


def test_jobs_of_plans_name_commands_and_tests_that_there_are(problems):
    """All plans can be in one queue, too."""
    assert [line for line in problems if ".json: " not in line] == []


PEERS = {"vllm-0.26.0-serving.json"}
"""Results of other systems, whose commands are not ours."""


def test_results_name_commands_that_still_parse(problems):
    assert [line for line in problems if ".json: " in line] == []


BAD_JOBS = {
    "run = 'bench.engine.no_such_bench'": "no_such_bench",
    "run = 'bench.engine.sweep --turns 3'": "unrecognized arguments: --turns 3",
    "run = 'bench.engine.sweep --cases few'": "invalid int value: 'few'",
    "run = 'bench.engine.speed --disabled-fast-paths pld'": "no such fast paths: pld",
    "pytest = 'tests/bench/no_such_test.py'": "no_such_test.py",
    "pytest = 'tests/bench/test_queue.py -k no_such_test'": "deselected",
}


def test_jobs_that_cannot_be_run_are_found(tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text(
        "question = ''\n"
        + "".join(
            f"[[job]]\nname = 'job{number}'\ndecides = ''\ngpus = 1\nlimit_s = 1\n{job}\n"
            for number, job in enumerate(BAD_JOBS)
        )
    )
    printed = "\n".join(problems_of(str(plan)))
    of_jobs = printed.split("plan.job")[1:]
    for job, (number, wrong) in zip(of_jobs, enumerate(BAD_JOBS.values()), strict=True):
        assert job.startswith(f"{number}: ") and wrong in job


def test_all_tests_that_need_a_gpu_are_in_the_plan_of_them():
    words = {word for job in read_plans(["gpu_tests"]) for word in job.words}
    marked = re.compile(r"mark\.(multi_)?gpu\b")
    needing = [
        path.relative_to(ROOT)
        for path in (ROOT / "tests").rglob("*.py")
        if marked.search(path.read_text())
    ]
    places = [path.parent if path.name == "conftest.py" else path for path in needing]
    assert len(places) > 20
    missing = [path for path in places if not {str(path), str(path.parent)} & words]
    assert not missing, missing


def test_every_result_is_named_by_what_needs_it():
    """A figure that no page, plan or program names is kept in the history alone."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *PLANS.glob("*.toml")]
    programs = [*FILES.values(), *ROOT.glob("tests/*/*.py"), *ROOT.glob("planner/profiles/*.json")]
    text = "\n".join(path.read_text() for path in [*pages, *programs])
    patterns = set(re.findall(r"[\w.*-]+\.(?:jsonl?|svg|png)", text))
    unnamed = [
        path.name
        for path in RESULTS.iterdir()
        if not any(fnmatch(path.name, pattern) for pattern in patterns if pattern[0] != "*")
    ]
    assert not unnamed, unnamed
