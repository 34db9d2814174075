"""A whole release, in a copy of the tree: dry, refused, and with stand-ins for others' tools.

The copy is a repository of one commit, so that nothing here depends on history or tags of this one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from release import ROOT, project, pyproject
from release.bases import pinned
from release.preflight import versions
from tests.helm.helm_engine import HelmCli, HelmSdk
from tests.helm.scenarios import reproducible, values_of
from tests.quick_imports import hidden_by
from tests.release.test_locks import entries

VERSION = project()["version"]
WHEEL = f"tandem-{VERSION}-py3-none-any.whl"
CHART = f"tandem-{VERSION}.tgz"
DIGEST = f"sha256:{'ab' * 32}"

DOCKER = f"""#!/bin/sh
echo "docker $*" >> "$LOG"
[ "$2" = imagetools ] && echo '{{"digest": "{DIGEST}", "manifests": [
  {{"platform": {{"os": "linux", "architecture": "amd64"}}}},
  {{"platform": {{"os": "linux", "architecture": "'"$ARM"'"}}}}]}}'
while [ $# -gt 0 ]; do
  [ "$1" = --metadata-file ] && echo '{{"containerimage.digest": "{DIGEST}"}}' > "$2"
  shift
done
exit 0
"""
COSIGN = """#!/bin/sh
echo "cosign $*" >> "$LOG"
"""
HELM_PUSH = f"""[ "$1" = push ] && {{ echo "helm $*" >> "$LOG"; echo "Digest: {DIGEST}"; exit; }}"""


def helm(before: str = "") -> str:
    """Returns a program that is Helm, but for what is done `before`."""
    return f'#!/bin/sh\n{before}\nexec {HelmCli().binary} "$@"\n'


@dataclass
class Checkout:
    """A copy of the tree as a repository, and a folder of programs that it finds."""

    tree: Path
    programs: Path
    log: Path

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", *arguments],
            cwd=self.tree,
            capture_output=True,
            text=True,
            check=False,
            env={
                **os.environ,
                "PATH": f"{self.programs}:/usr/bin:/bin",
                "PYTHONPATH": str(self.tree),
                "LOG": str(self.log),
                "ARM": "arm64",
                **environment,
            },
        )

    def git(self, *arguments: str) -> str:
        who = ["-c", "user.name=Test", "-c", "user.email=test@example.com"]
        command = ["git", *who, "-c", "commit.gpgsign=false", "-c", "tag.gpgsign=false"]
        done = subprocess.run(
            [*command, *arguments], cwd=self.tree, capture_output=True, text=True, check=True
        )
        return done.stdout

    def install(self, programs: Mapping[str, str]) -> None:
        for name, text in programs.items():
            (self.programs / name).write_text(text, encoding="utf-8")
            (self.programs / name).chmod(0o755)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    folder = tmp_path_factory.mktemp("release")
    made = Checkout(folder / "tree", folder / "programs", folder / "log")
    listed = ["git", "ls-files", "-z"]
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        # Tests and results are half of the files, and nothing here looks at them.
        if (ROOT / name).exists() and not name.startswith(("tests/", "bench/")):
            (made.tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, made.tree / name)
    changes = made.tree / "CHANGELOG.md"
    text = changes.read_text(encoding="utf-8")
    changes.write_text(re.sub(rf"(?m)^## {VERSION} \(.*\)$", f"## {VERSION} (2026-01-02)", text))
    made.programs.mkdir()
    made.git("init", "--quiet")
    made.git("add", "--all")
    made.git("commit", "--quiet", "--message", "All of it")
    return made


@pytest.fixture(scope="module")
def dry(checkout: Checkout) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Returns what a dry run made, and said, where there is neither Docker nor cosign."""
    out = checkout.tree.parent / "dry"
    checkout.install({"helm": helm()})
    done = checkout.run("release", "--dry-run", "--out", str(out))
    assert done.returncode == 0, done.stderr
    return out, done


def test_a_dry_run_makes_every_file_and_its_checksum(
    dry: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    out, _ = dry
    bills = {f"tandem-{image}-{VERSION}.cdx.json" for image in ("router", "engine")}
    expected = {WHEEL, CHART, f"tandem-{VERSION}.tar.gz", *bills}
    lines = (out / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    sums = {name: digest for digest, name in (line.split() for line in lines)}
    assert set(sums) == expected
    for name, digest in sums.items():
        assert hashlib.sha256((out / name).read_bytes()).hexdigest() == digest


def test_a_dry_run_names_missing_tools_and_shows_what_it_would_run(
    dry: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    _, done = dry
    missing = re.findall(r"^missing: ([a-z ]+) \(install", done.stderr, re.MULTILINE)
    # This Helm packages charts and cannot push them.
    assert missing == ["helm push", "docker buildx", "cosign"]
    would = re.findall(r"^would run: (\w+ \S+)", done.stdout, re.MULTILINE)
    signed = ["docker buildx", "cosign sign", "cosign attest"]
    assert would == [
        "docker buildx", *signed, *signed, "helm push", "cosign sign", "cosign sign-blob",
    ]  # fmt: skip
    assert not re.search(r"sha256:(?![0-9a-f]{64}\b|DIGEST-OF-THE-PUSH)", done.stdout)


def test_the_wheel_has_every_file_of_its_packages(
    checkout: Checkout, dry: tuple[Path, subprocess.CompletedProcess[str]]
) -> None:
    """Code, tables of measured kernels, the demo checkpoint, messages: all that git knows there."""
    wheel = pyproject()["tool"]["hatch"]["build"]["targets"]["wheel"]
    moved = wheel["sources"]
    packed = set(zipfile.ZipFile(dry[0] / WHEEL).namelist())
    expected = set()
    for folder in wheel["only-include"]:
        for name in checkout.git("ls-files", folder).splitlines():
            expected.add(name.replace(folder, moved.get(folder, folder), 1))
    assert "cli/demo_checkpoint/model.safetensors" in expected and len(expected) > 500
    assert {name for name in packed if ".dist-info/" not in name} == expected
    text = zipfile.ZipFile(dry[0] / WHEEL).read(f"tandem-{VERSION}.dist-info/METADATA").decode()
    assert f"\nVersion: {VERSION}\n" in text and "\nRequires-Dist: torch<2.16,>=2.11\n" in text


def test_the_wheel_installs_and_its_command_runs(
    tmp_path: Path, dry: tuple[Path, subprocess.CompletedProcess[str]]
) -> None:
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    install = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--offline", "--no-deps"]
    python = environment / "bin" / "python"
    subprocess.run([*install, "--python", python, dry[0] / WHEEL], check=True)

    def output(*command: str | Path, **more: str) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=False,
            env={"PATH": "/usr/bin:/bin", **more},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert output(environment / "bin" / "tandem", "--version") == f"tandem {VERSION}\n"
    # The libraries are those of this environment; every package of ours is the wheel's.
    libraries = str(Path(grpc.__file__).parents[1])
    code = (
        "import prefill_node.main, decode_node.main, router.main, tandem_kernels\n"
        "import sys; from cli.demo import __file__ as demo; print(demo, tandem_kernels.__file__)"
    )
    files = output(python, "-c", code, PYTHONPATH=libraries).split()
    assert len(files) == 2 and all(Path(f).is_relative_to(environment) for f in files)


@pytest.mark.parametrize("image", ["router", "engine"])
def test_bills_of_materials_have_every_package_with_its_hashes(
    image: str, dry: tuple[Path, subprocess.CompletedProcess[str]]
) -> None:
    bill = json.loads((dry[0] / f"tandem-{image}-{VERSION}.cdx.json").read_text("utf-8"))
    assert bill["bomFormat"] == "CycloneDX" and bill["specVersion"] == "1.6"
    described = bill["metadata"]["component"]
    assert (described["name"], described["version"]) == ("tandem", VERSION)
    found = {
        part["purl"]: {
            f"sha256:{one['content']}"
            for reference in part["externalReferences"]
            for one in reference["hashes"]
        }
        for part in bill["components"]
    }
    assert found == {
        f"pkg:pypi/{name}@{entry.version}": set(entry.hashes)
        for name, entry in entries(f"image-{image}").items()
    }


def test_the_packaged_chart_renders_what_the_folder_renders(
    dry: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    values = values_of("default")
    packaged = HelmSdk.shared().render(values, chart=dry[0] / CHART)
    assert reproducible(packaged) == reproducible(HelmSdk.shared().render(values))


def test_a_release_is_refused_without_tag_or_tools(checkout: Checkout) -> None:
    done = checkout.run("release", "--registry", "registry.example.com", "--out", "never")
    assert done.returncode == 1
    assert f"the commit is not tagged: git tag --sign v{VERSION}" in done.stderr
    assert "missing: cosign" in done.stderr
    assert not (checkout.tree / "never").exists()


def test_a_release_pushes_both_architectures_and_signs_what_it_pushed(
    checkout: Checkout, dry: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    checkout.git("tag", f"v{VERSION}")
    checkout.install({"docker": DOCKER, "cosign": COSIGN, "helm": helm(HELM_PUSH)})
    checkout.log.write_text("")
    out = checkout.tree.parent / "out"
    registry = "registry.example.com/team"
    # The dry run has looked at every address in the bill, which is the same here.
    paths = f"{checkout.tree}:{hidden_by(tmp_path)}"
    done = checkout.run("release", "--registry", registry, "--out", str(out), PYTHONPATH=paths)
    assert done.returncode == 0, done.stderr
    called = checkout.log.read_text(encoding="utf-8").splitlines()
    commit = checkout.git("rev-parse", "HEAD").strip()
    builds = [line for line in called if line.startswith("docker buildx build")]
    assert [re.findall(r"--target (\w+)", line) for line in builds] == [["router"], ["engine"]]
    for line in builds:
        for part in (
            "--platform linux/amd64,linux/arm64", "--attest type=provenance,mode=max",
            "--attest type=sbom", "rewrite-timestamp=true", "push=true",
            f"--build-arg REVISION={commit}", f"--build-arg VERSION={VERSION}",
            f"--build-arg SOURCE_DATE_EPOCH={checkout.git('log', '-1', '--format=%ct').strip()}",
        ):  # fmt: skip
            assert part in line
    signed = [line.split()[-1] for line in called if line.startswith("cosign sign --yes")]
    pushed = [f"{registry}/{name}@{DIGEST}" for name in ("tandem/router", "tandem/engine")]
    assert signed == [*pushed, f"{registry}/charts/tandem@{DIGEST}"]
    attested = [line.split()[-1] for line in called if line.startswith("cosign attest")]
    assert attested == pushed
    assert called[-1].startswith("cosign sign-blob") and called[-1].endswith("SHA256SUMS")
    # The same commit makes the same files again; Helm writes the time into the chart.
    for name in (WHEEL, f"tandem-{VERSION}.tar.gz", f"tandem-router-{VERSION}.cdx.json"):
        assert (out / name).read_bytes() == (dry[0] / name).read_bytes(), name
    # Chart and wire are kept for the tests that upgrade from them, and are all that changed.
    kept = f"tests/helm/releases/charts/tandem-{VERSION}"
    wire = f"tests/release/wire/tandem-{VERSION}.json"
    changed = checkout.git("status", "--porcelain", "--untracked-files=all").split()[1::2]
    assert changed == [f"{kept}.tgz", f"{kept}.values.yaml", wire]


def test_bases_are_pinned_to_what_the_registry_says(checkout: Checkout) -> None:
    checkout.install({"docker": DOCKER})
    path = checkout.tree / "Dockerfile"
    before = path.read_text(encoding="utf-8")
    done = checkout.run("release.bases", ARM="riscv64")
    assert done.returncode == 1 and "is no index with arm64" in done.stderr
    assert path.read_text(encoding="utf-8") == before
    done = checkout.run("release.bases", "--tag", "3.12.99-slim-bookworm")
    assert done.returncode == 0, done.stderr
    assert pinned(path.read_text("utf-8")) == ("python", "3.12.99-slim-bookworm", DIGEST)


def test_every_place_names_the_same_version() -> None:
    assert len(versions()) == 4 and set(versions().values()) == {VERSION}
