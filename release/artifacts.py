"""Makes what a release has on this machine: wheel, source, bills of materials, chart, checksums.

All but the chart's archive, in which Helm writes the time, is the same for the same commit.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from release import IMAGES, ROOT, project
from release.tools import Command, Runner, ToolFailed

SUMS = "SHA256SUMS"
BUILD = "requirements/build.lock"


def make_wheel(out: Path, epoch: int) -> list[Path]:
    """Makes the source archive, and the wheel from it, with the locked build system."""
    command = ["-m", "uv", "build", "--quiet", "--no-config", "--out-dir", str(out)]
    _python([*command, "--build-constraints", BUILD, "--require-hashes"], epoch)
    version = project()["version"]
    return [out / f"tandem-{version}.tar.gz", out / f"tandem-{version}-py3-none-any.whl"]


def make_bills(out: Path, epoch: int) -> list[Path]:
    """Makes a CycloneDX bill of materials of each image's Python packages, from its lock."""
    made = [out / f"tandem-{image}-{project()['version']}.cdx.json" for image in IMAGES]
    for image, path in zip(IMAGES, made, strict=True):
        # A lock knows no edges between packages, and the tool warns of that.
        command = ["-W", "ignore", "-m", "cyclonedx_py", "requirements", "--output-reproducible"]
        # All bills have one form, and checking it takes seconds: the first is checked.
        command += ["--validate" if image == IMAGES[0] else "--no-validate"]
        command += ["--pyproject", "pyproject.toml", "--mc-type", "application", "--sv", "1.6"]
        _python([*command, "--output-file", str(path), f"requirements/image-{image}.lock"], epoch)
    return made


def chart_name() -> str:
    return f"tandem-{project()['version']}.tgz"


def make_chart(out: Path, signing: Sequence[str], run: Runner) -> list[Path]:
    """Packages the chart. `signing`: Helm's flags that sign it, or none."""
    words = ("helm", "package", "helm", "--destination", str(out), *signing)
    run(Command("helm", words))
    chart = out / chart_name()
    return [chart, Path(f"{chart}.prov")] if signing else [chart]


def write_sums(out: Path, files: Sequence[Path]) -> Path:
    """Writes the checksums that `sha256sum --check` reads."""
    lines = [f"{hashlib.sha256(f.read_bytes()).hexdigest()}  {f.name}" for f in sorted(files)]
    path = out / SUMS
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _python(arguments: Sequence[str], epoch: int) -> None:
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch)}
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, check=False)
    if done.returncode:
        raise ToolFailed(f"python {' '.join(arguments[:4])} ended with {done.returncode}")
