"""The shell of a group's pods, run with stand-ins that write down how they are called."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.helm.helm_engine import HelmSdk, Rendered
from tests.helm.scenarios import overlay, rendered, templates_of, values_of, workload
from tests.helm.service_settings import arguments, containers

LEADER_IP = "10.9.9.1"
STAND_IN = """#!/bin/sh
echo "$(basename "$0") $*" >> "$CALLS"
if [ "$1" = health-check ]; then
  [ "$(grep -c health-check "$CALLS")" {answers} ]; exit
fi
"""


class Group:
    """Runs a part's command where `ray`, `tandem` and `sleep` are stand-ins."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._calls = folder / "calls"
        self.answer_health("-gt 2")
        for name in ("tandem", "sleep"):
            self._write(name, "")

    def answer_health(self, when: str) -> None:
        """Answers; `when` is a test of how often Ray's health was asked."""
        self._write("ray", when)

    def _write(self, name: str, answers: str) -> None:
        program = self.folder / name
        program.write_text(STAND_IN.replace("{answers}", answers or "-ge 0"), encoding="utf-8")
        program.chmod(0o755)

    def run(self, command: list[str], leader: str = LEADER_IP) -> subprocess.CompletedProcess[str]:
        here = [word.replace("/tmp/leader", str(self.folder / "leader")) for word in command]
        variables = {
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "CALLS": str(self._calls),
            "POD_IP": "10.9.9.2",
            "LWS_LEADER_ADDRESS": leader,
        }
        return subprocess.run(
            here, env=variables, capture_output=True, text=True, timeout=60, check=False
        )

    @property
    def calls(self) -> list[str]:
        return self._calls.read_text(encoding="utf-8").splitlines()


@pytest.fixture
def group(tmp_path: Path) -> Group:
    return Group(tmp_path)


def worker(found: Rendered | None = None) -> dict[str, list[str]]:
    pod = templates_of(workload(found or rendered("multi-host"), "decode"))["worker"]
    container = pod["spec"]["containers"][0]
    hook = container["lifecycle"]["preStop"]["exec"]["command"]
    return {"start": container["command"], "stop": hook}


def test_a_leader_starts_ray_and_becomes_the_service(group: Group) -> None:
    container = containers(rendered("multi-host"))["decode"]
    done = group.run([*container["command"], *arguments(container)])
    assert done.returncode == 0, done.stderr
    ray, tandem = group.calls
    assert ray.startswith("ray start --node-ip-address=10.9.9.2 ") and "--num-gpus=8" in ray
    assert "--head --port=6379" in ray and "--include-dashboard=false" in ray
    assert tandem == " ".join(["tandem decode", *arguments(container)])


def test_a_leader_whose_ray_does_not_start_serves_nothing(group: Group) -> None:
    (group.folder / "ray").write_text("#!/bin/sh\nexit 3\n", encoding="utf-8")
    container = containers(rendered("multi-host"))["decode"]
    assert group.run([*container["command"], *arguments(container)]).returncode == 3
    assert not (group.folder / "calls").exists()


def test_a_worker_waits_for_the_leader_and_joins_it(group: Group) -> None:
    done = group.run(worker()["start"])
    assert done.returncode == 0, done.stderr
    *waiting, join = group.calls
    assert [line.split()[1] for line in waiting if line.startswith("ray")] == ["health-check"] * 3
    assert f"--address={LEADER_IP}:6379 --block" in join and "--num-gpus=8" in join


def test_a_worker_joins_a_leader_with_an_ipv6_address(group: Group) -> None:
    values = overlay(values_of("multi-host"), {"ipFamily": "IPv6"})
    done = group.run(worker(HelmSdk.shared().render(values))["start"], leader="fd00::9")
    assert done.returncode == 0, done.stderr
    assert "--address=[fd00::9]:6379 --block" in group.calls[-1]


def test_a_worker_gives_up_with_a_word_when_no_leader_comes(group: Group) -> None:
    group.answer_health("-lt 0")
    # It asks every 2 s for the 1800 s that a pod may take to start.
    impatient = [word.replace("-ge 900", "-ge 5") for word in worker()["start"]]
    assert impatient != worker()["start"]
    done = group.run(impatient)
    assert done.returncode == 1 and f"no Ray at the leader {LEADER_IP}:6379" in done.stderr
    assert not any(line.startswith("ray start") for line in group.calls)


def test_a_worker_stays_until_the_leader_has_gone(group: Group) -> None:
    (group.folder / "leader").write_text(LEADER_IP, encoding="utf-8")
    group.answer_health("-lt 4")
    assert group.run(worker()["stop"]).returncode == 0
    asked = [line for line in group.calls if line.startswith("ray")]
    assert asked == [f"ray health-check --address {LEADER_IP}:6379"] * 4
