"""Tests of the queue of measurements, with real processes on places without a GPU."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.plan import ROOT, Job, PlanError, read_plans
from bench.queue import Queue, places_for
from tests.processes import is_alive

_LONG_S = 240


def job_text(name: str, what: str, **fields: object) -> str:
    """Returns a job of a plan that runs `tests.bench.queue_job`, unless `fields` say otherwise."""
    told = {"run": f"tests.bench.queue_job {what}", "decides": "nothing", "gpus": 1}
    told |= {"limit_s": _LONG_S, "takes_s": 1, "name": name, **fields}
    lines = [f"{key} = {json.dumps(value)}" for key, value in told.items() if value is not None]
    return "\n".join(["[[job]]", *lines, ""])


def write_plan(folder: Path, *jobs: str) -> Path:
    plan = folder / "plan.toml"
    plan.write_text('question = "Does it work?"\n' + "\n".join(jobs))
    return plan


def start_queue(plan: Path, *arguments: str) -> subprocess.Popen[str]:
    out = plan.parent / "out"
    command = [sys.executable, "-m", "bench.queue", str(plan), "--out", str(out), *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def told_by(out: Path) -> dict[str, dict[str, Any]]:
    return {job["name"]: job for job in json.loads((out / "queue.json").read_text())["jobs"]}


def run_queue(plan: Path, *arguments: str) -> tuple[int, str, dict[str, dict[str, Any]]]:
    """Returns its exit code, what it prints and what it writes about each job."""
    queue = start_queue(plan, *arguments)
    printed, _ = queue.communicate(timeout=_LONG_S)
    return queue.returncode, printed, told_by(plan.parent / "out")


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + _LONG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_jobs_behind_a_failure_go_on_and_what_needs_it_is_left_out(tmp_path):
    plan = write_plan(
        tmp_path,
        job_text("bad", "fail"),
        job_text("needs_bad", "fail", after=["bad"]),
        job_text("needs_that", "fail", after=["needs_bad"]),
        job_text("good", f"write {tmp_path}/figures.txt", results=[f"{tmp_path}/fig*.txt"]),
        job_text("needs_good", f"write {tmp_path}/kept", results=[f"{tmp_path}/kept"]),
        job_text("empty", f"alone {tmp_path}", results=[f"{tmp_path}/*.none"]),
        job_text("two_gpus", "fail", gpus=2),
    )
    code, printed, jobs = run_queue(plan, "--gpus", "cpu")
    assert code == 1
    assert {name: (job["state"], job["why"]) for name, job in jobs.items()} == {
        "plan.bad": ("failed", "exit code 3"),
        "plan.needs_bad": ("left out", "needs plan.bad"),
        "plan.needs_that": ("left out", "needs plan.needs_bad"),
        "plan.good": ("passed", ""),
        "plan.needs_good": ("passed", ""),
        "plan.empty": ("failed", f"did not write {tmp_path}/*.none"),
        "plan.two_gpus": ("left out", "needs 2 GPUs"),
    }
    out = tmp_path / "out"
    assert (out / "plan.good" / "figures.txt").read_text() == "figures"
    assert (out / "plan.needs_good" / "kept").read_text() == "figures"
    assert "fail with GPUs ''" in (out / "plan.bad.log").read_text()
    assert jobs["plan.bad"]["exit_code"] == 3 and jobs["plan.good"]["seconds"] > 0
    told = json.loads((out / "queue.json").read_text())
    assert {"machine", "versions", "date", "commit", "command"} <= set(told)
    table = printed.splitlines()[-len(jobs) :]
    assert [re.findall(r"plan\.\w+", line)[0] for line in table] == list(jobs)


def test_jobs_of_one_gpu_run_at_once_and_those_of_two_alone(tmp_path):
    """The first two end only if each sees the other; none of the rest may see another."""
    a, b = tmp_path / "a", tmp_path / "b"
    plan = write_plan(
        tmp_path,
        job_text("first", f"meet {tmp_path} {a} {b}"),
        job_text("second", f"meet {tmp_path} {b} {a}"),
        job_text("both", f"alone {tmp_path}", gpus=2),
        job_text("alone", f"alone {tmp_path}", alone=True),
    )
    code, _, jobs = run_queue(plan, "--gpus", "cpu,cpu")
    assert code == 0, jobs
    assert jobs["plan.both"]["gpus"] == jobs["plan.alone"]["gpus"] == ["cpu", "cpu"]


def test_a_gpu_that_is_named_twice_has_two_jobs_at_once(tmp_path):
    """The first two end only if each sees the other."""
    a, b = tmp_path / "a", tmp_path / "b"
    plan = write_plan(
        tmp_path,
        job_text("first", f"meet {tmp_path} {a} {b}"),
        job_text("second", f"meet {tmp_path} {b} {a}"),
        job_text("two_gpus", "fail", gpus=2),
        job_text("alone", f"alone {tmp_path}", alone=True),
    )
    code, printed, jobs = run_queue(plan, "--gpus", "5,05")
    assert code == 0, jobs
    assert [job["gpus"] for job in jobs.values()] == [["5"], ["5"], [], ["5", "5"]]
    assert jobs["plan.two_gpus"]["why"] == "needs 2 GPUs"
    assert "alone with GPUs '5'" in (tmp_path / "out" / "plan.alone.log").read_text()
    assert "GPU 5, GPU 5" not in printed


def test_places_are_numbers_or_cpu(tmp_path, capfd):
    queue = start_queue(write_plan(tmp_path, job_text("a", "fail")), "--gpus", "0,,1")
    queue.communicate(timeout=_LONG_S)
    assert queue.returncode == 2
    assert "numbers of GPUs, or cpu" in capfd.readouterr().err


def test_a_job_has_the_gpu_that_is_free(tmp_path):
    ended = tmp_path / "ended"
    plan = write_plan(
        tmp_path,
        job_text("long", f"wait {ended}"),
        job_text("short", f"write {tmp_path}/w"),
        job_text("next", f"write {ended}", after=["short"]),
    )
    code, _, jobs = run_queue(plan, "--gpus", "4,7")
    assert code == 0
    assert [job["gpus"] for job in jobs.values()] == [["4"], ["7"], ["7"]]
    assert "GPUs '7'" in (tmp_path / "out" / "plan.next.log").read_text()


def test_a_job_is_ended_at_its_limit(tmp_path):
    plan = write_plan(
        tmp_path,
        job_text("hangs", f"hang {tmp_path}/pids", limit_s=1),
        job_text("next", f"write {tmp_path}/w"),
    )
    code, printed, jobs = run_queue(plan, "--gpus", "cpu")
    assert code == 1
    assert jobs["plan.hangs"]["why"] == "it took longer than 1 s"
    assert jobs["plan.next"]["state"] == "passed"
    assert "failed    plan.hangs" in printed


def test_what_a_job_leaves_behind_is_ended_too(tmp_path):
    pids = tmp_path / "pids"
    plan = write_plan(tmp_path, job_text("leaves", f"leave {pids}"))
    code, _, jobs = run_queue(plan, "--gpus", "cpu")
    assert code == 0 and jobs["plan.leaves"]["state"] == "passed"
    assert not is_alive(int(pids.read_text()))


def test_when_the_time_of_all_is_over_jobs_are_ended_and_none_begins(tmp_path):
    """The queue's clock jumps once the first job runs; the end of the second wakes the queue, if
    that had begun by then."""
    pids = tmp_path / "pids"
    plan = write_plan(
        tmp_path,
        job_text("hangs", f"hang {pids}", limit_s=10_000),
        job_text("waits", f"wait {pids}", limit_s=10_000),
        job_text("long", "fail", takes_s=5_000, limit_s=5_000),
        job_text("late", "fail", after=["waits"]),
    )
    queue = Queue(
        read_plans([str(plan)]),
        ["cpu", "cpu"],
        tmp_path,
        limit_s=4_000,
        clock=lambda: time.monotonic() + (4_500 if pids.exists() else 0),
    )
    queue.run()
    entries = queue.entries
    assert entries["plan.hangs"].why == "the queue's time was over"
    assert entries["plan.long"].why == "no time is left for it"
    assert entries["plan.late"].state == "left out"
    assert not any(is_alive(int(pid)) for pid in pids.read_text().split())


def test_sigterm_ends_what_runs_and_leaves_the_rest_out(tmp_path):
    pids = tmp_path / "pids"
    plan = write_plan(tmp_path, job_text("hangs", f"hang {pids}"), job_text("next", "fail"))
    queue = start_queue(plan, "--gpus", "cpu")
    wait_until(pids.exists)
    queue.send_signal(signal.SIGTERM)
    printed, _ = queue.communicate(timeout=_LONG_S)
    assert queue.returncode == 1
    jobs = told_by(tmp_path / "out")
    assert {name: (job["state"], job["why"]) for name, job in jobs.items()} == {
        "plan.hangs": ("failed", "the queue got SIGTERM"),
        "plan.next": ("left out", "the queue got SIGTERM"),
    }
    assert "plan.next" in printed.splitlines()[-1]
    assert not any(is_alive(int(pid)) for pid in pids.read_text().split())


def test_tests_are_counted_and_a_job_of_none_but_skipped_ones_has_not_passed(tmp_path):
    tests = tmp_path / "test_some.py"
    tests.write_text(
        "import pytest\ndef test_one(): pass\n@pytest.mark.skip\ndef test_two(): pass\n"
    )
    some = f"-p no:cacheprovider -c /dev/null --rootdir {tmp_path} {tests}"
    plan = write_plan(
        tmp_path,
        job_text("both", "", run=None, pytest=some),
        job_text("skipped", "", run=None, pytest=f"{some}::test_two"),
    )
    code, _, jobs = run_queue(plan, "--gpus", "cpu,cpu")
    assert code == 1
    assert jobs["plan.both"]["state"] == "passed"
    assert jobs["plan.both"]["tests"] == {"tests": 2, "failures": 0, "errors": 0, "skipped": 1}
    assert jobs["plan.skipped"]["why"] == "no test ran"


def test_no_job_outlives_a_queue_that_fails(tmp_path):
    """It cannot write down that the second job has ended, as that one has removed its folder."""
    pids, out = tmp_path / "pids", tmp_path / "out"
    out.mkdir()
    plan = write_plan(
        tmp_path,
        job_text("hangs", f"hang {pids}"),
        job_text("removes", f"remove {pids} {out}"),
    )
    queue = Queue(read_plans([str(plan)]), ["cpu", "cpu"], out)
    with pytest.raises(FileNotFoundError):
        queue.run()
    assert not any(is_alive(int(pid)) for pid in pids.read_text().split())


def a_job(gpus: int, *, alone: bool = False) -> Job:
    return Job("one", "", gpus, 100.0, 10.0, alone, "this")


def test_a_job_goes_where_the_fewest_others_run():
    places = ["4", "4", "4", "7", "7"]
    assert places_for(a_job(1), places, places) == ["4"]
    assert places_for(a_job(1), ["4", "7", "7"], places) == ["7"]
    assert places_for(a_job(1), ["4", "7"], places) == ["4"]
    assert places_for(a_job(1), [], places) == []


def test_two_places_of_one_gpu_are_no_two_gpus():
    places = ["0", "0", "1", "1"]
    assert places_for(a_job(2), ["0", "0"], places) == []
    assert places_for(a_job(2), ["0", "0", "1"], places) == ["0", "1"]
    assert places_for(a_job(2), ["cpu", "cpu"], ["cpu", "cpu"]) == ["cpu", "cpu"]


def test_a_job_that_has_to_be_alone_takes_all_places_and_its_own_gpus_first():
    places = ["0", "0", "1"]
    assert places_for(a_job(2, alone=True), ["0", "1"], places) == []
    assert places_for(a_job(2, alone=True), places, places) == ["0", "1", "0"]


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        ([job_text("a", "fail", after=["b"]), job_text("b", "fail")], "none of those before"),
        ([job_text("a", "fail"), job_text("a", "fail")], "two jobs are called plan.a"),
        ([job_text("a", "fail", limits=3)], "unknown field `limits`"),
        ([job_text("a", "fail", gpus=0)], "at least one GPU"),
        ([job_text("a", "fail", takes_s=_LONG_S + 1)], "takes_s within limit_s"),
        ([job_text("a b", "fail")], "has to name files"),
        ([job_text("a", "fail", pytest="tests")], "one of run and pytest"),
        (
            [job_text(name, "fail", results=["bench/results/x.json"]) for name in "ab"],
            "plan.a and plan.b both write",
        ),
    ],
)
def test_plans_that_cannot_be_run_are_refused(tmp_path, jobs, message):
    with pytest.raises(PlanError, match=message):
        read_plans([str(write_plan(tmp_path, *jobs))])


def test_a_list_runs_nothing(tmp_path):
    plan = write_plan(tmp_path, job_text("a", "fail", decides="whether it is 3"))
    queue = start_queue(plan, "--list")
    printed, _ = queue.communicate(timeout=_LONG_S)
    assert queue.returncode == 0
    assert "plan.a: 1 GPU" in printed and "whether it is 3" in printed
    assert not (tmp_path / "out").exists()
