"""Sends a release to a registry: images for both architectures, the chart, signatures.

    1. images: buildx builds both architectures, pushes, and attaches SBOM and SLSA provenance
    2. cosign signs each image by the digest that was pushed, and attests its bill of materials
    3. helm pushes the chart, cosign signs its digest
    4. cosign signs the checksums of all files

Each step is a list of commands. Digests come out of the steps before; a dry run has none.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from release import IMAGES, project
from release.artifacts import SUMS, chart_name
from release.tools import Command, Runner, ToolFailed

PLATFORMS = "linux/amd64,linux/arm64"
UNKNOWN = "sha256:DIGEST-OF-THE-PUSH"
"""Stands in a dry run where a digest would."""


@dataclass(frozen=True)
class Target:
    """Says where a release goes and who signs it.

    `registry` is host and path; `key` is cosign's key, or None for a keyless signature with the
    identity of the user who is logged in."""

    registry: str
    out: Path
    revision: str
    epoch: int
    builder: str
    key: str | None = None

    def image(self, name: str) -> str:
        return f"{self.registry}/tandem/{name}"

    @property
    def chart(self) -> str:
        return f"{self.registry}/charts/tandem"

    @property
    def signing(self) -> tuple[str, ...]:
        return ("--yes", "--key", self.key) if self.key else ("--yes",)


def build(target: Target, name: str) -> Command:
    """Returns the command that builds and pushes an image."""
    version = project()["version"]
    made_of = {"SOURCE_DATE_EPOCH": target.epoch, "VERSION": version, "REVISION": target.revision}
    words = ["docker", "buildx", "build", "--builder", target.builder, "--platform", PLATFORMS]
    words += ["--target", name, "--tag", f"{target.image(name)}:{version}"]
    for argument, value in made_of.items():
        words += ["--build-arg", f"{argument}={value}"]
    words += ["--attest", "type=provenance,mode=max", "--attest", "type=sbom"]
    words += ["--output", "type=image,push=true,rewrite-timestamp=true"]
    words += ["--metadata-file", str(_metadata(target, name)), "."]
    return Command("docker buildx", tuple(words))


def sign(target: Target, reference: str) -> Command:
    return Command("cosign", ("cosign", "sign", *target.signing, reference))


def attest(target: Target, name: str, reference: str) -> Command:
    """Returns the command that attaches the bill of materials of an image's Python packages."""
    bill = target.out / f"tandem-{name}-{project()['version']}.cdx.json"
    words = ("cosign", "attest", *target.signing, "--type", "cyclonedx", "--predicate", str(bill))
    return Command("cosign", (*words, reference))


def publish(target: Target, run: Runner) -> dict[str, str]:
    """Runs every step; returns the digest of each image and of the chart. Raises `ToolMissing`,
    `ToolFailed`."""
    digests: dict[str, str] = {}
    for name in IMAGES:
        run(build(target, name))
        digests[name] = _digest_of_build(target, name)
        reference = f"{target.image(name)}@{digests[name]}"
        run(sign(target, reference))
        run(attest(target, name, reference))
    chart = str(target.out / chart_name())
    pushed = run(Command("helm push", ("helm", "push", chart, f"oci://{target.registry}/charts")))
    digests["chart"] = _digest_of_push(pushed)
    run(sign(target, f"{target.chart}@{digests['chart']}"))
    sums = str(target.out / SUMS)
    words = ("cosign", "sign-blob", *target.signing, "--bundle", f"{sums}.sigstore.json", sums)
    run(Command("cosign", words))
    return digests


def _metadata(target: Target, name: str) -> Path:
    return target.out / f"{name}.metadata.json"


def _digest_of_build(target: Target, name: str) -> str:
    path = _metadata(target, name)
    if not path.exists():
        return UNKNOWN
    found = json.loads(path.read_text(encoding="utf-8")).get("containerimage.digest")
    if not found:
        raise ToolFailed(f"docker buildx wrote no containerimage.digest into {path}")
    return str(found)


def _digest_of_push(text: str) -> str:
    if not text:
        return UNKNOWN
    found = re.search(r"sha256:[0-9a-f]{64}", text)
    if not found:
        raise ToolFailed(f"helm push told no digest: {text!r}")
    return found[0]
